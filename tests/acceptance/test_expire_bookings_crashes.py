"""Whatever dies at whatever moment: afterwards each due booking is expired exactly once, with one event each."""

import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Literal

import psycopg
import pytest

from crmctl.adapters import migrations
from crmctl.dev.postgres import PostgresServer, temporary_server
from crmctl.dev.seed import seed
from tests.acceptance.conftest import ChaosTable
from tests.expire_support import (
    AT_THE_GATE,
    Connection,
    assert_each_due_expired_once,
    assert_expired_once,
    backends,
    closed_gate,
    events,
    expire,
    expired,
    finish,
    gate_in_write,
    insert_queue,
    log_lines,
    remember_due,
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

IN_THE_COMMIT: Final = "wait_event = 'SyncRep'"


@pytest.fixture
def connection(database: Database) -> psycopg.Connection[Any]:
    return database.connect()


class TestTheProcessIsKilled:
    @pytest.mark.chaos
    def test_at_random_moments_of_a_drain(
        self, database: Database, connection: Connection, chaos_table: ChaosTable
    ) -> None:
        target, kills, attempts, dice = scaled(60, least=5), 0, 0, random.Random(9)
        with chaos_table.row("kill -9 at random moments of a drain") as row:
            with connection.transaction():
                seed(connection, scaled(150_000), due_share=0.8)
            row.due = remember_due(connection)
            while kills < target:
                attempts += 1
                assert attempts < 3 * target, "the drain is over before it can be killed"
                with start_expire(database, "--drain", "--batch-size", "50") as worker:
                    wait_for_a_random_moment(connection, worker, dice)
                    worker.kill()
                    code = finish(worker).exit_code
                assert code in (-signal.SIGKILL, 0)
                kills += code != 0
                wait_until_workers_are_gone(connection)
                sofar = tally(connection)
                assert sofar.expired == sofar.events == sofar.entries == sofar.recorded
            assert sofar.expired > 0
            last = expire(database, "--drain", "--time-budget", "5m", timeout=120)
            assert (last.exit_code, last.json["has_more"]) == (0, False)
            assert last.json["reserve_expired_count"] + last.json["booking_expired_count"] > 0
            assert_each_due_expired_once(connection)
            row.interruptions, row.outcome = f"{kills} kills", "each expired once, events and timeline one to one"

    def test_while_it_holds_its_locks_others_pass_by_and_nothing_of_it_stays(
        self, database: Database, connection: Connection
    ) -> None:
        ids = insert_queue(connection, 9)
        with closed_gate(database) as gate:
            gate_in_write(connection, ids[2])
            with start_expire(database, "--batch-size", "5") as worker:
                wait_for_worker(connection, AT_THE_GATE)
                worker.kill()
                assert finish(worker).exit_code == -signal.SIGKILL

            # The server has not noticed yet.
            assert backends(connection, AT_THE_GATE)
            second = expire(database, "--drain")
            assert (second.json["reserve_expired_count"], second.json["skipped_locked_count"]) == (4, 5)
            assert_expired_once(connection, ids[5:])

            gate.open()
            wait_until_workers_are_gone(connection)
        assert_expired_once(connection, ids[5:])
        assert expire(database).json["reserve_expired_count"] == 5
        assert_expired_once(connection, ids)

    def test_its_session_is_terminated_by_an_administrator(self, database: Database, connection: Connection) -> None:
        ids = insert_queue(connection, 5)
        with closed_gate(database) as gate:
            gate_in_write(connection, ids[3])
            with start_expire(database) as worker:
                pid = wait_for_worker(connection, AT_THE_GATE)
                assert scalar(connection, "select pg_terminate_backend(%s)", pid)
                result = finish(worker)
            gate.open()
        assert (result.exit_code, result.json["error"]["code"]) == (69, "CRMCTL_UNAVAILABLE")
        assert expired(connection) == set()
        assert [(run["outcome"], run["error_code"]) for run in runs(connection)] == [("failed", "CRMCTL_UNAVAILABLE")]
        connection.execute("drop trigger gate_in_write on crm.bookings")
        assert expire(database).exit_code == 0
        assert_expired_once(connection, ids)


@pytest.fixture(scope="module")
def durable_server() -> Iterator[PostgresServer]:
    """A server of this module's own, to be restarted; fsync and synchronous_commit are on, as in production."""
    with temporary_server(fsync=True) as server:
        yield server


@pytest.fixture
def durable_database(durable_server: PostgresServer) -> Iterator[Database]:
    with psycopg.connect(durable_server.url(), autocommit=True) as admin:
        admin.execute("drop database if exists crm with (force)")
        admin.execute("create database crm")
    migrations.upgrade(durable_server.url("crm"))
    database = Database(durable_server.url("crm"))
    yield database
    database.close()


class TestTheServerIsRestarted:
    @pytest.mark.chaos
    @pytest.mark.parametrize("mode", ["fast", "immediate"])
    def test_in_the_middle_of_a_drain(
        self,
        durable_server: PostgresServer,
        durable_database: Database,
        chaos_table: ChaosTable,
        mode: Literal["fast", "immediate"],
    ) -> None:
        restarts = scaled(10)
        url = durable_database.url
        with chaos_table.row(f"server restarted ({mode}) in the middle of a drain") as row:
            with psycopg.connect(url) as connection:
                seed(connection, scaled(100_000), due_share=0.8)
            with psycopg.connect(url, autocommit=True) as connection:
                row.due = remember_due(connection)
            for number in range(restarts):
                with start_expire(url, "--drain", "--batch-size", "20") as worker:
                    wait_for_batches(url, 2)
                    durable_server.restart(mode)
                    result = finish(worker)
                assert (result.exit_code, result.json["error"]["code"]) == (69, "CRMCTL_UNAVAILABLE"), result.stderr
                with psycopg.connect(url, autocommit=True) as connection:
                    sofar = tally(connection)
                    assert sofar.expired == sofar.events == sofar.entries == sofar.recorded < row.due, number
                    assert_what_was_told_is_kept(connection, result)

            last = expire(url, "--drain", "--time-budget", "5m", timeout=120)
            assert (last.exit_code, last.json["has_more"]) == (0, False)
            with psycopg.connect(url, autocommit=True) as connection:
                assert_each_due_expired_once(connection)
            row.interruptions, row.outcome = f"{restarts} restarts", "exit 69 each time; the rerun completes"


def wait_for_batches(url: str, count: int) -> None:
    """Wait until a drain has committed so many further batches."""
    with psycopg.connect(url, autocommit=True) as connection:

        def committed() -> int:
            number = scalar(connection, "select count(*) from crm.job_runs where outcome = 'committed'")
            assert isinstance(number, int)
            return number

        before = committed()
        wait_until(lambda: committed() >= before + count, "further batches")


def assert_what_was_told_is_kept(connection: Connection, result: CallResult) -> None:
    """Batches that a failed run told of are there; one more may be, whose commit was not acknowledged."""
    (failure,) = log_lines(result, "run failed")
    kept = scalar(
        connection,
        "select count(*) from crm.job_runs where run_id = %s and outcome = 'committed'",
        failure["run_id"],
    )
    assert kept - result.json["committed"]["batches"] in (0, 1)


class TestInTheMiddleOfTheCommit:
    """The server waits for a standby that never comes: the commit is under way and not acknowledged."""

    @pytest.fixture
    def database(self, durable_database: Database) -> Database:
        return durable_database

    @pytest.fixture
    def connection(self, database: Database) -> psycopg.Connection[Any]:
        connection = database.connect()
        connection.execute("set synchronous_commit = 'local'")
        return connection

    @contextmanager
    def commits_that_wait(self, database: Database) -> Iterator[None]:
        with psycopg.connect(database.url, autocommit=True) as admin:
            admin.execute("alter system set synchronous_standby_names = 'nobody'")
            admin.execute("select pg_reload_conf()")
        with psycopg.connect(database.url, autocommit=True) as observer:
            wait_until(lambda: scalar(observer, "show synchronous_standby_names") == "nobody", "the reload")
        try:
            yield
        finally:
            with psycopg.connect(database.url, autocommit=True) as admin:
                admin.execute("alter system reset synchronous_standby_names")
                admin.execute("select pg_reload_conf()")

    def test_a_kill_leaves_the_batch_whole(self, database: Database, connection: Connection) -> None:
        ids = insert_queue(connection, 5)
        with self.commits_that_wait(database), start_expire(database) as worker:
            wait_for_worker(connection, IN_THE_COMMIT)
            assert expired(connection) == set()
            worker.kill()
            assert finish(worker).exit_code == -signal.SIGKILL
        wait_until_workers_are_gone(connection)
        assert_expired_once(connection, ids)
        assert expire(database).json["reserve_expired_count"] == 0
        assert_expired_once(connection, ids)

    def test_a_signal_ends_the_process_within_5_seconds_and_leaves_the_batch_whole(
        self, database: Database, connection: Connection
    ) -> None:
        ids = insert_queue(connection, 5)
        with self.commits_that_wait(database), start_expire(database) as worker:
            wait_for_worker(connection, IN_THE_COMMIT)
            sent = time.monotonic()
            worker.send_signal(signal.SIGINT)
            assert worker.wait(timeout=20) == 130
            assert time.monotonic() - sent < 5
            finish(worker)
        wait_until_workers_are_gone(connection)
        assert_expired_once(connection, ids)
        assert expire(database).json["reserve_expired_count"] == 0
        assert_expired_once(connection, ids)

    def test_a_signal_is_noted_and_the_committed_batch_told(self, database: Database, connection: Connection) -> None:
        ids = insert_queue(connection, 6)
        with ExitStack() as stack:
            with self.commits_that_wait(database):
                worker = stack.enter_context(start_expire(database, "--drain", "--batch-size", "3"))
                wait_for_worker(connection, IN_THE_COMMIT)
                worker.send_signal(signal.SIGTERM)
            result = finish(worker)
        assert (result.exit_code, result.json["committed"]["reserve_expired_count"]) == (143, 3)
        assert_expired_once(connection, ids[:3])
        assert [(run["batch"], run["outcome"]) for run in runs(connection)] == [(1, "committed")]

    @pytest.mark.parametrize("flags", [(), ("--drain",)], ids=["one batch", "drain"])
    def test_a_signal_comes_too_late_when_all_is_done(
        self, database: Database, connection: Connection, flags: tuple[str, ...]
    ) -> None:
        ids = insert_queue(connection, 3)
        with ExitStack() as stack:
            with self.commits_that_wait(database):
                worker = stack.enter_context(start_expire(database, *flags))
                wait_for_worker(connection, IN_THE_COMMIT)
                worker.send_signal(signal.SIGTERM)
            result = finish(worker)
        assert (result.exit_code, result.json["reserve_expired_count"]) == (0, 3)
        assert_expired_once(connection, ids)
        assert [(run["batch"], run["outcome"]) for run in runs(connection)] == [(1, "committed")]

    def test_a_restart_is_exit_69_and_says_that_the_outcome_is_open(
        self, durable_server: PostgresServer, database: Database, connection: Connection
    ) -> None:
        ids = insert_queue(connection, 5)
        with start_expire(database) as worker:
            with self.commits_that_wait(database):
                wait_for_worker(connection, IN_THE_COMMIT)
                durable_server.restart("fast")
                connection = database.connect()
            result = finish(worker)
        assert (result.exit_code, result.json["error"]["code"]) == (69, "CRMCTL_UNAVAILABLE")
        assert "may or may not" in result.json["error"]["message"]
        assert_expired_once(connection, ids)
        assert events(connection)
        assert timeline(connection)
        assert expire(database).json["reserve_expired_count"] == 0
