"""Whoever else is at work on the same bookings: always exactly one outcome, no event without its transition."""

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from uuid import UUID

import psycopg
import pytest

from crmctl.dev.seed import seed
from crmctl.domain.bookings import BOOKING, RESERVE, Phase
from tests.acceptance.conftest import ChaosTable
from tests.expire_support import (
    AT_THE_GATE,
    Connection,
    assert_each_due_expired_once,
    assert_expired_once,
    backends,
    bookings,
    closed_gate,
    events,
    expire,
    expired,
    fingerprints,
    finish,
    gate_before_lock,
    gate_in_write,
    insert_queue,
    log_lines,
    remember_due,
    rows,
    runs,
    scalar,
    scaled,
    start_expire,
    tally,
    timeline,
    wait_for_a_random_moment,
    wait_for_worker,
    wait_until,
    wait_until_workers_are_gone,
)
from tests.support import CallResult, Database

SIGNALS = pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])

Decision = Callable[[Connection, UUID, int], int]


def confirm(connection: Connection, booking_id: UUID, version: int) -> int:
    """A manager confirms a reserve that they have read in this version; returns how many rows that changed."""
    return connection.execute(
        """
        update crm.bookings
        set status = 'Booked', booked_at = now(), booking_expires_at = now() + interval '3 days',
            version = version + 1, updated_at = now()
        where id = %s and version = %s
        """,
        (booking_id, version),
    ).rowcount


def extend(connection: Connection, booking_id: UUID, version: int) -> int:
    """A manager extends a booking that they have read in this version; returns how many rows that changed."""
    return connection.execute(
        """
        update crm.bookings
        set booking_expires_at = booking_expires_at + interval '3 days', extensions_count = extensions_count + 1,
            version = version + 1, updated_at = now()
        where id = %s and version = %s
        """,
        (booking_id, version),
    ).rowcount


DECISIONS = pytest.mark.parametrize(
    ("phase", "decide"), [(RESERVE, confirm), (BOOKING, extend)], ids=["confirm", "extend"]
)


@pytest.fixture
def connection(database: Database) -> psycopg.Connection[Any]:
    return database.connect()


@contextmanager
def waiting_manager(database: Database, decide: Decision, booking_id: UUID) -> Iterator[Callable[[], int]]:
    """A manager whose decision has to wait for the worker's lock; call what it yields to learn what came of it."""
    manager = database.connect()
    pid = manager.info.backend_pid
    with ThreadPoolExecutor(1) as pool, psycopg.connect(database.url, autocommit=True) as observer:
        decision = pool.submit(decide, manager, booking_id, 1)
        wait_until(lambda: scalar(observer, "select cardinality(pg_blocking_pids(%s))", pid), "the manager to wait")
        yield lambda: decision.result(timeout=20)


