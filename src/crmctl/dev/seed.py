"""Sample data: bookings of a dozen sales offices with deadlines around now, the same for the same seed."""

from dataclasses import dataclass
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from crmctl.domain.errors import UsageError

# From here on it is faster to build an empty table's indexes afterwards.
_BULK: Final = 10_000

# One row per booking. Everything random is drawn in one place (`drawn`), in a serial plan, so that setseed()
# decides it; `n` numbers the bookings, and every (bookings / due)-th of them is due. Nothing that is not due
# yet becomes due within 20 minutes.
_GENERATE: Final = """
    create temporary table seed_rows on commit drop as
    with offices as materialized (
        select array_agg(md5('office ' || k)::uuid order by k) as tenant_ids
        from generate_series(1, 12) as k
    ),
    clock as materialized (
        select now() as now, date_trunc('day', now(), 'Europe/Moscow') as today
    ),
    drawn as (
        select
            n,
            n * %(due)s::bigint / %(bookings)s > (n - 1) * %(due)s::bigint / %(bookings)s as is_due,
            random() as office,
            random() as kind,
            (array[30, 60, 60, 60, 120, 120, 1440])[1 + floor(7 * random())::int] as minutes,
            (array[24, 72, 72, 72, 168, 168, 336])[1 + floor(7 * random())::int] as hours,
            (array[0, 0, 0, 0, 0, 0, 0, 1, 1, 2])[1 + floor(10 * random())::int] as extensions,
            random() as progress,
            random() as age,
            (random() + random()) / 2 as time_of_day,
            random() as chat
        from generate_series(1, %(bookings)s::bigint) as n
    ),
    typed as (
        select
            *,
            case
                when is_due and kind < 0.36 then 'Reserved'
                when is_due and kind < 0.60 then 'AwaitingPayment'
                when is_due then 'Booked'
                when kind < 0.12 then 'Reserved'
                when kind < 0.20 then 'AwaitingPayment'
                when kind < 0.45 then 'Booked'
                when kind < 0.78 then 'ReserveExpired'
                else 'BookingExpired'
            end as status,
            make_interval(mins => minutes) as reserved_for,
            make_interval(hours => hours * (1 + extensions)) as booked_for,
            case
                when is_due then -interval '1 second' - interval '6 hours' * power(age, 3)
                else interval '20 minutes'
            end as earliest
        from drawn
    ),
    dated as (
        select
            typed.*,
            case
                when status in ('Reserved', 'AwaitingPayment') and is_due then now + earliest - reserved_for
                when status in ('Reserved', 'AwaitingPayment')
                    then now + earliest + (reserved_for - earliest) * age - reserved_for
                when status = 'Booked' and is_due then now + earliest - booked_for - reserved_for * progress
                when status = 'Booked'
                    then now + earliest + (booked_for - earliest) * age - booked_for - reserved_for * progress
                else today
                    - make_interval(days => 3 + hours * (1 + extensions) / 24 + floor(365 * age * age)::int)
                    + interval '9 hours' + interval '11 hours' * time_of_day
            end as created_at
        from typed
        cross join clock
    ),
    booked as (
        select
            *,
            case
                when status in ('Booked', 'BookingExpired') then created_at + reserved_for * progress
            end as booked_at
        from dated
    )
    select
        md5(%(seed)s || ' booking ' || n)::uuid as id,
        md5(%(seed)s || ' deal ' || n)::uuid as deal_id,
        md5(%(seed)s || ' object ' || n)::uuid as property_object_id,
        tenant_ids[1 + floor(12 * power(office, 2.2))::int] as tenant_id,
        status,
        is_due,
        minutes,
        hours,
        case when booked_at is null then 0 else extensions end as extensions,
        created_at,
        created_at + reserved_for as reserve_expires_at,
        booked_at,
        booked_at + booked_for as booking_expires_at,
        case
            when status = 'ReserveExpired' then created_at + reserved_for + interval '1 minute' * chat
            when status = 'BookingExpired' then booked_at + booked_for + interval '1 minute' * chat
        end as expired_at,
        case
            when chat < 0.80 then 'Ready'
            when chat < 0.90 then 'Pending'
            when chat < 0.96 then 'Provisioning'
            else 'Failed'
        end as chat_status
    from booked
    cross join offices
"""

