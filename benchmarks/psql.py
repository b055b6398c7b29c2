"""The yardsticks that run our own SQL without crmctl: psql batch by batch, and one giant statement per phase."""

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Final

import psycopg
from psycopg import conninfo

from benchmarks.harness import TRACEPARENT, clean_environment
from crmctl.dev.postgres import find_binaries
from crmctl.domain.errors import ConfigurationError
from crmctl.jobs.expire_bookings import END, POISON_LOG_LIMIT, PREPARE, START, STATEMENTS
from crmctl.sql import load

_PARAMETER: Final = re.compile(r"%\((\w+)\)s")
_LIBPQ: Final = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "password": "PGPASSWORD", "dbname": "PGDATABASE"}


def drain(url: str, due: Mapping[str, int], batch_size: int, as_of: datetime, *, whole_job: bool) -> float:
    """Drain with psql, committing once per batch of both phases; returns the seconds of the process.

    `whole_job` runs every statement that a batch of the job runs: guards, savepoints, the count of what was
    left behind, the job_runs row. Without it, each batch is BEGIN, the planner's settings, the two `expire`
    statements and COMMIT.
    """
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "drain.sql"
        lines = _whole_job(due, batch_size, as_of) if whole_job else _expire_only(due, batch_size, as_of)
        script.write_text("\n".join(lines), encoding="utf-8")
        target = conninfo.conninfo_to_dict(url)
        environment = clean_environment() | {name: str(target[key]) for key, name in _LIBPQ.items()}
        command = [_find_psql(), "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--file", str(script)]
        started = time.perf_counter()
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - started


def giant(url: str, as_of: datetime, limit: int) -> float:
    """Expire everything with one `expire` statement per phase in one transaction; returns its seconds."""
    with psycopg.connect(url) as connection:
        started = time.perf_counter()
        connection.execute(PREPARE.encode())
        for statements in STATEMENTS.values():
            start = {"floor_deadline": START.deadline, "floor_id": START.id}
            scope = {"as_of": as_of, "tenant_id": None, "booking_ids": None, "traceparent": TRACEPARENT}
            connection.execute(statements["expire"].encode(), {**scope, **start, "batch_size": limit})
        connection.commit()
        return time.perf_counter() - started


def _find_psql() -> str:
    found = find_binaries().psql or shutil.which("psql")
    if found is None:
        raise ConfigurationError("there is no psql to measure against", hint="install PostgreSQL's client programs")
    return str(found)


def _expire_only(due: Mapping[str, int], batch_size: int, as_of: datetime) -> Iterator[str]:
    for number, phases in _batches(due, batch_size):
        yield "begin;"
        yield f"{PREPARE};"
        for phase in phases:
            yield f"{_expire(phase, number, batch_size, as_of)} \\gset {phase}_{number}_"
        yield "commit;"


def _whole_job(due: Mapping[str, int], batch_size: int, as_of: datetime) -> Iterator[str]:
    guards = {
        "application_name": "crmctl expire-bookings",
        "statement_timeout": "30000",
        "lock_timeout": "5000",
        "idle_timeout": "30000",
    }
    record = {
        "run_id": "6f1c9a52-8a2e-4c1b-9a53-0d3f3f6b9e11",
        "job": "expire-bookings",
        "actor": "system",
        "as_of": as_of.isoformat(),
        "counts": '{"reserve_expired_count": 1000, "booking_expired_count": 1000}',
        "version": "0.1.0",
        "host": "localhost",
    }
    for number, phases in _batches(due, batch_size):
        yield "begin;"
        yield f"{_bind(load('session')['begin'], guards)} \\gset"
        yield f"{PREPARE};"
        for phase in phases:
            yield "savepoint s;"
            yield f"{_expire(phase, number, batch_size, as_of)} \\gset {phase}_{number}_"
            yield "release s;"
            yield f"{_left_behind(phase, number, as_of, full=due[phase] >= (number + 1) * batch_size)} \\gset"
        yield f"{_bind(load('job_runs')['record_batch'], {**record, 'batch': number})};"
        yield "commit;"


def _batches(due: Mapping[str, int], batch_size: int) -> Iterator[tuple[int, list[str]]]:
    """The batches that the job makes: a phase takes part until a batch of it comes back short."""
    for number in range(max(due.values()) // batch_size + 1):
        yield number, [phase for phase, count in due.items() if number <= count // batch_size]


def _expire(phase: str, number: int, batch_size: int, as_of: datetime) -> str:
    values = {**_scope(as_of), **_floor(phase, number), "batch_size": batch_size, "traceparent": TRACEPARENT}
    return _bind(STATEMENTS[phase]["expire"], values)


def _left_behind(phase: str, number: int, as_of: datetime, *, full: bool) -> str:
    reached = _Variable(f"{phase}_{number}_reached_deadline"), _Variable(f"{phase}_{number}_reached_id")
    deadline, identity = reached if full else (END.deadline, str(END.id))
    values = {
        **_scope(as_of),
        **_floor(phase, number),
        "reached_deadline": deadline,
        "reached_id": identity,
        "end_id": str(END.id),
        "failed_ids": "{}",
        "list_limit": POISON_LOG_LIMIT,
    }
    return _bind(STATEMENTS[phase]["left_behind"], values)


def _scope(as_of: datetime) -> dict[str, object]:
    return {"as_of": as_of.isoformat(), "tenant_id": None, "booking_ids": None}


def _floor(phase: str, number: int) -> dict[str, object]:
    """Where batch `number` begins: where psql's variables say that the one before it ended."""
    if number == 0:
        return {"floor_deadline": START.deadline, "floor_id": str(START.id)}
    before = f"{phase}_{number - 1}_reached"
    return {"floor_deadline": _Variable(f"{before}_deadline"), "floor_id": _Variable(f"{before}_id")}


class _Variable(str):
    """The name of a psql variable, which psql itself puts in as a literal."""


def _bind(statement: str, values: Mapping[str, object]) -> str:
    """Put literals in the place of psycopg's parameters."""

    def literal(match: re.Match[str]) -> str:
        value = values[match[1]]
        if value is None:
            return "null"
        if isinstance(value, _Variable):
            return f":'{value}'"
        return str(value) if isinstance(value, int) else f"'{value}'"

    return _PARAMETER.sub(literal, statement)
