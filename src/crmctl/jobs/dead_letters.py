"""What `dlq list`, `show`, `replay` and `discard` share: letters read in order, beside what the ledger says of them.

The ledger `dlq_resolutions` is the truth: a letter is closed by a row of its own, or by one of any letter with the same
source position (crash duplicates, letters made again by a full replay of the source).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

from psycopg.rows import DictRow

from crmctl.adapters.postgres import Transaction, array_literal
from crmctl.adapters.records import RawRecord
from crmctl.adapters.topic_reader import TopicReader
from crmctl.domain.chat_status import Position
from crmctl.domain.dead_letters import Letter, Resolution, read_letter
from crmctl.sql import load

_RAW: Final = load("dead_letters")
STATEMENTS: Final = {
    name: statement.format(lost_failures=_RAW["lost_failures"])
    for name, statement in _RAW.items()
    if name != "lost_failures"
}
# The code of a letter that bears none: without our headers.
NO_CODE: Final = "none"


class Found(NamedTuple):
    """A letter and what the ledger says. `tries` are the replays that failed, `code` and `reason` the latest.

    `own` is its own row, `other` the row that closes its source; either may be None.
    """

    letter: Letter
    own: DictRow | None
    other: DictRow | None

    @property
    def closed(self) -> bool:
        """Whether nothing is left to do about it."""
        return self.other is not None or (self.own is not None and self.own["resolution"] != Resolution.FAILED)

    @property
    def closed_by_another(self) -> bool:
        """Whether another letter of its source record was resolved, and that is not in its own row yet."""
        return self.other is not None and (self.own is None or self.own["resolution"] == Resolution.FAILED)

    @property
    def state(self) -> str:
        """`open`, or what became of it."""
        row = self.own if self.own is not None and self.own["resolution"] != Resolution.FAILED else self.other
        return "open" if row is None else str(row["resolution"])

    @property
    def tries(self) -> int:
        """How often a replay of it has failed."""
        return self.own["attempts"] if self.own is not None else 0

    @property
    def code(self) -> str:
        """Its latest error code."""
        return (self.own["code"] if self.own is not None else None) or self.letter.code or NO_CODE

    @property
    def reason(self) -> str | None:
        """Why it was dead-lettered, or why its latest replay failed."""
        return (self.own["reason"] if self.own is not None else None) or self.letter.reason


class Entry(NamedTuple):
    """A row to write: what became of a letter."""

    letter: Letter
    resolution: Resolution
    code: str | None
    reason: str | None
    attempts: int


def letters_of(records: Iterable[RawRecord]) -> list[Letter]:
    """Read records of the dead-letter topic."""
    return [read_letter(r.position, r.key, r.value, r.headers, r.timestamp_ms) for r in records]


def floors(tx: Transaction, reader: TopicReader) -> dict[int, int]:
    """Where the first open letter of each partition may stand: all before it is closed."""
    numbers = sorted(reader.first)
    rows = tx.all(
        STATEMENTS["floors"],
        {
            "topic_id": reader.topic.id,
            "partitions": numbers,
            "first": [reader.first[number] for number in numbers],
        },
    )
    return {row["partition"]: row["floor"] for row in rows}


def closed_count(tx: Transaction, reader: TopicReader, places: Mapping[int, int]) -> int:
    """How many letters are closed by a row of their own at these places, which were `floors` once, or later.

    It rises with every commit by which fewer letters of this topic are open, and only then, so two equal figures mean
    that nothing was closed between them. For what closes a letter is a row, of its own or of another one of its source;
    such a row is never changed nor deleted, and what stands before a floor has one already. Since it is counted from
    what a snapshot sees, and no time or order of writing is in it, transactions may overlap as they like: one that
    began first and commits last raises it when it commits. (Rows of an earlier topic of this name are written no more.)
    """
    row = tx.one(
        STATEMENTS["closed_count"],
        {"topic_id": reader.topic.id, "partitions": list(places), "floors": list(places.values())},
    )
    return int(row["closed_count"])


def look(tx: Transaction, letters: Sequence[Letter]) -> list[Found]:
    """Find what the ledger says of letters of one topic."""
    if not letters:
        return []
    ranges: dict[int, list[int]] = {}
    for letter in letters:
        ranges.setdefault(letter.at.partition, []).append(letter.at.offset)
    rows = tx.all(
        STATEMENTS["rows"],
        {
            "topic_id": letters[0].at.topic_id,
            "partitions": list(ranges),
            "first": [min(offsets) for offsets in ranges.values()],
            "last": [max(offsets) for offsets in ranges.values()],
        },
    )
    own = {(row["partition"], row["offset"]): row for row in rows}
    sources = list({letter.source for letter in letters if letter.source is not None})
    closed = tx.all(
        STATEMENTS["closed_sources"],
        {
            "topic_ids": array_literal([source.topic_id for source in sources]),
            "partitions": array_literal([source.partition for source in sources]),
            "offsets": array_literal([source.offset for source in sources]),
        },
    )
    others = {Position(row["source_topic_id"], row["source_partition"], row["source_offset"]): row for row in closed}
    return [
        Found(
            letter,
            own.get((letter.at.partition, letter.at.offset)),
            None if letter.source is None else others.get(letter.source),
        )
        for letter in letters
    ]


def record(tx: Transaction, entries: Sequence[Entry], *, resolved_by: str, run_id: UUID) -> None:
    """Write what became of letters of one topic."""
    if not entries:
        return
    sources = [entry.letter.source for entry in entries]
    tx.execute(
        STATEMENTS["record"],
        {
            "topic_id": entries[0].letter.at.topic_id,
            "resolved_by": resolved_by,
            "run_id": run_id,
            "partitions": array_literal([entry.letter.at.partition for entry in entries]),
            "offsets": array_literal([entry.letter.at.offset for entry in entries]),
            "source_topic_ids": [source and source.topic_id for source in sources],
            "source_partitions": [None if source is None else source.partition for source in sources],
            "source_offsets": [None if source is None else source.offset for source in sources],
            "resolutions": array_literal([entry.resolution for entry in entries]),
            "codes": [entry.code for entry in entries],
            "reasons": [entry.reason for entry in entries],
            "attempts": array_literal([entry.attempts for entry in entries]),
        },
    )


def lost_count(tx: Transaction, reader: TopicReader) -> int:
    """Letters that nobody closed and that the topic holds no more, by retention or because it was deleted."""
    numbers = sorted(reader.first)
    row = tx.one(
        STATEMENTS["lost"],
        {
            "topic_id": reader.topic.id,
            "partitions": numbers,
            "first": [reader.first[number] for number in numbers],
        },
    )
    return int(row["lost_count"])


class Prefix(NamedTuple):
    """Up to which offset everything is closed, by partition; `ended` are those where a letter is open."""

    offsets: Mapping[int, int]
    ended: frozenset[int] = frozenset()

    def over(self, found: Iterable[Found], closing: Collection[Position]) -> "Prefix":
        """Move it over the letters that follow; `closing` are closed by this very batch."""
        moved, ended = dict(self.offsets), set(self.ended)
        for item in found:
            number, offset = item.letter.at.partition, item.letter.at.offset
            if number in ended:
                continue
            if item.closed or item.letter.at in closing:
                moved[number] = offset + 1
            else:
                ended.add(number)
        return Prefix(moved, frozenset(ended))


def describe(item: Found) -> dict[str, Any]:
    """A letter as it is listed."""
    letter, event = item.letter, item.letter.event
    return {
        "letter": place(letter.at),
        "state": item.state,
        "code": item.code,
        "failed_at": _iso(letter.failed_at),
        "attempts": letter.attempts,
        "replays": item.tries,
        "deal_id": event.deal_id if event else None,
        "tenant_id": event.tenant_id if event else None,
        "status": event.sent_status if event else None,
        "message_id": event.message_id if event else None,
        "key": None if letter.key is None else letter.key.decode(errors="backslashreplace"),
        "source": None if letter.source is None else place(letter.source),
        "reason": item.reason,
    }


def place(position: Position) -> str:
    """Where a record stands, as it is written on the command line."""
    return f"{position.partition}:{position.offset}"


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()
