"""The dead-letter topic: the original record, byte for byte, with headers that say why and whence."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from crmctl.adapters.publisher import Publisher, Record
from crmctl.adapters.records import RawRecord, portions
from crmctl.domain.chat_status import ErrorCode
from crmctl.domain.dead_letters import HEADERS
from crmctl.domain.errors import UnavailableError

# The record, why it is a dead letter in a code and in words, and the retries that failed.
Letter = tuple[RawRecord, ErrorCode, str, int]

_LONGEST_REASON_BYTES: Final = 1_000


class Stopped(Exception):  # noqa: N818  a signal to the caller, not an error
    """A signal asks to stop, and not everything that is in hand is done."""


def _ignore(_letters: Sequence[Letter]) -> None:
    pass


class DeadLetters:
    """Writes dead letters and waits for their acknowledgement."""

    def __init__(self, publisher: Publisher, topic: str, group: str) -> None:
        self._publisher = publisher
        self._topic = topic
        self._group = group

    def write(
        self,
        letters: Sequence[Letter],
        stopping: Callable[[], bool],
        acknowledged: Callable[[Sequence[Letter]], None] = _ignore,
    ) -> None:
        """Write the letters, some MB at a time. `acknowledged` is told which are there, also where others are not.

        Raises UnavailableError unless all were acknowledged, and Stopped where that is a signal's doing.
        """
        for portion in portions(letters, lambda letter: letter[0].size()):
            self._write(portion, stopping, acknowledged)

    def _write(
        self,
        letters: Sequence[Letter],
        stopping: Callable[[], bool],
        acknowledged: Callable[[Sequence[Letter]], None],
    ) -> None:
        records = [self._record(*letter) for letter in letters]
        report = self._publisher.publish(records, stopping)
        there = set(report.delivered)
        if there:
            acknowledged([letter for letter, record in zip(letters, records, strict=True) if record.id in there])
        if report.refused:
            raise UnavailableError(
                f"{self._topic} refuses {len(report.refused)} dead letters: {next(iter(report.refused.values()))}",
                hint="nothing is committed past them; run: crmctl topics check",
            )
        if len(there) == len(records):
            return
        if stopping():
            raise Stopped
        raise report.outage or UnavailableError(f"{self._topic} did not acknowledge every dead letter in time")

    def _record(self, raw: RawRecord, code: ErrorCode, reason: str, attempts: int) -> Record:
        values = (
            reason.encode(errors="replace")[:_LONGEST_REASON_BYTES].decode(errors="ignore").replace("\0", "�"),
            code.value,
            raw.topic,
            str(raw.position.offset),
            raw.position.topic_id,
            str(raw.position.partition),
            str(raw.timestamp_ms),
            self._group,
            str(attempts),
            datetime.now(UTC).isoformat(),
        )
        original = tuple(header for header in raw.headers if header[0] not in HEADERS)
        ours = tuple((name, value.encode()) for name, value in zip(HEADERS, values, strict=True))
        # All travel together: the idempotent producer keeps the order of a key, and a refusal ends the batch anyway.
        return Record(str(raw.position), str(raw.position), self._topic, raw.key, raw.value, original + ours)
