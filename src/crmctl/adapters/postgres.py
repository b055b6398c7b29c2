"""PostgreSQL: one connection, guarded transactions, and the one translation of its errors.

Safe behind a transaction pooler: nothing is prepared on the server, and every guard is local to its
transaction. No message made here holds any part of a DSN but host, port, user and database.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import psycopg
from psycopg import conninfo
from psycopg.rows import DictRow, dict_row

from crmctl.domain.databases import DatabaseName
from crmctl.domain.errors import (
    ConfigurationError,
    CrmctlError,
    SchemaError,
    TryAgainError,
    UnavailableError,
)
from crmctl.migrations import check_revisions
from crmctl.settings import DatabaseSettings
from crmctl.sql import load

Params = Mapping[str, object]

# A serialization failure or a deadlock: the same transaction may succeed when it is run again.
RETRYABLE: Final = frozenset({"40001", "40P01"})
# Classes of SQLSTATE that blame the data of a statement, not the server or another session.
_DATA_ERROR_CLASSES: Final = frozenset({"22", "23", "27", "44", "P0"})
MAX_CLOCK_DIFFERENCE: Final = timedelta(hours=1)
_BEGIN: Final = load("session")["begin"]

# libpq reports a failed connection as text only.
_REFUSED_BY_SETUP: Final = (
    "password authentication failed",
    "authentication failed",
    "no pg_hba.conf entry",
    "no password supplied",
    "does not exist",
    "permission denied for database",
    "is not permitted to log in",
    "certificate",
)
_REFUSED_FOR_NOW: Final = (
    "is starting up",
    "is shutting down",
    "in recovery mode",
    "not yet accepting connections",
    "not accepting connections",
    "too many clients",
    "too many connections",
    "remaining connection slots",
    "session is read-only",
    "is in hot standby mode",
)
# What libpq, or psycopg for it, says of an option before it asks any server. It quotes the value.
_REFUSED_BY_LIBPQ: Final = re.compile(
    r"connection is bad: (?!connection to server|out of memory)"
    r"|invalid integer value|bad value for connect_timeout|could not match"
)
# What a connection keeps alive by: a peer that is gone without a word is noticed in about 25 s.
_LIBPQ_DEFAULTS: Final = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}


class Dsn(str):
    """A connection string that knows which setting it came from: an error names that, and quotes nothing of it."""

    setting: str

    def __new__(cls, text: str, setting: str = DatabaseName.MAIN.setting) -> "Dsn":
        """The string, and the setting that an error should name."""
        dsn = super().__new__(cls, text)
        dsn.setting = setting
        return dsn


def connect(dsn: str, settings: DatabaseSettings, *, application_name: str) -> psycopg.Connection[DictRow]:
    """Connect, or raise ConfigurationError (the DSN or the credentials), TryAgainError or UnavailableError."""
    dsn = dsn if isinstance(dsn, Dsn) else Dsn(dsn)
    parsed = parse_dsn(dsn)
    options = {
        **_LIBPQ_DEFAULTS,
        "connect_timeout": max(1, round(settings.connect_timeout.total_seconds())),
        **parsed,
        "application_name": application_name,
    }
    try:
        return psycopg.connect(**options, row_factory=dict_row, prepare_threshold=None)
    except psycopg.Error as error:
        raise _connect_error(error, parsed, dsn.setting) from None
    except UnicodeError:
        raise ConfigurationError(f"{dsn.setting} names a host that cannot be one") from None


def parse_dsn(dsn: Dsn) -> dict[str, Any]:
    """Split a DSN into libpq's options. Raises ConfigurationError without quoting any of it.

    A password with an unescaped `@`, `/` or `%` makes libpq see its tail as a host, a port or a database name,
    and print it: such a DSN is refused here, before libpq can.
    """
    hint = "in a URL, percent-encode @ : / ? # and % in the password (@ is %40)"
    try:
        parsed = conninfo.conninfo_to_dict(dsn)
    except (psycopg.Error, UnicodeEncodeError):
        raise ConfigurationError(f"{dsn.setting} is not a valid PostgreSQL DSN", hint=hint) from None
    ports = str(parsed.get("port") or "").split(",")
    suspicious = (
        "@" in str(parsed.get("host") or "")
        or "@" in str(parsed.get("dbname") or "")
        or any(port and not port.isdecimal() for port in ports)
    )
    if suspicious or not dsn.strip():
        raise ConfigurationError(
            f"{dsn.setting} does not name a server: its host, port or database is malformed", hint=hint
        )
    return parsed


def _connect_error(error: psycopg.Error, parsed: Mapping[str, Any], setting: str) -> CrmctlError:
    reason = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if _REFUSED_BY_LIBPQ.search(reason):
        why = reason.rpartition("failed: ")[2]
        named = [name for name in parsed if re.search(rf"\b{name}\b", why)]
        return ConfigurationError(
            f"{setting} has a value that libpq refuses" + (f": look at its {', '.join(named)}" if named else ""),
            hint="PostgreSQL's documentation of libpq lists the options and their values",
        )
    for name in ("password", "sslpassword"):
        if secret := parsed.get(name):
            reason = reason.replace(str(secret), "***")
    if any(text in reason for text in _REFUSED_FOR_NOW):
        return TryAgainError(f"PostgreSQL does not take connections now: {reason}", hint="try again later")
    if any(text in reason for text in _REFUSED_BY_SETUP):
        return ConfigurationError(
            f"PostgreSQL refused the connection: {reason}",
            hint=f"check {setting} and the server's roles",
        )
    return UnavailableError(
        f"cannot reach PostgreSQL: {reason}",
        hint=f"check that the server runs and {setting} names it",
    )


def is_data_error(error: psycopg.Error) -> bool:
    """Whether PostgreSQL blames the rows that were written: such a batch can be bisected."""
    return (error.sqlstate or "")[:2] in _DATA_ERROR_CLASSES


def describe(error: psycopg.Error) -> str:
    """SQLSTATE and primary message in one line; the DETAIL is left out, since it can quote a whole row."""
    primary = error.diag.message_primary or type(error).__name__
    return f"{error.sqlstate or 'no SQLSTATE'}: {' '.join(primary.split())[:200]}"


# What an SQLSTATE, or failing that its class, means to the person who ran the command.
_MEANINGS: Final[dict[str, tuple[type[CrmctlError], str, str]]] = {
    "40001": (TryAgainError, "other sessions kept getting in the way", "run it again"),
    "40P01": (TryAgainError, "other sessions kept getting in the way", "run it again"),
    "55P03": (TryAgainError, "waited too long for a lock", "see who holds it in pg_stat_activity; then run it again"),
    "57014": (
        TryAgainError,
        "a statement ran into its timeout",
        "use a smaller --batch-size or raise CRMCTL_DATABASE__STATEMENT_TIMEOUT",
    ),
    "57P03": (TryAgainError, "PostgreSQL cannot serve this now", "try again later"),
    "53": (TryAgainError, "PostgreSQL is out of a resource", "free it, then run it again"),
    "42501": (ConfigurationError, "this database role lacks a grant", "grant it, or use another role"),
    "25006": (ConfigurationError, "the server is read-only", "connect to the primary"),
    "42P01": (SchemaError, "the database schema does not fit", "run: crmctl db upgrade"),
    "42703": (SchemaError, "the database schema does not fit", "run: crmctl db upgrade"),
    "3F000": (SchemaError, "the database schema does not fit", "run: crmctl db upgrade"),
    "25P03": (UnavailableError, "PostgreSQL ended a transaction that idled too long", "run it again"),
    "57": (UnavailableError, "PostgreSQL ended the connection", "nothing uncommitted was kept; run it again"),
    "08": (UnavailableError, "the connection to PostgreSQL was lost", "nothing uncommitted was kept; run it again"),
    "": (UnavailableError, "the connection to PostgreSQL was lost", "nothing uncommitted was kept; run it again"),
}


def translate(error: psycopg.Error) -> CrmctlError | psycopg.Error:
    """Turn an error of a statement into ours, or return it as it is where it can only be a bug."""
    state = error.sqlstate or ""
    if not state and not isinstance(error, psycopg.OperationalError):
        return error
    meaning = _MEANINGS.get(state) or _MEANINGS.get(state[:2])
    if meaning is None:
        return error
    kind, what, hint = meaning
    return kind(f"{what} ({describe(error)})", hint=hint)


def array_literal(values: Sequence[object]) -> str:
    """One array parameter as PostgreSQL's text of it; the statement casts it, `%(ids)s::uuid[]`. No value is None.

    psycopg looks at each element of a list; for arrays of thousands, that costs more than the statement.
    """
    texts = [str(value) for value in values]
    if not texts:
        return "{}"
    joined = '","'.join(texts)
    if "\\" in joined or joined.count('"') != 2 * (len(texts) - 1):
        joined = '","'.join(text.replace("\\", "\\\\").replace('"', '\\"') for text in texts)
    return f'{{"{joined}"}}'


@dataclass(frozen=True, slots=True)
class Transaction:
    """An open transaction, as a job sees it: it reads and writes, and cannot commit.

    `now` is PostgreSQL's transaction timestamp, the one clock of every job.
    """

    connection: psycopg.Connection[DictRow]
    now: datetime

    def one(self, statement: str, params: Params | None = None) -> DictRow:
        """Run a statement that returns exactly one row."""
        row = self.connection.execute(statement, params).fetchone()
        if row is None:
            raise LookupError("the statement returned no row")
        return row

    def first(self, statement: str, params: Params | None = None) -> DictRow | None:
        """Run a statement and return its first row, or None."""
        return self.connection.execute(statement, params).fetchone()

    def all(self, statement: str, params: Params | None = None) -> list[DictRow]:
        """Run a statement and return its rows."""
        return self.connection.execute(statement, params).fetchall()

    def each(self, statement: str, params: Params | None = None) -> Iterator[DictRow]:
        """Run a statement and give its rows one at a time, so that they are never all in memory; read them all."""
        yield from self.connection.cursor().stream(statement, params)

    def execute(self, statement: str, params: Params | None = None) -> None:
        """Run a statement for its effect."""
        self.connection.execute(statement, params)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Undo what the block wrote if it raises; the locks that it took go with it."""
        with self.connection.transaction():
            yield