@DECISIONS
class TestAManagerDecides:
    def test_before_the_batch_and_wins(
        self, database: Database, connection: Connection, phase: Phase, decide: Decision
    ) -> None:
        theirs, *others = insert_queue(connection, 4, phase)
        assert decide(connection, theirs, 1) == 1
        decided = bookings(connection)[theirs]

        result = expire(database)

        assert result.json["skipped_locked_count"] == 0
        assert bookings(connection)[theirs] == decided
        assert_expired_once(connection, others)

    def test_while_the_batch_looks_and_is_skipped(
        self, database: Database, connection: Connection, phase: Phase, decide: Decision
    ) -> None:
        first, theirs, *others = insert_queue(connection, 4, phase)
        with psycopg.connect(database.url) as manager:
            assert decide(manager, theirs, 1) == 1
            result = expire(database)
            manager.commit()

        assert result.json["skipped_locked_count"] == 1
        assert_expired_once(connection, [first, *others])
        assert expire(database).json["skipped_locked_count"] == 0
        assert bookings(connection)[theirs]["status"] == "Booked"
        assert_expired_once(connection, [first, *others])

    def test_but_rolls_back_and_the_next_run_expires_it(
        self, database: Database, connection: Connection, phase: Phase, decide: Decision
    ) -> None:
        ids = insert_queue(connection, 3, phase)
        with psycopg.connect(database.url) as manager:
            assert decide(manager, ids[1], 1) == 1
            assert expire(database).json["skipped_locked_count"] == 1
            manager.rollback()

        assert expire(database).json["skipped_locked_count"] == 0
        assert_expired_once(connection, ids)

    def test_between_the_snapshot_and_the_lock_and_wins(
        self, database: Database, connection: Connection, phase: Phase, decide: Decision
    ) -> None:
        first, theirs, *others = insert_queue(connection, 4, phase)
        with closed_gate(database) as gate:
            gate_before_lock(connection, theirs)
            with start_expire(database) as worker:
                wait_for_worker(connection, AT_THE_GATE)
                assert decide(connection, theirs, 1) == 1
                decided = bookings(connection)[theirs]
                gate.open()
                result = finish(worker)

        assert result.exit_code == 0, result.stderr
        assert result.json["skipped_locked_count"] == 0
        assert bookings(connection)[theirs] == decided
        assert_expired_once(connection, [first, *others])

    def test_while_the_batch_writes_and_loses(
        self, database: Database, connection: Connection, phase: Phase, decide: Decision
    ) -> None:
        ids = insert_queue(connection, 4, phase)
        with closed_gate(database) as gate:
            gate_in_write(connection, ids[3])
            with start_expire(database) as worker:
                wait_for_worker(connection, AT_THE_GATE)
                with waiting_manager(database, decide, ids[1]) as outcome:
                    gate.open()
                    assert outcome() == 0
                assert finish(worker).exit_code == 0
        assert_expired_once(connection, ids)

    def test_while_the_batch_writes_and_wins_if_that_rolls_back(
        self, database: Database, connection: Connection, phase: Phase, decide: Decision
    ) -> None:
        ids = insert_queue(connection, 4, phase)
        with closed_gate(database) as gate:
            gate_in_write(connection, ids[3])
            with start_expire(database) as worker:
                wait_for_worker(connection, AT_THE_GATE)
                with waiting_manager(database, decide, ids[1]) as outcome:
                    worker.send_signal(signal.SIGTERM)
                    assert outcome() == 1
                assert finish(worker).exit_code == 143
            gate.open()
        assert expired(connection) == set()
        assert events(connection) == timeline(connection) == []
        assert expire(database).exit_code == 0
        assert bookings(connection)[ids[1]]["status"] == "Booked"
        assert_expired_once(connection, set(ids) - {ids[1]})

    def test_after_the_batch_and_loses(
        self, database: Database, connection: Connection, phase: Phase, decide: Decision
    ) -> None:
        ids = insert_queue(connection, 3, phase)
        assert expire(database).exit_code == 0
        assert decide(connection, ids[1], 1) == 0
        assert_expired_once(connection, ids)


