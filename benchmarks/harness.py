"""What every benchmark stands on: the scale, one server with a seeded template, runs of the real binary, figures."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from crmctl.adapters import migrations
from crmctl.dev.postgres import PostgresServer, temporary_server
from crmctl.dev.seed import SeedResult, seed
from crmctl.domain.bookings import BOOKING, RESERVE
from crmctl.telemetry import logs

CLEAN_LOG: Final = logs.configure(level="error")
CRMCTL: Final = str(Path(sys.executable).with_name("crmctl"))
# Some W3C trace context, for what writes events without crmctl.
TRACEPARENT: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
_PROBE: Final = str(Path(__file__).with_name("probe.py"))
_TEMPLATE: Final = "bench_template"
_IDLE: Final = "bench_idle"
# No checkpoint and no autovacuum falls into one measurement and not into the next.
_SERVER_SETTINGS: Final = {"autovacuum": "off", "max_wal_size": "16GB", "checkpoint_timeout": "1h"}


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured. `locked` of the `due` bookings stand at the head of the queue, held by another session."""

    name: str
    bookings: int
    due: int
    locked: int
    rounds: int
    startup_runs: int
    messages: int
    events: int
    letters: int


SCALES: Final = {
    scale.name: scale
    for scale in (
        Scale(
            "full",
            bookings=1_000_000,
            due=200_000,
            locked=10_000,
            rounds=3,
            startup_runs=21,
            messages=100_000,
            events=240_000,
            letters=200_000,
        ),
        Scale(
            "small",
            bookings=20_000,
            due=8_000,
            locked=400,
            rounds=1,
            startup_runs=5,
            messages=4_000,
            events=12_000,
            letters=8_000,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. `met` is None where the issue sets no target."""

    what: str
    measured: str
    ratio: str
    target: str
    met: bool | None


@dataclass(frozen=True, slots=True)
class Report:
    """How a run of the real binary went; `seconds` are those of the whole process."""

    seconds: float
    peak_mib: float
    stdout: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document on stdout."""
        document: dict[str, Any] = json.loads(self.stdout)
        return document


@dataclass(slots=True)
class Lab:
    """A server with a template database whose bookings are due as of `as_of`, and one that has nothing due."""

    server: PostgresServer
    due: dict[str, int]
    as_of: datetime
    load_before: float
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @contextmanager
    def database(self) -> Iterator[str]:
        """The address of a fresh copy of the template, which is dropped afterwards."""
        name = f"bench_{next(self._numbers)}"
        with psycopg.connect(self.server.url(), autocommit=True) as connection:
            _create_database(connection, name, template=_TEMPLATE)
            yield self.server.url(name)
            connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))

    def checkpoint(self) -> None:
        """Write everything out, so that each measurement starts with clean buffers and full-page writes ahead."""
        with psycopg.connect(self.server.url(), autocommit=True) as connection:
            connection.execute("checkpoint")

    @property
    def total_due(self) -> int:
        """Due bookings of both phases."""
        return sum(self.due.values())

    @property
    def idle_url(self) -> str:
        """The address of the database that has nothing due."""
        return self.server.url(_IDLE)


@contextmanager
def laboratory(scale: Scale) -> Iterator[Lab]:
    """Start a server that syncs to disk, and seed the template."""
    load_before = os.getloadavg()[0]
    with temporary_server(fsync=True, settings=_SERVER_SETTINGS) as server:
        say(f"seeding {scale.bookings:,} bookings, {scale.due:,} of them due")
        _seeded_database(server, _IDLE, bookings=1000, due=0)
        seeded = _seeded_database(server, _TEMPLATE, scale.bookings, scale.due)
        with psycopg.connect(server.url(), row_factory=tuple_row) as connection:
            (as_of,) = connection.execute("select now()").fetchone() or (None,)
        assert isinstance(as_of, datetime)
        yield Lab(server, {RESERVE.name: seeded.due_reserve, BOOKING.name: seeded.due_booking}, as_of, load_before)


def run_crmctl(*args: str, url: str, processes: int = 1, **settings: str) -> list[Report]:
    """Run the real binary, as `processes` processes at once, to the end of the last of them. All must exit 0."""
    command = [sys.executable, "-I", "-S", _PROBE, CRMCTL, *args]
    environment = clean_environment() | settings | {"CRMCTL_DATABASE_URL": url}
    running = [
        subprocess.Popen(command, env=environment, cwd="/", stdout=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    reports = []
    for process in running:
        answer = json.loads(process.communicate()[0])
        if answer["exit_code"] != 0:
            raise RuntimeError(f"crmctl {' '.join(args)} exited {answer['exit_code']}: {answer['stderr']}")
        reports.append(Report(answer["seconds"], answer["peak_mib"], answer["stdout"]))
    return reports


def clean_environment() -> dict[str, str]:
    """This process's environment without what configures crmctl or libpq."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("CRMCTL_", "PG"))}


def compare(what: str, ours: Sequence[float], theirs: Sequence[float], at_least: float | None, unit: str) -> Figure:
    """Our rate by theirs, round by round: the median of the rounds' ratios, the lowest and the highest."""
    by_round = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    ratio = median(by_round)
    return Figure(
        what,
        f"{median(ours):,.0f} against {median(theirs):,.0f} {unit}",
        f"{ratio:.2f} ({min(by_round):.2f} to {max(by_round):.2f})",
        "" if at_least is None else f"≥ {at_least:.2f}",
        None if at_least is None else ratio >= at_least,
    )


def say(text: str) -> None:
    """Tell on stderr what goes on."""
    print(text, file=sys.stderr, flush=True)


def _seeded_database(server: PostgresServer, name: str, bookings: int, due: int) -> SeedResult:
    with psycopg.connect(server.url(), autocommit=True) as connection:
        _create_database(connection, name)
    migrations.upgrade(server.url(name))
    with psycopg.connect(server.url(name)) as connection:
        seeded = seed(connection, bookings, due_share=due / bookings)
        connection.commit()
        connection.autocommit = True
        connection.execute("vacuum (freeze, analyze)")
    return seeded


def _create_database(connection: psycopg.Connection[Any], name: str, template: str | None = None) -> None:
    statement = sql.SQL("create database {}").format(sql.Identifier(name))
    if template is not None:
        # Copying files, not pages: the copy is then in no buffer, whichever measurement it is for.
        strategy = sql.SQL("strategy file_copy" if connection.info.server_version >= 150_000 else "")
        statement += sql.SQL(" template {} {}").format(sql.Identifier(template), strategy)
    connection.execute(statement)
