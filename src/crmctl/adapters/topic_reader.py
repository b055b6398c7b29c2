"""A topic read from given offsets to the ends that were seen at the start, without joining a group.

No rebalance can take a partition away, and an empty poll ends nothing: only the ends do. Where the reader stands is the
caller's: each call says from where, so that a batch that was rolled back is simply read again.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient

from crmctl.adapters import groups, kafka
from crmctl.adapters.records import PORTION_BYTES, RawRecord, Topic, describe_topic, raw_record
from crmctl.domain.chat_status import Position
from crmctl.domain.errors import UnavailableError
from crmctl.telemetry.logs import Log

_CALL_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.2
_MIRROR_SECONDS: Final = 1.0
# Nothing at all for so long, before the end of the topic: the broker is asked whether it is still there.
_SILENCE_SECONDS: Final = 10.0

Offsets = Mapping[int, int]


@dataclass(slots=True)
class TopicReader:
    """`first` and `ends` are the topic's offsets by partition when it was opened; nothing beyond is read."""

    consumer: Consumer
    topic: Topic
    first: dict[int, int]
    ends: dict[int, int]
    log: Log
    _at: dict[int, int] = field(default_factory=dict)
    _done: Offsets = field(default_factory=dict)
    _mirrored: Offsets = field(default_factory=dict)
    _mirrored_at: float = 0.0

    @classmethod
    def open(
        cls, consumer: Consumer, admin: AdminClient, name: str, log: Log, seconds: float = _CALL_SECONDS
    ) -> "TopicReader":
        """Look the topic up within so long. Raises UnavailableError, or ConfigurationError if it does not exist."""
        topic = describe_topic(admin, name, seconds)
        numbers = range(topic.partition_count)
        return cls(
            consumer,
            topic,
            first=groups.offsets(admin, name, numbers, "earliest"),
            ends=groups.offsets(admin, name, numbers, "latest"),
            log=log,
        )

    def total(self, at: Offsets) -> int:
        """How many offsets lie between a place and the ends."""
        return sum(max(0, end - at[number]) for number, end in self.ends.items())

    def read(self, at: Offsets, limit: int) -> tuple[list[RawRecord], dict[int, int]]:
        """Read up to `limit` records from `at` on; return them, and where the next call goes on.

        Large records are fewer: it takes no more once it has PORTION_BYTES. No records: the ends are reached. Raises
        UnavailableError when the broker is away, ConfigurationError where reading is forbidden.
        """
        if at != self._at:
            self._at = dict(at)
            self._assign()
        records: list[RawRecord] = []
        silent_since = time.monotonic()
        while not records and self.total(self._at):
            silent = True
            for message in kafka.take(self.consumer, limit, PORTION_BYTES, _POLL_SECONDS):
                silent = False
                self._take(message, records)
            if not silent:
                silent_since = time.monotonic()
            elif time.monotonic() - silent_since > _SILENCE_SECONDS:
                self._ask()
                silent_since = time.monotonic()
        return records, dict(self._at)

    def mirror(self, offsets: Offsets) -> None:
        """Let the group's committed offsets show how far all is done, for those who watch its lag.

        At most once a second, and when the reader is closed; best effort.
        """
        self._done = offsets
        if time.monotonic() - self._mirrored_at >= _MIRROR_SECONDS:
            self._commit(offsets)

    def close(self) -> None:
        """Show how far all is done, and close the connection."""
        if self._done != self._mirrored:
            self._commit(self._done)
        self.consumer.close()

    def _commit(self, offsets: Offsets) -> None:
        self._mirrored, self._mirrored_at = offsets, time.monotonic()
        target = [TopicPartition(self.topic.name, number, offset) for number, offset in offsets.items()]
        try:
            self.consumer.commit(offsets=target, asynchronous=False)
        except KafkaException as error:
            self.log.warning("offsets not committed", reason=kafka.describe(error.args[0]))

    def _assign(self) -> None:
        self.consumer.assign(
            [
                TopicPartition(self.topic.name, number, offset)
                for number, offset in self._at.items()
                if offset < self.ends[number]
            ]
        )

    def _take(self, message: Message, records: list[RawRecord]) -> None:
        number, offset, error = message.partition(), message.offset(), message.error()
        if error is not None and error.code() != KafkaError._PARTITION_EOF:
            if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                raise kafka.unavailable(error, f"READ on topic {self.topic.name}")
            if error.fatal() or error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise UnavailableError(f"cannot read {self.topic.name} ({kafka.describe(error)})")
            self.log.warning("kafka consumer", reason=kafka.describe(error))
            return
        if number is None or offset is None or self._at[number] >= self.ends[number]:
            return
        if error is not None or offset >= self.ends[number]:  # gaps and markers may stand before the end
            self._at[number] = max(self._at[number], min(offset, self.ends[number]))
            return
        self._at[number] = offset + 1
        records.append(raw_record(message, Position(self.topic.id, number, offset), self.topic.name))

    def _ask(self) -> None:
        try:
            self.consumer.list_topics(self.topic.name, timeout=_CALL_SECONDS)
        except KafkaException as error:
            raise kafka.unavailable(error.args[0]) from None
