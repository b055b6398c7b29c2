"""The table: on the terminal, and in benchmarks/results.md with what it was measured on."""

import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Final

import psycopg

from benchmarks.harness import Figure, Lab, Scale

_COLUMNS: Final = ("what", "figure", "ratio", "target", "met")
_NUMERIC: Final = ("ratio", "target")
_NOTES: Final = """\
- One embedded server, fsync on, autovacuum off, no checkpoint inside a measurement. Each drain has its own copy of the
  seeded database, follows a CHECKPOINT, and is checked: every due booking expired once, with one event and one
  timeline row. Rounds are interleaved. A figure is the median of the rounds, a ratio the median of the rounds' own
  ratios, in brackets the lowest and the highest of them.
- crmctl's rate comes from the `duration_ms` of the real binary's result (connecting included, starting Python not),
  psql's from its whole process, two workers' from the start of both processes to the end of the later one.
- "Every statement of the job": guards, savepoints, the count of what was left behind and the job_runs row included.
  "Only the expire statements": BEGIN, the job's planner settings, `expire` of both phases, COMMIT. Both commit once per
  batch, as crmctl does; the giant statement runs under the same planner settings.
- No client that commits per batch can pass "its floor": the same SQL with nothing around it. What makes it was looked
  for by experiment: with fsync off, with synchronous_commit off, with 256 MB of WAL buffers and with the whole database
  in shared_buffers the floor stayed where it is. EXPLAIN ANALYZE shows each part of a batch dearer per row than the
  giant's: its N keys lie all over every index, so a key lookup of the UPDATE touches 3.7 pages a row where the giant,
  which walks the primary key leaf by leaf, touches 1.0; the inserts of the timeline and the outbox 7 to 10 where the
  giant needs 6 to 8.
- The relay's parts: the same records from memory through an idempotent producer that is flushed after as many; the same
  statements without producing. Its own time is the whole job's, with connecting and a new producer's handshake; the
  bare and the naive producer have had a record acknowledged before their time begins. The naive relay and the naive
  consumer take a share of the rows and are compared by their rates; both consumers' times begin when their first
  transaction is done, so that neither counts the joining of its group.
- The ORM loop drains a tenth of the due bookings at N = 1000, each loaded with its deal, which the job checks too.
"""


def table(figures: Iterable[Figure]) -> str:
    """Lay the figures out in Markdown, aligned for reading as plain text too."""
    rows = [(f.what, f.measured, f.ratio, f.target, _MET[f.met]) for f in figures]
    widths = [max(len(row[i]) for row in (_COLUMNS, *rows)) for i in range(len(_COLUMNS))]
    rule = [
        "-" * (width - 1) + (":" if name in _NUMERIC else "-") for name, width in zip(_COLUMNS, widths, strict=True)
    ]
    return "".join(_lines((_COLUMNS, rule, *rows), widths))


def page(figures: Sequence[Figure], lab: Lab, scale: Scale) -> str:
    """The whole of results.md."""
    with psycopg.connect(lab.server.url()) as connection:
        (server,) = connection.execute("show server_version").fetchone() or ("",)
    facts = {
        "Date": f"{datetime.now(UTC):%Y-%m-%d}",
        "Command": "`make bench`" if scale.name == "full" else f"`python -m benchmarks --scale {scale.name}`",
        "Scale": f"{scale.name}: {lab.total_due:,} due among {scale.bookings:,} bookings, {scale.rounds} round(s)",
        "Versions": f"crmctl {version('crmctl')}, Python {platform.python_version()}, PostgreSQL {server}, "
        f"psycopg {version('psycopg')}, SQLAlchemy {version('sqlalchemy')}",
        "Machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, "
        f"load average before the start {lab.load_before:.1f}",
    }
    head = "".join(f"- {name}: {value}\n" for name, value in facts.items())
    return f"# Benchmark results\n\n{head}\n{table(figures)}\n## How it is measured\n\n{_NOTES}"


_MET: Final = {True: "met", False: "NOT MET", None: ""}


def _lines(rows: Iterable[Sequence[str]], widths: Sequence[int]) -> Iterator[str]:
    for row in rows:
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |\n"
