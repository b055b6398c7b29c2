"""A Kafka record as it is in its topic, byte for byte, and what the cluster says of the topic."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple, TypeVar, cast

from confluent_kafka import KafkaError, KafkaException, Message, TopicCollection
from confluent_kafka.admin import AdminClient

from crmctl.adapters import kafka
from crmctl.domain.chat_status import Position
from crmctl.domain.errors import ConfigurationError

T = TypeVar("T")

Headers = tuple[tuple[str, bytes | None], ...]

# Records are kept, written and sent on in portions of so many bytes, or of one record that has more.
PORTION_BYTES: Final = 8 * 1024 * 1024


class RawRecord(NamedTuple):
    """A record as it is in its topic: `timestamp_ms` is Kafka's, -1 where there is none."""

    position: Position
    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int

    def size(self) -> int:
        """Bytes of its key, value and headers."""
        size = len(self.key or b"") + len(self.value or b"")
        for name, value in self.headers:
            size += len(name) + len(value or b"")
        return size


class Topic(NamedTuple):
    """What the cluster says of a topic: its id changes when the topic is re-created."""

    name: str
    id: str = ""
    partition_count: int = 0


def portions(items: Iterable[T], size: Callable[[T], int], limit: int = PORTION_BYTES) -> Iterator[list[T]]:
    """Split into lists of at most `limit` bytes each, or of a single larger item."""
    portion: list[T] = []
    total = 0
    for item in items:
        bytes_ = size(item)
        if portion and total + bytes_ > limit:
            yield portion
            portion, total = [], 0
        portion.append(item)
        total += bytes_
    if portion:
        yield portion


def describe_topic(admin: AdminClient, name: str, seconds: float) -> Topic:
    """Look a topic up. Raises UnavailableError, or ConfigurationError if it does not exist."""
    try:
        cluster = admin.list_topics(name, timeout=seconds)
        if kafka.is_mock(cluster.cluster_id):
            return Topic(name, "mock", len(cluster.topics[name].partitions))
        futures = admin.describe_topics(TopicCollection([name]), request_timeout=seconds)
        description = futures[name].result()
    except KafkaException as error:
        if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise ConfigurationError(
                f"topic {name} does not exist", hint="its owner creates it; see crmctl topics check"
            ) from None
        raise kafka.unavailable(error.args[0], f"DESCRIBE on topic {name}") from None
    return Topic(name, str(description.topic_id), len(description.partitions))


def raw_record(message: Message, position: Position, topic: str) -> RawRecord:
    """The record of a message without an error."""
    kind, timestamp = message.timestamp()
    return RawRecord(
        position=position,
        topic=topic,
        key=_bytes(message.key()),
        value=_bytes(message.value()),
        headers=_headers(message),
        timestamp_ms=timestamp if kind else -1,
    )


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _headers(message: Message) -> Headers:
    try:
        headers = message.headers() or []
    except (UnicodeDecodeError, SystemError):  # a name that is not UTF-8: the client gives none of them
        return ()
    return tuple(cast("list[tuple[str, bytes | None]]", headers))  # those of a record that was read are bytes
