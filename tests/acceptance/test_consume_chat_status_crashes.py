"""Whatever dies or freezes at whatever moment: the projection is the oracle's, and nothing is lost or applied twice."""

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from crmctl.dev.kafka import temporary_kafka
from crmctl.dev.kafka_server import KafkaServer
from crmctl.dev.postgres import PostgresServer, temporary_server
from tests.acceptance.conftest import ChaosTable
from tests.chat_status_chaos import (
    IDLE,
    IN_THE_COMMIT,
    PATIENT,
    QUICK_BROKER,
    Cast,
    Line,
    Worker,
    applied_count,
    assert_as_expected,
    assert_nothing_is_skipped,
    committed_offsets,
    drain,
    fresh_database,
    full_run_only,
    gate_in_commit,
    gate_in_write,
    history,
    locked_deal,
    locked_schema,
    make_chat,
    reconnected,
    record_changes,
    revive,
    sessions,
    small_history,
    stop,
    wait_for,
    wait_for_members,
    wait_until_read,
    worker,
)
from tests.chat_status_support import Chat, Deal
from tests.expire_support import AT_THE_GATE, CHAOS_FULL, scalar, scaled
from tests.support import insert_deal

pytestmark = [pytest.mark.chaos, pytest.mark.real_kafka(embedded=True)]


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """PostgreSQL of this module's own, to be restarted; it loses no commit."""
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


class TestTheyAreKilled:
    def test_at_random_moments_with_both_servers_restarted(
        self, chat: Chat, server: PostgresServer, broker: KafkaServer, chaos_table: ChaosTable
    ) -> None:
        with chaos_table.row("chat-status consume: kill -9, PostgreSQL and Kafka restarted") as row:
            row.due = 20_000 if CHAOS_FULL else 2_000
            storm = Storm(chat, server, broker, random.Random(11), row.due, scaled(60, least=6))
            storm.run()
            expected = assert_as_expected(storm.chat, storm.cast, storm.lines)
            row.interruptions = (
                f"{storm.kills} kills, PostgreSQL {storm.server_restarts}, Kafka {storm.broker_restarts} times"
            )
            row.outcome = f"the oracle's: {expected.applied:,} applied, {len(expected.letters):,} dead letters"

    def test_in_the_transaction(self, chat: Chat) -> None:
        cast, lines = small_history(chat)
        with ExitStack() as stack:
            with locked_deal(chat, lines[0].deal):
                first = stack.enter_context(worker(chat, "first", env=PATIENT))
                wait_for(lambda: sessions(chat.connection, "wait_event = 'transactionid'"), "the deal's lock")
                first.kill()
                second = stack.enter_context(worker(chat, "second", env=PATIENT))
                # The server has not noticed yet: the dead one's session still holds the partitions' locks.
                wait_for(lambda: sessions(chat.connection, "wait_event = 'advisory'"), "the successor")
                assert committed_offsets(chat) == {}
            wait_until_read(chat, len(lines))
            assert stop(second) == 0
        drain(chat)
        assert_as_expected(chat, cast, lines)

    def test_between_the_commit_and_the_offsets(self, chat: Chat) -> None:
        cast, lines = small_history(chat)
        with ExitStack() as stack:
            with gate_in_commit(chat) as gate:
                first = stack.enter_context(worker(chat, "first", env=PATIENT))
                wait_for(lambda: sessions(chat.connection, IN_THE_COMMIT), "the commit")
                first.stop()
                gate.open()
                wait_for(lambda: not sessions(chat.connection, "state = 'active'"), "the end of the commit")
                assert scalar(chat.connection, "select count(*) from crm.processed_messages") > 0
                first.kill()
            assert committed_offsets(chat) == {}
        again = chat.consumed()
        assert again["duplicate_count"] > 0
        assert again["applied_count"] == 0
        drain(chat)
        assert_as_expected(chat, cast, lines)

    @full_run_only
    def test_in_the_commit(self, chat: Chat) -> None:
        cast, lines = small_history(chat)
        with ExitStack() as stack:
            with gate_in_commit(chat) as gate:
                first = stack.enter_context(worker(chat, "first", env=PATIENT))
                wait_for(lambda: sessions(chat.connection, IN_THE_COMMIT), "the commit")
                first.kill()
                gate.open()
            wait_for(lambda: not sessions(chat.connection), "the end of the dead one's session")
            assert committed_offsets(chat) == {}
        drain(chat)
        assert_as_expected(chat, cast, lines)

    def test_with_dead_letters_written_and_nothing_else(self, chat: Chat) -> None:
        """They are written once more; nothing is committed past them in between."""
        cast, lines = small_history(chat)
        with ExitStack() as stack:
            with gate_in_write(chat) as gate:
                first = stack.enter_context(worker(chat, "first", env=PATIENT))
                wait_for(lambda: sessions(chat.connection, AT_THE_GATE), "the transaction that writes")
                written = Counter(letter.source for letter in chat.letters())
                assert {letter.code for letter in chat.letters()} == {
                    "CRM_CHAT_STATUS_MALFORMED",
                    "CRM_CHAT_STATUS_UNKNOWN",
                    "CRM_CHAT_STATUS_TENANT_MISMATCH",
                }
                first.kill()
                gate.open()
            wait_for(lambda: not sessions(chat.connection), "the end of the dead one's session")
            assert committed_offsets(chat) == {}
        drain(chat)
        assert_as_expected(chat, cast, lines)
        twice = Counter(letter.source for letter in chat.letters())
        assert {source: count for source, count in twice.items() if count == 2} == dict.fromkeys(written, 2)
        assert max(twice.values()) == 2


