"""Fixtures: one Kafka per session, topics of its own for each test.

It is the broker that `CRMCTL_TEST_KAFKA` names, else an embedded Apache Kafka, else librdkafka's mock cluster.
Tests marked `real_kafka` are skipped where there is only the mock; with `CRMCTL_REQUIRE_REAL_KAFKA=1` the
mock is a failure instead.
"""

import itertools
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic  # .admin has it too, but does not tell mypy

from crmctl.dev.kafka import temporary_broker
from crmctl.dev.kafka_maven import why_not_here
from crmctl.dev.kafka_mock import PARTITIONS

# Read before any fixture runs: conftest.py hides crmctl's settings from the tests.
_GIVEN = os.environ.get("CRMCTL_TEST_KAFKA")
_REAL_REQUIRED = os.environ.get("CRMCTL_REQUIRE_REAL_KAFKA") == "1"

_SECONDS = 30.0
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A record to produce; without a partition its key decides."""

    value: bytes | str | None
    key: bytes | str | None = None
    headers: tuple[tuple[str, bytes | str | None], ...] = ()
    partition: int = -1
    timestamp_ms: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """A record as a consumer sees it."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class Kafka:
    """The session's Kafka, and what tests do to it."""

    bootstrap_servers: str
    kind: Literal["external", "apache-kafka", "librdkafka-mock"]

    @property
    def is_real(self) -> bool:
        return self.kind != "librdkafka-mock"

    def admin(self) -> AdminClient:
        """Keep it in a variable until its futures are done: they fail when it is collected."""
        return AdminClient({"bootstrap.servers": self.bootstrap_servers})

    def produce(self, topic: str, records: Iterable[Outgoing | bytes | str], **settings: Any) -> list[Record]:
        """Produce and wait; returns the records with their partitions and offsets, in order of acknowledgement."""
        return produce(self.bootstrap_servers, topic, records, **settings)

    def read(self, topic: str, **settings: Any) -> list[Record]:
        """Every record up to the end offsets of this moment, by partition, then offset."""
        return read_topic(self.bootstrap_servers, topic, **settings)


class MakeTopic(Protocol):
    """Create a topic for the test and return its name; it is gone afterwards."""

    def __call__(
        self, name: str | None = None, *, partitions: int = PARTITIONS, config: Mapping[str, str] | None = None
    ) -> str: ...


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture of a test marked `real_kafka`, or `real_kafka(embedded=True)` if it starts its own broker."""
    marker = item.get_closest_marker("real_kafka")
    if marker is None or (_GIVEN and not marker.kwargs.get("embedded")):
        return
    reason = why_not_here()
    if reason is not None:
        skip_or_fail(f"there is no real Kafka broker: {reason}")


def skip_or_fail(reason: str) -> NoReturn:
    """Skip a test that real Kafka, or what comes with it, is wanting for; fail it where that is required."""
    if _REAL_REQUIRED:
        pytest.fail(f"CRMCTL_REQUIRE_REAL_KAFKA is set, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def kafka() -> Iterator[Kafka]:
    if _GIVEN:
        yield Kafka(_GIVEN, "external")
        return
    if _REAL_REQUIRED and (reason := why_not_here()):
        skip_or_fail(reason)
    with temporary_broker() as broker:
        yield Kafka(broker.bootstrap_servers, broker.kind)


@pytest.fixture
def make_topic(kafka: Kafka) -> Iterator[MakeTopic]:
    """On the mock, a topic with a name, another number of partitions or settings of its own skips the test."""
    made: list[str] = []

    def make(name: str | None = None, *, partitions: int = PARTITIONS, config: Mapping[str, str] | None = None) -> str:
        if not kafka.is_real and (name is not None or partitions != PARTITIONS or config):
            pytest.skip("librdkafka's mock cluster makes topics in one way only, and never removes one")
        name = name or f"test.{uuid.uuid4().hex[:8]}.{next(_numbers)}"
        if kafka.is_real:
            made.append(name)
            create_topic(kafka.bootstrap_servers, name, partitions=partitions, config=config)
        else:
            wait_for_topic(kafka.bootstrap_servers, name)
        return name

    yield make
    delete_topics(kafka.bootstrap_servers, made)


def create_topic(
    bootstrap_servers: str, name: str, *, partitions: int = PARTITIONS, config: Mapping[str, str] | None = None
) -> None:
    """Create a topic on a real broker and wait until it can be used."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    admin.create_topics([NewTopic(name, partitions, 1, config=dict(config or {}))])[name].result(_SECONDS)
    wait_for_topic(bootstrap_servers, name)


