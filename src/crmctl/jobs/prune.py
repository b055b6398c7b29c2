"""`crmctl prune`: delete what nobody needs any more, in bounded transactions.

One batch is one transaction. It deletes, each up to N rows that are older than the cutoff:

1. `outbox_messages` that were published before it; one that is not published is never deleted, however old;
2. `processed_messages`: the consumer's idempotency marks. Without its mark an old event that is read again is decided
   by the one rule, which ends in the same state (source 003, AC-8);
3. `job_runs`, but of each job its last success: that is what `crmctl status` and the alerts go by;
4. its own record, by the wrapper.

Not deleted: `extension_requests`, because the same request id must return the first answer whenever it comes again;
`deferred_messages`, which the consumer ends itself; `deal_notifications`, which are the CRM's.

A crash leaves all of a batch or nothing of it, and the next run goes on. It waits for no other job: those never touch
what is old. A second prune leaves at once.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from crmctl.adapters.postgres import Transaction
from crmctl.domain.errors import UsageError
from crmctl.jobs.job import Job, Run
from crmctl.sql import load

STATEMENTS: Final = load("prune")
# Younger rows are what operators look at when something went wrong.
SHORTEST_AGE: Final = timedelta(days=1)
# The same in every crmctl: "prune" in ASCII.
_LOCK: Final = 0x7072756E65


@dataclass(frozen=True, slots=True)
class Options:
    """How old a row must be, and how many of each kind one transaction takes."""

    older_than: timedelta = timedelta(days=30)
    batch_size: int = 5000


@dataclass(frozen=True, slots=True)
class Progress:
    """Rows of the whole run, and how far the outbox was walked; `floor` None: to its end."""

    outbox_count: int = 0
    marks_count: int = 0
    runs_count: int = 0
    cutoff: str | None = None
    batches: int = 0
    more: bool = False
    skipped: str | None = None
    floor: str | None = "(0,0)"
    needs_person: bool = False
    failure: None = None

    def counts(self) -> dict[str, int]:
        """The result's figures."""
        return {
            "outbox_count": self.outbox_count,
            "marks_count": self.marks_count,
            "runs_count": self.runs_count,
        }

    def document(self) -> dict[str, object]:
        """The result; `cutoff`: before it rows are old. `has_more` is null where another prune holds the lock."""
        return {
            "skipped": self.skipped,
            "cutoff": self.cutoff,
            **self.counts(),
            "batches": self.batches,
            "has_more": None if self.skipped else self.more,
        }


def check(options: Options) -> None:
    """Raise UsageError for an age that would delete what is still looked at."""
    if options.older_than < SHORTEST_AGE:
        raise UsageError("--older-than must be a day or more", hint="write it like 30d")


def batch(tx: Transaction, run: Run, options: Options, before: Progress) -> Progress:  # noqa: ARG001
    """Delete up to `options.batch_size` old rows of each kind."""
    if not tx.one(STATEMENTS["take_lock"], {"lock": _LOCK})["taken"]:
        return replace(before, more=False, skipped="locked")
    tx.execute(STATEMENTS["prepare"])
    cutoff = tx.now - options.older_than
    params: dict[str, object] = {"cutoff": cutoff, "batch_size": options.batch_size}
    outbox, floor = 0, before.floor
    if floor is not None:
        row = tx.one(STATEMENTS["outbox"], {**params, "floor": floor})
        outbox, floor = row["deleted_count"], row["reached"]
    marks = tx.one(STATEMENTS["marks"], params)["deleted_count"]
    runs = tx.one(STATEMENTS["runs"], params)["deleted_count"]
    return Progress(
        outbox_count=before.outbox_count + outbox,
        marks_count=before.marks_count + marks,
        runs_count=before.runs_count + runs,
        cutoff=cutoff.isoformat(),
        batches=before.batches + 1,
        more=floor is not None or options.batch_size in (marks, runs),
        floor=floor,
    )


JOB: Final = Job(name="prune", actor="system", start=lambda _: Progress(), batch=batch)
