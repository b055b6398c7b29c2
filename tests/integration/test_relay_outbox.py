"""`crmctl outbox relay` on a real server and broker: what is published, in which order, and what holds it back."""

import json
import os
import re
import signal
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import psycopg
import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from crmctl.dev import kafka_maven
from crmctl.domain.bookings import BOOKING, RESERVE
from crmctl.jobs import relay_outbox
from tests.expire_support import (
    CHAOS_FULL,
    TOPIC,
    Connection,
    bookings,
    column,
    expire,
    finish,
    insert_due,
    log_lines,
    rows,
    runs,
    scalar,
    scaled,
    wait_until,
)
from tests.kafka_fixtures import Kafka, MakeTopic, skip_or_fail
from tests.prefork import run_crmctl
from tests.relay_support import (
    Arrivals,
    Chessboard,
    count,
    envelope,
    error_of,
    extend,
    insert_event,
    insert_events,
    let_pauses_pass,
    message_id,
    messages,
    numbers,
    record_count,
    relay,
    relay_environment,
    rsa_signer,
    start_relay,
    tenant_of,
)
from tests.support import Database, start_crmctl

DOCUMENT: Final = {
    "job": str,
    "run_id": str,
    "dry_run": bool,
    "skipped": type(None),
    "published_count": int,
    "refused_count": int,
    "held_count": int,
    "refused": list,
    "messages": list,
    "batches": int,
    "has_more": bool,
    "duration_ms": int,
}
NOWHERE: Final = "127.0.0.1:1"
HELD: Final = "published_at is null and next_attempt_at is not null"
PENDING: Final = "published_at is null"


@pytest.fixture
def connection(database: Database) -> psycopg.Connection[Any]:
    return database.connect()


@pytest.fixture
def topic(make_topic: MakeTopic) -> str:
    return make_topic()


