"""What tests share: a database of their own, the real binary, and rows to begin with."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from psycopg import sql

# Seconds: far more than any command of a test takes, so what reaches it hangs.
_TIMEOUT = 60.0


@dataclass(slots=True)
class Database:
    """A migrated database that belongs to one test; `url` is its superuser's."""

    url: str
    _connections: list[psycopg.Connection[Any]] = field(default_factory=list)

    def connect(self, *, autocommit: bool = True, **options: Any) -> psycopg.Connection[Any]:
        """A connection, closed after the test; `options` go to psycopg.connect."""
        connection = psycopg.connect(self.url, autocommit=autocommit, **options)
        self._connections.append(connection)
        return connection

    def close(self) -> None:
        """Close what `connect` handed out."""
        for connection in self._connections:
            connection.close()


@dataclass(frozen=True, slots=True)
class CallResult:
    """What a run of the binary left: its exit code and what it wrote."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """The one document on stdout."""
        return json.loads(self.stdout)


def run_process(
    *args: str,
    env: Mapping[str, str] | None = None,
    database: Database | str | None = None,
    stdin: str | None = None,
    timeout: float = _TIMEOUT,
    cwd: Path | None = None,
) -> CallResult:
    """Run the real binary to its end, from its start, in `cwd` (default: the root, where no dev.toml is)."""
    done = subprocess.run(
        [sys.executable, "-m", "crmctl", *args],
        env=environment(env, database),
        cwd=cwd or Path("/"),
        stdin=subprocess.DEVNULL if stdin is None else None,
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
        check=False,
    )
    return CallResult(done.returncode, done.stdout, done.stderr)


def start_crmctl(
    *args: str,
    env: Mapping[str, str] | None = None,
    database: Database | str | None = None,
    cwd: Path | None = None,
) -> subprocess.Popen[str]:
    """Start the real binary and return at once; use it as a context manager, so that its pipes are closed."""
    return subprocess.Popen(
        [sys.executable, "-m", "crmctl", *args],
        env=environment(env, database),
        cwd=cwd or Path("/"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def insert_booking(connection: psycopg.Connection[Any], *, deal: bool = True, **overrides: object) -> uuid.UUID:
    """Insert a booking, and its deal unless told not to; returns the booking's id.

    Without overrides it is Reserved and due since a minute; with another status, what that status needs is
    filled in (Booked: due since a minute as well). An override names a column; deadlines that are not
    overridden follow from created_at and booked_at.
    """
    columns = _booking(_now(connection), overrides)
    if deal:
        insert_deal(connection, id=columns["deal_id"], tenant_id=columns["tenant_id"])
    _insert(connection, "bookings", columns)
    booking_id = columns["id"]
    assert isinstance(booking_id, uuid.UUID)
    return booking_id


def insert_deal(connection: psycopg.Connection[Any], **overrides: object) -> uuid.UUID:
    """Insert a deal in progress; returns its id. An override names a column."""
    now = _now(connection)
    columns = {
        "id": uuid.uuid4(),
        "tenant_id": uuid.uuid4(),
        "status": "InProgress",
        "created_at": now,
        "updated_at": now,
    } | overrides
    _insert(connection, "deals", columns)
    deal_id = columns["id"]
    assert isinstance(deal_id, uuid.UUID)
    return deal_id


def _booking(now: datetime, overrides: Mapping[str, object]) -> dict[str, object]:
    status = overrides.get("status", "Reserved")
    minutes = overrides.get("reserve_duration_minutes", 60)
    hours = overrides.get("booking_duration_hours", 24)
    extensions = overrides.get("extensions_count", 0)
    assert isinstance(minutes, int)
    assert isinstance(hours, int)
    assert isinstance(extensions, int)
    reserved_for = timedelta(minutes=minutes)
    booked_for = timedelta(hours=hours) * (1 + extensions)
    booked = status in ("Booked", "BookingExpired")
    lead = booked_for + timedelta(minutes=5) if booked else reserved_for
    created_at = overrides.get("created_at", now - timedelta(minutes=1) - lead)
    booked_at = overrides.get("booked_at")
    if booked and isinstance(created_at, datetime) and "booked_at" not in overrides:
        booked_at = created_at + timedelta(minutes=5)
    return {
        "id": uuid.uuid4(),
        "tenant_id": uuid.uuid4(),
        "deal_id": uuid.uuid4(),
        "property_object_id": uuid.uuid4(),
        "status": status,
        "reserve_duration_minutes": minutes,
        "booking_duration_hours": hours,
        "created_at": created_at,
        "reserve_expires_at": created_at + reserved_for if isinstance(created_at, datetime) else None,
        "booked_at": booked_at,
        "booking_expires_at": booked_at + booked_for if isinstance(booked_at, datetime) else None,
        "expired_at": now if status in ("ReserveExpired", "BookingExpired") else None,
        "updated_at": booked_at or created_at,
        **overrides,
    }


def _insert(connection: psycopg.Connection[Any], table: LiteralString, columns: Mapping[str, object]) -> None:
    statement = sql.SQL("insert into crm.{} ({}) values ({})").format(
        sql.Identifier(table),
        sql.SQL(", ").join(sql.Identifier(name) for name in columns),
        sql.SQL(", ").join(sql.Placeholder(name) for name in columns),
    )
    connection.execute(statement, dict(columns))


def _now(connection: psycopg.Connection[Any]) -> datetime:
    with connection.cursor(row_factory=psycopg.rows.scalar_row) as cursor:
        now = cursor.execute("select clock_timestamp()").fetchone()
    assert isinstance(now, datetime)
    return now


def environment(env: Mapping[str, str] | None, database: Database | str | None) -> dict[str, str]:
    """This process's environment without what configures crmctl or libpq, with the database's address and `env`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("CRMCTL_", "PG"))}
    if database is not None:
        clean["CRMCTL_DATABASE_URL"] = database if isinstance(database, str) else database.url
    return clean | dict(env or {})
