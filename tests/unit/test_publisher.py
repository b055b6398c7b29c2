"""The publisher against a client that refuses, loses and stalls as it likes: nothing is overtaken, nothing is blamed.

The fake stands at the boundary to librdkafka: it is what `confluent_kafka.Producer` is to the publisher.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from hypothesis import given, settings
from hypothesis import strategies as st

from crmctl.adapters.publisher import Publisher, Record, Report

TOPIC: Final = "events"
# The relay's guard: PostgreSQL ends a transaction that waits for Kafka longer than this.
IDLE_GUARD_SECONDS: Final = 30.0

OnDelivery = Callable[[KafkaError | None, object], None]


def record(order: str, number: int, topic: str = TOPIC) -> Record:
    return Record(f"{order}/{number}", order, topic, order.encode(), f"{number}".encode(), ())


def never() -> bool:
    return False


@dataclass(slots=True)
class Cluster:
    """The brokers and the network as one; `whims` decides what happens next, `now` is the time."""

    whims: random.Random
    bad: set[tuple[bytes, bytes]] = field(default_factory=set)
    outages: float = 0.0
    refuses_sets: float = 1.0
    sends_whole_queues: float = 0.5
    capacity: int = 1000
    seconds_per_set: float = 0.01
    now: float = 0.0
    log: list[tuple[bytes, bytes]] = field(default_factory=list)
    acknowledged: set[tuple[bytes, bytes]] = field(default_factory=set)
    refused_alone: set[tuple[bytes, bytes]] = field(default_factory=set)

    def publisher(self) -> Publisher:
        return Publisher(lambda: cast(Producer, FakeProducer(self)), clock=lambda: self.now)

    def first_arrivals(self, order: str) -> list[int]:
        numbers = [int(value) for key, value in self.log if key == order.encode()]
        return list(dict.fromkeys(numbers))


class FakeProducer:
    """One client of the cluster: a queue that goes out in sets, and a report for every record, now or later."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.queue: list[tuple[bytes, bytes, OnDelivery]] = []

    def list_topics(self, timeout: float) -> Any:
        if self.cluster.whims.random() < self.cluster.outages / 4:
            raise KafkaException(KafkaError(KafkaError._ALL_BROKERS_DOWN))
        return SimpleNamespace(topics={TOPIC: None})

    def produce(self, topic: str, value: bytes, key: bytes, headers: Sequence[object], on_delivery: OnDelivery) -> None:
        assert topic == TOPIC, "asked for a topic that does not exist"
        assert key not in {queued[0] for queued in self.queue}, "two unacknowledged records of one key"
        if len(self.queue) >= self.cluster.capacity:
            raise BufferError
        self.queue.append((key, value, on_delivery))

    def poll(self, timeout: float) -> int:
        self._advance(timeout)
        return 1

    def flush(self, timeout: float) -> int:
        self._advance(timeout)
        return len(self.queue)

    def purge(self) -> None:
        for _, _, on_delivery in self.queue:
            on_delivery(KafkaError(KafkaError._PURGE_QUEUE), None)
        self.queue.clear()

    def _advance(self, timeout: float) -> None:
        cluster, whims = self.cluster, self.cluster.whims
        if not self.queue or whims.random() < 0.1:
            cluster.now += timeout
            return
        cluster.now += cluster.seconds_per_set
        size = len(self.queue) if whims.random() < cluster.sends_whole_queues else whims.randint(1, len(self.queue))
        sent, alone = self.queue[:size], len(self.queue) == 1
        self.queue = self.queue[size:]
        if whims.random() < cluster.outages:
            self._lose(sent)
        elif any(entry[:2] in cluster.bad for entry in sent) and (alone or whims.random() < cluster.refuses_sets):
            for entry in sent:
                self._refuse(entry, alone=alone)
        else:
            for entry in sent:
                if entry[:2] in cluster.bad:
                    self._refuse(entry, alone=alone)
                else:
                    self._accept(entry)

    def _lose(self, sent: Sequence[tuple[bytes, bytes, OnDelivery]]) -> None:
        """No answer came in time; the records may have been written all the same."""
        written = self.cluster.whims.random() < 0.5
        for key, value, on_delivery in sent:
            if written and (key, value) not in self.cluster.bad:
                self.cluster.log.append((key, value))
            on_delivery(KafkaError(KafkaError._MSG_TIMED_OUT), None)

    def _refuse(self, entry: tuple[bytes, bytes, OnDelivery], *, alone: bool) -> None:
        if alone:
            self.cluster.refused_alone.add(entry[:2])
        entry[2](KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), None)

    def _accept(self, entry: tuple[bytes, bytes, OnDelivery]) -> None:
        self.cluster.log.append(entry[:2])
        self.cluster.acknowledged.add(entry[:2])
        entry[2](None, None)


