"""A topic read as a member of a consumer group: batches of records, the progress to commit, held partitions.

Nothing is committed by itself. Progress counts what was polled, and gaps (compaction, transaction markers) as the
end-of-partition events show them; the caller commits it once a batch is done. How old the oldest record is that is not
done is known all the time, also while partitions are held.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient

from crmctl.adapters import kafka
from crmctl.adapters.records import PORTION_BYTES, RawRecord, Topic, describe_topic, portions, raw_record
from crmctl.domain.chat_status import Position
from crmctl.domain.errors import ConfigurationError, CrmctlError, UnavailableError
from crmctl.telemetry.logs import Log

_HEARTBEAT_SECONDS: Final = 0.5
_CALL_SECONDS: Final = 10.0
# Within a rebalance, where no signal is heard.
_CALLBACK_SECONDS: Final = 2.0
# Losing a partition between a batch and its commit is ordinary: its new owner reads the batch again.
_MOVED_ON: Final = frozenset(
    {
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError._NO_OFFSET,
        KafkaError._STATE,
        KafkaError._ASSIGNMENT_LOST,
    }
)


@dataclass(slots=True)
class RecordSource:
    """The group member. `assigned` maps our partitions to the next offset, None until something was read."""

    consumer: Consumer
    admin: AdminClient
    topic: Topic
    group: str
    log: Log
    assigned: dict[int, int | None] = field(default_factory=dict)
    joined: bool = False
    _committed: dict[int, int] = field(default_factory=dict)
    _carried: list[RawRecord] = field(default_factory=list)
    _moved: set[int] = field(default_factory=set)
    # Kafka's timestamps (ms) by partition: of the first record that was read and is not handled, and, where the end
    # was not seen since, of the last record that was read or else the moment when the partition became ours.
    _in_hand: dict[int, float] = field(default_factory=dict)
    _behind: dict[int, float] = field(default_factory=dict)
    _held: set[int] = field(default_factory=set)
    # A rebalance could not look the topic up: what was read since may bear the id of a topic that is no more.
    _unsure: bool = False

    def subscribe(self, stopping: Callable[[], bool]) -> None:
        """Join the group. Raises UnavailableError, also when it should stop, or ConfigurationError."""
        kafka.existing_topics(self.admin, stopping)  # asks in short calls: a signal is not heard within one
        self.refresh()
        self.consumer.subscribe(
            [self.topic.name], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_revoke
        )

    def refresh(self, seconds: float = _CALL_SECONDS) -> None:
        """Look the topic up. Raises UnavailableError, or ConfigurationError if it does not exist."""
        self.topic = describe_topic(self.admin, self.topic.name, seconds)

    def end_offsets(self) -> dict[int, int]:
        """The end of every partition now."""
        try:
            return {
                number: self.consumer.get_watermark_offsets(
                    TopicPartition(self.topic.name, number), timeout=_CALL_SECONDS
                )[1]
                for number in range(self.topic.partition_count)
            }
        except KafkaException as error:
            raise self._unavailable(error.args[0]) from None

    def poll(self, limit: int, seconds: float) -> list[RawRecord]:
        """Take up to `limit` records and PORTION_BYTES, waiting at most so long.

        Raises UnavailableError or ConfigurationError. No record is lost to an error: the next call returns what was
        read before it.
        """
        if self._unsure:
            self._settle()
        if not self._carried:
            self._consume(limit, seconds)
        if self._unsure:  # since this call: a rebalance happened in it
            return []
        first = next(portions(self._carried[:limit], RawRecord.size), [])
        del self._carried[: len(first)]
        return first

    def _consume(self, limit: int, seconds: float) -> None:
        failure: CrmctlError | None = None
        for message in kafka.take(self.consumer, limit, PORTION_BYTES, seconds):
            if (error := message.error()) is None:
                self._keep(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                self._reach(message)
            elif error.fatal():
                raise ConfigurationError(
                    f"the group {kafka.describe(error)}",
                    hint="two consumers with one CRMCTL_CHAT_STATUS__GROUP_INSTANCE_ID?",
                )
            elif kafka.forbids(error):
                failure = self._unavailable(error)
            elif error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                failure = UnavailableError(f"cannot read {self.topic.name} ({kafka.describe(error)})")
            else:
                self.log.warning("kafka consumer", reason=kafka.describe(error))
        if failure is not None:
            raise failure

    def _unavailable(self, error: KafkaError) -> CrmctlError:
        of_group = error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED
        return kafka.unavailable(error, f"READ on {f'group {self.group}' if of_group else f'topic {self.topic.name}'}")

    def _settle(self) -> None:
        self.refresh()
        self._unsure = False
        self._carried = [
            record._replace(position=record.position._replace(topic_id=self.topic.id)) for record in self._carried
        ]
        self._resume()

    def commit(self) -> None:
        """Commit the progress of the partitions that are still ours. Raises UnavailableError."""
        done = dict(self.assigned)
        for record in reversed(self._carried):  # read, but not handled yet
            done[record.position.partition] = record.position.offset
        offsets = [
            TopicPartition(self.topic.name, number, offset)
            for number, offset in done.items()
            if offset is not None and offset != self._committed.get(number)
        ]
        if offsets:
            self._commit(offsets)
        self._in_hand.clear()
        for record in self._carried:
            self._note(record)

    def _commit(self, offsets: list[TopicPartition]) -> None:
        try:
            self.consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            if error.args[0].code() not in _MOVED_ON:
                raise self._unavailable(error.args[0]) from None
            self.log.warning("offsets not committed", reason=kafka.describe(error.args[0]))
        else:
            self._committed |= {entry.partition: entry.offset for entry in offsets}

    def hold(self, seconds: float, stopping: Callable[[], bool]) -> None:
        """Wait; polling goes on, so the group does not rebalance.

        Paused is every partition that has a record in hand. Of the others one record is read, if there is one, and
        kept for the next poll: how long it has been waiting is told by nothing else.
        """
        end = time.monotonic() + seconds
        self._hold()
        try:
            while (left := end - time.monotonic()) > 0 and not stopping():
                try:
                    self._consume(1, min(left, _HEARTBEAT_SECONDS))
                except UnavailableError as error:
                    self.log.warning("kafka consumer", reason=error.message)
                    time.sleep(min(left, _HEARTBEAT_SECONDS))
                self._hold()
        finally:
            self._held.clear()
            if not self._unsure:
                self._resume()

    def take_moved(self) -> set[int]:
        """The partitions that left us since the last call: what was read from them is their new owner's."""
        moved, self._moved = self._moved, set()
        return moved

    def at_end(self, ends: dict[int, int]) -> bool:
        """Whether every partition of ours has been read up to `ends`."""
        return (
            self.joined
            and not self._carried
            and all((offset or 0) >= ends.get(number, 0) for number, offset in self.assigned.items())
        )

    @property
    def oldest_unread_ms(self) -> float | None:
        """Kafka's timestamp of the oldest record that is not handled, as far as it is known; None: there is none.

        A partition that is not at its end and has nothing in hand counts by its last record, or by the moment when it
        became ours: its next one is younger.
        """
        return min([*self._in_hand.values(), *self._behind.values()], default=None)

    def close(self) -> None:
        """Leave the group."""
        self.consumer.close()

    def _keep(self, message: Message) -> None:
        number, offset = message.partition(), message.offset()
        assert number is not None  # noqa: S101
        assert offset is not None  # noqa: S101  a record has both
        if number in self.assigned:
            self.assigned[number] = offset + 1
            record = raw_record(message, Position(self.topic.id, number, offset), self.topic.name)
            self._carried.append(record)
            self._behind[number] = self._note(record)

    def _note(self, record: RawRecord) -> float:
        """Count a record among those in hand; return its timestamp (ms), which is now where it has none."""
        number = record.position.partition
        milliseconds = record.timestamp_ms if record.timestamp_ms >= 0 else _now_ms()
        self._in_hand.setdefault(number, milliseconds)
        return milliseconds

    def _reach(self, message: Message) -> None:
        number, offset = message.partition(), message.offset()
        if number in self.assigned and offset is not None and offset >= 0:
            self.assigned[number] = max(self.assigned[number] or 0, offset)
            self._behind.pop(number, None)

    def _hold(self) -> None:
        if fresh := self._in_hand.keys() - self._held:
            self._held |= fresh
            self._pause(fresh)

    def _pause(self, numbers: Iterable[int]) -> None:
        self.consumer.pause([TopicPartition(self.topic.name, number) for number in numbers])

    def _resume(self) -> None:
        self.consumer.resume([TopicPartition(self.topic.name, number) for number in self.assigned])

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.joined = True
        try:
            self.refresh(_CALLBACK_SECONDS)
        except (UnavailableError, ConfigurationError) as error:
            self._unsure = True
            self.log.warning("kafka consumer", reason=error.message)
        for partition in partitions:
            self.assigned[partition.partition] = None
            self._committed.pop(partition.partition, None)
            self._behind[partition.partition] = _now_ms()
        consumer.incremental_assign(partitions)
        if self._unsure:
            self._pause(self.assigned)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        for partition in partitions:
            self.assigned.pop(partition.partition, None)
            self._in_hand.pop(partition.partition, None)
            self._behind.pop(partition.partition, None)
            self._moved.add(partition.partition)
        self._carried = [record for record in self._carried if record.position.partition in self.assigned]
        if self._held or self._unsure:  # the client remembers it: what comes back to us one day would never be read
            consumer.resume(partitions)
        self._held -= {partition.partition for partition in partitions}
        consumer.incremental_unassign(partitions)


def _now_ms() -> float:
    return time.time() * 1000
