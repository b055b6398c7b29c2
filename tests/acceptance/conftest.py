"""The table of what the crash and race tests did: kept while they run, written by a full run (`make chaos`)."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psycopg
import pytest

from crmctl import __version__
from crmctl.dev.postgres import PostgresServer
from tests.expire_support import CHAOS_FULL

_REPORT: Final = Path(__file__).parents[2] / "benchmarks" / "chaos.md"
_COLUMNS: Final = ("test", "kills / races", "rows", "outcome", "seconds")


@dataclass(slots=True)
class ChaosRow:
    """One line of the table; the test fills it in as it goes."""

    test: str
    interruptions: str = ""
    due: int = 0
    outcome: str = ""


@dataclass(slots=True)
class ChaosTable:
    """The lines so far, and the versions they were measured with."""

    postgres: str
    lines: list[tuple[str, ...]] = field(default_factory=list)

    @contextmanager
    def row(self, test: str) -> Iterator[ChaosRow]:
        """A line for the test in the block, also when it fails."""
        row, started = ChaosRow(test), datetime.now(UTC)
        try:
            yield row
        except BaseException as error:
            row.outcome = f"FAILED: {type(error).__name__}"
            raise
        finally:
            seconds = (datetime.now(UTC) - started).total_seconds()
            self.lines.append((row.test, row.interruptions, f"{row.due:,}", row.outcome, f"{seconds:.1f}"))
            print(" | ".join(self.lines[-1]))

    def markdown(self) -> str:
        """The table with its date and versions."""
        lines = [_COLUMNS, tuple("---" for _ in _COLUMNS), *self.lines]
        versions = f"crmctl {__version__}, PostgreSQL {self.postgres}, Python {platform.python_version()}"
        machine = f"{platform.system()} {platform.machine()}"
        return (
            "# Crashes and races\n\n"
            f"{datetime.now(UTC):%Y-%m-%d}, {versions}, {machine}. Made by `make chaos`.\n\n"
            + "".join(f"| {' | '.join(line)} |\n" for line in lines)
        )


@pytest.fixture(scope="session")
def chaos_table(postgres_server: PostgresServer) -> Iterator[ChaosTable]:
    """Where a chaos test records what it did."""
    with psycopg.connect(postgres_server.url()) as connection:
        version = connection.info.server_version
    table = ChaosTable(f"{version // 10_000}.{version % 10_000}")
    yield table
    if CHAOS_FULL:
        _REPORT.parent.mkdir(exist_ok=True)
        _REPORT.write_text(table.markdown(), encoding="utf-8")
