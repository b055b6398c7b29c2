"""`crmctl runs list`: reads the record of runs, changes nothing."""

from dataclasses import asdict, dataclass
from typing import Any, Final

from crmctl.adapters.postgres import Transaction
from crmctl.sql import load

STATEMENTS: Final = load("job_runs")


@dataclass(frozen=True, slots=True)
class Options:
    """Which runs; `failed` means those that rolled something back."""

    job: str | None = None
    failed: bool = False
    limit: int = 20


def query(tx: Transaction, options: Options) -> dict[str, Any]:
    """Return `{"runs": [{run_id, job, actor, outcome, batches, started_at, finished_at, counts, error…}]}`.

    The latest first; `counts` holds the figures that are not 0. Of a job with nothing to do, one run in five minutes
    leaves a record.
    """
    return {"runs": tx.all(STATEMENTS["list"], asdict(options))}