@dataclass(slots=True)
class Outbox:
    """What the relay does around the publisher: who is pending, and which keys wait behind a refused record."""

    pending: list[Record]
    held: set[str] = field(default_factory=set)

    def batch(self, *, retry: bool) -> list[Record]:
        """Everything that is not held, and of held keys the first record if their pause is over."""
        heads: dict[str, Record] = {}
        for entry in self.pending:
            heads.setdefault(entry.order, entry)
        free = [entry for entry in self.pending if entry.order not in self.held]
        return [heads[order] for order in sorted(self.held) if retry and order in heads] + free

    def mark(self, report: Report) -> None:
        by_id = {entry.id: entry for entry in self.pending}
        for delivered in report.delivered:
            self.held.discard(by_id[delivered].order)
        self.held |= {by_id[refused].order for refused in report.refused}
        self.pending = [entry for entry in self.pending if entry.id not in set(report.delivered)]


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    bad=st.sets(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=4),
    outages=st.sampled_from([0.0, 0.05, 0.3]),
    refuses_sets=st.sampled_from([0.0, 0.5, 1.0]),
    capacity=st.sampled_from([1, 2, 1000]),
    stops=st.sampled_from([0.0, 0.02]),
    seed=st.integers(0, 2**32 - 1),
)
def test_whatever_the_cluster_does_order_holds_and_only_the_guilty_are_refused(
    lengths: list[int],
    bad: set[tuple[int, int]],
    outages: float,
    refuses_sets: float,
    capacity: int,
    stops: float,
    seed: int,
) -> None:
    whims = random.Random(seed)
    keys = [f"key-{n}" for n in range(len(lengths))]
    records = [
        record(key, n) for n in range(max(lengths)) for key, length in zip(keys, lengths, strict=True) if n < length
    ]
    cluster = Cluster(
        whims,
        bad={(f"key-{key}".encode(), f"{number}".encode()) for key, number in bad},
        outages=outages,
        refuses_sets=refuses_sets,
        capacity=capacity,
    )
    publisher, outbox = cluster.publisher(), Outbox(records)
    by_id = {entry.id: (entry.order.encode(), entry.value) for entry in records}
    for attempt in range(8):
        sent = outbox.batch(retry=attempt % 2 == 1)
        started = cluster.now
        report = publisher.publish(sent, lambda: whims.random() < stops)
        assert cluster.now - started < IDLE_GUARD_SECONDS
        assert len(set(report.delivered)) == len(report.delivered)
        assert set(report.delivered) | set(report.refused) <= {entry.id for entry in sent}
        assert not set(report.delivered) & set(report.refused)
        assert {by_id[delivered] for delivered in report.delivered} <= cluster.acknowledged
        assert {by_id[refused] for refused in report.refused} <= cluster.refused_alone & cluster.bad
        outbox.mark(report)
    cluster.bad.clear()
    cluster.outages = 0.0
    for _ in range(len(records) + 1):
        outbox.mark(publisher.publish(outbox.batch(retry=True), never))
    assert outbox.pending == []
    for key, length in zip(keys, lengths, strict=True):
        assert cluster.first_arrivals(key) == list(range(length))


