"""The walk over the dead-letter topic that `dlq replay` and `dlq discard` share: one transaction per batch of letters.

What is done with the chosen letters of a batch is the job's own; reading, locks, the choice, the ledger and the run's
figures are here.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from crmctl.adapters.postgres import Transaction
from crmctl.adapters.records import RawRecord
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


class Choice(NamedTuple):
    """What a batch is to do with the letters that it has read, of which only the first `passed` are done with.

    Of those that the filters select: `tried` are open, `elsewhere` were closed by another letter of their source and
    have no such row of their own yet, and `refused` is how many have been tried too often.
    """

    passed: int
    tried: list[Found]
    elsewhere: list[Found]
    refused: int


def job(
    name: str,
    counted: tuple[Resolution, ...],
    handle: Callable[[Transaction, Choice], list[Entry]],
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
        at, allowance = before.at or {}, _allowance(options, before)
        if options.rate is not None:
            run.wait(began + (before.tried_count + allowance) / options.rate - time.monotonic())
        records, reached = _read(reader, options, at)
        letters = letters_of(records)
        prepare(tx)
        lock_partitions(tx, options.group, reader.topic.name, sorted({letter.at.partition for letter in letters}))
        found = look(tx, letters)
        choice = _choose(options, found, allowance)
        entries = handle(tx, choice)
        record(tx, entries, resolved_by=actor, run_id=run.id)
        after = _count(before, found[: choice.passed], choice, entries)
        reached |= _starts(found[choice.passed :])
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


def _allowance(options: Options, before: Progress) -> int:
    """How many letters the next batch may try; it reads as many as ever, for most may not be selected."""
    allowance = options.batch_size
    if options.rate is not None:
        allowance = min(allowance, options.rate)
    if options.limit is not None:
        allowance = min(allowance, options.limit - before.tried_count)
    return allowance


def _read(reader: TopicReader, options: Options, at: Mapping[int, int]) -> tuple[list[RawRecord], dict[int, int]]:
    """Read a batch; under a limit from one partition at a time: which letters it takes must not be a matter of luck."""
    if options.limit is None:
        return reader.read(at, options.batch_size)
    number = min((number for number, offset in at.items() if offset < reader.ends[number]), default=None)
    if number is None:
        return [], dict(at)
    records, reached = reader.read({**reader.ends, number: at[number]}, options.batch_size)
    return records, {**at, number: reached[number]}


def _choose(options: Options, found: Sequence[Found], allowance: int) -> Choice:
    """What is to be done, up to the letter that uses up the allowance."""
    tried: list[Found] = []
    elsewhere: list[Found] = []
    refused = 0
    for passed, item in enumerate(found, start=1):
        if not options.filters.selects(item.letter, item.code):
            continue
        if item.closed_by_another:
            elsewhere.append(item)
        elif item.closed:
            continue
        elif options.max_attempts is not None and item.tries >= options.max_attempts:
            refused += 1
        else:
            tried.append(item)
            if len(tried) == allowance:
                return Choice(passed, tried, elsewhere, refused)
    return Choice(len(found), tried, elsewhere, refused)


def _starts(found: Iterable[Found]) -> dict[int, int]:
    """The offset of the first of these letters in each of their partitions."""
    starts: dict[int, int] = {}
    for item in found:
        starts.setdefault(item.letter.at.partition, item.letter.at.offset)
    return starts


def _count(before: Progress, passed: Sequence[Found], choice: Choice, entries: Sequence[Entry]) -> Progress:
    resolved = [entry.letter for entry in entries if entry.resolution is not Resolution.FAILED]
    ats, sources = {letter.at for letter in resolved}, {letter.source for letter in resolved} - {None}
    closing = {item.letter.at for item in passed if item.letter.at in ats or item.letter.source in sources}
    failures = tuple(entry for entry in entries if entry.resolution is Resolution.FAILED)
    latest = {entry.letter.at: entry.code for entry in failures}
    left = [item for item in passed if not item.closed and item.letter.at not in closing]
    return replace(
        before,
        prefix=before.prefix.over(passed, closing),
        resolved=Counter(before.resolved) + Counter(entry.resolution.value for entry in entries),
        failed=Counter(before.failed) + Counter(str(entry.code) for entry in failures),
        open=Counter(before.open) + Counter(latest.get(item.letter.at) or item.code for item in left),
        tried_count=before.tried_count + len(choice.tried),
        refused_count=before.refused_count + choice.refused,
        batches=before.batches + bool(entries),
        last_failures=failures,
    )