_INSERT_DEALS: Final = """
    insert into crm.deals (id, tenant_id, status, chat_status, created_at, updated_at)
    select deal_id, tenant_id, 'InProgress', chat_status, created_at, coalesce(booked_at, created_at)
    from seed_rows
"""

_INSERT_BOOKINGS: Final = """
    insert into crm.bookings (
        id, tenant_id, deal_id, property_object_id, status, reserve_duration_minutes, booking_duration_hours,
        created_at, reserve_expires_at, booked_at, booking_expires_at, expired_at,
        extensions_count, version, updated_at
    )
    select
        id, tenant_id, deal_id, property_object_id, status, minutes, hours,
        created_at, reserve_expires_at, booked_at, booking_expires_at, expired_at,
        extensions,
        extensions + case status
            when 'Reserved' then 1
            when 'Booked' then 3
            when 'BookingExpired' then 4
            else 2
        end,
        coalesce(expired_at, booked_at, created_at)
    from seed_rows
"""

_COUNT: Final = """
    select
        count(*) filter (where is_due and status <> 'Booked'),
        count(*) filter (where is_due and status = 'Booked'),
        count(*) filter (where not is_due and expired_at is null),
        count(*) filter (where expired_at is not null)
    from seed_rows
"""

_SECONDARY_INDEXES: Final = """
    select indexname, indexdef
    from pg_indexes
    where schemaname = 'crm' and tablename = 'bookings'
        and not exists (
            select from pg_constraint where conindid = format('%I.%I', schemaname, indexname)::regclass
        )
    order by indexname
"""


@dataclass(frozen=True, slots=True)
class SeedResult:
    """How many bookings were added: due in either phase, active but not due, and expired long ago."""

    bookings: int
    due_reserve: int
    due_booking: int
    upcoming: int
    expired: int


def seed(connection: psycopg.Connection[Any], bookings: int, *, seed: int = 1, due_share: float = 0.2) -> SeedResult:
    """Add `bookings` bookings, each with its deal, of which exactly round(bookings * due_share) are due now.

    Runs in the caller's open transaction and does not commit. The same seed gives the same rows, with times
    relative to now; a seed can be used once in a database. Raises UsageError for numbers that make no sense.
    """
    if bookings < 1 or not 0 <= due_share <= 1:
        raise UsageError(
            f"Cannot seed {bookings} bookings of which a share of {due_share} is due",
            hint="give at least 1 booking, and a share between 0 and 1",
        )
    if connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE:
        raise ValueError("seed() belongs in a transaction: set autocommit off, or use connection.transaction()")
    with connection.cursor(row_factory=tuple_row) as cursor:
        cursor.execute("set local max_parallel_workers_per_gather = 0")
        cursor.execute("set local maintenance_work_mem = '512MB'")
        cursor.execute("select setseed(%s)", (seed % 1_000_003 / 1_000_003,))
        cursor.execute(_GENERATE, {"bookings": bookings, "due": round(bookings * due_share), "seed": str(seed)})
        indexes = _drop_indexes(cursor) if bookings >= _BULK and _is_empty(cursor) else []
        try:
            cursor.execute(_INSERT_DEALS)
            cursor.execute(_INSERT_BOOKINGS)
        except psycopg.errors.UniqueViolation as error:
            raise UsageError(
                f"The database has bookings of seed {seed} already", hint="use another seed to add more"
            ) from error
        for definition in indexes:
            cursor.execute(definition)
        cursor.execute("analyze crm.deals, crm.bookings")
        due_reserve, due_booking, upcoming, expired = cursor.execute(_COUNT).fetchone() or (0, 0, 0, 0)
        cursor.execute("drop table seed_rows")
    return SeedResult(bookings, due_reserve, due_booking, upcoming, expired)


def _is_empty(cursor: psycopg.Cursor[Any]) -> bool:
    return cursor.execute("select from crm.bookings limit 1").fetchone() is None


def _drop_indexes(cursor: psycopg.Cursor[Any]) -> list[LiteralString]:
    """Drop the bookings' secondary indexes; returns the statements that make them again."""
    definitions: list[LiteralString] = []
    for name, definition in cursor.execute(_SECONDARY_INDEXES).fetchall():
        cursor.execute(sql.SQL("drop index crm.{}").format(sql.Identifier(name)))
        definitions.append(definition)
    return definitions
