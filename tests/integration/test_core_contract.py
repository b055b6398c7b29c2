"""`crmctl db check` on core tables that crmctl did not create: columns, types, and the four indexes, by catalogue."""

from typing import Any

import psycopg
import pytest

from tests.expire_support import expire, insert_due
from tests.prefork import run_crmctl
from tests.support import CallResult, Database


@pytest.fixture
def connection(database: Database) -> psycopg.Connection[Any]:
    """A database whose core tables belong to the CRM: no revision of ours tells of them."""
    connection = database.connect()
    connection.execute("delete from crm.crmctl_schema_version where version_num like 'core%'")
    return connection


def check(database: Database) -> CallResult:
    return run_crmctl("db", "check", "-o", "json", database=database)


def test_a_core_that_fits_passes(database: Database, connection: psycopg.Connection[Any]) -> None:
    result = check(database)
    assert result.exit_code == 0, result.stderr
    assert result.json["faults"] == []
    assert result.json["parts"][0]["state"] == "owned-by-crm"


@pytest.mark.parametrize(
    "change",
    [
        "alter table crm.bookings alter column status type varchar(40)",
        "alter table crm.bookings add column note text, add column weight integer not null default 1",
        "alter table crm.bookings add column mandatory integer not null",
        "alter index crm.ix_bookings_reserve_expires_at rename to idx_1",
        "alter table crm.bookings alter column version type bigint",
        "alter table crm.outbox_messages add column shard integer",
        "create index extra on crm.bookings (tenant_id)",
        """drop index crm.ix_bookings_booking_expires_at;
        create index other on crm.bookings (booking_expires_at, id) include (tenant_id) where 'Booked' = status""",
    ],
    ids=[
        "varchar",
        "more columns",
        "columns we never insert",
        "another name",
        "wider",
        "a null one",
        "more",
        "covering",
    ],
)
def test_what_the_crm_may_do_differently_passes_and_the_expiry_works(
    database: Database, connection: psycopg.Connection[Any], change: str
) -> None:
    connection.execute(change.encode())
    result = check(database)
    assert (result.exit_code, result.json["faults"]) == (0, [])
    if "mandatory" not in change:
        insert_due(connection)
        assert expire(database).json["reserve_expired_count"] == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("alter table crm.deals drop column chat_status", ["crm.deals.chat_status does not exist"]),
        ("alter table crm.bookings drop column version", ["crm.bookings.version does not exist"]),
        (
            "alter table crm.bookings alter column reserve_expires_at type timestamp",
            ["crm.bookings.reserve_expires_at is timestamp without time zone, not timestamp with time zone"],
        ),
        ("alter table crm.outbox_messages alter column payload type text", ["crm.outbox_messages.payload is text"]),
        ("drop table crm.deal_timeline_events", ["table crm.deal_timeline_events does not exist"]),
        ("drop index crm.ix_bookings_reserve_expires_at", ["index on (reserve_expires_at, id)"]),
        ("drop index crm.ux_bookings_active_deal", ["unique index on (deal_id)"]),
        (
            """drop index crm.ix_bookings_booking_expires_at;
            create index ix_bookings_booking_expires_at on crm.bookings (booking_expires_at, id)""",
            ["index on (booking_expires_at, id) where status in (Booked)"],
        ),
        (
            """drop index crm.ix_bookings_reserve_expires_at;
            create index ix_bookings_reserve_expires_at on crm.bookings (reserve_expires_at, id)
            where status = 'Reserved'""",
            ["where status in (AwaitingPayment, Reserved)"],
        ),
        (
            """drop index crm.ux_bookings_active_property_object;
            create index ux_bookings_active_property_object on crm.bookings (property_object_id)
            where status in ('Reserved', 'AwaitingPayment', 'Booked')""",
            ["unique index on (property_object_id)"],
        ),
        (
            "alter table crm.deal_timeline_events add column author text not null",
            ["crm.deal_timeline_events.author is NOT NULL without a default"],
        ),
        (
            "alter table crm.outbox_messages alter column position drop identity",
            ["crm.outbox_messages.position is NOT NULL without a default"],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 70 else "",
)
def test_what_the_jobs_cannot_do_without_is_named(
    database: Database, connection: psycopg.Connection[Any], change: str, words: list[str]
) -> None:
    connection.execute(change.encode())
    result = check(database)
    assert result.exit_code == 78
    assert len(result.json["faults"]) >= len(words)
    text = "\n".join(result.json["faults"])
    assert all(word in text for word in words), text
    assert words[0] in run_crmctl("db", "check", database=database).stdout
