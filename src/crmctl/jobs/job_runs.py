"""The record of runs: one row per committed batch, in its transaction; one for a run that rolled back."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from psycopg.types.json import Jsonb

from crmctl import __version__
from crmctl.adapters.postgres import Transaction
from crmctl.sql import load

_STATEMENTS: Final = load("job_runs")


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
