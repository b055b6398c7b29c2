"""A dead letter as its headers and its value tell it, which letters a filter selects, and what can become of one.

Pure. The headers are those that the consumer writes (docs/contracts.md); a letter may lack all of them, or bear those
of an older set: what is missing is None, and the letter is still listed, replayed or discarded.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final, NamedTuple

from crmctl.domain.chat_status import Event, Position
from crmctl.domain.chat_status_decoding import MalformedError, decode

HEADERS: Final = (
    "x-dlq-reason",
    "x-dlq-error-code",
    "x-source-topic",
    "x-original-offset",
    "x-source-topic-id",
    "x-original-partition",
    "x-original-timestamp",
    "x-dlq-group",
    "x-dlq-attempts",
    "x-dlq-failed-at",
)
# Those that a letter is made of; the others are for people.
_READ: Final = frozenset(HEADERS) - {"x-original-timestamp", "x-dlq-group"}
_LONGEST_CODE: Final = 100
_LONGEST_NAME: Final = 249
_LONGEST_REASON: Final = 1_000
_LARGEST_PARTITION: Final = 2**31 - 1
_LARGEST_OFFSET: Final = 2**63 - 1
_LONGEST_NUMBER: Final = len(str(_LARGEST_OFFSET))
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Resolution(StrEnum):
    """What became of a letter, as `dlq_resolutions` keeps it.

    Failed: it was tried and is still open. Lost: its topic lost it while it was open, and somebody acknowledged that.
    """

    APPLIED = "applied"
    STALE = "stale"
    DUPLICATE = "duplicate"
    DISCARDED = "discarded"
    LOST = "lost"
    FAILED = "failed"


class Letter(NamedTuple):
    """A record of the dead-letter topic.

    `at` is where it stands in that topic, `source` where its record stood in messenger's. `code`, `reason`, `attempts`
    (retries before it was dead-lettered) and `failed_at` are its headers', with the record's own timestamp where the
    last is missing. `event` is its decoded value; where that cannot be, `malformed` says why.
    """

    at: Position
    key: bytes | None
    source: Position | None
    source_topic: str | None
    code: str | None
    reason: str | None
    attempts: int
    failed_at: datetime | None
    event: Event | None
    malformed: str | None


def read_letter(
    at: Position,
    key: bytes | None,
    value: bytes | None,
    headers: Iterable[tuple[str, bytes | None]],
    timestamp_ms: int,
) -> Letter:
    """Read a record of the dead-letter topic, whatever it is."""
    found = {name: data for name, data in headers if name in _READ and data}
    source = _source(found)
    try:
        event, malformed = decode(value, source or Position(f"dlq:{at.topic_id}", at.partition, at.offset)), None
    except MalformedError as error:
        event, malformed = None, str(error)
    return Letter(
        at=at,
        key=key,
        source=source,
        source_topic=_text(found.get("x-source-topic"), _LONGEST_NAME),
        code=_text(found.get("x-dlq-error-code"), _LONGEST_CODE),
        reason=_text(found.get("x-dlq-reason"), _LONGEST_REASON),
        attempts=_number(found.get("x-dlq-attempts"), _LARGEST_PARTITION) or 0,
        failed_at=_instant(found.get("x-dlq-failed-at"), timestamp_ms),
        event=event,
        malformed=malformed,
    )


def _text(data: bytes | None, longest: int) -> str | None:
    if data is None:
        return None
    text = data.decode(errors="replace")[:longest]
    return text.replace("\0", "�") if "\0" in text else text


def _number(digits: bytes | None, largest: int) -> int | None:
    if digits is None or len(digits) > _LONGEST_NUMBER or not digits.isdigit():
        return None
    number = int(digits)
    return number if number <= largest else None


def _source(found: dict[str, bytes]) -> Position | None:
    topic_id = _text(found.get("x-source-topic-id"), _LONGEST_NAME)
    partition = _number(found.get("x-original-partition"), _LARGEST_PARTITION)
    offset = _number(found.get("x-original-offset"), _LARGEST_OFFSET)
    if topic_id is None or partition is None or offset is None:
        return None
    return Position(topic_id, partition, offset)


def _instant(text: bytes | None, timestamp_ms: int) -> datetime | None:
    try:
        moment = datetime.fromisoformat((text or b"").decode())
        if moment.tzinfo is not None:
            return moment.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    return _EPOCH + timedelta(milliseconds=timestamp_ms) if 0 <= timestamp_ms < _LARGEST_OFFSET // 1_000_000 else None


class Range(NamedTuple):
    """Offsets of one partition, both ends included; `last` None: to its end."""

    partition: int
    first: int = 0
    last: int | None = None

    def holds(self, at: Position) -> bool:
        """Whether a letter stands in it."""
        return (
            at.partition == self.partition and at.offset >= self.first and (self.last is None or at.offset <= self.last)
        )


def parse_range(text: str) -> Range:
    """Read `PARTITION`, `PARTITION:OFFSET`, `PARTITION:FIRST-LAST` or `PARTITION:FIRST-`. Raises ValueError."""
    partition, colon, offsets = text.partition(":")
    first, dash, last = offsets.partition("-")
    numbers = [_number(part.encode(), _LARGEST_OFFSET) for part in (partition, first if colon else "0", last or "0")]
    if any(number is None for number in numbers) or numbers[0] is None or numbers[0] > _LARGEST_PARTITION:
        raise ValueError(f"{text!r} is no place in a topic; write 2, 2:17, 2:17-40 or 2:17-")
    _, start, end = (number or 0 for number in numbers)
    if not colon:
        return Range(numbers[0])
    if not dash:
        return Range(numbers[0], start, start)
    if last and end < start:
        raise ValueError(f"{text!r} ends before it begins")
    return Range(numbers[0], start, end if last else None)


@dataclass(frozen=True, slots=True)
class Filters:
    """Which letters are meant: those that fit each kind that is given; within a kind, any value of it.

    `since` and `until` compare `failed_at`, the second not included. A letter that cannot be decoded has no deal and
    no tenant. An empty filter selects every letter.
    """

    codes: frozenset[str] = frozenset()
    deal_ids: frozenset[str] = frozenset()
    tenant_ids: frozenset[str] = frozenset()
    keys: frozenset[bytes] = frozenset()
    ranges: tuple[Range, ...] = ()
    since: datetime | None = None
    until: datetime | None = None

    @property
    def empty(self) -> bool:
        """Whether it selects every letter."""
        return self == Filters()

    def selects(self, letter: Letter, code: str | None) -> bool:
        """Whether a letter is meant; `code` is its latest, which a replay may have changed."""
        event, moment = letter.event, letter.failed_at
        return (
            (not self.codes or code in self.codes)
            and (not self.deal_ids or (event is not None and event.deal_id in self.deal_ids))
            and (not self.tenant_ids or (event is not None and event.tenant_id in self.tenant_ids))
            and (not self.keys or letter.key in self.keys)
            and (not self.ranges or any(place.holds(letter.at) for place in self.ranges))
            and (self.since is None or (moment is not None and moment >= self.since))
            and (self.until is None or (moment is not None and moment < self.until))
        )