def delete_topics(bootstrap_servers: str, names: Iterable[str]) -> None:
    """Delete those of the topics that are there, and wait until no client is told of them."""
    if not (doomed := set(names)):
        return
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    for deleted in admin.delete_topics(list(doomed)).values():
        try:
            deleted.result(_SECONDS)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
    deadline = time.monotonic() + _SECONDS
    while left := doomed & set(admin.list_topics(timeout=_SECONDS).topics):
        assert time.monotonic() < deadline, f"{left} are still there"
        time.sleep(0.02)


def wait_for_topic(bootstrap_servers: str, topic: str) -> None:
    """Wait until every partition of the topic has a leader."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    deadline = time.monotonic() + _SECONDS
    while True:
        found = admin.list_topics(topic, timeout=_SECONDS).topics[topic]
        leaders = [partition.leader for partition in found.partitions.values()]
        if found.error is None and leaders and min(leaders) >= 0:
            return
        assert time.monotonic() < deadline, f"{topic} has no leaders: {found.error}"
        time.sleep(0.02)


def produce(
    bootstrap_servers: str, topic: str, records: Iterable[Outgoing | bytes | str], **settings: Any
) -> list[Record]:
    """Produce and wait for every acknowledgement; `settings` are librdkafka's, with _ for the dots."""
    delivered: list[Record] = []
    refused: list[KafkaError] = []

    def on_delivery(error: KafkaError | None, message: Message) -> None:
        if error is None:
            delivered.append(_record(message))
        else:
            refused.append(error)

    # Not idempotent: asking for a producer id takes half a second.
    defaults: dict[str, Any] = {"bootstrap.servers": bootstrap_servers, "acks": "all", "max.in.flight": 1}
    producer = Producer(defaults | {"linger.ms": 0} | _dotted(settings))
    for record in records:
        outgoing = record if isinstance(record, Outgoing) else Outgoing(record)
        while True:
            try:
                producer.produce(
                    topic,
                    outgoing.value,
                    outgoing.key,
                    outgoing.partition,
                    on_delivery,
                    timestamp=outgoing.timestamp_ms,
                    headers=list(outgoing.headers),
                )
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(_SECONDS) == 0, f"{topic}: not everything was acknowledged in {_SECONDS} s"
    assert not refused, f"{topic}: {refused[0]}"
    return delivered


def read_topic(bootstrap_servers: str, topic: str, **settings: Any) -> list[Record]:
    """Read a topic from its beginning to the end offsets of this moment; `settings` as for `produce`.

    What no consumer gets (transaction markers, aborted and compacted records) ends no wait and no reading.
    """
    defaults: dict[str, Any] = {
        "bootstrap.servers": bootstrap_servers,
        "group.id": f"test-{uuid.uuid4()}",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
    }
    consumer = Consumer(defaults | _dotted(settings))
    try:
        partitions = consumer.list_topics(topic, timeout=_SECONDS).topics[topic].partitions
        ends = {
            number: consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=_SECONDS)[1]
            for number in partitions
        }
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
        records: list[Record] = []
        unread = set(partitions)
        deadline = time.monotonic() + _SECONDS
        while unread:
            assert time.monotonic() < deadline, f"{topic}: partitions {unread} did not end in {_SECONDS} s"
            message = consumer.poll(0.1)
            if message is None:
                continue
            number, offset, error = message.partition(), message.offset(), message.error()
            assert number is not None
            assert offset is not None
            if error is not None:
                assert error.code() == KafkaError._PARTITION_EOF, f"{topic}: {error}"
            elif offset < ends[number]:
                records.append(_record(message))
            if error is not None or offset >= ends[number] - 1:
                unread.discard(number)
        return sorted(records, key=lambda record: (record.partition, record.offset))
    finally:
        consumer.close()


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether the condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "."): value for name, value in settings.items()}


def _record(message: Message) -> Record:
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None
    assert partition is not None
    assert offset is not None
    headers: Any = message.headers() or []
    return Record(topic, partition, offset, message.key(), message.value(), tuple(headers), message.timestamp()[1])
