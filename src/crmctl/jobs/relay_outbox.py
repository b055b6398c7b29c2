"""`crmctl outbox relay`: publish outbox rows to Kafka, in position order per aggregate (UC-BKG-003 step 7).

One batch is one transaction, in this order:

1. takes the relay's advisory lock for the transaction; if another relay holds it, there is nothing to do;
2. selects up to N rows: of held aggregates whose pause is over the first row, and rows that nothing holds;
3. produces them with at most one of an aggregate unacknowledged, and waits for the reports, bounded by the delivery
   timeout (no row is locked while it waits);
4. marks, in one statement: `published_at` on a row's own delivery report only; attempts, last_error and
   next_attempt_at on a row that the broker refused, which holds back its aggregate and nobody else;
5. `job_runs`, by the wrapper; commit.

Delivery is at least once with a stable MessageId and stable bytes: a crash between 3 and the commit publishes those
rows again, and nothing else. An outage marks what was delivered before it and ends the run with exit 69. There
is no cursor: a row that took an early position and commits late is simply the next to be selected.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final

import orjson
from psycopg.rows import DictRow

from crmctl.adapters.postgres import Transaction, array_literal
from crmctl.adapters.publisher import Publisher, Record, Report
from crmctl.domain.errors import CrmctlError
from crmctl.jobs.job import Job, Run
from crmctl.sql import load
from crmctl.telemetry.logs import Log

STATEMENTS: Final = load("relay_outbox")
LIST_LIMIT: Final = 100
# The same in every crmctl that serves a database: "outbox" in ASCII.
LOCK: Final = 0x6F7574626F78
# Above the delivery timeout, so that PostgreSQL does not end the transaction that waits for the broker.
_IDLE_GUARD: Final = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class Options:
    """How many rows one transaction takes, and whether it only looks."""

    batch_size: int = 500
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """Rows of the whole run. `held_count`: rows that began to wait behind a refused one of their aggregate.

    The result lists the run's first refusals; `just_refused` are all of the last batch's, for the log.
    """

    published_count: int = 0
    refused_count: int = 0
    held_count: int = 0
    batches: int = 0
    more: bool = False
    skipped: str | None = None
    failure: CrmctlError | None = None
    refused: tuple[tuple[str, str], ...] = ()
    just_refused: tuple[tuple[str, str], ...] = ()
    listed: tuple[Mapping[str, object], ...] = ()

    @property
    def needs_person(self) -> bool:
        """A record that the broker refuses will be refused again until somebody acts."""
        return self.refused_count > 0

    def counts(self) -> dict[str, int]:
        """The result's figures."""
        return {
            "published_count": self.published_count,
            "refused_count": self.refused_count,
            "held_count": self.held_count,
        }

    def document(self) -> dict[str, object]:
        """The result; `messages` is filled by a dry run only, `has_more` is null where another relay holds the lock."""
        return {
            "skipped": self.skipped,
            **self.counts(),
            "refused": [{"message_id": message_id, "error": error} for message_id, error in self.refused],
            "messages": list(self.listed),
            "batches": self.batches,
            "has_more": None if self.skipped else self.more,
        }


def envelope(row: Mapping[str, Any]) -> bytes:
    """The record's value: the same bytes for a row whenever it is published (docs/contracts.md)."""
    return orjson.dumps(
        {
            "MessageId": row["id"],
            "ContractVersion": row["contract_version"],
            "CreatedAt": row["created_at"],
            "AggregateId": row["aggregate_id"],
            "AggregateType": row["aggregate_type"],
            "Payload": orjson.Fragment(row["payload"]),
        }
    )


def job(publisher: Publisher) -> Job[Options, Progress]:
    """The job, publishing through `publisher`."""

    def batch(tx: Transaction, run: Run, options: Options, before: Progress) -> Progress:
        idle = replace(before, more=False, failure=None, skipped=None, just_refused=())
        if not tx.one(STATEMENTS["take_lock"], {"lock": LOCK})["taken"]:
            return replace(idle, skipped="locked")
        retries = tx.all(STATEMENTS["select_retries"], {"limit": max(1, options.batch_size // 4)})
        fresh = tx.all(STATEMENTS["select_fresh"], {"limit": max(1, options.batch_size - len(retries))})
        rows = [row for row in (*retries, *fresh) if not row["held"]]
        if not rows and not fresh:
            return idle
        if options.dry_run:
            report = Report(delivered=[row["id"] for row in rows])
        else:
            report = publisher.publish([_record(row) for row in rows], run.stopping)
        delivered = set(report.delivered)
        refused = tuple(report.refused.items())
        released = {_aggregate(row) for row in retries if row["id"] in delivered}
        marked = _mark(tx, retries, fresh, report, released)
        followers = any(row["held"] and _aggregate(row) in released for row in fresh)
        full = len(retries) + len(fresh) >= options.batch_size
        unsent = len(rows) > len(report.delivered) + len(report.refused)
        return Progress(
            published_count=before.published_count + marked["delivered_count"],
            refused_count=before.refused_count + marked["refused_count"],
            held_count=before.held_count + marked["held_count"],
            batches=before.batches + 1,
            more=full or unsent or followers or marked["released_count"] > 0,
            failure=report.outage,
            refused=(*before.refused, *refused)[:LIST_LIMIT],
            just_refused=refused,
            listed=(*before.listed, *map(_listed, rows))[:LIST_LIMIT] if options.dry_run else (),
        )

    return Job(
        name="relay-outbox",
        actor="system",
        start=lambda _: Progress(),
        batch=batch,
        log=_log,
        graceful=True,
        guards={"idle_in_transaction_timeout": _IDLE_GUARD},
    )


def _record(row: DictRow) -> Record:
    order = f"{row['aggregate_type']}/{row['aggregate_id']}"
    return Record(row["id"], order, row["topic"], row["key"].encode(), envelope(row), _headers(row["headers"]))


@lru_cache(maxsize=1024)
def _headers(text: str) -> tuple[tuple[str, bytes], ...]:
    """The headers of a row; the events of a run share them."""
    return tuple((name, str(value).encode()) for name, value in orjson.loads(text).items())


def _mark(
    tx: Transaction,
    retries: list[DictRow],
    fresh: list[DictRow],
    report: Report,
    released: set[tuple[str, str]],
) -> DictRow:
    # An aggregate that is tried again in this batch is released or held as a whole by what became of its head.
    retried = {_aggregate(row) for row in retries}
    return tx.one(
        STATEMENTS["mark"],
        {
            "delivered": array_literal(report.delivered),
            "refused_ids": list(report.refused),
            "refused_errors": list(report.refused.values()),
            "held": [row["id"] for row in fresh if row["held"] and _aggregate(row) not in retried],
            "released_types": [kind for kind, _ in released],
            "released_ids": [aggregate_id for _, aggregate_id in released],
        },
    )


def _aggregate(row: DictRow) -> tuple[str, str]:
    return row["aggregate_type"], row["aggregate_id"]


def _listed(row: DictRow) -> dict[str, object]:
    return {
        "message_id": row["id"],
        "topic": row["topic"],
        "key": row["key"],
        "aggregate_id": row["aggregate_id"],
        "created_at": row["created_at"],
    }


def _log(log: Log, _before: Progress, after: Progress) -> None:
    by_reason: dict[str, list[str]] = {}
    for message_id, error in after.just_refused:
        by_reason.setdefault(error, []).append(message_id)
    for error, message_ids in by_reason.items():
        log.error("records refused", reason=error, count=len(message_ids), first_message_id=message_ids[0])
