"""The relay, the broker and the connection die at any moment: every event arrives, in order, under one MessageId."""

import random
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Final

import pytest

from crmctl.dev.kafka import temporary_kafka
from crmctl.dev.kafka_server import KafkaServer
from tests.acceptance.conftest import ChaosTable
from tests.expire_support import CHAOS_FULL, Connection, column, finish, rows, scalar, scaled, wait_until
from tests.kafka_fixtures import Kafka, MakeTopic, Record, create_topic, read_topic, wait_for_topic
from tests.relay_support import Arrivals, count, insert_events, message_id, messages, numbers, relay, start_relay
from tests.support import CallResult, Database

pytestmark = pytest.mark.chaos

embedded = pytest.mark.real_kafka(embedded=True)

APPLICATION: Final = "crmctl relay-outbox"
PENDING: Final = "published_at is null"
# The client gives a record up sooner than by default, so that a test of an outage is over sooner.
IMPATIENT: Final = {"delivery.timeout.ms": "4000"}


def in_a_batch(connection: Connection) -> bool:
    """Whether a relay waits for the broker in the middle of its transaction."""
    found = """
        select 1 from pg_stat_activity
        where application_name = %s and datname = current_database() and state = 'idle in transaction'
    """
    return bool(rows(connection, found, APPLICATION))


def waits_for_the_broker(connection: Connection) -> bool:
    """Whether a relay has been waiting in the middle of its transaction for longer than between two statements."""
    found = """
        select 1 from pg_stat_activity
        where application_name = %s and datname = current_database() and state = 'idle in transaction'
            and state_change < clock_timestamp() - interval '500 milliseconds'
    """
    return bool(rows(connection, found, APPLICATION))


def slow_down_marking(connection: Connection) -> None:
    """Some milliseconds pass between the acknowledgement and the commit, so that kills fall there too."""
    connection.execute(
        """
        create function public.slow_down() returns trigger language plpgsql as $$
        begin
            perform pg_sleep(0.01);
            return null;
        end $$;
        create trigger slow_down after update on crm.outbox_messages
            for each statement execute function public.slow_down()
        """
    )


@pytest.mark.real_kafka
class TestTwoRelaysAreKilled:
    def test_at_random_and_every_event_arrives_in_order(
        self, database: Database, kafka: Kafka, make_topic: MakeTopic, chaos_table: ChaosTable
    ) -> None:
        """100 events of each of 50 aggregates, written while two relays die and come back."""
        connection, topic, chance = database.connect(), make_topic(), random.Random(20_261_129)
        kills, aggregates, each = scaled(40, least=4), 50, scaled(100)
        slow_down_marking(connection)
        with chaos_table.row("two relays killed with SIGKILL") as row, ExitStack() as stack:
            relays = [self.start(stack, database, kafka) for _ in range(2)]
            killed = written = 0
            while killed < kills:
                share = each * (killed + 1) // kills - written
                insert_events(connection, topic, aggregates=aggregates, first=written + 1, each=share)
                written += share
                wait_until(lambda: in_a_batch(connection) or count(connection, PENDING) == 0, "a batch")
                time.sleep(chance.choice([0.0, chance.uniform(0, 0.04), chance.uniform(0, 0.4)]))
                # Mostly one of the two, so that the other takes over; now and then both.
                for victim in chance.sample([0, 1], chance.choice([1, 1, 1, 2])):
                    relays[victim].kill()
                    relays[victim].communicate()
                    relays[victim] = self.start(stack, database, kafka)
                    killed += 1
            insert_events(connection, topic, aggregates=aggregates, first=written + 1, each=each - written)
            wait_until(lambda: count(connection, PENDING) == 0, "the end of the queue", seconds=120)
            for process in relays:
                process.send_signal(signal.SIGTERM)
            assert [finish(process).exit_code for process in relays] == [0, 0]
            arrivals = Arrivals.of(kafka.read(topic))
            arrivals.assert_complete_and_in_order(connection)
            assert len(arrivals.by_id) == aggregates * each
            assert count(connection, "attempts > 0 or last_error is not null") == 0
            row.interruptions, row.due = f"{killed} kills", aggregates * each
            row.outcome = f"all arrived in order, {arrivals.duplicates} duplicates"

    @staticmethod
    def start(stack: ExitStack, database: Database, kafka: Kafka) -> subprocess.Popen[str]:
        process = start_relay(database, kafka.bootstrap_servers, "--follow", "--batch-size", "60")
        return stack.enter_context(process)


@pytest.fixture(scope="module")
def own_broker() -> Iterator[KafkaServer]:
    with temporary_kafka() as server:
        yield server