class Database:
    """A lazily opened connection on which one guarded transaction at a time is begun, and ended by the wrapper."""

    def __init__(self, dsn: str, settings: DatabaseSettings, *, application_name: str) -> None:
        self._dsn = dsn
        self._settings = settings
        self._application_name = application_name
        self._connection: psycopg.Connection[DictRow] | None = None
        self.warnings: list[str] = []

    def begin(self, *, read_only: bool = False) -> Transaction:
        """Open a transaction with this session's guards, and check that the server can carry a job.

        Raises TryAgainError on a standby, ConfigurationError on a server that is read-only by configuration
        or whose clock is more than an hour off ours, SchemaError when the schema is behind. A read-only
        transaction asks for a fitting schema only.
        """
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._dsn, self._settings, application_name=self._application_name)
        self._connection.read_only = read_only or None
        # Whatever the database's default is: the jobs count on seeing what others committed before each statement.
        self._connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        guards = self._settings
        row = self._connection.execute(
            _BEGIN,
            {
                "application_name": self._application_name,
                "statement_timeout": _milliseconds(guards.statement_timeout),
                "lock_timeout": _milliseconds(guards.lock_timeout),
                "idle_timeout": _milliseconds(guards.idle_in_transaction_timeout),
            },
        ).fetchone()
        assert row is not None  # noqa: S101  the statement has no FROM
        if not read_only:
            _check_server(in_recovery=row["in_recovery"], read_only=row["read_only"], clock=row["clock"])
        self.warnings = check_revisions(row["revisions"], row["minimum_version"])
        return Transaction(self._connection, row["now"])

    def commit(self) -> None:
        """Commit the open transaction."""
        if self._connection is not None:
            self._connection.commit()

    def rollback(self) -> None:
        """Roll the open transaction back, if the connection still lives."""
        if self._connection is not None and not self._connection.closed:
            self._connection.rollback()

    def close(self) -> None:
        """Close the connection; the server rolls back what is open."""
        if self._connection is not None:
            self._connection.close()


def _milliseconds(value: timedelta) -> str:
    return str(max(1, round(value.total_seconds() * 1000)))


def _check_server(*, in_recovery: bool, read_only: bool, clock: float) -> None:
    if in_recovery:
        raise TryAgainError(
            "this PostgreSQL is a standby in recovery",
            hint="try again after the failover, or name the primary",
        )
    if read_only:
        raise ConfigurationError(
            "this PostgreSQL session is read-only by configuration",
            hint="look at default_transaction_read_only of the server, the database and the role",
        )
    difference = timedelta(seconds=abs(clock - time.time()))
    if difference > MAX_CLOCK_DIFFERENCE:
        raise ConfigurationError(
            f"the clocks of PostgreSQL and of this host differ by {round(difference.total_seconds() / 60)} minutes",
            hint="expiry is final: find out which clock is wrong before anything expires",
        )
