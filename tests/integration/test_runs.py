"""`crmctl runs list|show`: the record of runs as people read it."""

from typing import Any

import psycopg
import pytest

from crmctl.jobs.relay_outbox import LOCK
from tests.chat_status_support import Chat
from tests.expire_support import expire, finish, insert_due, insert_queue, wait_until
from tests.kafka_fixtures import Kafka, MakeTopic
from tests.prefork import run_crmctl
from tests.relay_support import insert_events, relay
from tests.support import Database

Connection = psycopg.Connection[Any]
MISSING = "00000000-0000-4000-8000-000000000001"


@pytest.fixture
def connection(database: Database) -> Connection:
    return database.connect()


def listed(database: Database, *args: str) -> list[dict[str, Any]]:
    result = run_crmctl("runs", "list", "-o", "json", *args, database=database)
    assert result.exit_code == 0, result.stderr
    runs: list[dict[str, Any]] = result.json["runs"]
    return runs


def test_a_run_is_one_line_with_the_sums_of_its_batches(database: Database, connection: Connection) -> None:
    insert_queue(connection, 5)
    run_id = expire(database, "--drain", "--batch-size", "2").json["run_id"]
    (run,) = listed(database)
    assert (run["run_id"], run["job"], run["actor"]) == (run_id, "expire-bookings", "system")
    assert (run["outcome"], run["batches"], run["counts"]) == ("committed", 3, {"reserve_expired_count": 5})
    assert run["started_at"] <= run["finished_at"]


def test_a_run_with_nothing_to_do_leaves_no_record(database: Database) -> None:
    assert expire(database).exit_code == 0
    assert listed(database) == []
    assert run_crmctl("runs", "list", database=database).stdout == "No runs.\n"


def test_the_latest_come_first_and_only_those_that_are_asked_for(database: Database, connection: Connection) -> None:
    insert_due(connection)
    good = expire(database).json["run_id"]
    assert expire(database, "--id", MISSING).exit_code == 10
    insert_due(connection)
    last = expire(database).json["run_id"]
    assert [run["run_id"] for run in listed(database)][::2] == [last, good]
    assert [run["run_id"] for run in listed(database, "--limit", "1")] == [last]
    (failed,) = listed(database, "--failed")
    assert (failed["outcome"], failed["error_code"]) == ("failed", "CRM_BOOKING_NOT_FOUND")
    assert listed(database, "--failed", "--job", "expire-bookings") == [failed]
    assert listed(database, "--job", "relay-outbox") == []
    table = run_crmctl("runs", "list", "--failed", database=database).stdout
    assert failed["run_id"] in table


def test_a_job_that_does_not_exist_is_2(database: Database) -> None:
    result = run_crmctl("runs", "list", "--job", "no-such-job", database=database)
    assert result.exit_code == 2
    assert "expire-bookings" in result.stderr


def test_a_run_is_shown_batch_by_batch(database: Database, connection: Connection) -> None:
    insert_queue(connection, 3)
    run_id = expire(database, "--drain", "--batch-size", "2").json["run_id"]
    document = run_crmctl("runs", "show", run_id, "-o", "json", database=database).json
    assert (document["run_id"], document["job"]) == (run_id, "expire-bookings")
    assert [batch["batch"] for batch in document["batches"]] == [1, 2]
    assert [batch["counts"]["reserve_expired_count"] for batch in document["batches"]] == [2, 1]
    table = run_crmctl("runs", "show", run_id, database=database)
    assert table.exit_code == 0
    assert document["host"] in table.stdout


def test_a_run_without_a_record_is_10(database: Database) -> None:
    result = run_crmctl("runs", "show", MISSING, "-o", "json", database=database)
    assert result.exit_code == 10
    assert (result.json["error"]["code"], result.json["error"]["run_id"]) == ("CRMCTL_RUN_NOT_FOUND", MISSING)


def age_records(connection: Connection, minutes: int) -> None:
    connection.execute(
        "update crm.job_runs set started_at = now() - make_interval(mins => %s), "
        "finished_at = now() - make_interval(mins => %s)",
        (minutes, minutes),
    )


def test_a_quiet_job_leaves_a_sign_of_life_every_five_minutes(database: Database, connection: Connection) -> None:
    insert_due(connection)
    assert expire(database).exit_code == 0
    assert expire(database).exit_code == 0
    assert len(listed(database)) == 1
    age_records(connection, 6)
    quiet = expire(database).json["run_id"]
    assert expire(database).exit_code == 0
    latest, _ = listed(database)
    assert (latest["run_id"], latest["outcome"], latest["counts"]) == (quiet, "committed", {})
    age_records(connection, 6)
    assert expire(database, "--dry-run").exit_code == 0
    assert len(listed(database)) == 2


def test_a_run_that_is_kept_from_its_work_leaves_no_sign_of_life(
    database: Database, connection: Connection, kafka: Kafka, make_topic: MakeTopic
) -> None:
    insert_events(connection, make_topic())
    with database.connect(autocommit=False) as other:
        other.execute("select pg_advisory_xact_lock(%s)", (LOCK,))
        assert relay(database, kafka.bootstrap_servers).json["skipped"] == "locked"
    away = relay(database, "127.0.0.1:1", options={"message.timeout.ms": "1000"})
    assert away.exit_code == 69
    assert [row for row in listed(database, "--job", "relay-outbox") if row["outcome"] == "committed"] == []


def test_a_quiet_consumer_leaves_one_too_and_its_next_batch_is_recorded_after_it(
    database: Database, connection: Connection, kafka: Kafka, make_topic: MakeTopic
) -> None:
    chat = Chat.make(kafka, database, make_topic)
    chat.send(chat.deal().event("Provisioning"))
    chat.consumed()
    age_records(connection, 6)
    with chat.running() as consumer:
        wait_until(lambda: len(listed(database, "--job", "consume-chat-status")) == 2, "the sign of life")
        chat.send(chat.deal().event("Ready"))
        wait_until(lambda: len(chat.marks()) == 2, "the next event")
        consumer.terminate()
        result = finish(consumer)
    assert (result.exit_code, result.json["batches"]) == (0, 1)
    (latest, _) = listed(database, "--job", "consume-chat-status")
    assert (latest["batches"], latest["counts"]) == (2, {"applied_count": 1})
