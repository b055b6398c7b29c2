"""Publishes records in order per key with at most one of a key unacknowledged, and reports each one's fate.

A batch goes out in waves: the first record of every key, then the second of those whose first was acknowledged,
and so on. So a record that the broker refuses is never overtaken by its successor. A wave is flushed, so nothing
waits for linger.ms.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Producer

from crmctl.adapters import kafka
from crmctl.adapters.kafka import Fault
from crmctl.domain.errors import CrmctlError, UnavailableError

# No wave begins later than this into a batch: with the delivery timeout of the last one, a batch stays below the
# relay's idle-in-transaction guard of 30 s.
_WAVES_SECONDS: Final = 10.0
_SLICE_SECONDS: Final = 0.1
# How long reports are waited for once a signal asks to stop; what has none by then is published again later.
_STOPPING_SECONDS: Final = 2.5


class Record(NamedTuple):
    """One record to send; `id` names it in the report, `order` is the key within which order holds."""

    id: str
    order: str
    topic: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


@dataclass(slots=True)
class Report:
    """What became of a batch: ids with an acknowledgement, ids that were refused and why, what ended it early.

    A record that is in neither was not sent, or is one of the `unknown` that were given up without a report: it is
    to be sent again.
    """

    delivered: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    unknown: int = 0
    outage: CrmctlError | None = None

    @property
    def broken_off(self) -> bool:
        """Whether nothing further may be sent: records without a report may still be on their way."""
        return self.outage is not None or self.unknown > 0


class Publisher:
    """A producer that is made when it is first needed, and made anew after an outage."""

    def __init__(
        self,
        build: Callable[[], Producer],
        *,
        delivery_timeout: float = kafka.DELIVERY_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._build = build
        self._delivery_timeout = delivery_timeout
        self._clock = clock
        self._producer: Producer | None = None
        self._topics: frozenset[str] = frozenset()

    def publish(self, records: Sequence[Record], stopping: Callable[[], bool]) -> Report:
        """Send the records in order per `order` key, until all have their report, a signal, or an outage.

        Raises nothing that the cluster does: an outage is in the report, with what was delivered before it.
        """
        report = Report()
        first: dict[str, Record] = {}
        later: dict[str, deque[Record]] = defaultdict(deque)
        for record in records:
            if first.setdefault(record.order, record) is not record:
                later[record.order].append(record)
        end = self._clock() + _WAVES_SECONDS

        def go_on() -> bool:
            return not report.broken_off and not stopping() and self._clock() < end

        try:
            producer = self._ready({record.topic for record in records}, stopping)
            wave = list(first.values())
            while wave and go_on():
                delivered = self._send_wave(producer, wave, report, stopping, go_on)
                later = {order: queue for order, queue in later.items() if order in delivered and queue}
                wave = [queue.popleft() for queue in later.values()]
        except CrmctlError as error:
            report.outage = error
        if report.broken_off:
            self._abandon()
        return report

    def close(self) -> None:
        """Let the producer go; nothing is waiting in it."""
        self._producer = None

    def _ready(self, topics: set[str], stopping: Callable[[], bool]) -> Producer:
        if self._producer is None:
            self._producer, self._topics = self._build(), frozenset()
        if not topics <= self._topics:
            # A topic that does not exist is asked for by name only once: the client would wait for it.
            self._topics = kafka.existing_topics(self._producer, stopping)
        return self._producer

    def _send_wave(
        self,
        producer: Producer,
        wave: Sequence[Record],
        report: Report,
        stopping: Callable[[], bool],
        go_on: Callable[[], bool],
    ) -> set[str]:
        """Send one record of each key; return the keys whose record was delivered.

        One oversized record can fail the whole set of records that travelled with it: those that were refused
        together are sent again one by one, and only then are they refused. What there is no time for is left.
        """
        known = [record for record in wave if record.topic in self._topics]
        if len(known) < len(wave):
            for record in wave:
                if record.topic not in self._topics:
                    report.refused[record.id] = f"UNKNOWN_TOPIC_OR_PART: topic {record.topic} does not exist"
        together = self._send(producer, known, report, stopping)
        if len(known) == 1:
            report.refused |= together.refused
        delivered = together.delivered
        if len(known) == 1 or not together.refused:
            return delivered
        for record in known:
            if record.id in together.refused and go_on():
                alone = self._send(producer, [record], report, stopping)
                delivered |= alone.delivered
                report.refused |= alone.refused
        return delivered

    def _send(
        self, producer: Producer, records: Sequence[Record], report: Report, stopping: Callable[[], bool]
    ) -> "_Flight":
        """Send records of different keys and wait for their reports, only a little longer once it should stop."""
        flight = _Flight(report)
        deadline = self._clock() + self._delivery_timeout + 1
        for record in records:
            flight.send(producer, record)
        stop_at: float | None = None
        while flight.unreported and self._clock() < min(deadline, stop_at or deadline):
            producer.flush(_SLICE_SECONDS)
            if stop_at is None and stopping():
                stop_at = self._clock() + _STOPPING_SECONDS
        report.unknown += flight.unreported
        if flight.unreported and stop_at is None and report.outage is None:
            report.outage = UnavailableError(
                f"Kafka did not acknowledge {flight.unreported} records in time", hint="check the brokers; run it again"
            )
        return flight

    def _abandon(self) -> None:
        """Give up what is still queued, so that it cannot be delivered behind the back of a later run."""
        if self._producer is not None:
            self._producer.purge()
            self._producer.flush(0)
            self._producer = None


class _Flight:
    """Records that are under way together: how many have no report yet, and what the others' reports say."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.unreported = 0
        self.delivered: set[str] = set()
        self.refused: dict[str, str] = {}

    def send(self, producer: Producer, record: Record) -> None:
        """Hand a record to the producer, waiting while its queue is full; not after an outage."""
        on_delivery = partial(self._note, record)
        while self._report.outage is None:
            try:
                producer.produce(
                    record.topic,
                    value=record.value,
                    key=record.key,
                    headers=list(record.headers),
                    on_delivery=on_delivery,
                )
            except BufferError:
                producer.poll(_SLICE_SECONDS)
            except KafkaException as error:
                self._fail(record, error.args[0])
                return
            else:
                self.unreported += 1
                return

    def _note(self, record: Record, error: KafkaError | None, _message: object) -> None:
        self.unreported -= 1
        if error is None:
            self.delivered.add(record.order)
            self._report.delivered.append(record.id)
        else:
            self._fail(record, error)

    def _fail(self, record: Record, error: KafkaError) -> None:
        if error.code() in {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}:
            return  # given up by us, after the report was closed
        if kafka.classify(error) is Fault.RECORD:
            self.refused[record.id] = kafka.describe(error)
        else:
            self._report.outage = self._report.outage or kafka.unavailable(error)