class TestTheyFreeze:
    """A zombie: stopped for longer than its session, while its heir takes over and drains, and then continued."""

    @full_run_only
    def test_before_its_locks_and_it_wakes_up_in_a_transaction_that_is_long_outdated(self, chat: Chat) -> None:
        cast, lines = small_history(chat)
        with ExitStack() as stack:
            with locked_schema(chat):
                zombie = stack.enter_context(worker(chat, "zombie", env=PATIENT))
                wait_for(lambda: sessions(chat.connection, "wait_event = 'relation'"), "the beginning of a transaction")
                zombie.stop()
            wait_for(lambda: sessions(chat.connection, IDLE), "a transaction that idles")
            heir = stack.enter_context(worker(chat, "heir", env=PATIENT))
            wait_until_read(chat, len(lines))
            self.assert_it_goes_on(chat, cast, lines, zombie, heir)

    def test_waiting_for_a_deal_until_its_wait_times_out(self, chat: Chat) -> None:
        cast, lines = small_history(chat)
        with ExitStack() as stack:
            with locked_deal(chat, lines[0].deal):
                zombie = stack.enter_context(
                    worker(chat, "zombie", env=PATIENT | {"CRMCTL_DATABASE__LOCK_TIMEOUT": "3s"})
                )
                wait_for(lambda: sessions(chat.connection, "wait_event = 'transactionid'"), "the deal's lock")
                zombie.stop()
                heir = stack.enter_context(worker(chat, "heir", env=PATIENT))
                # The server has undone the zombie's transaction, whose partitions' locks are free now.
                wait_for(lambda: sessions(chat.connection, f"{IDLE} and state like '%aborted%'"), "the timeout")
                wait_for(lambda: sessions(chat.connection, "wait_event = 'transactionid'"), "the heir at the same lock")
            wait_until_read(chat, len(lines))
            self.assert_it_goes_on(chat, cast, lines, zombie, heir)

    def test_with_its_locks_until_postgresql_ends_its_session(self, chat: Chat) -> None:
        cast, lines = small_history(chat)
        with ExitStack() as stack:
            with locked_deal(chat, lines[0].deal):
                zombie = stack.enter_context(
                    worker(chat, "zombie", env=PATIENT | {"CRMCTL_DATABASE__IDLE_IN_TRANSACTION_TIMEOUT": "8s"})
                )
                wait_for(lambda: sessions(chat.connection, "wait_event = 'transactionid'"), "the deal's lock")
                zombie.stop()
            heir = stack.enter_context(worker(chat, "heir", env=PATIENT))
            wait_for(lambda: sessions(chat.connection, "wait_event = 'advisory'"), "the heir at the partitions' locks")
            assert committed_offsets(chat) == {}
            wait_until_read(chat, len(lines))
            self.assert_it_goes_on(chat, cast, lines, zombie, heir)
            assert zombie.say("waiting to try again")

    def test_with_its_locks_and_it_wakes_up_while_its_heir_waits_for_them(self, chat: Chat) -> None:
        cast, lines = small_history(chat)
        with ExitStack() as stack:
            with locked_deal(chat, lines[0].deal):
                zombie = stack.enter_context(worker(chat, "zombie", env=PATIENT))
                wait_for(lambda: sessions(chat.connection, "wait_event = 'transactionid'"), "the deal's lock")
                zombie.stop()
            heir = stack.enter_context(worker(chat, "heir", env=PATIENT))
            wait_for(lambda: sessions(chat.connection, "wait_event = 'advisory'"), "the heir at the partitions' locks")
            self.assert_it_goes_on(chat, cast, lines, zombie, heir)

    @full_run_only
    def test_in_the_commit(self, chat: Chat) -> None:
        cast, lines = small_history(chat)
        with ExitStack() as stack:
            with gate_in_commit(chat) as gate:
                zombie = stack.enter_context(worker(chat, "zombie", env=PATIENT))
                wait_for(lambda: sessions(chat.connection, IN_THE_COMMIT), "the commit")
                zombie.stop()
                heir = stack.enter_context(worker(chat, "heir", env=PATIENT))
                wait_for(lambda: sessions(chat.connection, AT_THE_GATE), "the heir at the partitions' locks")
                gate.open()
            wait_until_read(chat, len(lines))
            self.assert_it_goes_on(chat, cast, lines, zombie, heir)
            # It told the group of a batch that was no longer its own, and was refused.
            assert zombie.say("offsets not committed")

    def test_between_the_commit_and_the_offsets(self, chat: Chat) -> None:
        cast, lines = small_history(chat)
        with ExitStack() as stack:
            with gate_in_commit(chat) as gate:
                zombie = stack.enter_context(worker(chat, "zombie", env=PATIENT))
                wait_for(lambda: sessions(chat.connection, IN_THE_COMMIT), "the commit")
                zombie.stop()
                gate.open()
            wait_for(lambda: not sessions(chat.connection, "state <> 'idle'"), "the end of the commit")
            applied = applied_count(chat.connection)
            assert applied > 0
            heir = stack.enter_context(worker(chat, "heir", env=PATIENT))
            wait_until_read(chat, len(lines))
            assert applied_count(chat.connection) == applied
            self.assert_it_goes_on(chat, cast, lines, zombie, heir)
            assert zombie.say("offsets not committed")

    def test_at_random_moments(self, chat: Chat, chaos_table: ChaosTable) -> None:
        impatient = {
            "CRMCTL_DATABASE__LOCK_TIMEOUT": "1s",
            "CRMCTL_DATABASE__IDLE_IN_TRANSACTION_TIMEOUT": "2s",
        }
        count, rounds, dice = 5_000 if CHAOS_FULL else 500, scaled(20, least=2), random.Random(3)
        cast = Cast.of(count // 10)
        cast.insert(chat.connection)
        lines = history(cast, count, dice)
        chunk = -(-count // rounds)
        with chaos_table.row("chat-status consume: SIGSTOP for longer than the session") as row, ExitStack() as stack:
            row.due = count
            names = ("left", "right")
            workers = {
                name: stack.enter_context(worker(chat, name, "--batch-size", "10", env=impatient)) for name in names
            }
            for number in range(rounds):
                wait_for_members(chat, *names)
                chat.send(*(line.record for line in lines[number * chunk : (number + 1) * chunk]))
                victim, heir = dice.sample(names, 2)
                time.sleep(dice.uniform(0, 0.3))
                workers[victim].stop()
                wait_for_members(chat, heir)
                if dice.random() < 0.5:
                    wait_until_read(chat, min(count, (number + 1) * chunk))
                workers[victim].signal(signal.SIGCONT)
                assert_nothing_is_skipped(chat, lines)
            wait_for_members(chat, *names)
            for deal in cast.late:
                insert_deal(chat.connection, id=deal.id, tenant_id=deal.tenant_id)
            for consumer in workers.values():
                assert stop(consumer) == 0
            drain(chat)
            expected = assert_as_expected(chat, cast, lines)
            row.interruptions, row.outcome = f"{rounds} zombies", f"the oracle's: {expected.applied:,} applied"

    def assert_it_goes_on(
        self, chat: Chat, cast: Cast, lines: list[Line], zombie: Worker, heir: Worker, *, more: int = 200
    ) -> None:
        """The zombie wakes up, takes its share of the partitions again, and what comes then is handled by both."""
        zombie.signal(signal.SIGCONT)
        wait_for_members(chat, "zombie", "heir")
        later = history(cast, more, random.Random(8))
        chat.send(*(line.record for line in later))
        wait_until_read(chat, len(lines) + more)
        assert [stop(zombie), stop(heir)] == [0, 0]
        assert_as_expected(chat, cast, [*lines, *later])


@dataclass(slots=True)
class Storm:
    """Two consumers of a history that is sent bit by bit, and everything that happens to them meanwhile."""

    chat: Chat
    server: PostgresServer
    broker: KafkaServer
    dice: random.Random
    size: int
    rounds: int
    cast: Cast = field(init=False)
    lines: list[Line] = field(init=False)
    kills: int = 0
    server_restarts: int = 0
    broker_restarts: int = 0
    _midway: int = 0
    _workers: dict[str, Worker] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cast = Cast.of(self.size // 10)
        self.lines = history(self.cast, self.size, self.dice)
        self.cast.insert(self.chat.connection)

    def run(self) -> None:
        """Kill in each round; at the end stop both, let all missing deals appear that ever do, and drain."""
        chunk = -(-self.size // self.rounds)
        births = self._births(chunk)
        restarts = 3 if CHAOS_FULL else 1
        faults = self.dice.sample(range(1, self.rounds), 2 * restarts)
        with ExitStack() as stack:
            for side in ("left", "right"):
                self._start(stack, side)
            for number in range(self.rounds):
                self.chat.send(*(line.record for line in self.lines[number * chunk : (number + 1) * chunk]))
                self._insert(births.get(number, []))
                if number in faults[:restarts]:
                    self._restart_server()
                elif number in faults[restarts:]:
                    self._restart_broker()
                self._kill_one(stack)
                if number % 5 == 4:
                    assert_nothing_is_skipped(self.chat, self.lines)
            assert self._midway >= self.kills // 2, "the kills hit idle consumers"
            assert_nothing_is_skipped(self.chat, self.lines)
            self._insert([deal for born, deals in births.items() if born >= self.rounds for deal in deals])
            wait_for_members(self.chat, *(consumer.name for consumer in self._workers.values()))
            for consumer in self._workers.values():
                assert stop(consumer) == 0
        drain(self.chat)

    def _births(self, chunk: int) -> dict[int, list[Deal]]:
        """In which round each late deal appears: soon after the first event that misses it."""
        first: dict[Deal, int] = {}
        for index, line in enumerate(self.lines):
            first.setdefault(line.deal, index // chunk)
        born: dict[int, list[Deal]] = {}
        for deal in self.cast.late:
            born.setdefault(first.get(deal, 0) + self.dice.randint(1, 6), []).append(deal)
        return born

    def _insert(self, deals: list[Deal]) -> None:
        with self.chat.connection.transaction():
            for deal in deals:
                insert_deal(self.chat.connection, id=deal.id, tenant_id=deal.tenant_id)

    def _start(self, stack: ExitStack, side: str) -> None:
        # A name of its own: the group still counts the dead one for a while.
        name = f"{side} {self.kills}"
        self._workers[side] = stack.enter_context(worker(self.chat, name, "--batch-size", "10"))

    def _batches(self) -> int:
        count = scalar(self.chat.connection, "select count(*) from crm.job_runs")
        assert isinstance(count, int)
        return count

    def _let_them_work(self) -> bool:
        """Let some batches be committed, and then a moment pass; whether there was anything to do."""
        goal, deadline = self._batches() + self.dice.choice([1, 2, 4, 8]), time.monotonic() + 8
        while self._batches() < goal:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        time.sleep(self.dice.uniform(0, 0.05))
        return True

    def _kill_one(self, stack: ExitStack) -> None:
        victim = self.dice.choice(sorted(self._workers))
        if self.dice.random() < 0.2:
            # While it starts, joins or moves partitions.
            time.sleep(self.dice.uniform(0, 3))
        else:
            self._midway += self._let_them_work()
        self._workers[victim].kill()
        self.kills += 1
        self._start(stack, victim)

    def _restart_server(self) -> None:
        self._let_them_work()
        self.server.restart("fast" if self.server_restarts % 2 == 0 else "immediate")
        self.server_restarts += 1
        self.chat = reconnected(self.chat)

    def _restart_broker(self) -> None:
        self._let_them_work()
        if self.broker_restarts % 2 == 0:
            self.broker.kill()
        revive(self.broker, self.chat)
        self.broker_restarts += 1
        for consumer in self._workers.values():
            assert consumer.running, consumer.text()[-3000:]
