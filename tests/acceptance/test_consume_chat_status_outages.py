"""PostgreSQL, Kafka or the dead-letter topic away, and members that come and go: waited for, and nothing is lost."""

import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Final
from uuid import UUID, uuid4

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from crmctl.adapters import kafka, record_source
from crmctl.adapters.dead_letters import DeadLetters
from crmctl.adapters.postgres import Database
from crmctl.adapters.publisher import Publisher
from crmctl.adapters.record_source import RecordSource
from crmctl.adapters.records import Topic
from crmctl.dev.kafka import temporary_kafka
from crmctl.dev.kafka_server import KafkaServer
from crmctl.dev.postgres import PostgresServer, temporary_server
from crmctl.jobs.consume_chat_status import Consumption, Options
from crmctl.jobs.job import Budget, Run
from crmctl.settings import DatabaseSettings, KafkaSettings
from crmctl.telemetry import logs
from crmctl.telemetry.metrics import ChatStatusMetrics
from crmctl.telemetry.tracing import Tracing
from tests.acceptance.conftest import ChaosTable
from tests.chat_status_chaos import (
    IN_THE_COMMIT,
    PATIENT,
    QUICK_BROKER,
    QUICK_GROUP,
    Cast,
    Line,
    Worker,
    assert_as_expected,
    committed_offsets,
    drain,
    expect,
    fresh_database,
    full_run_only,
    gate_in_commit,
    generations,
    history,
    locked_deal,
    make_chat,
    members,
    reconnected,
    record_changes,
    revive,
    sessions,
    slow_network,
    small_history,
    stop,
    wait_for,
    wait_for_members,
    wait_until_read,
    worker,
)
from tests.chat_status_support import Chat
from tests.expire_support import CHAOS_FULL, scalar
from tests.kafka_fixtures import Outgoing, create_topic

pytestmark = [pytest.mark.chaos, pytest.mark.real_kafka(embedded=True)]

WAITING: Final = "waiting to try again"
# A member that has not polled for so long leaves the group.
IMPATIENT_GROUP: Final = {**QUICK_GROUP, "max.poll.interval.ms": "20000" if CHAOS_FULL else "5000"}


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """PostgreSQL of this module's own, to be stopped."""
    with temporary_server(fsync=True) as server:
        yield server


@pytest.fixture(scope="module")
def broker() -> Iterator[KafkaServer]:
    """Apache Kafka of this module's own, to be killed."""
    with temporary_kafka(settings=QUICK_BROKER) as broker:
        yield broker
        broker.kill()  # nobody needs its orderly end


@pytest.fixture
def chat(server: PostgresServer, broker: KafkaServer) -> Iterator[Chat]:
    for away in (server, broker):  # where the test before failed
        if not away.running:
            away.restart()
    database = fresh_database(server)
    chat = make_chat(broker, database)
    record_changes(chat.connection)
    yield chat
    database.close()