@pytest.mark.chaos
def test_managers_and_the_worker_at_random_have_one_outcome_for_each_booking(
    database: Database, connection: Connection, chaos_table: ChaosTable
) -> None:
    rounds, size = scaled(30), 400
    won = 0
    with chaos_table.row("managers confirm and extend at random during a drain") as row:
        for number in range(rounds):
            connection.execute("truncate crm.bookings, crm.deals, crm.outbox_messages, crm.deal_timeline_events")
            with connection.transaction():
                seed(connection, size, seed=number, due_share=1.0)
            due = {row["id"]: row for row in rows(connection, "select id, version, status from crm.bookings")}
            dice = random.Random(number)

            def manage(number: int, due: dict[UUID, Any] = due, dice: random.Random = dice) -> set[UUID]:
                manager = database.connect()
                mine = dice.sample(sorted(due), len(due) // 3)
                wait_until(lambda: backends(manager), "the worker to come")
                decided = set()
                for booking_id in mine:
                    with manager.transaction():
                        decide = extend if due[booking_id]["status"] == "Booked" else confirm
                        if decide(manager, booking_id, due[booking_id]["version"]):
                            decided.add(booking_id)
                return decided

            with ThreadPoolExecutor(2) as pool, start_expire(database, "--drain", "--batch-size", "20") as worker:
                managers = [pool.submit(manage, n) for n in range(2)]
                result = finish(worker)
                outcomes = [manager.result() for manager in managers]
            assert result.exit_code == 0, result.stderr
            assert expire(database, "--drain").exit_code == 0

            assert not outcomes[0] & outcomes[1]
            decided = outcomes[0] | outcomes[1]
            assert_expired_once(connection, due.keys() - decided)
            after = bookings(connection)
            assert {after[booking_id]["version"] - due[booking_id]["version"] for booking_id in due} == {1}
            won += len(decided)
        row.interruptions = f"{rounds} drains against 2 managers"
        row.due = rounds * size
        row.outcome = f"one outcome each: managers won {won:,}, the worker {rounds * size - won:,}"


STILL_DUE: Final = {
    "an ignored column": "updated_at = now()",
    "the version": "version = version + 1",
    "the other status of the phase": "status = 'AwaitingPayment', version = version + 1",
    "the deadline, a little later": "reserve_expires_at = reserve_expires_at + interval '1.5 seconds'",
    "the deadline, behind all others": "reserve_expires_at = now() - interval '1 second'",
}
NO_LONGER_DUE: Final = {
    "extended": "reserve_expires_at = now() + interval '1 day'",
    "confirmed": "status = 'Booked', booked_at = now(), booking_expires_at = now() + interval '1 day'",
    "cancelled": "status = 'Cancelled'",
    "without a deadline": "reserve_expires_at = null",
}
NEXT_RUN_AT_THE_LATEST: Final = {
    "moved to the head of the queue": "created_at = created_at - interval '1 day', "
    "reserve_expires_at = reserve_expires_at - interval '1 day'",
    "confirmed, and overdue again": "status = 'Booked', booked_at = now() - interval '2 days', "
    "booking_expires_at = now() - interval '1 day'",
}
WALKS = pytest.mark.parametrize("flags", [("--batch-size", "100"), ("--batch-size", "3", "--drain")], ids=" ".join)


def change(booking_id: UUID, assignments: str) -> str:
    return f"update crm.bookings set {assignments} where id = '{booking_id}'"


class TestARowChangesBetweenTheSnapshotAndTheLock:
    """The walk waits in front of the fourth row, while another session changes that row, or rows further down."""

    def run_while(
        self, database: Database, connection: Connection, ids: list[UUID], changes: str, *flags: str
    ) -> CallResult:
        with closed_gate(database) as gate:
            gate_before_lock(connection, ids[3])
            with start_expire(database, *flags) as worker:
                wait_for_worker(connection, AT_THE_GATE)
                connection.execute(changes.encode())
                gate.open()
                result = finish(worker)
        assert result.exit_code == 0, result.stderr
        return result

    @WALKS
    @pytest.mark.parametrize("what", STILL_DUE)
    def test_still_due_it_expires_in_this_run(
        self, database: Database, connection: Connection, flags: tuple[str, ...], what: str
    ) -> None:
        ids = insert_queue(connection, 8)

        result = self.run_while(database, connection, ids, change(ids[3], STILL_DUE[what]), *flags)

        assert_expired_once(connection, ids)
        assert (result.json["skipped_locked_count"], result.json["has_more"]) == (0, False)

    @pytest.mark.parametrize("what", NO_LONGER_DUE)
    def test_no_longer_due_it_stays_and_has_no_event(
        self, database: Database, connection: Connection, what: str
    ) -> None:
        ids = insert_queue(connection, 8)
        changes = change(ids[3], NO_LONGER_DUE[what])

        result = self.run_while(database, connection, ids, changes, "--batch-size", "3", "--drain")

        assert_expired_once(connection, set(ids) - {ids[3]})
        assert (result.json["skipped_locked_count"], result.json["has_more"]) == (0, False)

    @pytest.mark.parametrize(
        "flags",
        [("--batch-size", "100"), ("--batch-size", "15", "--drain"), ("--batch-size", "5", "--drain")],
        ids=" ".join,
    )
    def test_all_that_at_once_to_rows_further_down(
        self, database: Database, connection: Connection, flags: tuple[str, ...]
    ) -> None:
        ids = insert_queue(connection, 30)
        still_due = dict(zip(ids[4::3], STILL_DUE.values(), strict=False))
        no_longer_due = dict(zip(ids[5::3], NO_LONGER_DUE.values(), strict=False))
        deleted = ids[6]
        changes = [change(booking_id, what) for booking_id, what in (still_due | no_longer_due).items()]
        changes.append(f"delete from crm.bookings where id = '{deleted}'")

        result = self.run_while(database, connection, ids, ";".join(changes), *flags)

        assert_expired_once(connection, set(ids) - no_longer_due.keys() - {deleted})
        assert (result.json["skipped_locked_count"], result.json["has_more"]) == (0, False)

    @pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
    def test_it_is_no_conflict_whatever_the_databases_default_isolation_is(
        self, database: Database, connection: Connection, isolation: str
    ) -> None:
        ids = insert_queue(connection, 8)
        name = scalar(connection, "select quote_ident(current_database())")
        connection.execute(f"alter database {name} set default_transaction_isolation = '{isolation}'".encode())

        result = self.run_while(database, connection, ids, change(ids[3], STILL_DUE["the version"]))

        assert log_lines(result, "retrying the transaction") == []
        assert_expired_once(connection, ids)

    def test_deleted_it_has_no_event(self, database: Database, connection: Connection) -> None:
        ids = insert_queue(connection, 8)
        self.run_while(database, connection, ids, f"delete from crm.bookings where id = '{ids[3]}'")
        assert_expired_once(connection, set(ids) - {ids[3]})

    def test_broken_it_is_poison(self, database: Database, connection: Connection) -> None:
        ids = insert_queue(connection, 8)
        result = self.run_while(database, connection, ids, change(ids[3], "created_at = now() + interval '1 year'"))
        assert_expired_once(connection, set(ids) - {ids[3]})
        assert result.json["poison"] == [{"booking_id": str(ids[3]), "reason": "DEADLINE_BEFORE_BASE"}]

    @WALKS
    @pytest.mark.parametrize("what", NEXT_RUN_AT_THE_LATEST)
    def test_due_again_behind_the_walk_it_expires_in_the_next_run_at_the_latest(
        self, database: Database, connection: Connection, flags: tuple[str, ...], what: str
    ) -> None:
        ids = insert_queue(connection, 8)
        self.run_while(database, connection, ids, change(ids[3], NEXT_RUN_AT_THE_LATEST[what]), *flags)
        assert set(ids) - {ids[3]} <= expired(connection)
        assert expire(database, "--drain").exit_code == 0
        assert_expired_once(connection, ids)

    @pytest.mark.parametrize("what", ["the version", "the deadline, behind all others"])
    def test_while_a_poison_row_is_being_isolated_those_behind_it_are_not_passed_over(
        self, database: Database, connection: Connection, what: str
    ) -> None:
        poison, moved, *behind = insert_queue(connection, 6)
        connection.execute("update crm.bookings set version = 2147483647 where id = %s", (poison,))
        with closed_gate(database) as gate:
            # The statement that locks one row and writes nothing: what the bisecting has narrowed down to.
            picking = "current_query() like '%for no key update%' and current_query() not like '%update crm.bookings%'"
            gate_before_lock(connection, moved, statement=picking)
            with start_expire(database, "--batch-size", "4", "--drain") as worker:
                wait_for_worker(connection, AT_THE_GATE)
                connection.execute(change(moved, STILL_DUE[what]).encode())
                gate.open()
                result = finish(worker)

        assert result.exit_code == 0, result.stderr
        assert_expired_once(connection, [moved, *behind])
        assert (result.json["poison_count"], result.json["skipped_locked_count"]) == (1, 0)


class TestSeveralWorkers:
    def test_a_second_worker_passes_by_what_the_first_one_holds(
        self, database: Database, connection: Connection
    ) -> None:
        ids = insert_queue(connection, 12)
        with closed_gate(database) as gate:
            gate_in_write(connection, ids[2])
            with start_expire(database, "--batch-size", "5") as first:
                wait_for_worker(connection, AT_THE_GATE)

                second = expire(database, "--drain", "--batch-size", "3")

                assert (second.exit_code, second.json["reserve_expired_count"]) == (0, 7)
                assert second.json["skipped_locked_count"] == 5
                gate.open()
                assert finish(first).json["reserve_expired_count"] == 5
        assert_expired_once(connection, ids)

    @pytest.mark.chaos
    def test_five_at_once_share_the_queue_and_none_fails(
        self, database: Database, connection: Connection, chaos_table: ChaosTable
    ) -> None:
        workers = 5
        with chaos_table.row("five processes drain at once") as row:
            with connection.transaction():
                seed(connection, scaled(20_000) * 5 // 4, due_share=0.8)
            row.due, row.interruptions = remember_due(connection), f"{workers} processes"
            with ExitStack() as stack:
                # Everybody waits in front of the schema check, so that all begin at the same moment.
                door = stack.enter_context(psycopg.connect(database.url))
                door.execute("lock table crm.crmctl_schema_version in access exclusive mode")
                flags = ("--drain", "--batch-size", "100")
                started = [stack.enter_context(start_expire(database, *flags)) for _ in range(workers)]
                wait_until(lambda: len(backends(connection, "wait_event_type = 'Lock'")) == workers, "five workers")
                door.rollback()
                results = [finish(worker) for worker in started]

            assert [result.exit_code for result in results] == [0] * workers, [result.stderr for result in results]
            assert_each_due_expired_once(connection)
            shares = [r.json["reserve_expired_count"] + r.json["booking_expired_count"] for r in results]
            assert sum(shares) == row.due
            assert {result.json["poison_count"] for result in results} == {0}
            row.outcome = f"each expired once; shares {', '.join(str(share) for share in sorted(shares))}"


class TestSignals:
    @SIGNALS
    @pytest.mark.parametrize("flags", [(), ("--dry-run",)], ids=["run", "dry run"])
    def test_a_running_statement_is_cancelled_and_rolled_back(
        self, database: Database, connection: Connection, signum: signal.Signals, flags: tuple[str, ...]
    ) -> None:
        ids = insert_queue(connection, 5)
        before = fingerprints(connection)
        with closed_gate(database) as gate:
            gate_in_write(connection, ids[3])
            with start_expire(database, *flags) as worker:
                wait_for_worker(connection, AT_THE_GATE)
                code, seconds = stop(worker, signum)
                result = finish(worker)
                # The gate is still closed: the statement did not end by itself.
                wait_until_workers_are_gone(connection)
                after = fingerprints(connection)
            gate.open()

        assert code == 128 + signum
        assert seconds < 5
        assert (result.json["error"]["code"], result.json["error"]["signal"]) == ("CRMCTL_INTERRUPTED", signum)
        assert signum.name in result.json["error"]["message"]
        assert {table for table in before if before[table] != after[table]} <= {"crm.job_runs"}
        failures = [] if flags else [("failed", "CRMCTL_INTERRUPTED")]
        assert [(run["outcome"], run["error_code"]) for run in runs(connection)] == failures
        connection.execute("drop trigger gate_in_write on crm.bookings")
        assert expire(database).exit_code == 0
        assert_expired_once(connection, ids)

    @SIGNALS
    def test_a_drain_keeps_and_tells_what_it_had_committed(
        self, database: Database, connection: Connection, signum: signal.Signals
    ) -> None:
        ids = insert_queue(connection, 9)
        with closed_gate(database) as gate:
            gate_in_write(connection, ids[5])
            with start_expire(database, "--drain", "--batch-size", "2") as worker:
                wait_for_worker(connection, AT_THE_GATE)
                code, seconds = stop(worker, signum)
                result = finish(worker)
            gate.open()

        assert (code, seconds < 5) == (128 + signum, True)
        assert (result.json["committed"]["batches"], result.json["committed"]["reserve_expired_count"]) == (2, 4)
        assert_expired_once(connection, ids[:4])
        found = [(run["batch"], run["outcome"]) for run in runs(connection)]
        assert found == [(1, "committed"), (2, "committed"), (3, "failed")]
        connection.execute("drop trigger gate_in_write on crm.bookings")
        assert expire(database, "--drain").exit_code == 0
        assert_expired_once(connection, ids)

    @SIGNALS
    def test_while_it_waits_between_two_attempts_it_ends_at_once(
        self, database: Database, connection: Connection, signum: signal.Signals
    ) -> None:
        insert_queue(connection, 3)
        connection.execute(
            """
            create function public.conflict() returns trigger language plpgsql as $$
            begin
                raise exception 'somebody got in the way' using errcode = '40001';
            end $$
            """
        )
        connection.execute("create trigger conflict before update on crm.bookings execute function public.conflict()")
        with start_expire(database, env={"CRMCTL_DATABASE__TRANSACTION_ATTEMPTS": "100"}) as worker:
            wait_for_worker(connection, "state = 'idle' and query ilike 'rollback'")
            code, seconds = stop(worker, signum)
            result = finish(worker)
        assert (code, seconds < 5) == (128 + signum, True)
        assert result.json["error"]["code"] == "CRMCTL_INTERRUPTED"
        assert expired(connection) == set()

    @SIGNALS
    def test_while_it_waits_for_a_silent_server_it_ends_at_once(self, signum: signal.Signals) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            with start_expire(f"postgresql://crmctl:crmctl@127.0.0.1:{port}/crm") as worker:
                visitor, _ = silent.accept()
                with visitor:
                    code, seconds = stop(worker, signum)
                    result = finish(worker)
        assert (code, seconds < 5) == (128 + signum, True)
        assert result.json["error"]["code"] == "CRMCTL_INTERRUPTED"

    def test_a_server_that_does_not_react_cannot_hold_it(self, database: Database, connection: Connection) -> None:
        ids = insert_queue(connection, 5)
        with closed_gate(database) as gate:
            gate_in_write(connection, ids[3])
            with start_expire(database) as worker, stopped_backend(wait_for_worker(connection, AT_THE_GATE)):
                code, seconds = stop(worker, signal.SIGTERM)
                finish(worker)
            gate.open()
        wait_until_workers_are_gone(connection)
        assert (code, seconds < 5) == (143, True)
        assert expired(connection) == set()
        assert expire(database).exit_code == 0
        assert_expired_once(connection, ids)

    @pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
    def test_a_second_signal_ends_it_at_once(
        self, database: Database, connection: Connection, second: signal.Signals
    ) -> None:
        first = signal.SIGINT if second is signal.SIGTERM else signal.SIGTERM
        ids = insert_queue(connection, 5)
        with closed_gate(database) as gate:
            gate_in_write(connection, ids[3])
            with start_expire(database) as worker, stopped_backend(wait_for_worker(connection, AT_THE_GATE)):
                worker.send_signal(first)
                code, seconds = stop(worker, second)
                finish(worker)
            gate.open()
        wait_until_workers_are_gone(connection)
        assert seconds < 2
        assert code in (128 + first, 128 + second)
        assert expired(connection) == set()
        assert expire(database).exit_code == 0
        assert_expired_once(connection, ids)

    @pytest.mark.chaos
    @SIGNALS
    def test_at_random_moments_of_a_drain_only_whole_batches_stay(
        self, database: Database, connection: Connection, chaos_table: ChaosTable, signum: signal.Signals
    ) -> None:
        count, stopped = scaled(30), 0
        dice = random.Random(signum)
        with chaos_table.row(f"{signum.name} at random moments of a drain") as row:
            with connection.transaction():
                seed(connection, scaled(100_000), due_share=1.0)
            row.due = remember_due(connection)
            for _ in range(count):
                with start_expire(database, "--drain", "--batch-size", "50") as worker:
                    wait_for_a_random_moment(connection, worker, dice)
                    code, seconds = stop(worker, signum)
                    result = finish(worker)
                assert code in (0, 128 + signum), result.stderr
                assert seconds < 5
                stopped += code != 0
                wait_until_workers_are_gone(connection)
                sofar = tally(connection)
                assert sofar.expired == sofar.events == sofar.entries == sofar.recorded
            assert expire(database, "--drain").exit_code == 0
            assert_each_due_expired_once(connection)
            row.interruptions, row.outcome = f"{stopped} of {count} stopped", "each expired once, whole batches only"
        assert stopped > 0


def stop(worker: subprocess.Popen[str], signum: signal.Signals) -> tuple[int, float]:
    """Send a signal and wait for the end; returns the exit code and the seconds that it took."""
    sent = time.monotonic()
    worker.send_signal(signum)
    return worker.wait(timeout=20), time.monotonic() - sent


@contextmanager
def stopped_backend(pid: int) -> Iterator[None]:
    """The server process of a session, frozen: it neither answers nor notices a cancel request."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
