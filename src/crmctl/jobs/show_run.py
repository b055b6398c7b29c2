"""`crmctl runs show`: reads one run, batch by batch, changes nothing."""

from typing import Any, Final
from uuid import UUID

from crmctl.adapters.postgres import Transaction
from crmctl.domain.errors import RunNotFoundError
from crmctl.sql import load

STATEMENTS: Final = load("job_runs")
_OF_THE_RUN: Final = ("job", "actor", "version", "host")


def query(tx: Transaction, run_id: UUID) -> dict[str, Any]:
    """Return the run's job, actor, version and host, and `batches` in their order. Raises RunNotFoundError."""
    rows = tx.all(STATEMENTS["show"], {"run_id": run_id})
    if not rows:
        raise RunNotFoundError(
            f"no record of run {run_id}",
            hint="it had nothing to do, was pruned, or is in the other --database; list them with: crmctl runs list",
            run_id=str(run_id),
        )
    return {
        "run_id": run_id,
        **{name: rows[0][name] for name in _OF_THE_RUN},
        "batches": [{name: value for name, value in row.items() if name not in _OF_THE_RUN} for row in rows],
    }
