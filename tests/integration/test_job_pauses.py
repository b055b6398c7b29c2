"""`crmctl jobs …`: a pause is honoured by every job at its next batch, and nothing is lost by it."""

import signal
import time
from collections.abc import Callable
from typing import Any, Final

import psycopg
import pytest

from crmctl.domain.jobs import NAMES
from tests.chat_status_support import Chat, log_lines
from tests.expire_support import (
    expire,
    expired,
    fingerprints,
    finish,
    insert_due,
    insert_queue,
    rows,
    scalar,
    wait_until,
)
from tests.kafka_fixtures import Kafka, MakeTopic, Outgoing
from tests.prefork import run_crmctl
from tests.relay_support import count, extend, insert_booked, insert_events, relay, rsa_signer, start_relay, tenant_of
from tests.support import CallResult, Database

Connection = psycopg.Connection[Any]
REASON: Final = "the disk is full"


@pytest.fixture
def connection(database: Database) -> Connection:
    return database.connect()


def pause(database: Database, *jobs: str, reason: str = REASON, by: str = "night shift") -> CallResult:
    result = run_crmctl("jobs", "pause", *jobs, "--reason", reason, "--by", by, "-o", "json", database=database)
    assert result.exit_code == 0, result.stderr
    return result


def resume(database: Database, *jobs: str) -> CallResult:
    result = run_crmctl("jobs", "resume", *jobs, "-o", "json", database=database)
    assert result.exit_code == 0, result.stderr
    return result


def assert_skipped(result: CallResult) -> None:
    assert result.exit_code == 0, result.stderr
    document = result.json
    assert (document["skipped"], document["pause_reason"], document["paused_by"]) == ("paused", REASON, "night shift")
    assert document["paused_at"]


class TestAPausedJob:
    def test_ends_at_once_and_goes_on_after_the_pause(self, database: Database, connection: Connection) -> None:
        ids = set(insert_queue(connection, 3))
        pause(database, "expire-bookings")
        before = fingerprints(connection)
        for arguments in ((), ("--drain",), ("--dry-run",), ("--drain", "--strict")):
            assert_skipped(expire(database, *arguments))
        assert fingerprints(connection) == before
        resume(database, "expire-bookings")
        assert expire(database).json["reserve_expired_count"] == 3
        assert expired(connection) == ids

    def test_says_so_to_people(self, database: Database) -> None:
        pause(database, "expire-bookings")
        result = run_crmctl("bookings", "expire", database=database)
        assert result.exit_code == 0
        assert REASON in result.stdout
        assert "night shift" in result.stdout
        assert "crmctl jobs resume expire-bookings" in result.stdout

    def test_stops_between_two_batches(self, database: Database, connection: Connection) -> None:
        """The pause is set while the first batch runs: that one is kept, no other is begun."""
        insert_queue(connection, 5)
        connection.execute(
            """
            create function public.pause() returns trigger language plpgsql as $$
            begin
                insert into crm.job_pauses (job, reason, paused_by)
                values ('expire-bookings', 'the disk is full', 'night shift') on conflict do nothing;
                return new;
            end $$;
            create trigger pause before update on crm.bookings for each row execute function public.pause()
            """
        )
        result = expire(database, "--drain", "--batch-size", "2")
        assert_skipped(result)
        assert (result.json["reserve_expired_count"], result.json["batches"]) == (2, 1)
        assert len(expired(connection)) == 2

    def test_extends_nothing(self, database: Database, connection: Connection) -> None:
        booking_id = insert_booked(connection)
        token = rsa_signer().token(tenant_of(connection, booking_id))
        pause(database, "extend-booking")
        assert_skipped(extend(database, booking_id, token=token))
        assert scalar(connection, "select extensions_count from crm.bookings") == 0
        assert scalar(connection, "select count(*) from crm.extension_requests") == 0

    def test_prunes_nothing(self, database: Database, connection: Connection) -> None:
        insert_events(connection, "any")
        connection.execute("update crm.outbox_messages set published_at = now() - interval '90 days'")
        pause(database, "prune")
        assert_skipped(run_crmctl("prune", "-o", "json", database=database))
        assert count(connection) == 1

    def test_publishes_nothing(
        self, database: Database, connection: Connection, kafka: Kafka, make_topic: MakeTopic
    ) -> None:
        topic = make_topic()
        insert_events(connection, topic)
        pause(database, "relay-outbox")
        for arguments in ((), ("--drain",), ("--dry-run",)):
            assert_skipped(relay(database, kafka.bootstrap_servers, *arguments))
        assert kafka.read(topic) == []

    def test_leaves_other_jobs_alone(self, database: Database, connection: Connection) -> None:
        insert_due(connection)
        pause(database, "relay-outbox", "prune")
        assert expire(database).json["reserve_expired_count"] == 1


