"""Sample data is exact where tests and benchmarks count on it, and keeps every rule of the schema."""

from typing import Any

import psycopg
import pytest

from crmctl.dev.seed import SeedResult, seed
from crmctl.domain.errors import UsageError
from tests.support import Database

_DUE_RESERVE = "status in ('Reserved', 'AwaitingPayment') and reserve_expires_at < now()"
_DUE_BOOKING = "status = 'Booked' and booking_expires_at < now()"

# What each seeded booking must satisfy; a row that is listed breaks it.
_BROKEN_RULES = """
    select b.id, b.status
    from crm.bookings as b
    left join crm.deals as d on d.id = b.deal_id and d.tenant_id = b.tenant_id
    where not coalesce(
        d.id is not null
        and b.reserve_duration_minutes in (30, 60, 120, 1440)
        and b.booking_duration_hours in (24, 72, 168, 336)
        and b.reserve_expires_at = b.created_at + make_interval(mins => b.reserve_duration_minutes)
        and (b.booked_at is not null) = (b.status in ('Booked', 'BookingExpired'))
        and (b.booked_at is null or b.booked_at between b.created_at and b.reserve_expires_at)
        and b.booking_expires_at is not distinct from
            b.booked_at + make_interval(hours => b.booking_duration_hours * (1 + b.extensions_count))
        and (b.expired_at is not null) = (b.status in ('ReserveExpired', 'BookingExpired'))
        and (b.expired_at is null or b.expired_at >= coalesce(b.booking_expires_at, b.reserve_expires_at))
        and greatest(b.created_at, b.booked_at, b.expired_at, b.updated_at, d.created_at) <= now()
    , false)
"""


def scalar(connection: psycopg.Connection[Any], query: str) -> Any:
    row = connection.execute(query).fetchone()
    assert row is not None
    return row[0]


def count(connection: psycopg.Connection[Any], condition: str = "true") -> int:
    number = scalar(connection, f"select count(*) from crm.bookings where {condition}")
    assert isinstance(number, int)
    return number


@pytest.mark.parametrize(
    ("bookings", "due_share"),
    [(1, 0.2), (1, 1.0), (7, 0.5), (10, 0.2), (1000, 0.2), (1000, 0.0), (1000, 1.0), (25_000, 0.333)],
)
def test_counts_are_exact_and_no_rule_is_broken(database: Database, bookings: int, due_share: float) -> None:
    with database.connect(autocommit=False) as connection:
        result = seed(connection, bookings, due_share=due_share)
        due_reserve, due_booking = count(connection, _DUE_RESERVE), count(connection, _DUE_BOOKING)
        assert count(connection) == bookings == scalar(connection, "select count(*) from crm.deals")
        assert due_reserve + due_booking == round(bookings * due_share)
        assert result == SeedResult(
            bookings=bookings,
            due_reserve=due_reserve,
            due_booking=due_booking,
            upcoming=count(connection, "expired_at is null") - due_reserve - due_booking,
            expired=count(connection, "expired_at is not null"),
        )
        assert connection.execute(_BROKEN_RULES).fetchall() == []


def test_the_mix_is_a_real_offices(database: Database) -> None:
    with database.connect(autocommit=False) as connection:
        result = seed(connection, 25_000)
        statuses = {row[0] for row in connection.execute("select distinct status from crm.bookings")}
        tenants = connection.execute("select count(*) from crm.bookings group by tenant_id order by 1 desc").fetchall()
    assert statuses == {"Reserved", "AwaitingPayment", "Booked", "ReserveExpired", "BookingExpired"}
    assert len(tenants) == 12
    assert tenants[0][0] > 5 * tenants[-1][0]
    assert result.due_reserve / result.due_booking == pytest.approx(1.5, rel=0.1)


def test_nothing_else_becomes_due_while_a_test_or_a_benchmark_runs(database: Database) -> None:
    with database.connect(autocommit=False) as connection:
        seed(connection, 5000, due_share=0.2)
        later = "now() + interval '19 minutes'"
        due = f"({_DUE_RESERVE}) or ({_DUE_BOOKING})".replace("now()", later)
        assert count(connection, due) == 1000
        oldest = "coalesce(booking_expires_at, reserve_expires_at) < now() - interval '7 hours'"
        assert count(connection, f"expired_at is null and {oldest}") == 0


def test_the_same_seed_gives_the_same_rows(database: Database) -> None:
    query = """
        select b.*, d.chat_status, case when expired_at is null then b.created_at - now() end as age
        from crm.bookings as b
        join crm.deals as d on d.id = b.deal_id
        order by b.id
    """
    timeless = "to_jsonb(r) - '{created_at,reserve_expires_at,booked_at,booking_expires_at,expired_at,updated_at}'"
    digest = f"select md5(string_agg(({timeless}::text[])::text, '' order by r.id)) from ({query}) as r"
    digests = []
    for number in (1, 1, 2):
        with database.connect(autocommit=False) as connection:
            seed(connection, 12_000, seed=number)
            digests.append(scalar(connection, digest))
            connection.rollback()
    assert digests[0] == digests[1] != digests[2]


def test_the_indexes_are_as_before(database: Database) -> None:
    indexes = """
        select i.indexrelid::regclass::text, pg_get_indexdef(i.indexrelid), i.indisunique, i.indisprimary, i.indisvalid
        from pg_index as i
        where i.indrelid in ('crm.bookings'::regclass, 'crm.deals'::regclass)
        order by 1
    """
    with database.connect(autocommit=False) as connection:
        before = connection.execute(indexes).fetchall()
        seed(connection, 10_000)
        connection.commit()
        assert connection.execute(indexes).fetchall() == before
    assert len(before) == 6


@pytest.mark.parametrize("bookings", [10, 10_000])
def test_another_seed_adds_and_the_same_one_is_refused(database: Database, bookings: int) -> None:
    connection = database.connect(autocommit=False)
    seed(connection, bookings)
    seed(connection, bookings, seed=-7)
    connection.commit()
    assert count(connection) == 2 * bookings
    with pytest.raises(UsageError, match="seed 1 already"):
        seed(connection, bookings)
    connection.rollback()
    assert count(connection) == 2 * bookings


def test_the_caller_commits(database: Database) -> None:
    connection = database.connect()
    with pytest.raises(ValueError, match="transaction"):
        seed(connection, 10)
    with connection.transaction(force_rollback=True):
        seed(connection, 10_000)
    assert count(connection) == 0
    with connection.transaction():
        seed(connection, 10)
    assert count(connection) == 10


@pytest.mark.parametrize(("bookings", "due_share"), [(0, 0.2), (-1, 0.2), (10, 1.1), (10, -0.1)])
def test_senseless_numbers_are_refused(database: Database, bookings: int, due_share: float) -> None:
    with pytest.raises(UsageError, match="Cannot seed"):
        seed(database.connect(autocommit=False), bookings, due_share=due_share)
