"""Jobs through PgBouncer in transaction mode: nothing is prepared on the server, each guard is its transaction's."""

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.expire_support import assert_expired_once, expire, insert_queue, rows
from tests.pgbouncer_support import Binary, NotHereError, find, pooled
from tests.prefork import run_crmctl
from tests.support import CallResult, Database


@pytest.fixture(scope="module")
def binary() -> Iterator[Binary]:
    with tempfile.TemporaryDirectory(prefix="crmctl-pgbouncer-") as folder:
        Path(folder).chmod(0o755)  # as root, it runs as nobody
        try:
            yield find(Path(folder))
        except NotHereError as error:
            pytest.skip(str(error))


@pytest.fixture
def pool(binary: Binary, database: Database) -> Iterator[str]:
    with pooled(binary, database.url) as url:
        yield url


def test_twenty_runs_of_two_clients_expire_everything_once(pool: str, database: Database) -> None:
    connection = database.connect()
    ids = insert_queue(connection, 200)
    results: list[CallResult] = []

    def client() -> None:
        results.extend(expire(pool, "--drain", "--batch-size", "7", "--max-expire", "10") for _ in range(10))

    clients = [threading.Thread(target=client) for _ in range(2)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    assert [result.exit_code for result in results] == [0] * 20, [result.stderr for result in results]
    assert sum(result.json["reserve_expired_count"] for result in results) == 200
    assert_expired_once(connection, ids)


def test_the_guards_hold_within_the_transaction_and_do_not_leak(pool: str, database: Database) -> None:
    connection = database.connect()
    insert_queue(connection, 1)
    connection.execute(
        """
        create table public.seen (name text, statement_timeout text, lock_timeout text);
        create function public.note() returns trigger language plpgsql as $$
        begin
            insert into public.seen values (current_setting('application_name'),
                current_setting('statement_timeout'), current_setting('lock_timeout'));
            return new;
        end $$;
        create trigger note before update on crm.bookings for each row execute function public.note()
        """
    )
    assert expire(pool, env={"CRMCTL_DATABASE__STATEMENT_TIMEOUT": "45s"}).exit_code == 0
    (seen,) = rows(connection, "select * from public.seen")
    assert seen == {"name": "crmctl expire-bookings", "statement_timeout": "45s", "lock_timeout": "5s"}
    with psycopg.connect(pool, prepare_threshold=None) as other:
        assert other.execute("show statement_timeout").fetchone() == ("0",)


def test_a_timeout_is_in_force(pool: str, database: Database) -> None:
    with psycopg.connect(database.url) as holder:
        holder.execute("lock table crm.bookings in access exclusive mode")
        result = expire(pool, env={"CRMCTL_DATABASE__LOCK_TIMEOUT": "300ms"})
    assert result.exit_code == 75
    assert "lock" in result.stderr


@pytest.mark.parametrize(
    "command",
    [("bookings", "list"), ("db", "check"), ("jobs", "list"), ("prune",), ("db", "upgrade")],
    ids=" ".join,
)
def test_other_commands_work_too(pool: str, command: tuple[str, ...]) -> None:
    result = run_crmctl(*command, "-o", "json", database=pool)
    assert result.exit_code == 0, result.stderr
