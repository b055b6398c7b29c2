"""The walk over the dead-letter topic that `dlq replay` and `dlq discard` share: one transaction per batch of letters.

What is done with a batch of letters is the job's own; reading, locks, the ledger and the run's figures are here.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from crmctl.adapters.postgres import Transaction
from crmctl.adapters.topic_reader import TopicReader
from crmctl.domain.dead_letters import Filters, Resolution
from crmctl.domain.errors import CrmctlError
from crmctl.jobs.dead_letters import Entry, Found, Prefix, floors, letters_of, look, lost_count, record
from crmctl.jobs.job import Job, Run
from crmctl.jobs.project_chat_status import lock_partitions, prepare
from crmctl.telemetry.logs import Log


@dataclass(frozen=True, slots=True)
class Options:
    """Which letters, how many at the most, how many a second, and after how many failed replays no more.

    `group` is the consumer group whose committed offsets mirror what is closed.
    """

    group: str
    filters: Filters = field(default_factory=Filters)
    batch_size: int = 1000
    limit: int | None = None
    rate: int | None = None
    max_attempts: int | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the run stands: `at` is the next offset of each partition, None before the first batch.

    `open` counts, by latest code, the letters that were read and are left open; `failed` those that failed now.
    """

    counted: tuple[Resolution, ...]
    at: Mapping[int, int] | None = None
    prefix: Prefix = field(default_factory=lambda: Prefix({}))
    resolved: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)
    open: Mapping[str, int] = field(default_factory=dict)
    tried_count: int = 0
    refused_count: int = 0
    lost_count: int = 0
    batches: int = 0
    more: bool = True
    unread: bool = True
    last_failures: tuple[Entry, ...] = ()
    failure: CrmctlError | None = None

    @property
    def needs_person(self) -> bool:
        """A letter that is left open is somebody's to look at."""
        return bool(self.open) or self.lost_count > 0

    def counts(self) -> dict[str, int]:
        """What was written, in letters."""
        return {f"{resolution}_count": self.resolved.get(resolution, 0) for resolution in self.counted}

    def document(self) -> dict[str, object]:
        """The result as it is printed."""
        return {
            **self.counts(),
            "failed": dict(self.failed),
            "refused_count": self.refused_count,
            "open_count": sum(self.open.values()),
            "open": dict(self.open),
            "lost_count": self.lost_count,
            "batches": self.batches,
            "has_more": self.unread,
        }


class Handled(NamedTuple):
    """The rows to write for a batch, how many letters were tried, and how many were tried too often already."""

    entries: list[Entry]
    tried: int
    refused: int = 0


def job(
    name: str,
    counted: tuple[Resolution, ...],
    handle: Callable[[Transaction, Options, Sequence[Found]], Handled],
    reader: TopicReader,
    actor: str,
    committed: Callable[[Progress], None],
) -> Job[Options, Progress]:
    """A job that walks `reader`'s topic on behalf of `actor`; `committed` is told of each committed batch."""
    began = time.monotonic()

    def batch(tx: Transaction, run: Run, options: Options, before: Progress) -> Progress:
        if before.at is None:
            start = floors(tx, reader)
            before = replace(before, at=start, prefix=Prefix(start), lost_count=lost_count(tx, reader))
        at, size = before.at or {}, _size(options, before)
        if options.rate is not None:
            run.wait(began + (before.tried_count + size) / options.rate - time.monotonic())
        records, reached = reader.read(at, size)
        letters = letters_of(records)
        prepare(tx)
        lock_partitions(tx, options.group, reader.topic.name, sorted({letter.at.partition for letter in letters}))
        found = look(tx, letters)
        handled = handle(tx, options, found)
        record(tx, handled.entries, resolved_by=actor, run_id=run.id)
        after = _count(before, found, handled)
        unread = reader.total(reached) > 0
        limited = options.limit is not None and after.tried_count >= options.limit
        return replace(after, at=reached, more=unread and not limited, unread=unread)

    def log(logger: Log, _: Progress, after: Progress) -> None:
        for entry in after.last_failures:
            logger.error(
                "replay failed",
                partition=entry.letter.at.partition,
                offset=entry.letter.at.offset,
                DealId=entry.letter.event.deal_id if entry.letter.event else None,
                code=entry.code,
                reason=entry.reason,
                attempts=entry.attempts,
            )
        reader.mirror(after.prefix.offsets)
        committed(after)

    return Job(name, actor, lambda _: Progress(counted), batch, log=log)


def selected(options: Options, found: Sequence[Found]) -> list[Found]:
    """The letters of a batch that are open and that the filters select."""
    return [item for item in found if not item.closed and options.filters.selects(item.letter, item.code)]


def _size(options: Options, before: Progress) -> int:
    size = options.batch_size
    if options.rate is not None:
        size = min(size, options.rate)
    if options.limit is not None:
        size = min(size, max(1, options.limit - before.tried_count))
    return size


def _count(before: Progress, found: Sequence[Found], handled: Handled) -> Progress:
    entries = handled.entries
    closing = {entry.letter.at for entry in entries if entry.resolution is not Resolution.FAILED}
    failures = tuple(entry for entry in entries if entry.resolution is Resolution.FAILED)
    latest = {entry.letter.at: entry.code for entry in failures}
    left = [item for item in found if not item.closed and item.letter.at not in closing]
    return replace(
        before,
        prefix=before.prefix.over(found, closing),
        resolved=Counter(before.resolved) + Counter(entry.resolution.value for entry in entries),
        failed=Counter(before.failed) + Counter(str(entry.code) for entry in failures),
        open=Counter(before.open) + Counter(latest.get(item.letter.at) or item.code for item in left),
        tried_count=before.tried_count + handled.tried,
        refused_count=before.refused_count + handled.refused,
        batches=before.batches + bool(entries),
        last_failures=failures,
    )
