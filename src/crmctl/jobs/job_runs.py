"""The record of runs: one row per committed batch, in its transaction; one for a run that rolled back.

A batch with nothing to do leaves a row only when the job's last success is older than SIGN_OF_LIFE: so its age says
whether the job runs, also in a quiet night, and running a job again still changes nothing.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from psycopg.types.json import Jsonb

from crmctl import __version__
from crmctl.adapters.postgres import Transaction
from crmctl.sql import load

_STATEMENTS: Final = load("job_runs")
SIGN_OF_LIFE: Final = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Who runs what; `as_of` None means each batch's own transaction timestamp."""

    run_id: UUID
    job: str
    actor: str
    as_of: datetime | None = None

    def committed(self, tx: Transaction, batch: int, counts: Mapping[str, int]) -> None:
        """Record batch number `batch` (from 1) in its own transaction."""
        tx.execute(_STATEMENTS["record_batch"], {**self._identity(batch, tx.now), "counts": Jsonb(dict(counts))})

    def idle(self, tx: Transaction, batch: int) -> bool:
        """Record a batch with nothing to do if the job's last success is older than SIGN_OF_LIFE; whether it was."""
        params = {**self._identity(batch, tx.now), "interval": SIGN_OF_LIFE}
        return tx.first(_STATEMENTS["record_idle"], params) is not None

    def failed(self, tx: Transaction, batch: int, *, began: datetime, code: str, message: str | None) -> None:
        """Record that batch number `batch`, begun at `began`, was rolled back."""
        failure = {"started_at": began, "error_code": code, "error": message}
        tx.execute(_STATEMENTS["record_failure"], {**self._identity(batch, began), **failure})

    def _identity(self, batch: int, now: datetime) -> dict[str, object]:
        return {
            "run_id": self.run_id,
            "batch": batch,
            "job": self.job,
            "actor": self.actor,
            "as_of": self.as_of or now,
            "version": __version__,
            "host": socket.gethostname(),
        }