class TestTheOutbox:
    def test_is_published_in_position_order_of_each_aggregate(
        self, database: Database, connection: Connection, kafka: Kafka, topic: str
    ) -> None:
        insert_events(connection, topic, aggregates=20, each=5)
        result = relay(database, kafka.bootstrap_servers)
        assert result.exit_code == 0, result.stderr
        assert {name: type(value) for name, value in result.json.items()} == DOCUMENT
        assert result.json["published_count"] == 100
        assert (result.json["batches"], result.json["has_more"]) == (1, False)
        records = kafka.read(topic)
        assert numbers(records) == {f"a-{n}": [1, 2, 3, 4, 5] for n in range(1, 21)}
        Arrivals.of(records).assert_complete_and_in_order(connection)
        assert len(records) == 100
        assert all(
            (row["published_at"] > row["created_at"], row["attempts"], row["last_error"], row["next_attempt_at"])
            == (True, 0, None, None)
            for row in messages(connection)
        )
        (run,) = runs(connection)
        assert (run["job"], run["counts"]["published_count"], run["outcome"]) == ("relay-outbox", 100, "committed")

    def test_gives_each_record_its_key_and_headers(
        self, database: Database, connection: Connection, kafka: Kafka, topic: str
    ) -> None:
        insert_events(connection, topic, aggregates=3)
        assert relay(database, kafka.bootstrap_servers).exit_code == 0
        by_id = {row["id"]: row for row in messages(connection)}
        for record in kafka.read(topic):
            row = by_id.pop(message_id(record))
            assert record.key == row["key"].encode()
            assert record.headers == (("traceparent", row["headers"]["traceparent"].encode()),)
            assert envelope(record) == {
                "MessageId": str(row["id"]),
                "ContractVersion": 1,
                "CreatedAt": envelope(record)["CreatedAt"],
                "AggregateId": row["aggregate_id"],
                "AggregateType": "Booking",
                "Payload": row["payload"],
            }
            assert datetime.fromisoformat(envelope(record)["CreatedAt"]) == row["created_at"]
        assert by_id == {}

    def test_goes_out_byte_for_byte_whatever_its_data(
        self, database: Database, connection: Connection, kafka: Kafka, topic: str
    ) -> None:
        odd = '{"Имя": "Ёж 🦔 \\" \\\\ \\n \\u001f", "Big": 123456789012345678901234567890.125, "None": null}'
        rows(
            connection,
            "insert into crm.outbox_messages (topic, key, aggregate_type, aggregate_id, contract_version, payload) "
            "values (%s, 'ключ', 'Бронь', 'бронь/1', 7, %s)",
            topic,
            odd,
        )
        first = relay(database, kafka.bootstrap_servers)
        connection.execute("update crm.outbox_messages set published_at = null")
        again = relay(database, kafka.bootstrap_servers, env={"TZ": "Asia/Vladivostok", "PGTZ": "Asia/Vladivostok"})
        assert (first.exit_code, again.exit_code) == (0, 0)
        one, two = kafka.read(topic)
        assert (one.value, one.key, one.headers) == (two.value, two.key, two.headers)
        assert one.key == "ключ".encode()
        assert envelope(one)["Payload"] == json.loads(odd)
        assert b"123456789012345678901234567890.125" in (one.value or b"")
        assert (envelope(one)["ContractVersion"], envelope(one)["AggregateType"]) == (7, "Бронь")

    def test_is_published_batch_by_batch_with_drain(
        self, database: Database, connection: Connection, kafka: Kafka, topic: str
    ) -> None:
        insert_events(connection, topic, aggregates=10, each=5)
        one = relay(database, kafka.bootstrap_servers, "--batch-size", "20")
        assert (one.json["published_count"], one.json["has_more"]) == (20, True)
        assert [row["published_at"] is None for row in messages(connection)] == [False] * 20 + [True] * 30
        rest = relay(database, kafka.bootstrap_servers, "--batch-size", "20", "--drain")
        assert (rest.json["published_count"], rest.json["has_more"]) == (30, False)
        assert len(kafka.read(topic)) == 50
        Arrivals.of(kafka.read(topic)).assert_complete_and_in_order(connection)
        assert [run["counts"]["published_count"] for run in runs(connection)] == [20, 20, 10]

    def test_is_drained_as_long_as_the_time_budget_lasts(
        self, database: Database, connection: Connection, kafka: Kafka, topic: str
    ) -> None:
        insert_events(connection, topic, aggregates=5)
        result = relay(database, kafka.bootstrap_servers, "--drain", "--batch-size", "2", "--time-budget", "1ms")
        assert (result.exit_code, result.json["batches"], result.json["has_more"]) == (0, 1, True)
        assert (result.json["published_count"], count(connection, PENDING)) == (2, 3)

    def test_may_hold_several_topics(
        self, database: Database, connection: Connection, kafka: Kafka, make_topic: MakeTopic
    ) -> None:
        one, two = make_topic(), make_topic()
        for number in (1, 2):
            for topic in (one, two):
                insert_event(connection, topic, "a-1", number)
        assert relay(database, kafka.bootstrap_servers).json["published_count"] == 4
        assert numbers(kafka.read(one)) == numbers(kafka.read(two)) == {"a-1": [1, 2]}

    def test_keeps_a_row_that_took_an_early_position_and_commits_late(
        self, database: Database, connection: Connection, kafka: Kafka, topic: str
    ) -> None:
        with psycopg.connect(database.url) as slow:
            early = insert_event(slow, topic, "a-1")
            late = insert_event(connection, topic, "a-2")
            assert relay(database, kafka.bootstrap_servers, "--drain").json["published_count"] == 1
            assert [message_id(record) for record in kafka.read(topic)] == [late]
            slow.commit()
        assert [row["id"] for row in messages(connection)] == [early, late]
        assert relay(database, kafka.bootstrap_servers, "--drain").json["published_count"] == 1
        assert {message_id(record) for record in kafka.read(topic)} == {early, late}

    @pytest.mark.chaos
    def test_loses_nothing_in_a_tiny_queue_of_the_client(
        self, database: Database, connection: Connection, kafka: Kafka, topic: str
    ) -> None:
        total = scaled(50_000)
        insert_events(connection, topic, aggregates=total // 2, each=2)
        result = relay(
            database,
            kafka.bootstrap_servers,
            "--drain",
            "--time-budget",
            "30m",
            options={"queue.buffering.max.messages": "10"},
            timeout=1800,
        )
        assert result.exit_code == 0
        assert result.json["published_count"] == total
        assert count(connection, PENDING) == 0
        arrivals = Arrivals.of(kafka.read(topic))
        assert len(arrivals.records) == total
        arrivals.assert_complete_and_in_order(connection)


class TestNothingToDo:
    def test_is_a_success_that_needs_no_broker(self, database: Database, connection: Connection, topic: str) -> None:
        insert_event(connection, topic, "a-1")
        connection.execute("update crm.outbox_messages set published_at = now()")
        result = relay(database, NOWHERE, "--drain")
        assert result.exit_code == 0
        assert {name: type(value) for name, value in result.json.items()} == DOCUMENT
        assert (result.json["published_count"], result.json["has_more"]) == (0, False)
        assert result.json["duration_ms"] < 5000
        assert runs(connection) == []

    def test_is_said_in_the_table(self, database: Database) -> None:
        result = run_crmctl("outbox", "relay", database=database, env={"CRMCTL_KAFKA__BOOTSTRAP_SERVERS": NOWHERE})
        assert result.exit_code == 0
        assert re.search(r"^Published +0$", result.stdout, re.MULTILINE)

    @pytest.mark.parametrize("flag", [(), ("--drain",)], ids=["one batch", "drain"])
    def test_while_another_relay_holds_the_lock(
        self, database: Database, connection: Connection, flag: tuple[str, ...]
    ) -> None:
        insert_event(connection, TOPIC, "a-1")
        with psycopg.connect(database.url) as other:
            other.execute("select pg_advisory_xact_lock(%s)", (relay_outbox.LOCK,))
            result = relay(database, NOWHERE, *flag)
        assert result.exit_code == 0
        assert (result.json["skipped"], result.json["published_count"]) == ("locked", 0)
        assert result.json["has_more"] is None
        assert count(connection, PENDING) == 1

    def test_that_takes_the_lock_between_two_batches_hides_nothing_of_the_first(
        self, database: Database, connection: Connection, kafka: Kafka, topic: str
    ) -> None:
        insert_events(connection, topic, aggregates=100)
        command = ("outbox", "relay", "--drain", "--batch-size", "50")
        with (
            psycopg.connect(database.url) as gate,
            psycopg.connect(database.url) as other,
            ThreadPoolExecutor(1) as thread,
        ):
            gate.execute("select from crm.outbox_messages order by position limit 1 for update")
            with start_crmctl(*command, database=database, env=relay_environment(kafka.bootstrap_servers)) as process:
                waiting = "select exists (select from pg_locks where locktype = %s and not granted)"
                wait_until(lambda: scalar(connection, waiting, "transactionid"), "the relay's mark")
                taken = thread.submit(other.execute, "select pg_advisory_xact_lock(%s)", (relay_outbox.LOCK,))
                wait_until(lambda: scalar(connection, waiting, "advisory"), "the other relay")
                gate.commit()
                result = finish(process)
                taken.result()
        assert result.exit_code == 0, result.stderr
        assert result.stdout.startswith("Skipped: locked by another run of relay-outbox.\n")
        assert re.search(r"^Published +50$", result.stdout, re.MULTILINE)
        assert count(connection, PENDING) == 50


class TestADryRun:
    def test_lists_the_batch_and_produces_nothing(
        self, database: Database, connection: Connection, kafka: Kafka, topic: str
    ) -> None:
        insert_events(connection, topic, aggregates=2, each=2)
        before = messages(connection)
        result = relay(database, kafka.bootstrap_servers, "--dry-run", "--batch-size", "3")
        assert result.exit_code == 0
        assert (result.json["dry_run"], result.json["published_count"], result.json["has_more"]) == (True, 3, True)
        assert [listed["message_id"] for listed in result.json["messages"]] == [str(row["id"]) for row in before[:3]]
        assert result.json["messages"][0].items() >= {"topic": topic, "aggregate_id": "a-1", "key": "a-1"}.items()
        assert kafka.read(topic) == []
        assert messages(connection) == before
        assert runs(connection) == []

    def test_needs_no_broker(self, database: Database, connection: Connection, topic: str) -> None:
        insert_event(connection, topic, "a-1")
        assert relay(database, NOWHERE, "--dry-run").json["published_count"] == 1


class TestABrokerThatCannotBeReached:
    def test_is_unavailable_and_nothing_is_marked(self, database: Database, connection: Connection) -> None:
        insert_events(connection, TOPIC, aggregates=3)
        before = messages(connection)
        result = relay(database, NOWHERE, "--drain")
        assert result.exit_code == 69
        assert (error_of(result)["code"], error_of(result)["exit_code"]) == ("CRMCTL_UNAVAILABLE", 69)
        assert "CRMCTL_KAFKA__BOOTSTRAP_SERVERS" in error_of(result)["hint"]
        assert messages(connection) == before

    def test_is_a_configuration_error_where_none_is_configured(
        self, database: Database, connection: Connection
    ) -> None:
        insert_event(connection, TOPIC, "a-1")
        before = messages(connection)
        result = relay(database, None)
        assert result.exit_code == 78
        with start_relay(database, None, "--follow") as process:
            assert finish(process).exit_code == 78
        assert "CRMCTL_KAFKA__BOOTSTRAP_SERVERS" in error_of(result)["hint"]
        assert messages(connection) == before

    def test_is_a_configuration_error_where_the_options_are_wrong(
        self, database: Database, connection: Connection
    ) -> None:
        insert_event(connection, TOPIC, "a-1")
        result = relay(database, NOWHERE, options={"no.such.option": "1"})
        assert result.exit_code == 78
        assert "no.such.option" in error_of(result)["message"]


@pytest.mark.real_kafka
class TestATopicThatDoesNotExist:
    def test_holds_its_aggregates_until_it_does(
        self, database: Database, connection: Connection, kafka: Kafka, topic: str, make_topic: MakeTopic
    ) -> None:
        missing = f"missing.{uuid.uuid4()}"
        insert_events(connection, missing, aggregates=2, each=2, prefix="m")
        insert_events(connection, topic, aggregates=2, each=2)
        result = relay(database, kafka.bootstrap_servers, "--drain")
        assert result.exit_code == 0
        counts = {name: result.json[name] for name in ("published_count", "refused_count", "held_count")}
        assert counts == {"published_count": 4, "refused_count": 2, "held_count": 2}
        for row in messages(connection, HELD):
            first = row["payload"]["Number"] == 1
            assert row["attempts"] == int(first)
            assert (row["last_error"] is not None) == first
            assert not first or ("UNKNOWN_TOPIC" in row["last_error"] and missing in row["last_error"])
        assert relay(database, kafka.bootstrap_servers, "--drain").json["published_count"] == 0
        make_topic(missing)
        let_pauses_pass(connection)
        assert relay(database, kafka.bootstrap_servers, "--drain").json["published_count"] == 4
        assert numbers(kafka.read(missing)) == {"m-1": [1, 2], "m-2": [1, 2]}
        assert count(connection, PENDING) == 0

    def test_needs_a_person_with_strict(self, database: Database, connection: Connection, kafka: Kafka) -> None:
        insert_event(connection, f"missing.{uuid.uuid4()}", "a-1")
        result = relay(database, kafka.bootstrap_servers, "--strict")
        assert result.exit_code == 3
        assert [refused["message_id"] for refused in result.json["refused"]] == [
            str(row["id"]) for row in messages(connection)
        ]
        (line,) = log_lines(result, "records refused")
        assert (line["level"], line["count"]) == ("error", 1)

    def test_100_refusals_are_listed_and_every_one_is_logged(
        self, database: Database, connection: Connection, kafka: Kafka
    ) -> None:
        insert_events(connection, f"missing.{uuid.uuid4()}", aggregates=130)
        insert_events(connection, f"missing.{uuid.uuid4()}", aggregates=1, prefix="later")
        result = relay(database, kafka.bootstrap_servers, "--drain", "--batch-size", "50")
        assert (result.json["refused_count"], len(result.json["refused"])) == (131, 100)
        lines = log_lines(result, "records refused")
        assert sum(line["count"] for line in lines) == 131
        assert len({line["reason"] for line in lines}) == 2

    def test_is_asked_for_less_and_less_often(self, database: Database, connection: Connection, kafka: Kafka) -> None:
        insert_event(connection, f"missing.{uuid.uuid4()}", "a-1", 1)
        insert_event(connection, messages(connection)[0]["topic"], "a-1", 2)
        pauses = []
        for attempt in range(1, 4):
            relay(database, kafka.bootstrap_servers)
            head, follower = messages(connection)
            assert (head["attempts"], follower["attempts"], follower["last_error"]) == (attempt, 0, None)
            assert head["next_attempt_at"] == follower["next_attempt_at"]
            pauses.append(head["next_attempt_at"] - scalar(connection, "select now()"))
            let_pauses_pass(connection)
        assert timedelta(seconds=5) < pauses[0] <= timedelta(seconds=10)
        assert pauses[0] + timedelta(seconds=5) < pauses[1] < pauses[2] - timedelta(seconds=10)
        connection.execute("update crm.outbox_messages set attempts = 2000000, next_attempt_at = now()")
        relay(database, kafka.bootstrap_servers)
        assert messages(connection)[0]["next_attempt_at"] - scalar(connection, "select now()") <= timedelta(hours=1)


def raise_limit(kafka: Kafka, topic: str, size: int) -> None:
    """Let the broker take records of this size on a topic."""
    entry = ConfigEntry("max.message.bytes", str(size), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    admin = kafka.admin()
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(30)


@pytest.mark.real_kafka
class TestARecordThatIsTooLarge:
    BIG: Final = 300_000
    HUGE: Final = 1_500_000

    @pytest.fixture
    def narrow(self, make_topic: MakeTopic) -> str:
        """A topic whose broker takes 200,000 bytes and no more."""
        return make_topic(config={"max.message.bytes": "200000"})

    @pytest.mark.parametrize("size", [BIG, HUGE], ids=["for the broker", "for the client"])
    def test_among_500_holds_its_aggregate_and_nobody_else(
        self, database: Database, connection: Connection, kafka: Kafka, narrow: str, size: int
    ) -> None:
        insert_events(connection, narrow, aggregates=249, size=200)
        large = insert_event(connection, narrow, "a-100", 2, size=size)
        insert_events(connection, narrow, aggregates=250, first=3, size=200)
        assert count(connection) == 500
        result = relay(database, kafka.bootstrap_servers, "--drain")
        assert result.exit_code == 0, result.stderr
        counts = {name: result.json[name] for name in ("published_count", "refused_count", "held_count")}
        assert counts == {"published_count": 498, "refused_count": 1, "held_count": 1}
        assert [refused["message_id"] for refused in result.json["refused"]] == [str(large)]
        held = messages(connection, PENDING)
        assert [row["payload"]["Number"] for row in held] == [2, 3]
        assert [row["attempts"] for row in held] == [1, 0]
        assert "MSG_SIZE_TOO_LARGE" in held[0]["last_error"]
        assert held[1]["last_error"] is None
        assert count(connection, "attempts > 0 or last_error is not null") == 1
        records = kafka.read(narrow)
        assert len(records) == 498
        assert numbers(records)["a-100"] == [1]
        insert_event(connection, narrow, "a-100", 4)
        insert_event(connection, narrow, "a-101", 4)
        assert relay(database, kafka.bootstrap_servers, "--drain").json["published_count"] == 1
        raise_limit(kafka, narrow, 2_000_000)
        assert relay(database, kafka.bootstrap_servers, "--drain").json["published_count"] == 0
        let_pauses_pass(connection)
        bigger = {"message.max.bytes": "2000000"}
        assert relay(database, kafka.bootstrap_servers, "--drain", options=bigger).json["published_count"] == 3
        assert numbers(kafka.read(narrow, fetch_message_max_bytes=2_000_000))["a-100"] == [1, 2, 3, 4]
        assert count(connection, PENDING) == 0
        assert messages(connection, f"id = '{large}'")[0]["attempts"] == 1

    def test_is_refused_again_when_its_pause_is_over_and_only_it_counts_attempts(
        self, database: Database, connection: Connection, kafka: Kafka, narrow: str
    ) -> None:
        insert_event(connection, narrow, "a-1", 1, size=self.BIG)
        insert_events(connection, narrow, first=2, each=3)
        insert_event(connection, narrow, "a-2", 1, size=self.BIG)
        relay(database, kafka.bootstrap_servers, "--drain")
        let_pauses_pass(connection)
        insert_event(connection, narrow, "a-1", 5)
        insert_event(connection, narrow, "a-3", 1)
        result = relay(database, kafka.bootstrap_servers, "--drain")
        assert (result.json["published_count"], result.json["refused_count"]) == (1, 2)
        found = [
            (row["aggregate_id"], row["attempts"], row["next_attempt_at"] is None)
            for row in messages(connection, PENDING)
        ]
        assert found == [
            ("a-1", 2, False),
            ("a-1", 0, False),
            ("a-1", 0, False),
            ("a-1", 0, False),
            ("a-2", 2, False),
            ("a-1", 0, False),
        ]
        assert len({row["next_attempt_at"] for row in messages(connection, PENDING)}) == 1
        assert numbers(kafka.read(narrow)) == {"a-3": [1]}

    def test_that_somebody_removes_lets_the_others_follow(
        self, database: Database, connection: Connection, kafka: Kafka, narrow: str
    ) -> None:
        large = insert_event(connection, narrow, "a-1", 1, size=self.BIG)
        insert_events(connection, narrow, first=2, each=2)
        relay(database, kafka.bootstrap_servers, "--drain")
        connection.execute("delete from crm.outbox_messages where id = %s", (large,))
        let_pauses_pass(connection)
        assert relay(database, kafka.bootstrap_servers, "--drain").json["published_count"] == 2
        assert numbers(kafka.read(narrow)) == {"a-1": [2, 3]}

    def test_holds_no_other_type_of_aggregate_with_the_same_id(
        self, database: Database, connection: Connection, kafka: Kafka, narrow: str
    ) -> None:
        insert_event(connection, narrow, "a-1", 1, size=self.BIG)
        other = insert_event(connection, narrow, "a-1", 2)
        connection.execute("update crm.outbox_messages set aggregate_type = 'Deal' where id = %s", (other,))
        relay(database, kafka.bootstrap_servers, "--drain")
        let_pauses_pass(connection)
        relay(database, kafka.bootstrap_servers, "--drain")
        assert [message_id(record) for record in kafka.read(narrow)] == [other]

    def test_lets_a_row_of_its_aggregate_with_an_earlier_position_go_first(
        self, database: Database, connection: Connection, kafka: Kafka, narrow: str
    ) -> None:
        """It took its position before the refused one, and was committed after the refusal."""
        with psycopg.connect(database.url) as slow:
            insert_event(slow, narrow, "a-1", 1)
            insert_event(connection, narrow, "a-1", 2, size=self.BIG)
            insert_event(connection, narrow, "a-1", 3)
            assert relay(database, kafka.bootstrap_servers, "--drain").json["refused_count"] == 1
            slow.commit()
        relay(database, kafka.bootstrap_servers, "--drain")
        raise_limit(kafka, narrow, 1_000_000)
        let_pauses_pass(connection)
        relay(database, kafka.bootstrap_servers, "--drain")
        assert numbers(kafka.read(narrow)) == {"a-1": [1, 2, 3]}

    def test_is_followed_in_the_same_run_by_what_was_written_since(
        self, database: Database, connection: Connection, kafka: Kafka, narrow: str
    ) -> None:
        insert_event(connection, narrow, "a-1", 1, size=self.BIG)
        relay(database, kafka.bootstrap_servers, "--drain")
        raise_limit(kafka, narrow, 1_000_000)
        let_pauses_pass(connection)
        insert_event(connection, narrow, "a-1", 2)
        result = relay(database, kafka.bootstrap_servers, "--drain")
        assert (result.json["published_count"], result.json["has_more"]) == (2, False)
        assert numbers(kafka.read(narrow)) == {"a-1": [1, 2]}

    def test_in_sets_that_are_too_large_only_together_everything_is_published(
        self, database: Database, connection: Connection, kafka: Kafka, make_topic: MakeTopic
    ) -> None:
        """500 records of 1 kB in sets that a limit of 3 kB refuses: none of them is to blame."""
        tight = make_topic(config={"max.message.bytes": "3000"})
        insert_events(connection, tight, aggregates=500, size=1000)
        result = relay(database, kafka.bootstrap_servers, "--drain")
        assert (result.json["published_count"], result.json["refused_count"]) == (500, 0)
        assert count(connection, "attempts > 0") == 0
        Arrivals.of(kafka.read(tight)).assert_complete_and_in_order(connection)


def explained(connection: Connection, statement: str, limit: int = 500) -> dict[str, Any]:
    """The plan of one of the job's statements, executed and counted."""
    plan = connection.execute(
        f"explain (analyze, buffers, timing off, format json) {relay_outbox.STATEMENTS[statement]}".encode(),
        {"limit": limit},
    ).fetchone()
    assert plan is not None
    document: dict[str, Any] = plan[0][0]["Plan"]
    return document


def nodes(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def scans(plan: Mapping[str, Any]) -> set[tuple[str, str | None]]:
    """How each table is read: the kind of scan and the index."""
    return {(node["Node Type"], node.get("Index Name")) for node in nodes(plan) if "Scan" in node["Node Type"]}


def rows_read(plan: Mapping[str, Any]) -> float:
    """How many rows all scans together looked at, kept or not."""
    return sum(
        float((node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"])
        for node in nodes(plan)
        if "Scan" in node["Node Type"]
    )


def buffers(plan: Mapping[str, Any]) -> int:
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def note_rows_read(connection: Connection) -> None:
    """From here on each batch notes how many rows and index entries of the outbox its transaction read."""
    connection.execute(
        """
        create table public.reads (run bigint generated always as identity, rows_read bigint);
        create function public.note_rows_read() returns trigger language plpgsql as $$
        begin
            insert into public.reads (rows_read)
            select pg_stat_get_xact_tuples_returned(o) + pg_stat_get_xact_tuples_fetched(o) + (
                select sum(pg_stat_get_xact_tuples_returned(i.indexrelid)) from pg_index i where i.indrelid = o
            )
            from cast('crm.outbox_messages' as regclass) o;
            return new;
        end $$;
        create trigger note_rows_read before insert on crm.job_runs
            for each row execute function public.note_rows_read()
        """
    )


class TestTheQueriesPlan:
    @pytest.mark.chaos
    def test_among_a_million_published_rows_walks_the_partial_index(
        self, database: Database, connection: Connection
    ) -> None:
        total = 1_000_000 if CHAOS_FULL else 200_000
        rows(
            connection,
            """
            insert into crm.outbox_messages
                (topic, key, aggregate_type, aggregate_id, contract_version, payload, created_at, published_at)
            select 't', 'a-' || n %% 50000, 'Booking', 'a-' || n %% 50000, 1, '{}', now(), now()
            from generate_series(1, %s) n
            """,
            total,
        )
        insert_events(connection, TOPIC, aggregates=10)
        for analyzed in (False, True):
            if analyzed:
                connection.execute("analyze crm.outbox_messages")
            fresh = explained(connection, "select_fresh")
            assert ("Index Scan", "ix_outbox_messages_publishable") in scans(fresh), scans(fresh)
            assert "Seq Scan" not in {kind for kind, _ in scans(fresh)}
            assert "Sort" not in {node["Node Type"] for node in nodes(fresh)}
            assert fresh["Actual Rows"] == 10
            assert buffers(fresh) < 100
            retries = explained(connection, "select_retries", 125)
            assert "Seq Scan" not in {kind for kind, _ in scans(retries)}
            assert retries["Actual Rows"] == 0
            assert buffers(retries) < 20

    @pytest.mark.parametrize("aggregates", [10_000, 1], ids=["of as many aggregates", "of one aggregate"])
    def test_does_not_read_10000_held_rows_at_the_head(
        self, database: Database, connection: Connection, aggregates: int
    ) -> None:
        insert_events(connection, TOPIC, aggregates=1000, prefix="free")
        connection.execute("vacuum analyze crm.outbox_messages")
        alone = {name: buffers(explained(connection, name)) for name in ("select_fresh", "select_retries")}
        connection.execute("delete from crm.outbox_messages")
        insert_events(connection, TOPIC, aggregates=aggregates, each=10_000 // aggregates, prefix="held")
        connection.execute(
            "update crm.outbox_messages set next_attempt_at = now() + interval '5 minutes', attempts = 1"
        )
        insert_events(connection, TOPIC, aggregates=1000, prefix="free")
        connection.execute("vacuum analyze crm.outbox_messages")
        fresh, retries = explained(connection, "select_fresh"), explained(connection, "select_retries", 125)
        assert fresh["Actual Rows"] == 500
        assert retries["Actual Rows"] == 0
        assert rows_read(fresh) <= 500 + 500
        assert rows_read(retries) == 0
        # For each of the 500 rows a probe of an index: a few pages, whether anything is held or not.
        assert buffers(fresh) <= alone["select_fresh"] + 4 * 500
        assert buffers(retries) <= alone["select_retries"] + 4

    def test_of_a_whole_batch_reads_no_more_past_10000_held_rows_than_without(
        self, database: Database, connection: Connection, kafka: Kafka, topic: str
    ) -> None:
        note_rows_read(connection)
        insert_events(connection, topic, aggregates=10_000, prefix="held")
        connection.execute("update crm.outbox_messages set published_at = now()")
        connection.execute("vacuum analyze crm.outbox_messages")
        insert_events(connection, topic, aggregates=500, prefix="alone")
        assert relay(database, kafka.bootstrap_servers).json["published_count"] == 500
        connection.execute(
            "update crm.outbox_messages set published_at = null, next_attempt_at = now() + interval '5 minutes', "
            "attempts = 1 where aggregate_id like 'held-%'"
        )
        connection.execute("vacuum analyze crm.outbox_messages")
        insert_events(connection, topic, aggregates=500, prefix="free")
        result = relay(database, kafka.bootstrap_servers)
        assert (result.json["published_count"], result.json["has_more"]) == (500, True)
        alone, past_held_rows = column(connection, "select rows_read from public.reads order by run")
        assert 500 <= alone <= 5 * 500, alone
        # Where nearly every row is held, the planner may look for held ones of an aggregate in the index of all rows;
        # it then meets the row itself: an entry and a row for each of the 500.
        assert past_held_rows <= alone + 2 * 500 + 50
        assert {key for record in kafka.read(topic) if (key := record.key)} == {
            f"{prefix}-{n}".encode() for prefix in ("alone", "free") for n in range(1, 501)
        }
        assert relay(database, kafka.bootstrap_servers, "--drain").json["published_count"] == 0


class TestASignal:
    def test_ends_a_batch_early_and_what_was_delivered_is_marked(
        self, database: Database, connection: Connection, kafka: Kafka, topic: str
    ) -> None:
        """One aggregate, so each record waits for the acknowledgement of the one before it."""
        insert_events(connection, topic, each=10_000)
        with (
            record_count(kafka.bootstrap_servers, topic) as arrived,
            start_relay(database, kafka.bootstrap_servers, "--drain", "--batch-size", "10000") as process,
        ):
            wait_until(lambda: arrived() >= 5, "the first records")
            process.send_signal(signal.SIGTERM)
            result = finish(process)
            number = arrived()
        assert result.exit_code == 143
        assert 5 <= number < 10_000
        assert count(connection, "published_at is not null") == number
        assert result.json["committed"]["published_count"] == number
        connection.execute("delete from crm.outbox_messages where (payload ->> 'Number')::int > %s", (number + 50,))
        assert relay(database, kafka.bootstrap_servers, "--drain").json["published_count"] == 50
        assert numbers(kafka.read(topic)) == {"a-1": list(range(1, number + 51))}

    def test_ends_following_with_success(
        self, database: Database, connection: Connection, kafka: Kafka, topic: str
    ) -> None:
        insert_events(connection, topic, aggregates=5)
        with start_relay(database, kafka.bootstrap_servers, "--follow") as process:
            wait_until(lambda: count(connection, PENDING) == 0, "the first batch")
            insert_events(connection, topic, aggregates=5, first=2)
            wait_until(lambda: count(connection, PENDING) == 0, "the second batch")
            process.send_signal(signal.SIGTERM)
            result = finish(process)
        assert result.exit_code == 0, result.stderr
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        assert [line["published_count"] for line in lines] == [5, 5]
        assert numbers(kafka.read(topic)) == {f"a-{n}": [1, 2] for n in range(1, 6)}


_JAVA_READER: Final = """
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.List;
import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.utils.Utils;

public class Reader {
    public static void main(String[] args) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", args[0]);
        settings.put("group.id", args[1] + "-java");
        settings.put("auto.offset.reset", "earliest");
        PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        ByteArrayDeserializer bytes = new ByteArrayDeserializer();
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(settings, bytes, bytes)) {
            int partitions = consumer.partitionsFor(args[1]).size();
            int left = Integer.parseInt(args[2]);
            long end = System.currentTimeMillis() + 60_000;
            consumer.subscribe(List.of(args[1]));
            while (left > 0 && System.currentTimeMillis() < end) {
                for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(200))) {
                    int expected = Utils.toPositive(Utils.murmur2(record.key())) % partitions;
                    out.print(record.partition() + "\\t" + expected + "\\t" + text(record.key()) + "\\t");
                    for (Header header : record.headers()) {
                        out.print(header.key() + "=" + text(header.value()) + ";");
                    }
                    out.println("\\t" + text(record.value()));
                    left--;
                }
            }
        }
    }

    private static String text(byte[] bytes) throws Exception {
        return StandardCharsets.UTF_8.newDecoder().decode(java.nio.ByteBuffer.wrap(bytes)).toString();
    }
}
"""


@pytest.fixture
def booking_topic(kafka: Kafka, make_topic: MakeTopic) -> str:
    """The topic of the contract, empty."""
    if kafka.is_real:
        return make_topic(TOPIC, partitions=6)
    pytest.skip("the topic of the contract is not empty on a shared mock cluster")


@pytest.mark.real_kafka
class TestTheEventOfAnExpiredBooking:
    TRACE: Final = "4bf92f3577b34da6a3ce929d0e0e4736"

    @pytest.mark.parametrize("phase", [RESERVE, BOOKING], ids=lambda phase: phase.name)
    def test_has_exactly_the_fields_of_its_contract(
        self, database: Database, connection: Connection, kafka: Kafka, booking_topic: str, phase: Any
    ) -> None:
        """AC8."""
        booking_id = insert_due(connection, phase)
        trace = {"TRACEPARENT": f"00-{self.TRACE}-00f067aa0ba902b7-01"}
        as_of = expire(database, env=trace).json["as_of"]
        assert relay(database, kafka.bootstrap_servers).json["published_count"] == 1
        (record,) = kafka.read(booking_topic)
        booking, (row,) = bookings(connection)[booking_id], messages(connection)
        assert record.key == str(booking_id).encode()
        assert envelope(record) == {
            "MessageId": str(row["id"]),
            "ContractVersion": 1,
            "CreatedAt": envelope(record)["CreatedAt"],
            "AggregateId": str(booking_id),
            "AggregateType": "Booking",
            "Payload": {
                "BookingId": str(booking_id),
                "TenantId": booking["tenant_id"],
                "DealId": booking["deal_id"],
                "PropertyObjectId": booking["property_object_id"],
                "Phase": phase.name,
                "ExpiredAt": booking["expired_at"],
            },
        }
        for moment in (envelope(record)["CreatedAt"], envelope(record)["Payload"]["ExpiredAt"]):
            assert datetime.fromisoformat(moment).utcoffset() == timedelta(0)
        assert datetime.fromisoformat(envelope(record)["Payload"]["ExpiredAt"]) == datetime.fromisoformat(as_of)
        ((name, value),) = record.headers
        assert name == "traceparent"
        assert re.fullmatch(rf"00-{self.TRACE}-[0-9a-f]{{16}}-01", (value or b"").decode())
        assert not (value or b"").endswith(b"-00f067aa0ba902b7-01")

    def test_is_read_by_a_client_that_is_not_ours(
        self, database: Database, connection: Connection, kafka: Kafka, booking_topic: str, tmp_path: Path
    ) -> None:
        """Apache Kafka's own Java consumer; and each key is in the partition that a Java producer would choose."""
        if "jdk.compiler" not in subprocess.check_output(["java", "--list-modules"], text=True):
            skip_or_fail("this Java has no compiler for the reader")
        ids = {str(insert_due(connection, phase)) for phase in (RESERVE, BOOKING) for _ in range(10)}
        expire(database, "--drain")
        assert relay(database, kafka.bootstrap_servers).json["published_count"] == 20
        source = tmp_path / "Reader.java"
        source.write_text(_JAVA_READER)
        libraries = f"{kafka_maven.libraries()}/*"
        read = subprocess.run(
            ["java", "-XX:TieredStopAtLevel=1", "-cp", libraries, source, kafka.bootstrap_servers, booking_topic, "20"],
            env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"},
            capture_output=True,
            encoding="utf-8",
            timeout=120,
            check=False,
        )
        lines = [line.split("\t") for line in read.stdout.splitlines()]
        assert len(lines) == 20, read.stderr
        assert {key for _, _, key, _, _ in lines} == ids
        by_key = {str(row["aggregate_id"]): row for row in messages(connection)}
        for partition, expected, key, headers, value in lines:
            assert partition == expected
            assert headers == f"traceparent={by_key[key]['headers']['traceparent']};"
            assert json.loads(value)["MessageId"] == str(by_key[key]["id"])
            assert json.loads(value)["Payload"] == by_key[key]["payload"]

    def test_frees_the_property_object_once_in_spite_of_duplicates(
        self, database: Database, connection: Connection, kafka: Kafka, booking_topic: str
    ) -> None:
        """AC2: the chessboard's stand-in frees the property object of each expired booking, and of no other."""
        due = {insert_due(connection, phase) for phase in (RESERVE, BOOKING) for _ in range(20)}
        extended = insert_due(connection, BOOKING)
        token = rsa_signer().token(tenant_of(connection, extended))
        assert extend(database, extended, token=token).exit_code == 0
        assert expire(database, "--drain").exit_code == 0
        for _ in range(3):
            relay(database, kafka.bootstrap_servers, "--drain")
            # As if the relay had died between the acknowledgement and its commit.
            connection.execute("update crm.outbox_messages set published_at = null where position % 3 = 0")
        chessboard = Chessboard()
        chessboard.consume(kafka.read(booking_topic))
        found = bookings(connection)
        assert chessboard.repeated > 0
        assert chessboard.freed == {UUID(found[booking_id]["property_object_id"]): 1 for booking_id in due}
        assert found[extended]["status"] == "Booked"

    def test_does_not_exist_for_an_extension(
        self, database: Database, connection: Connection, kafka: Kafka, booking_topic: str
    ) -> None:
        booking_id = insert_due(connection, BOOKING)
        assert extend(database, booking_id, token=rsa_signer().token(tenant_of(connection, booking_id))).exit_code == 0
        assert relay(database, kafka.bootstrap_servers, "--drain").json["published_count"] == 0
        assert kafka.read(booking_topic) == []


class TestTheList:
    def test_shows_what_is_pending_and_what_is_held(self, database: Database, connection: Connection) -> None:
        insert_events(connection, TOPIC, aggregates=3, each=2)
        connection.execute("update crm.outbox_messages set published_at = now() where aggregate_id = 'a-1'")
        connection.execute(
            "update crm.outbox_messages set next_attempt_at = now() + interval '1 minute' where aggregate_id = 'a-2'"
        )
        connection.execute(
            "update crm.outbox_messages set attempts = 1, last_error = 'MSG_SIZE_TOO_LARGE: [bold]too large[/bold]' "
            "where aggregate_id = 'a-2' and payload ->> 'Number' = '1'"
        )

        def states(*args: str) -> list[tuple[str, str]]:
            result = run_crmctl("outbox", "list", "-o", "json", *args, database=database)
            assert result.exit_code == 0
            return [(row["aggregate_id"], row["state"]) for row in result.json["messages"]]

        a_2, a_3 = ("a-2", "held"), ("a-3", "pending")
        assert states() == [a_2, a_3, a_2, a_3]
        assert states("--held") == [a_2, a_2]
        assert states("--aggregate", "a-3") == [a_3, a_3]
        assert states("--limit", "1") == [a_2]
        assert states("--topic", "elsewhere") == []
        assert states("--all") == [a_3, a_2, ("a-1", "published")] * 2
        table = run_crmctl("outbox", "list", database=database)
        assert "MSG_SIZE_TOO_LARGE: [bold]too large[/bold]" in table.stdout
        assert run_crmctl("outbox", "list", "--all", "--held", database=database).exit_code == 2