@pytest.fixture
def broker(own_broker: KafkaServer) -> Iterator[KafkaServer]:
    """A broker that a test may stop, pause and kill; the next test finds it well again."""
    own_broker.start(dies_with_parent=True)
    yield own_broker
    own_broker.resume()


@pytest.fixture
def topic(broker: KafkaServer) -> str:
    name = f"test.{uuid.uuid4().hex}"
    create_topic(broker.bootstrap_servers, name)
    return name


def arrived(broker: KafkaServer, topic: str) -> list[Record]:
    """What the topic holds, once the broker leads its partitions again: it does not at once after an outage."""
    wait_for_topic(broker.bootstrap_servers, topic)
    return read_topic(broker.bootstrap_servers, topic)


def assert_nothing_is_marked_that_did_not_arrive(connection: Connection, broker: KafkaServer, topic: str) -> None:
    """Each marked row is in the topic, and an outage is nobody's fault."""
    marked = set(column(connection, "select id from crm.outbox_messages where published_at is not null"))
    assert marked <= {message_id(record) for record in arrived(broker, topic)}
    assert count(connection, "attempts > 0 or last_error is not null or next_attempt_at is not null") == 0


def assert_a_rerun_completes(database: Database, connection: Connection, broker: KafkaServer, topic: str) -> int:
    """Run the relay again: all is published, in order, under its own MessageId. Returns the duplicates."""
    result = relay(database, broker.bootstrap_servers, "--drain")
    assert result.exit_code == 0, result.stderr
    assert count(connection, PENDING) == 0
    arrivals = Arrivals.of(arrived(broker, topic))
    arrivals.assert_complete_and_in_order(connection)
    return arrivals.duplicates


def stop(broker: KafkaServer) -> None:
    broker.stop()


def crash(broker: KafkaServer) -> None:
    broker.kill()


def pause(broker: KafkaServer) -> None:
    broker.pause()


def start(broker: KafkaServer) -> None:
    broker.start(dies_with_parent=True)


def resume(broker: KafkaServer) -> None:
    broker.resume()


@embedded
class TestTheBroker:
    @pytest.mark.parametrize(
        ("happens", "mends", "options"),
        [
            pytest.param(crash, start, IMPATIENT, id="crashes"),
            pytest.param(pause, resume, {}, id="is so slow that the flush times out"),
            *([pytest.param(stop, start, {}, id="is stopped")] if CHAOS_FULL else []),
        ],
    )
    def test_mid_run_ends_the_run_and_a_rerun_completes(
        self,
        database: Database,
        broker: KafkaServer,
        topic: str,
        chaos_table: ChaosTable,
        happens: Callable[[KafkaServer], None],
        mends: Callable[[KafkaServer], None],
        options: dict[str, str],
    ) -> None:
        connection, aggregates, each = database.connect(), 100, 100 if CHAOS_FULL else 40
        insert_events(connection, topic, aggregates=aggregates, each=each)
        with chaos_table.row(f"the broker under a relay: {happens.__name__}") as row:
            with start_relay(
                database, broker.bootstrap_servers, "--drain", "--batch-size", "200", options=options
            ) as process:
                wait_until(lambda: count(connection, PENDING) < aggregates * each, "the first batch")
                happens(broker)
                result = finish(process)
            self.assert_unavailable(result)
            left = count(connection, PENDING)
            assert 0 < left < aggregates * each
            assert result.json["committed"]["published_count"] == aggregates * each - left
            mends(broker)
            assert_nothing_is_marked_that_did_not_arrive(connection, broker, topic)
            duplicates = assert_a_rerun_completes(database, connection, broker, topic)
            row.interruptions, row.due = "1 outage", aggregates * each
            row.outcome = f"exit 69 with {left:,} left, all arrived, {duplicates} duplicates"

    @staticmethod
    def assert_unavailable(result: CallResult) -> None:
        assert result.exit_code == 69, result.stderr
        assert result.json["error"]["code"] == "CRMCTL_UNAVAILABLE"
        assert result.json["error"]["hint"]

    @pytest.mark.parametrize(
        ("happens", "mends"),
        [
            pytest.param(crash, start, id="crashes"),
            *([pytest.param(pause, resume, id="is paused")] if CHAOS_FULL else []),
        ],
    )
    def test_is_waited_for_with_follow(
        self,
        database: Database,
        broker: KafkaServer,
        topic: str,
        happens: Callable[[KafkaServer], None],
        mends: Callable[[KafkaServer], None],
    ) -> None:
        connection = database.connect()
        insert_events(connection, topic, aggregates=20, each=5)
        with start_relay(database, broker.bootstrap_servers, "--follow", options=IMPATIENT) as process:
            wait_until(lambda: count(connection, PENDING) == 0, "the first batch")
            happens(broker)
            insert_events(connection, topic, aggregates=20, first=6, each=5)
            assert process.stderr is not None
            assert any("waiting to try again" in line for line in process.stderr)
            assert process.poll() is None
            assert count(connection, PENDING) == 100
            mends(broker)
            wait_until(lambda: count(connection, PENDING) == 0, "the second batch", seconds=90)
            process.send_signal(signal.SIGTERM)
            result = finish(process)
        assert result.exit_code == 0, result.stderr
        Arrivals.of(arrived(broker, topic)).assert_complete_and_in_order(connection)
        assert count(connection, "attempts > 0") == 0

    @pytest.mark.parametrize(("mode", "exit_code"), [("--drain", 143), ("--follow", 0)])
    def test_that_hangs_does_not_keep_the_relay_from_stopping(
        self, database: Database, broker: KafkaServer, topic: str, mode: str, exit_code: int
    ) -> None:
        connection = database.connect()
        insert_events(connection, topic, aggregates=10, each=2)
        with start_relay(database, broker.bootstrap_servers, mode, "--batch-size", "10") as process:
            wait_until(lambda: count(connection, PENDING) < 20, "the first batch")
            broker.pause()
            insert_events(connection, topic, aggregates=10, first=3, each=2)
            wait_until(lambda: waits_for_the_broker(connection), "a batch that waits for the broker")
            process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            result = finish(process)
        assert time.monotonic() - began < 8
        assert result.exit_code == exit_code, result.stderr
        broker.resume()
        assert_nothing_is_marked_that_did_not_arrive(connection, broker, topic)
        assert_a_rerun_completes(database, connection, broker, topic)


