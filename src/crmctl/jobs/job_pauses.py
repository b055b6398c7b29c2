"""Pauses of jobs: what `crmctl jobs …` sets and removes, and what every batch looks at in its own transaction.

A batch that has begun finishes; the next one, of any run of that job, sees the pause. A run that is paused ends with
exit 0 and `"skipped": "paused"`; `--follow` and the consumer wait for the end of the pause.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from crmctl.adapters.postgres import Transaction
from crmctl.domain.databases import DatabaseName
from crmctl.domain.jobs import JOBS, NAMES
from crmctl.sql import load

STATEMENTS: Final = load("job_pauses")


@dataclass(frozen=True, slots=True)
class Pause:
    """Who paused a job, when and why."""

    job: str
    reason: str
    paused_by: str
    paused_at: datetime

    def document(self) -> dict[str, object]:
        """What the result of a run that was skipped says."""
        return {
            "skipped": "paused",
            "paused_by": self.paused_by,
            "paused_at": self.paused_at,
            "pause_reason": self.reason,
        }


class JobPausedError(Exception):
    """The job is paused: nothing of this batch was done."""

    def __init__(self, pause: Pause) -> None:
        super().__init__(f"{pause.job} is paused")
        self.pause = pause


def find_pause(tx: Transaction, job: str) -> Pause | None:
    """The pause of a job, if it has one."""
    row = tx.first(STATEMENTS["find"], {"job": job})
    return None if row is None else Pause(**row)


def pause(tx: Transaction, jobs: Sequence[str], *, reason: str, by: str) -> set[str]:
    """Pause the jobs; one that is paused already keeps its first reason. Returns those that were not."""
    rows = tx.all(STATEMENTS["pause"], {"jobs": list(jobs), "reason": reason, "paused_by": by})
    return {row["job"] for row in rows}


def resume(tx: Transaction, jobs: Sequence[str]) -> set[str]:
    """End the pauses of the jobs. Returns those that had one."""
    rows = tx.all(STATEMENTS["resume"], {"jobs": list(jobs)})
    return {row["job"] for row in rows}


def query(
    tx: Transaction, jobs: Sequence[str] = NAMES, database: DatabaseName = DatabaseName.MAIN
) -> list[dict[str, Any]]:
    """Return [{job, command, database, paused, paused_by, …, last_success_at, last_failure_at}] of the jobs."""
    commands = {job.name: f"crmctl {job.command}" for job in JOBS}
    rows = tx.all(STATEMENTS["list"], {"jobs": list(jobs)})
    return [{"job": row["job"], "command": commands[row["job"]], "database": database, **row} for row in rows]