class TestALongRun:
    def test_of_the_relay_waits_and_goes_on(
        self, database: Database, connection: Connection, kafka: Kafka, make_topic: MakeTopic
    ) -> None:
        topic = make_topic()
        insert_events(connection, topic)
        with start_relay(database, kafka.bootstrap_servers, "--follow") as process:
            wait_until(lambda: count(connection, "published_at is null") == 0, "the first message")
            pause(database, "relay-outbox")
            insert_events(connection, topic, first=2)
            assert stays(lambda: count(connection, "published_at is null") == 1, process)
            resume(database, "relay-outbox")
            wait_until(lambda: count(connection, "published_at is null") == 0, "the message after the pause")
            process.send_signal(signal.SIGTERM)
            result = finish(process)
        assert result.exit_code == 0
        assert [line["pause_reason"] for line in log_lines(result, "paused")] == [REASON]
        assert len(log_lines(result, "resumed")) == 1

    def test_of_the_consumer_keeps_its_partitions_and_goes_on(
        self, database: Database, kafka: Kafka, make_topic: MakeTopic
    ) -> None:
        chat = Chat.make(kafka, database, make_topic)
        first, second = chat.deal(), chat.deal()
        chat.send(first.event("Provisioning"))
        with chat.running() as consumer:
            wait_until(lambda: chat.status(first) == "Provisioning", "the first event")
            pause(database, "consume-chat-status")
            chat.send(second.event("Ready"), Outgoing(value=b"not JSON", key=str(second.id)))
            assert stays(lambda: chat.status(second) == "Pending" and not chat.letters(), consumer)
            assert len(chat.marks()) == 1
            resume(database, "consume-chat-status")
            wait_until(lambda: chat.status(second) == "Ready", "the event after the pause")
            wait_until(lambda: len(chat.letters()) == 1, "the dead letter after the pause")
            consumer.terminate()
            result = finish(consumer)
        assert result.exit_code == 0
        assert result.json["applied_count"] == 2
        assert len(log_lines(result, "paused")) == len(log_lines(result, "resumed")) == 1

    def test_of_the_consumer_ends_within_its_pause_when_it_is_told_to(
        self, database: Database, kafka: Kafka, make_topic: MakeTopic
    ) -> None:
        chat = Chat.make(kafka, database, make_topic)
        pause(database, "consume-chat-status")
        deal = chat.deal()
        chat.send(deal.event("Ready"))
        with chat.running() as consumer:
            assert stays(lambda: chat.status(deal) == "Pending", consumer)
            consumer.terminate()
            result = finish(consumer)
        assert (result.exit_code, result.json["applied_count"]) == (0, 0)
        assert not any(chat.committed().values())

    def test_of_the_consumer_with_a_time_budget_is_skipped_when_it_is_spent(
        self, database: Database, kafka: Kafka, make_topic: MakeTopic
    ) -> None:
        chat = Chat.make(kafka, database, make_topic)
        chat.send(chat.deal().event("Ready"))
        pause(database, "consume-chat-status")
        with chat.running("--time-budget", "2s") as consumer:
            result = finish(consumer)
        assert_skipped(result)
        assert len(log_lines(result, "paused")) == 1

    def test_of_the_consumer_as_a_cronjob_is_skipped(
        self, database: Database, kafka: Kafka, make_topic: MakeTopic
    ) -> None:
        chat = Chat.make(kafka, database, make_topic)
        deal = chat.deal()
        chat.send(deal.event("Ready"))
        pause(database, "consume-chat-status")
        assert_skipped(chat.consume())
        shown = run_crmctl("chat-status", "consume", "--until-caught-up", database=database, env=chat.env)
        assert shown.exit_code == 0
        for text in ("Skipped", "paused", "night shift", REASON, "crmctl jobs resume consume-chat-status"):
            assert text in shown.stdout
        assert "Applied" not in shown.stdout
        assert [line["pause_reason"] for line in log_lines(shown, "paused")] == [REASON]
        assert [line["skipped"] for line in log_lines(shown, "run finished")] == ["paused"]
        assert not any(chat.committed().values())
        resume(database, "consume-chat-status")
        assert chat.consumed()["applied_count"] == 1
        assert chat.status(deal) == "Ready"