@embedded
class TestTheConnectionToPostgresql:
    def test_is_lost_while_the_broker_is_waited_for_and_a_rerun_completes(
        self, database: Database, broker: KafkaServer, topic: str
    ) -> None:
        connection = database.connect()
        insert_events(connection, topic, aggregates=10, each=3)
        before = messages(connection)
        # The topics are known before the pause, because the relay asks for them.
        with start_relay(database, broker.bootstrap_servers, "--follow") as process:
            wait_until(lambda: count(connection, PENDING) == 0, "the first batch")
            broker.pause()
            insert_events(connection, topic, aggregates=10, first=4, each=3)
            wait_until(lambda: waits_for_the_broker(connection), "a batch that waits for the broker")
            terminated = scalar(
                connection,
                "select count(pg_terminate_backend(pid)) from pg_stat_activity "
                "where application_name = %s and datname = current_database()",
                APPLICATION,
            )
            assert terminated == 1
            broker.resume()
            wait_until(lambda: count(connection, PENDING) == 0, "the second batch", seconds=60)
            process.send_signal(signal.SIGTERM)
            assert finish(process).exit_code == 0
        arrivals = Arrivals.of(arrived(broker, topic))
        arrivals.assert_complete_and_in_order(connection)
        assert arrivals.duplicates > 0
        assert len(messages(connection)) == len(before) + 30
        assert set(numbers(arrivals.records)) == {f"a-{n}" for n in range(1, 11)}


@embedded
class TestAZombie:
    def test_that_wakes_up_behind_its_successor_overtakes_nothing(
        self, database: Database, broker: KafkaServer, topic: str
    ) -> None:
        """A relay is frozen in its batch until PostgreSQL has given it up and another one has done its work."""
        connection = database.connect()
        insert_events(connection, topic, aggregates=10)
        with start_relay(database, broker.bootstrap_servers, "--follow") as zombie:
            wait_until(lambda: count(connection, PENDING) == 0, "the first batch")
            broker.pause()
            insert_events(connection, topic, aggregates=10, first=2, each=4)
            wait_until(lambda: waits_for_the_broker(connection), "a batch that waits for the broker")
            zombie.send_signal(signal.SIGSTOP)
            scalar(
                connection,
                "select count(pg_terminate_backend(pid)) from pg_stat_activity "
                "where application_name = %s and datname = current_database()",
                APPLICATION,
            )
            broker.resume()
            insert_events(connection, topic, aggregates=10, first=6, each=2)
            wait_until(lambda: not in_a_batch(connection), "the end of its session")
            successor = relay(database, broker.bootstrap_servers, "--drain")
            assert (successor.exit_code, successor.json["published_count"]) == (0, 60)
            zombie.send_signal(signal.SIGCONT)
            insert_events(connection, topic, aggregates=10, first=8)
            wait_until(lambda: count(connection, PENDING) == 0, "the zombie's next batch", seconds=60)
            zombie.send_signal(signal.SIGTERM)
            assert finish(zombie).exit_code == 0
        Arrivals.of(arrived(broker, topic)).assert_complete_and_in_order(connection)
