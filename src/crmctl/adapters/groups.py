"""A consumer group as its operators see it: offsets, ends, members; and how it is moved."""

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Final, TypeVar

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec

from crmctl.adapters import kafka
from crmctl.domain.errors import GroupActiveError

T = TypeVar("T")

_CALL_SECONDS: Final = 10.0
_READ_SECONDS: Final = 5.0
# The group's coordinator is starting, or has just moved.
_MOVING: Final = frozenset(
    {KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.NOT_COORDINATOR}
)
_MOVING_SECONDS: Final = 0.2


def committed(reader: Consumer, topic: str, partitions: Iterable[int]) -> dict[int, int]:
    """The committed offsets of the reader's group by partition, without joining it; those without one are missing.

    Not asked through an admin client: librdkafka (2.16 too) ends the process when the group's coordinator has
    just moved or is still loading (confluentinc/librdkafka#5040).
    """
    try:
        asked = [TopicPartition(topic, number) for number in partitions]
        found = _once_settled(lambda: reader.committed(asked, timeout=_CALL_SECONDS))
    except KafkaException as error:
        raise kafka.unavailable(error.args[0]) from None
    return {entry.partition: entry.offset for entry in found if entry.offset >= 0}


def offsets(client: AdminClient, topic: str, partitions: Iterable[int], at: str | datetime) -> dict[int, int]:
    """The offsets of `earliest`, `latest`, or of the first record at or after a moment (-1: there is none)."""
    if isinstance(at, datetime):
        spec: Any = OffsetSpec.for_timestamp(round(at.timestamp() * 1000))
    else:
        spec = OffsetSpec.earliest() if at == "earliest" else OffsetSpec.latest()
    asked = {TopicPartition(topic, number): spec for number in partitions}
    try:
        futures = client.list_offsets(
            asked, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=_CALL_SECONDS
        )
        return {partition.partition: future.result().offset for partition, future in futures.items()}
    except KafkaException as error:
        raise kafka.unavailable(error.args[0]) from None


def partitions(client: AdminClient, topic: str) -> list[int]:
    """The topic's partitions; none where it does not exist."""
    try:
        found = client.list_topics(timeout=_CALL_SECONDS).topics.get(topic)
    except KafkaException as error:
        raise kafka.unavailable(error.args[0]) from None
    return sorted(found.partitions) if found is not None else []


def member_count(client: AdminClient, group: str) -> int:
    """How many members the group has; 0 where there is no such group."""
    try:
        description = _once_settled(
            lambda: client.describe_consumer_groups([group], request_timeout=_CALL_SECONDS)[group].result()
        )
    except KafkaException as error:
        if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
            return 0
        raise kafka.unavailable(error.args[0]) from None
    return len(description.members)


def check_empty(client: AdminClient, group: str) -> None:
    """Raise GroupActiveError while the group has members."""
    if members := member_count(client, group):
        raise _active(group, members)


def move(client: AdminClient, group: str, topic: str, to: Mapping[int, int]) -> None:
    """Set the group's offsets. Raises GroupActiveError where a member has joined meanwhile."""
    target = [TopicPartition(topic, number, offset) for number, offset in to.items()]
    try:
        request = [ConsumerGroupTopicPartitions(group, target)]
        result = client.alter_consumer_group_offsets(request, request_timeout=_CALL_SECONDS)[group].result()
        for partition in result.topic_partitions or ():
            if partition.error is not None:
                raise KafkaException(partition.error)
    except KafkaException as error:
        if error.args[0].code() in {KafkaError.UNKNOWN_MEMBER_ID, KafkaError.NON_EMPTY_GROUP}:
            raise _active(group, None) from None
        raise kafka.unavailable(error.args[0]) from None


def timestamps(consumer: Consumer, topic: str, at: Mapping[int, int]) -> dict[int, int]:
    """Kafka's timestamps (ms) of the first records at or after the given offsets; without joining the group.

    The consumer has nothing assigned afterwards, and may be used again.
    """
    found: dict[int, int] = {}
    try:
        consumer.assign([TopicPartition(topic, number, offset) for number, offset in at.items()])
        while len(found) < len(at) and (message := consumer.poll(_READ_SECONDS)) is not None:
            number, error = message.partition(), message.error()
            if error is not None and kafka.forbids(error):
                raise kafka.unavailable(error, f"READ on topic {topic}")
            if error is None and number is not None and number not in found:
                found[number] = message.timestamp()[1]
                consumer.pause([TopicPartition(topic, number)])
    except KafkaException as error:
        raise kafka.unavailable(error.args[0]) from None
    finally:
        consumer.unassign()
    return found


def _once_settled(call: Callable[[], T]) -> T:
    """Make a call again, for some seconds, while the group's coordinator is on its way."""
    end = time.monotonic() + _READ_SECONDS
    while True:
        try:
            return call()
        except KafkaException as error:
            if error.args[0].code() not in _MOVING or time.monotonic() > end:
                raise
            time.sleep(_MOVING_SECONDS)


def _active(group: str, members: int | None) -> GroupActiveError:
    count = "" if members is None else f"{members} "
    return GroupActiveError(
        f"group {group} still has {count}members", hint="stop every consumer of the group first; then run it again"
    )