def sent_history(chat: Chat, count: int, seed: int = 1) -> tuple[Cast, list[Line]]:
    """A history in which everything applies, without the records sent; the deals are there."""
    cast = Cast.of(max(10, count // 10), plain=True)
    cast.insert(chat.connection)
    return cast, history(cast, count, random.Random(seed), plain=True)


def send(chat: Chat, lines: Iterable[Line]) -> None:
    chat.send(*(line.record for line in lines))


def resent(lines: list[Line]) -> int:
    """How many records of a history are duplicates of an earlier one."""
    return len(lines) - len({line.message_id for line in lines})


def stays(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition holds all the time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not condition():
            return False
        time.sleep(0.02)
    return True


def wait_for_session(chat: Chat) -> int:
    """Wait until the consumer has a session; returns its backend's pid."""
    pid = wait_for(lambda: sessions(chat.connection), "a session")[0]["pid"]
    assert isinstance(pid, int)
    return pid


def pauses(consumer: Worker) -> list[float]:
    """The pauses in seconds that it announced so far."""
    return [line["seconds"] for line in consumer.say(WAITING)]


class TestPostgresqlIsAway:
    def test_for_longer_than_the_group_waits_for_a_poll(self, chat: Chat, server: PostgresServer) -> None:
        """The member stays the same with the same partitions, and the same offset is next."""
        cast, lines = sent_history(chat, 400)
        longest = 16 if CHAOS_FULL else 4
        with worker(chat, "one", options=IMPATIENT_GROUP) as one:
            send(chat, lines[:200])
            wait_until_read(chat, 200)
            before = wait_for_members(chat, "one")
            committed, generation = committed_offsets(chat), generations(chat)[-1]
            server.stop()
            stopped, seen = time.monotonic(), []
            send(chat, lines[200:])

            def has_waited() -> bool:
                seen.append(members(chat))
                return pauses(one)[-1:] == [longest]

            wait_for(has_waited, f"a pause of {longest} s")
            # It has been away for the pauses before this one, and stays so for most of it: for longer than it may.
            assert stays(lambda: members(chat) == before, longest - 0.5)
            assert all(found == before for found in seen)
            assert committed_offsets(chat) == committed
            away = time.monotonic() - stopped
            server.restart()
            wait_until_read(chat, 400)
            assert members(chat) == before
            assert generations(chat)[-1] == generation
            one.signal(signal.SIGTERM)
            result = one.end()
        assert pauses(one) == [2.0**n for n in range(len(pauses(one)))]
        times = [datetime.fromisoformat(line["timestamp"]) for line in one.say(WAITING)]
        waited = [(later - sooner).total_seconds() for sooner, later in pairwise(times)]
        assert all(real >= told for real, told in zip(waited, pauses(one)[:-1], strict=True)), waited
        assert away > float(IMPATIENT_GROUP["max.poll.interval.ms"]) / 1000
        expected = assert_as_expected(reconnected(chat), cast, lines)
        # Nothing was read twice.
        assert (result.exit_code, result.json["duplicate_count"]) == (0, resent(lines))
        assert result.json["applied_count"] == expected.applied

    def test_the_pauses_grow_to_a_minute(self, chat: Chat) -> None:
        """Told by the pauses that it asks for: nobody sits them out here."""
        cast, lines = sent_history(chat, 20)
        send(chat, lines)
        asked: list[float] = []

        class Hurried(RecordSource):
            def hold(self, seconds: float, stopping: Callable[[], bool]) -> None:
                asked.append(seconds)

        consume_in_process(chat, Hurried, "postgresql://nobody@127.0.0.1:1/nothing", lambda: len(asked) == 9)
        assert asked == [1, 2, 4, 8, 16, 32, 60, 60, 60]
        chat.consumed()
        assert_as_expected(chat, cast, lines)

    @full_run_only
    def test_and_comes_back_within_each_pause_of_a_batch_with_dead_letters(
        self, chat: Chat, server: PostgresServer
    ) -> None:
        """Restarted again and again: a dead letter that is written is not written again by the same process."""
        cast, lines = small_history(chat)
        with worker(chat, "one", "--batch-size", "20") as one:
            for _ in range(3):
                wait_for_session(chat)
                server.restart("immediate")
                chat = reconnected(chat)
            wait_until_read(chat, len(lines))
            assert stop(one) == 0
        assert_as_expected(chat, cast, lines)
        sources = Counter(letter.source for letter in chat.letters())
        assert set(sources.values()) == {1}

    def test_sigterm_while_it_is_away_is_exit_0_within_5_seconds(self, chat: Chat, server: PostgresServer) -> None:
        cast, lines = sent_history(chat, 100)
        with worker(chat, "one") as one:
            server.stop()
            send(chat, lines)
            wait_for(lambda: pauses(one)[-1:] == [4.0], "a pause of 4 s")
            assert stop(one) == 0
        assert committed_offsets(chat) == {}
        server.restart()
        chat = reconnected(chat)
        chat.consumed()
        assert_as_expected(chat, cast, lines)

    @full_run_only
    def test_sigterm_while_it_does_not_answer_ends_it_within_5_seconds(self, chat: Chat) -> None:
        cast, lines = sent_history(chat, 100)
        with worker(chat, "one") as one:
            wait_for_members(chat, "one")
            # A session that is stopped answers nothing, and its connection stays open.
            pid = wait_for_session(chat)
            os.kill(pid, signal.SIGSTOP)
            send(chat, lines)
            assert stays(lambda: one.running, 1.0)
            assert stop(one) == 143
            os.kill(pid, signal.SIGCONT)
        wait_for(lambda: not sessions(chat.connection), "the end of its session")
        drain(chat)
        assert_as_expected(chat, cast, lines)


class TestKafkaIsAway:
    def test_while_nothing_is_to_do(self, chat: Chat, broker: KafkaServer) -> None:
        cast, lines = sent_history(chat, 200)
        with worker(chat, "one") as one:
            send(chat, lines[:100])
            wait_until_read(chat, 100)
            broker.kill()
            # For longer than its session.
            assert stays(lambda: one.running, 3.0)
            revive(broker, chat)
            send(chat, lines[100:])
            wait_until_read(chat, 200)
            assert stop(one) == 0
        assert_as_expected(chat, cast, lines)

    @pytest.mark.parametrize(
        "seconds",
        [pytest.param(0.0, marks=full_run_only, id="for a moment"), pytest.param(3.0, id="for longer than a session")],
    )
    def test_between_the_commit_and_the_offsets(self, chat: Chat, broker: KafkaServer, seconds: float) -> None:
        cast, lines = sent_history(chat, 200)
        send(chat, lines)
        with worker(chat, "one", env=PATIENT) as one:
            with gate_in_commit(chat) as gate:
                wait_for(lambda: sessions(chat.connection, IN_THE_COMMIT), "the commit")
                broker.kill()
                gate.open()
                wait_for(lambda: scalar(chat.connection, "select count(*) from crm.processed_messages"), "the commit")
            assert stays(lambda: one.running, seconds)
            revive(broker, chat)
            wait_until_read(chat, 200)
            assert stop(one) == 0
        assert_as_expected(chat, cast, lines)

    def test_when_it_is_asked_about_the_topic_in_a_rebalance(self, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
        """The rebalance ends all the same; nothing is applied before the topic's id is known, and then all of it is."""
        cast, lines = sent_history(chat, 100)
        send(chat, lines)
        monkeypatch.setattr(record_source, "_CALL_SECONDS", 1.0)
        monkeypatch.setattr(record_source, "_CALLBACK_SECONDS", 1.0)

        held = []

        class Unlucky(RecordSource):
            def subscribe(self, stopping: Callable[[], bool]) -> None:
                super().subscribe(stopping)
                # The broker that will be asked is not there any more.
                self.lucky, self.admin = self.admin, AdminClient({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})

            def hold(self, seconds: float, stopping: Callable[[], bool]) -> None:
                super().hold(seconds, stopping)
                held.append((self.joined, sorted(self.assigned), len(chat.marks())))
                self.admin = self.lucky

        deadline = time.monotonic() + 20
        consume_in_process(
            chat,
            Unlucky,
            chat.database.url,
            lambda: time.monotonic() > deadline or sum(committed_offsets(chat).values()) == 100,
        )
        assert held == [(True, list(range(6)), 0)]
        assert_as_expected(chat, cast, lines)

    def test_when_a_consumer_starts(self, chat: Chat, broker: KafkaServer) -> None:
        cast, lines = sent_history(chat, 100)
        send(chat, lines)
        broker.kill()
        with worker(chat, "one") as one:
            # It looks for the topic for ten seconds before it pauses.
            assert stays(lambda: one.running, 2.0)
            if CHAOS_FULL:
                wait_for(lambda: pauses(one), "a pause")
            revive(broker, chat)
            wait_until_read(chat, 100)
            assert stop(one) == 0
        assert_as_expected(chat, cast, lines)

    def test_sigterm_while_it_is_away_ends_it_within_5_seconds(self, chat: Chat, broker: KafkaServer) -> None:
        """Cleanly, although it cannot say goodbye to the group."""
        cast, lines = sent_history(chat, 100)
        with worker(chat, "one") as one:
            send(chat, lines)
            wait_until_read(chat, 100)
            broker.kill()
            assert stays(lambda: one.running, 1.0)
            assert stop(one) == 0
        revive(broker, chat)
        assert_as_expected(chat, cast, lines)

    @full_run_only
    def test_sigterm_with_offsets_that_kafka_does_not_take_ends_it_within_5_seconds(
        self, chat: Chat, broker: KafkaServer
    ) -> None:
        cast, lines = sent_history(chat, 100)
        send(chat, lines)
        with worker(chat, "one", env=PATIENT) as one:
            with gate_in_commit(chat) as gate:
                wait_for(lambda: sessions(chat.connection, IN_THE_COMMIT), "the commit")
                broker.kill()
                gate.open()
                wait_for(lambda: scalar(chat.connection, "select count(*) from crm.processed_messages"), "the commit")
            assert stop(one) in (0, 143)
        revive(broker, chat)
        assert committed_offsets(chat) == {}
        drain(chat)
        assert_as_expected(chat, cast, lines)


class TestTheDeadLetterTopicIsAway:
    """Nothing is committed past a record that it does not take, the log says why, and it goes on when it is back."""

    @full_run_only
    def test_because_it_does_not_exist(self, chat: Chat) -> None:
        admin = chat.kafka.admin()
        admin.delete_topics([chat.dlq_topic])[chat.dlq_topic].result()
        reasons = self.blocked(chat, lambda: create_topic(chat.kafka.bootstrap_servers, chat.dlq_topic, partitions=3))
        assert chat.dlq_topic in reasons[0]
        assert "does not exist" in reasons[0]

    def test_because_it_refuses_the_record(self, chat: Chat) -> None:
        configure(chat, chat.dlq_topic, "max.message.bytes", "50")
        reasons = self.blocked(chat, lambda: configure(chat, chat.dlq_topic, "max.message.bytes", "1000000"))
        assert chat.dlq_topic in reasons[0]
        assert "MSG_SIZE_TOO_LARGE" in reasons[0]

    @full_run_only
    def test_because_the_broker_freezes_before_it_acknowledges(self, chat: Chat, broker: KafkaServer) -> None:
        cast, lines = small_history(chat)
        with worker(chat, "one", env=PATIENT) as one:
            with locked_deal(chat, lines[0].deal):
                wait_for(lambda: sessions(chat.connection, "wait_event = 'transactionid'"), "the first transaction")
                broker.pause()
            try:
                wait_for(lambda: pauses(one), "a pause")
                assert scalar(chat.connection, "select count(*) from crm.processed_messages") == 0
            finally:
                broker.resume()
            wait_until_read(chat, len(lines))
            assert stop(one) == 0
        assert_as_expected(chat, cast, lines)
        assert "Kafka" in one.say(WAITING)[0]["reason"]

    def test_or_slow_and_a_thousand_letters_of_one_key_get_through(
        self, server: PostgresServer, tmp_path: Path
    ) -> None:
        """Twelve milliseconds to Kafka and back: what is acknowledged is not sent again and again."""
        broker: KafkaServer | None = None

        def port() -> int:
            assert broker is not None
            settings = (broker.directory / "server.properties").read_text()
            (address,) = re.findall(r"^listeners=PLAINTEXT://127.0.0.1:(\d+)", settings, re.MULTILINE)
            return int(address)

        with slow_network(0.006, port) as entrance, closing(fresh_database(server)) as database:
            broker = KafkaServer(tmp_path, settings={"advertised.listeners": f"PLAINTEXT://127.0.0.1:{entrance}"})
            broker.start(dies_with_parent=True)
            try:
                chat = make_chat(broker, database)
                chat.send(*(Outgoing(f"no event {number}", "one key") for number in range(1_000)), linger_ms=100)
                with worker(chat, "one", options={}) as one:
                    wait_until_read(chat, 1_000, seconds=30)
                    assert stop(one) == 0
                assert [letter.source[1] for letter in chat.letters()] == list(range(1_000))
            finally:
                broker.kill()

    def blocked(self, chat: Chat, mend: Callable[[], object]) -> list[str]:
        """Send a history with dead letters in it; returns why the consumer waited before `mend` was called."""
        cast, lines = small_history(chat)
        expected = expect(cast, lines, chat.kafka.read(chat.topic))
        first_bad: dict[int, int] = {}
        for partition, offset in sorted(expected.letters):
            first_bad.setdefault(partition, offset)
        with worker(chat, "one", "--batch-size", "5") as one:
            before = wait_for_members(chat, "one")
            wait_for(lambda: len(pauses(one)) >= 2, "two attempts")
            committed = committed_offsets(chat)
            assert all(committed.get(number, 0) <= offset for number, offset in first_bad.items())
            assert members(chat) == before
            mend()
            wait_until_read(chat, len(lines))
            assert stop(one) == 0
        assert_as_expected(chat, cast, lines)
        return [line["reason"] for line in one.say(WAITING)]


class TestMembersComeAndGo:
    def test_two_join_and_leave_while_events_flow(self, chat: Chat, chaos_table: ChaosTable) -> None:
        count = 5_000 if CHAOS_FULL else 500
        cast, lines = sent_history(chat, count)
        chunks = iter([lines[n : n + count // 10] for n in range(0, count, count // 10)])
        with chaos_table.row("chat-status consume: two members join and leave") as row, ExitStack() as stack:
            row.due = count
            first = stack.enter_context(worker(chat, "first", "--batch-size", "10"))
            send(chat, next(chunks))
            for number in range(2):
                names = [f"{name} {number}" for name in ("second", "third")]
                guests = []
                for name in names:
                    send(chat, next(chunks))
                    guests.append(stack.enter_context(worker(chat, name, "--batch-size", "10")))
                send(chat, next(chunks))
                wait_for_members(chat, "first", *names)
                for guest in guests:
                    assert stop(guest) == 0
                    if guest is guests[0]:
                        send(chat, next(chunks))
            for rest in chunks:
                send(chat, rest)
            wait_until_read(chat, count)
            assert stop(first) == 0
            expected = assert_as_expected(chat, cast, lines)
            row.interruptions, row.outcome = "4 joins, 4 leaves", f"the oracle's: {expected.applied:,} applied"

    def test_partitions_that_leave_while_postgresql_is_away_are_read_when_they_come_back(
        self, chat: Chat, server: PostgresServer
    ) -> None:
        """The first member holds its partitions when half of them go; nobody must hold them when they return."""
        cast, lines = sent_history(chat, 300)
        with ExitStack() as stack:
            first = stack.enter_context(worker(chat, "first"))
            wait_for_members(chat, "first")
            server.stop()
            send(chat, lines[:100])
            wait_for(lambda: pauses(first), "a pause")
            second = stack.enter_context(worker(chat, "second"))
            wait_for_members(chat, "first", "second")
            server.restart()
            chat = reconnected(chat)
            send(chat, lines[100:200])
            wait_until_read(chat, 200)
            assert stop(second) == 0
            wait_for_members(chat, "first")
            send(chat, lines[200:])
            wait_until_read(chat, 300, seconds=20)
            assert stop(first) == 0
        assert_as_expected(chat, cast, lines)

    def test_sigterm_in_a_backlog_is_exit_0_within_5_seconds_and_commits_what_is_done(self, chat: Chat) -> None:
        cast, lines = sent_history(chat, 3_000)
        send(chat, lines)
        for _ in range(3):
            with worker(chat, "one", "--batch-size", "10") as one:
                wait_for(lambda: one.say("batch"), "a batch")
                assert stop(one) == 0
            committed = committed_offsets(chat)
            covered = [r for r in chat.kafka.read(chat.topic) if r.offset < committed.get(r.partition, 0)]
            assert 0 < len(covered) < len(lines)
            assert chat.marks() == {UUID(json.loads(record.value or b"")["MessageId"]) for record in covered}
        assert chat.consumed()["duplicate_count"] <= resent(lines)
        assert_as_expected(chat, cast, lines)

    def test_a_static_member_comes_back_without_a_rebalance(self, chat: Chat) -> None:
        cast, lines = sent_history(chat, 300)
        options = {**QUICK_GROUP, "session.timeout.ms": "30000"}
        with ExitStack() as stack:

            def start(name: str, instance: str) -> Worker:
                env = {"CRMCTL_CHAT_STATUS__GROUP_INSTANCE_ID": instance}
                return stack.enter_context(worker(chat, name, options=options, env=env))

            stays_on, leaves = start("stays", "a"), start("leaves", "b")
            send(chat, lines[:100])
            before = wait_for_members(chat, "stays", "leaves")
            wait_until_read(chat, 100)
            generation = generations(chat)[-1]
            assert stop(leaves) == 0
            send(chat, lines[100:200])
            assert stays(lambda: members(chat)["stays"] == before["stays"], 2.0)
            comes_back = start("comes back", "b")
            # It takes up its own partitions, and only it could.
            wait_until_read(chat, 200)
            send(chat, lines[200:])
            wait_until_read(chat, 300)
            after = {member.instance: member for member in members(chat).values()}
            assert after["a"] == before["stays"]
            assert after["b"].partitions == before["leaves"].partitions
            assert generations(chat)[-1] == generation
            assert [stop(comes_back), stop(stays_on)] == [0, 0]
        assert_as_expected(chat, cast, lines)


def configure(chat: Chat, topic: str, name: str, value: str) -> None:
    """Change one setting of a topic and wait until the broker goes by it."""
    resource = ConfigResource(
        ResourceType.TOPIC,
        topic,
        incremental_configs=[ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)],
    )
    admin = chat.kafka.admin()
    admin.incremental_alter_configs([resource])[resource].result()

    def applied() -> bool:
        asked = ConfigResource(ResourceType.TOPIC, topic)
        return bool(admin.describe_configs([asked])[asked].result()[name].value == value)

    wait_for(applied, f"{name} = {value}")


def consume_in_process(chat: Chat, source: type[RecordSource], database: str, stopping: Callable[[], bool]) -> None:
    """Run the consumer's loop in this process, with a source of the test's own."""
    log = logs.configure(level="error")
    settings = KafkaSettings(bootstrap_servers=chat.kafka.bootstrap_servers)
    member = kafka.consumer(
        settings,
        log,
        group=chat.group,
        partition_assignment_strategy="cooperative-sticky",
        enable_partition_eof=True,
    )
    records = source(member, kafka.admin(settings, log), Topic(chat.topic), chat.group, log)
    consumption = Consumption(
        source=records,
        database=Database(database, DatabaseSettings(), application_name="test"),
        dead_letters=DeadLetters(Publisher(lambda: kafka.producer(settings, log)), chat.dlq_topic, chat.group),
        metrics=ChatStatusMetrics(),
        tracing=Tracing(),
        log=log,
        group=chat.group,
        run=Run(uuid4(), "", Budget(timedelta(minutes=2)), stopping),
        options=Options(),
    )
    try:
        consumption.consume()
    finally:
        records.close()
        consumption.database.close()
