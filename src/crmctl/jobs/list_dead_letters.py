"""`crmctl dlq list`: reads the dead-letter topic beside its ledger, changes nothing."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from crmctl.adapters.postgres import Transaction
from crmctl.adapters.topic_reader import TopicReader
from crmctl.domain.dead_letters import Filters
from crmctl.jobs.dead_letters import Found, describe, floors, letters_of, look, lost_count

_PAGE: Final = 1000
_MOST_GROUPS: Final = 1000
_OTHER: Final = "(other reasons)"


@dataclass(frozen=True, slots=True)
class Options:
    """Which letters: the open ones, or `all`; at most `limit` of them are shown, and all are counted."""

    filters: Filters = field(default_factory=Filters)
    all: bool = False
    limit: int | None = None


@dataclass(slots=True)
class _Group:
    count: int = 0
    first: datetime | None = None
    last: datetime | None = None

    def add(self, moment: datetime | None) -> None:
        self.count += 1
        if moment is not None:
            self.first = moment if self.first is None else min(self.first, moment)
            self.last = moment if self.last is None else max(self.last, moment)


def query(
    tx: Transaction, reader: TopicReader, options: Options, emit: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    """Give each letter to `emit`, page by page, and return {open_count, listed_count, lost_count, has_more}.

    `open_count` counts the open letters that the filters select, shown or not.
    """
    counts = {"open_count": 0, "listed_count": 0}
    has_more = False
    for item in _walk(tx, reader, options):
        counts["open_count"] += not item.closed
        if options.limit is not None and counts["listed_count"] >= options.limit:
            has_more = True
            continue
        counts["listed_count"] += 1
        emit(describe(item))
    return {**counts, "lost_count": lost_count(tx, reader), "has_more": has_more}


def summary(tx: Transaction, reader: TopicReader, options: Options) -> dict[str, Any]:
    """Return {groups: [{code, reason, count, first_failed_at, last_failed_at}], open_count, lost_count}.

    The largest group first.
    """
    groups: dict[tuple[str, str], _Group] = {}
    open_count = 0
    for item in _walk(tx, reader, options):
        open_count += not item.closed
        key = item.code, item.reason or ""
        if key not in groups and len(groups) >= _MOST_GROUPS:
            key = item.code, _OTHER
        groups.setdefault(key, _Group()).add(item.letter.failed_at)
    ordered = sorted(groups.items(), key=lambda entry: (-entry[1].count, entry[0]))
    return {
        "groups": [
            {
                "code": code,
                "reason": reason,
                "count": group.count,
                "first_failed_at": group.first,
                "last_failed_at": group.last,
            }
            for (code, reason), group in ordered
        ],
        "open_count": open_count,
        "lost_count": lost_count(tx, reader),
    }


def _walk(tx: Transaction, reader: TopicReader, options: Options) -> Iterator[Found]:
    at: Mapping[int, int] = reader.first if options.all else floors(tx, reader)
    while True:
        records, at = reader.read(at, _PAGE)
        if not records:
            return
        for item in look(tx, letters_of(records)):
            if (options.all or not item.closed) and options.filters.selects(item.letter, item.code):
                yield item
