"""What crmctl asks of the CRM's core tables: columns, types and four indexes, by name and not by revision.

A CRM that owns its core may have more columns, more indexes and other names for them; what is listed here is what the
jobs' statements count on.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from crmctl.domain.bookings import PHASES

_TEXT: Final = ("text", "character varying")
_UUID: Final = ("uuid",)
_MOMENT: Final = ("timestamp with time zone",)
_INTEGER: Final = ("integer", "bigint")
_SMALL: Final = ("integer", "smallint")
_JSON: Final = ("jsonb",)


@dataclass(frozen=True, slots=True)
class Table:
    """One table: the types that each column may have, and the columns that crmctl's INSERTs fill in, if it has any."""

    name: str
    columns: Mapping[str, Sequence[str]]
    written: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Index:
    """A partial index: its key, and the statuses that its predicate names."""

    table: str
    key: tuple[str, ...]
    statuses: frozenset[str]
    unique: bool = False

    def __str__(self) -> str:
        kind = "unique index" if self.unique else "index"
        return f"{kind} on ({', '.join(self.key)}) where status in ({', '.join(sorted(self.statuses))})"


@dataclass(frozen=True, slots=True)
class Column:
    """A column as the catalogue has it; `filled` is whether PostgreSQL fills it in or it may be null."""

    table: str
    name: str
    type: str
    filled: bool


@dataclass(frozen=True, slots=True)
class FoundIndex:
    """An index as the catalogue has it; `predicate` is PostgreSQL's text of it."""

    table: str
    key: tuple[str, ...]
    predicate: str | None
    unique: bool


TABLES: Final = (
    Table(
        "bookings",
        {
            "id": _UUID,
            "tenant_id": _UUID,
            "deal_id": _UUID,
            "property_object_id": _UUID,
            "status": _TEXT,
            "reserve_duration_minutes": _SMALL,
            "booking_duration_hours": _SMALL,
            "created_at": _MOMENT,
            "reserve_expires_at": _MOMENT,
            "booked_at": _MOMENT,
            "booking_expires_at": _MOMENT,
            "expired_at": _MOMENT,
            "extensions_count": (*_SMALL, "bigint"),
            "version": _INTEGER,
            "updated_at": _MOMENT,
        },
    ),
    Table(
        "deals",
        {"id": _UUID, "tenant_id": _UUID, "chat_status": _TEXT, "deleted_at": _MOMENT, "updated_at": _MOMENT},
    ),
    Table(
        "deal_timeline_events",
        {
            "id": (*_UUID, *_INTEGER),
            "tenant_id": _UUID,
            "deal_id": _UUID,
            "type": _TEXT,
            "payload": _JSON,
            "occurred_at": _MOMENT,
        },
        frozenset({"tenant_id", "deal_id", "type", "payload", "occurred_at"}),
    ),
    Table(
        "outbox_messages",
        {
            "id": _UUID,
            "position": _INTEGER,
            "topic": _TEXT,
            "key": _TEXT,
            "aggregate_type": _TEXT,
            "aggregate_id": _TEXT,
            "contract_version": _SMALL,
            "payload": _JSON,
            "headers": _JSON,
            "created_at": _MOMENT,
            "published_at": _MOMENT,
            "attempts": _INTEGER,
            "last_error": _TEXT,
            "next_attempt_at": _MOMENT,
        },
        frozenset({"topic", "key", "aggregate_type", "aggregate_id", "contract_version", "payload", "headers"}),
    ),
)
_ACTIVE: Final = frozenset(str(status) for phase in PHASES for status in phase.statuses)
INDEXES: Final = (
    *(Index("bookings", (phase.deadline, "id"), frozenset(map(str, phase.statuses))) for phase in PHASES),
    Index("bookings", ("property_object_id",), _ACTIVE, unique=True),
    Index("bookings", ("deal_id",), _ACTIVE, unique=True),
)


def faults(columns: Iterable[Column], indexes: Iterable[FoundIndex]) -> list[str]:
    """Say where the core falls short of the contract, in words that name the table and the column."""
    by_table: dict[str, dict[str, Column]] = {}
    for column in columns:
        by_table.setdefault(column.table, {})[column.name] = column
    found = [fault for table in TABLES for fault in _table_faults(table, by_table.get(table.name))]
    there = list(indexes)
    missing = [index for index in INDEXES if index.table in by_table and not any(_serves(one, index) for one in there)]
    return [*found, *(f"crm.{index.table} has no {index}" for index in missing)]


def _table_faults(table: Table, columns: Mapping[str, Column] | None) -> list[str]:
    if columns is None:
        return [f"table crm.{table.name} does not exist"]
    found = []
    for name, types in table.columns.items():
        column = columns.get(name)
        if column is None:
            found.append(f"column crm.{table.name}.{name} does not exist")
        elif column.type not in types:
            found.append(f"column crm.{table.name}.{name} is {column.type}, not {' or '.join(types)}")
    if table.written:
        found += [
            f"column crm.{table.name}.{column.name} is NOT NULL without a default, and crmctl writes nothing to it"
            for column in columns.values()
            if not column.filled and column.name not in table.written
        ]
    return found


def _serves(found: FoundIndex, wanted: Index) -> bool:
    return (
        found.table == wanted.table
        and found.key == wanted.key
        and found.unique is wanted.unique
        and frozenset(re.findall(r"'([^']*)'", found.predicate or "")) == wanted.statuses
    )