def test_the_first_record_of_every_key_goes_out_before_the_second_of_any() -> None:
    cluster = Cluster(random.Random(1))
    records = [record(key, number) for key in "abc" for number in range(3)]
    report = cluster.publisher().publish(records, never)
    assert report == Report(delivered=[record(key, number).id for number in range(3) for key in "abc"])


def test_what_was_refused_with_others_is_sent_alone_and_only_the_guilty_one_is_refused() -> None:
    cluster = Cluster(random.Random(1), bad={(b"b", b"0")})
    records = [record(key, number) for key in "abc" for number in range(2)]
    report = cluster.publisher().publish(records, never)
    assert list(report.refused) == [record("b", 0).id]
    assert set(report.delivered) == {record(key, number).id for key in "ac" for number in range(2)}
    assert report.outage is None


def test_a_topic_that_does_not_exist_is_never_asked_for_and_refuses_its_records_only() -> None:
    cluster = Cluster(random.Random(1))
    report = cluster.publisher().publish([record("a", 0, "nowhere"), record("b", 0), record("a", 1, "nowhere")], never)
    assert report.delivered == [record("b", 0).id]
    assert list(report.refused) == [record("a", 0, "nowhere").id]
    assert "nowhere" in report.refused[record("a", 0, "nowhere").id]


@pytest.mark.parametrize("seconds_per_set", [0.01, 0.1, 1.0])
def test_many_refused_together_do_not_outlast_the_guard_of_the_transaction(seconds_per_set: float) -> None:
    """A slow broker refuses a set of 500: PostgreSQL would end the transaction, and nothing would be marked."""
    records = [record(f"key-{n}", 0) for n in range(500)]
    cluster = Cluster(random.Random(1), bad={(b"key-7", b"0")}, sends_whole_queues=1.0, seconds_per_set=seconds_per_set)
    publisher, outbox = cluster.publisher(), Outbox(records)
    longest = 0.0
    for _ in range(100):
        before, started = len(outbox.pending), cluster.now
        outbox.mark(publisher.publish(outbox.batch(retry=False), never))
        longest = max(longest, cluster.now - started)
        if len(outbox.pending) in {before, 1}:
            break
    assert [entry.order for entry in outbox.pending] == ["key-7"]
    assert longest < IDLE_GUARD_SECONDS


def test_a_silent_broker_is_an_outage_in_time_and_nothing_counts_as_delivered_or_refused() -> None:
    class Silent(FakeProducer):
        def _advance(self, timeout: float) -> None:
            self.cluster.now += timeout

    cluster = Cluster(random.Random(1))
    client = Silent(cluster)
    publisher = Publisher(lambda: cast(Producer, client), clock=lambda: cluster.now)
    report = publisher.publish([record("a", 0), record("b", 0)], never)
    assert report.outage is not None
    assert (report.delivered, report.refused) == ([], {})
    assert 15 <= cluster.now < IDLE_GUARD_SECONDS
    assert client.queue == [], "what was given up could still arrive behind the back of a later run"


def test_after_an_outage_the_next_batch_gets_a_client_of_its_own() -> None:
    cluster = Cluster(random.Random(1), outages=1.0)
    made: list[FakeProducer] = []

    def build() -> Producer:
        made.append(FakeProducer(cluster))
        return cast(Producer, made[-1])

    publisher = Publisher(build, clock=lambda: cluster.now)
    while not publisher.publish([record("a", 0)], never).outage:
        pass
    cluster.outages = 0.0
    assert publisher.publish([record("a", 0)], never).delivered == [record("a", 0).id]
    assert publisher.publish([record("a", 1)], never).delivered == [record("a", 1).id]
    assert len(made) == 2
    assert made[0].queue == []


def test_once_it_should_stop_nothing_new_is_sent() -> None:
    cluster = Cluster(random.Random(1))
    report = cluster.publisher().publish([record("a", n) for n in range(100)], lambda: len(cluster.log) >= 3)
    assert len(report.delivered) == len(cluster.log) == 3
    assert report.outage is None