def stays(condition: Callable[[], bool], process: Any, seconds: float = 2.5) -> bool:
    """Whether the condition holds, and the process lives, for longer than a running one would leave it so."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not condition() or process.poll() is not None:
            return False
        time.sleep(0.1)
    return True


class TestTheCommands:
    def test_pause_and_resume_say_what_they_did(self, database: Database, connection: Connection) -> None:
        first = pause(database, "prune", "relay-outbox").json
        assert first == {
            "paused": ["prune", "relay-outbox"],
            "already_paused": [],
            "reason": REASON,
            "paused_by": "night shift",
        }
        second = pause(database, "prune", reason="another").json
        assert (second["paused"], second["already_paused"]) == ([], ["prune"])
        assert scalar(connection, "select reason from crm.job_pauses where job = 'prune'") == REASON
        assert resume(database, "prune", "expire-bookings").json == {
            "resumed": ["prune"],
            "not_paused": ["expire-bookings"],
        }
        assert [row["job"] for row in rows(connection, "select job from crm.job_pauses")] == ["relay-outbox"]

    def test_all_means_every_job(self, database: Database, connection: Connection) -> None:
        assert pause(database, "--all").json["paused"] == sorted(NAMES)
        assert resume(database, "--all").json["resumed"] == sorted(NAMES)
        assert rows(connection, "select from crm.job_pauses") == []

    def test_the_default_of_who_is_somebody(self, database: Database, connection: Connection) -> None:
        assert run_crmctl("jobs", "pause", "prune", "--reason", "x", database=database).exit_code == 0
        assert "@" in scalar(connection, "select paused_by from crm.job_pauses")

    @pytest.mark.parametrize(
        "arguments",
        [
            ("pause", "no-such-job", "--reason", "x"),
            ("pause", "prune"),
            ("pause", "prune", "--reason", " "),
            ("pause", "--reason", "x"),
            ("pause", "prune", "--all", "--reason", "x"),
            ("resume",),
            ("resume", "no-such-job"),
        ],
        ids=" ".join,
    )
    def test_a_wrong_command_line_is_2_and_pauses_nothing(
        self, database: Database, connection: Connection, arguments: tuple[str, ...]
    ) -> None:
        result = run_crmctl("jobs", *arguments, database=database)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert rows(connection, "select from crm.job_pauses") == []

    def test_list_shows_every_job_with_its_pause_and_its_last_runs(
        self, database: Database, connection: Connection
    ) -> None:
        insert_due(connection)
        assert expire(database).exit_code == 0
        assert expire(database, "--id", "00000000-0000-4000-8000-000000000001").exit_code == 10
        pause(database, "prune")
        listed = {row["job"]: row for row in run_crmctl("jobs", "list", "-o", "json", database=database).json["jobs"]}
        assert tuple(listed) == NAMES
        assert listed["prune"]["paused"]
        assert listed["prune"]["pause_reason"] == REASON
        assert not listed["expire-bookings"]["paused"]
        assert listed["expire-bookings"]["last_success_at"] < listed["expire-bookings"]["last_failure_at"]
        assert listed["relay-outbox"]["last_success_at"] is None
        table = run_crmctl("jobs", "list", database=database).stdout
        assert REASON in table
