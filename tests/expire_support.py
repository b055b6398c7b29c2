"""What the tests of `bookings expire` share: a queue of due bookings, what a run left of it, gates, waiting."""

import json
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg.rows import dict_row

from crmctl.domain.bookings import RESERVE, Phase
from tests.prefork import run_crmctl
from tests.support import CallResult, Database, insert_booking, start_crmctl

Connection = psycopg.Connection[Any]

APPLICATION: Final = "crmctl expire-bookings"
TOPIC: Final = "pin.crm.booking-expired.v1"
CHAOS_FULL: Final = os.environ.get("CRMCTL_TEST_CHAOS") == "full"
# Seconds: what a test waits for comes within a fraction of it, or never.
_PATIENCE: Final = 20.0


def scaled(count: int, *, least: int = 3) -> int:
    """`count` in a full run of the chaos tests (CRMCTL_TEST_CHAOS=full), else a tenth of it."""
    return count if CHAOS_FULL else max(least, count // 10)


def expire(
    database: Database | str, *args: str, env: Mapping[str, str] | None = None, timeout: float = 60.0
) -> CallResult:
    """Run `crmctl bookings expire -o json` to its end."""
    return run_crmctl("bookings", "expire", "-o", "json", *args, database=database, env=env, timeout=timeout)


def start_expire(database: Database | str, *args: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start `crmctl bookings expire -o json`, which waits at a gate for long; use it as a context manager."""
    patient = {"CRMCTL_DATABASE__LOCK_TIMEOUT": "60s", "CRMCTL_DATABASE__STATEMENT_TIMEOUT": "60s"}
    return start_crmctl("bookings", "expire", "-o", "json", *args, database=database, env=patient | dict(env or {}))


def finish(process: subprocess.Popen[str], timeout: float = 60.0) -> CallResult:
    """Wait for a process that was started and return what it left."""
    stdout, stderr = process.communicate(timeout=timeout)
    return CallResult(process.returncode, stdout, stderr)


def log_lines(result: CallResult, message: str) -> list[dict[str, Any]]:
    """The JSON log lines on stderr that carry a message."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in result.stderr.splitlines()]
    return [line for line in lines if line["message"] == message]


def rows(connection: Connection, statement: str, *params: object) -> list[dict[str, Any]]:
    """Run a statement of a test and return its rows; its placeholders are `%s`."""
    with connection.cursor(row_factory=dict_row) as cursor:
        cursor.execute(statement.encode(), params or None)
        return cursor.fetchall() if cursor.description else []


def column(connection: Connection, statement: str, *params: object) -> list[Any]:
    """The first column of a statement's rows."""
    return [next(iter(row.values())) for row in rows(connection, statement, *params)]


def scalar(connection: Connection, statement: str, *params: object) -> Any:
    """The one value that a statement returns."""
    (value,) = column(connection, statement, *params)
    return value


def insert_due(
    connection: Connection,
    phase: Phase = RESERVE,
    *,
    overdue: timedelta = timedelta(minutes=1),
    deadline: datetime | None = None,
    **overrides: Any,
) -> UUID:
    """Insert a healthy booking of a phase whose deadline has passed `overdue` ago, or was `deadline`."""
    at = deadline or scalar(connection, "select clock_timestamp()") - overdue
    timer = (
        {"created_at": at - timedelta(minutes=60)}
        if phase is RESERVE
        else {"created_at": at - timedelta(hours=24, minutes=5), "booking_expires_at": at}
    )
    return insert_booking(connection, **{"status": phase.statuses[0], **timer, **overrides})


def insert_queue(
    connection: Connection,
    count: int,
    phase: Phase = RESERVE,
    *,
    oldest: timedelta = timedelta(hours=2),
    apart: timedelta = timedelta(seconds=1),
    **overrides: Any,
) -> list[UUID]:
    """Insert healthy due bookings; returns their ids in queue order, which is (deadline, id)."""
    first = scalar(connection, "select clock_timestamp()") - oldest
    with connection.transaction():
        ids = [insert_due(connection, phase, deadline=first + apart * n, **overrides) for n in range(count)]
    return ids if apart else sorted(ids)


def bookings(connection: Connection) -> dict[UUID, dict[str, Any]]:
    """Every booking by id, as JSON has it: Python's datetime cannot hold an infinite deadline."""
    found = rows(connection, "select b.id, to_jsonb(b) as booking from crm.bookings b")
    return {row["id"]: row["booking"] for row in found}


def expired(connection: Connection) -> set[UUID]:
    """The ids of the bookings in a terminal status."""
    return set(column(connection, "select id from crm.bookings where status in ('ReserveExpired', 'BookingExpired')"))


def events(connection: Connection) -> list[dict[str, Any]]:
    """The outbox in the order of its positions."""
    return rows(connection, "select * from crm.outbox_messages order by position")


def timeline(connection: Connection) -> list[dict[str, Any]]:
    """The timeline of all deals."""
    return rows(connection, "select * from crm.deal_timeline_events order by occurred_at, deal_id")


def runs(connection: Connection) -> list[dict[str, Any]]:
    """The run records in the order of their writing."""
    return rows(connection, "select * from crm.job_runs order by started_at, run_id, batch")


def assert_expired_once(connection: Connection, ids: Collection[UUID]) -> None:
    """Exactly these bookings are expired, each with one version more, one event and one timeline row of its own."""
    assert expired(connection) == set(ids)
    assert Counter(event["aggregate_id"] for event in events(connection)) == Counter(str(i) for i in ids)
    assert Counter(entry["payload"]["BookingId"] for entry in timeline(connection)) == Counter(str(i) for i in ids)
    broken = rows(
        connection,
        """
        select b.id, b.status, o.payload, t.type
        from crm.bookings b
        join crm.outbox_messages o on o.aggregate_id = b.id::text
        join crm.deal_timeline_events t on t.deal_id = b.deal_id and t.payload ->> 'BookingId' = b.id::text
        where (b.status, o.payload ->> 'Phase', t.type) not in (
                ('ReserveExpired', 'Reserve', 'BookingReserveExpired'),
                ('BookingExpired', 'Booking', 'BookingExpired')
            )
            or (o.payload ->> 'ExpiredAt')::timestamptz is distinct from b.expired_at
            or t.occurred_at is distinct from b.expired_at
        """,
    )
    assert broken == []


def remember_due(connection: Connection) -> int:
    """Note down, beside the schema, what is due now and what is not; returns how many are due."""
    connection.execute(
        """
        drop table if exists public.due, public.others;
        create table public.due as
        select b.id, b.version + 1 as version,
               case b.status when 'Booked' then 'BookingExpired' else 'ReserveExpired' end as status
        from crm.bookings b
        where b.status in ('Reserved', 'AwaitingPayment') and b.reserve_expires_at < now()
            or b.status = 'Booked' and b.booking_expires_at < now();
        create table public.others as
        select b.id, md5(b::text) as digest
        from crm.bookings b
        where not exists (select from public.due d where d.id = b.id);
        analyze public.due, public.others
        """
    )
    count = scalar(connection, "select count(*) from public.due")
    assert isinstance(count, int)
    return count


def assert_each_due_expired_once(connection: Connection) -> None:
    """All that `remember_due` noted is expired exactly once, with one event and one timeline row each; nothing else."""
    broken = rows(
        connection,
        """
        select d.id, b.status, b.version, e.events, t.entries
        from public.due d
        left join crm.bookings b on b.id = d.id
        left join (select aggregate_id, count(*) as events from crm.outbox_messages group by 1) e
            on e.aggregate_id = d.id::text
        left join (
            select deal_id, payload ->> 'BookingId' as booking_id, count(*) as entries
            from crm.deal_timeline_events
            group by 1, 2
        ) t on t.deal_id = b.deal_id and t.booking_id = d.id::text
        where (b.status, b.version, e.events, t.entries) is distinct from (d.status, d.version, 1::bigint, 1::bigint)
        limit 5
        """,
    )
    assert broken == []
    changed = """
        select o.id from public.others o left join crm.bookings b on b.id = o.id
        where o.digest is distinct from md5(b::text) limit 5
    """
    assert column(connection, changed) == []
    due = scalar(connection, "select count(*) from public.due")
    assert tally(connection) == Tally(due, due, due, due)


@dataclass(frozen=True, slots=True)
class Tally:
    """How many rows each part of the expiry has left so far; in a consistent database they are equal."""

    expired: int
    events: int
    entries: int
    recorded: int


def tally(connection: Connection) -> Tally:
    """Count those of `remember_due` that are expired, the events, the timeline rows, and what the run records say."""
    (found,) = rows(
        connection,
        """
        select
            (
                select count(*)
                from public.due d
                join crm.bookings b on b.id = d.id and b.status in ('ReserveExpired', 'BookingExpired')
            ) as expired,
            (select count(*) from crm.outbox_messages) as events,
            (select count(*) from crm.deal_timeline_events) as entries,
            (
                select coalesce(
                    sum((r.counts ->> 'reserve_expired_count')::int + (r.counts ->> 'booking_expired_count')::int), 0
                )::bigint
                from crm.job_runs r
                where r.outcome = 'committed'
            ) as recorded
        """,
    )
    return Tally(**found)


def fingerprints(connection: Connection) -> dict[str, str]:
    """A hash over all rows of each table of the schema."""
    tables = column(
        connection,
        "select format('%I.%I', schemaname, tablename) from pg_tables where schemaname = 'crm' order by tablename",
    )
    digest = "select md5(coalesce(string_agg(md5(r::text), '' order by md5(r::text)), '')) from {} r"
    return {table: scalar(connection, digest.format(table)) for table in tables}


def unchanged_apart_from(document: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A result document without the fields in which two runs always differ, and without `names`."""
    return {name: value for name, value in document.items() if name not in {"run_id", "duration_ms", *names}}


def wait_until(condition: Callable[[], Any], what: str, *, seconds: float = _PATIENCE) -> Any:
    """Ask again and again until the condition holds; returns its value. Fails the test with `what` after a while."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.003)
    return value


def backends(connection: Connection, condition: str = "true") -> list[dict[str, Any]]:
    """The worker's sessions in this database that satisfy a condition on pg_stat_activity."""
    return rows(
        connection,
        f"""
        select pid, state, wait_event_type, wait_event, query
        from pg_stat_activity
        where application_name = '{APPLICATION}' and datname = current_database() and ({condition})
        """,
    )


def wait_for_worker(connection: Connection, condition: str = "true") -> int:
    """Wait until a session of the worker satisfies a condition on pg_stat_activity; returns its backend's pid."""
    found = wait_until(lambda: backends(connection, condition), f"a worker's session with {condition}")
    pid = found[0]["pid"]
    assert isinstance(pid, int)
    return pid


def wait_until_workers_are_gone(connection: Connection) -> None:
    """Wait until the server has ended every session of the worker, and so rolled back what was open."""
    wait_until(lambda: not backends(connection), "the end of every session of the worker")


def wait_for_a_random_moment(connection: Connection, worker: subprocess.Popen[str], dice: random.Random) -> None:
    """Let a drain begin and go on for a while: into its first batch, or past some commits into a later one."""

    def batches() -> int:
        number = scalar(connection, "select count(*) from crm.job_runs")
        assert isinstance(number, int)
        return number

    goal = batches() + dice.choice([0, 1, 2, 5])
    wait_until(lambda: backends(connection) or worker.poll() is not None, "the worker to come")
    wait_until(lambda: batches() >= goal or worker.poll() is not None, "some batches")
    time.sleep(dice.uniform(0, 0.03))


AT_THE_GATE: Final = "wait_event_type = 'Lock' and wait_event = 'advisory'"

_GATE_KEY: Final = 20_261_129


@dataclass(slots=True)
class Gate:
    """A place in the database where a session waits until the test opens it: an advisory lock.

    `crm_test.pass_gate()` waits while the gate is closed, and lets everybody through once it is open.
    """

    connection: Connection

    def close(self) -> None:
        """Hold up whoever comes to the gate from now on."""
        self.connection.execute("select pg_advisory_lock(%s)", (_GATE_KEY,))

    def open(self) -> None:
        """Let everybody through."""
        self.connection.execute("select pg_advisory_unlock_all()")


@contextmanager
def closed_gate(database: Database) -> Iterator[Gate]:
    """Make the gate, close it, and open it in the end whatever happens."""
    connection = database.connect()
    connection.execute("create schema if not exists crm_test")
    connection.execute(
        f"""
        create or replace function crm_test.pass_gate() returns boolean language plpgsql volatile as $$
        begin
            perform pg_advisory_xact_lock_shared({_GATE_KEY});
            return true;
        end $$
        """.encode()
    )
    gate = Gate(connection)
    gate.close()
    try:
        yield gate
    finally:
        gate.open()


def gate_before_lock(
    connection: Connection, booking_id: UUID, *, statement: str = "current_query() like '%update crm.bookings%'"
) -> None:
    """Put the gate between a statement's snapshot and its lock on one booking.

    The job reads crm.deals for each row before it locks it. Here crm.deals becomes a view that waits at the gate
    for this booking's deal, in those statements that the condition names (default: the one that expires).
    """
    connection.execute("alter table crm.deals rename to deals_table")
    connection.execute(
        f"""
        create function crm_test.pass_gate_for(deal_id uuid) returns boolean language plpgsql volatile as $$
        begin
            if deal_id = (select b.deal_id from crm.bookings b where b.id = '{booking_id}')
                and {statement}
            then
                return crm_test.pass_gate();
            end if;
            return true;
        end $$
        """.encode()
    )
    connection.execute("create view crm.deals as select * from crm.deals_table d where crm_test.pass_gate_for(d.id)")


def gate_in_write(connection: Connection, booking_id: UUID) -> None:
    """Put the gate into the UPDATE of one booking: whoever waits there holds its lock and those of the batch."""
    connection.execute(
        f"""
        create function crm_test.gate_in_write() returns trigger language plpgsql as $$
        begin
            if new.id = '{booking_id}' and new.status in ('ReserveExpired', 'BookingExpired') then
                perform crm_test.pass_gate();
            end if;
            return new;
        end $$
        """.encode()
    )
    connection.execute(
        "create trigger gate_in_write before update on crm.bookings "
        "for each row execute function crm_test.gate_in_write()"
    )


@contextmanager
def locked(database: Database, ids: Collection[UUID], strength: str = "for update") -> Iterator[None]:
    """Another session that holds the row locks of some bookings."""
    with psycopg.connect(database.url) as holder:
        held = column(holder, f"select id from crm.bookings where id = any(%s) {strength}", list(ids))
        assert len(held) == len(ids)
        yield
        holder.rollback()
