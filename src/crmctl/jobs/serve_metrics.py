"""`crmctl metrics serve`: figures of the database and of Kafka, read when Prometheus asks.

The one-shot jobs cannot be scraped, so their state is read from what they left. A new gauge is one more function in
MAIN, EVERYWHERE or KAFKA. A source that fails or does not answer in time loses its series until it answers again, and
`crm_scrape_up` says so.

Where bitrix24-php-lib's tables are in a database of their own, the source `installations` has that database's queues
and jobs as well; the label `database` tells them apart.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import Final

import psycopg
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from crmctl.adapters import bitrix24_tables, postgres
from crmctl.adapters.postgres import Database, Transaction
from crmctl.adapters.topic_reader import TopicReader
from crmctl.domain.databases import DatabaseName
from crmctl.domain.errors import CrmctlError
from crmctl.jobs import figures, list_dead_letters, list_installations
from crmctl.jobs.dead_letters import closed_count, floors
from crmctl.settings import Bitrix24Settings
from crmctl.telemetry.logs import Log

# Seconds. Prometheus gives a scrape ten; scrapes that come together share one snapshot.
MAX_AGE: Final = 5.0
TIMEOUT: Final = 8.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the collectors of Kafka look at; `reader` asks for its group's offsets and never joins."""

    client: AdminClient
    reader: Consumer
    topic: str


@dataclass(frozen=True, slots=True)
class Place:
    """Which database the collectors look at, and the jobs that run there."""

    name: DatabaseName
    jobs: tuple[str, ...]


def bookings(tx: Transaction) -> Iterator[Metric]:
    """The two timers of UC-BKG-003."""
    found = figures.bookings(tx)
    due = _family("crm_bookings_due", "Bookings that are due and may expire", "phase")
    oldest = _family("crm_bookings_oldest_due_seconds", "Seconds since the oldest of their deadlines, or 0", "phase")
    for name, phase in found.phases.items():
        due.add_metric([name], phase.due_count)
        oldest.add_metric([name], phase.oldest_due_seconds)
    yield due
    yield oldest
    yield _gauge(
        "crm_bookings_poison", "Bookings that the last recorded run of the expiry could not expire", found.poison_count
    )
    yield _gauge(
        "crm_bookings_never_expire", "Active bookings with a missing or infinite deadline", found.never_expire_count
    )


def outbox(tx: Transaction, place: Place) -> Iterator[Metric]:
    """What the relay has not published yet."""
    found = figures.outbox(tx)
    pending = _family("crm_outbox_pending", "Outbox messages that wait to be published", "database")
    held = _family("crm_outbox_held", "Outbox messages that wait behind a refused one", "database")
    oldest = _family(
        "crm_outbox_oldest_unpublished_seconds",
        "Seconds since the oldest unpublished outbox message was written, or 0",
        "database",
    )
    pending.add_metric([place.name], found.pending_count)
    held.add_metric([place.name], found.held_count)
    oldest.add_metric([place.name], found.oldest_unpublished_seconds)
    yield pending
    yield held
    yield oldest


def jobs(tx: Transaction, place: Place) -> Iterator[Metric]:
    """What the jobs left; a job that never did anything has left nothing."""
    success = _family("crm_job_last_success_timestamp_seconds", "When a job last committed a batch", "job", "database")
    failure = _family("crm_job_last_failure_timestamp_seconds", "When a job last rolled back", "job", "database")
    paused = _family("crm_job_paused", "Whether a job is paused", "job", "database")
    for job in figures.jobs(tx, place.jobs, place.name):
        labels = [job.job, job.database]
        paused.add_metric(labels, int(job.paused))
        if job.last_success_at is not None:
            success.add_metric(labels, job.last_success_at.timestamp())
        if job.last_failure_at is not None:
            failure.add_metric(labels, job.last_failure_at.timestamp())
    yield success
    yield failure
    yield paused


def prunable(tx: Transaction, place: Place) -> Iterator[Metric]:
    """What prune has to delete one day: by its age one sees whether prune runs, also if it never has."""
    oldest = _family(
        "crm_prunable_oldest_seconds", "Seconds since the oldest run record that prune may delete", "database"
    )
    oldest.add_metric([place.name], figures.oldest_prunable_seconds(tx, place.jobs))
    yield oldest


def deferred(tx: Transaction) -> Iterator[Metric]:
    """Chat-status events that wait for their deal."""
    found = figures.deferred(tx)
    yield _gauge("crm_chat_status_deferred", "Chat-status events that wait for their deal", found.deferred_count)
    yield _gauge(
        "crm_chat_status_oldest_deferred_seconds",
        "Seconds since the oldest of them was deferred, or 0",
        found.oldest_deferred_seconds,
    )


def group(cluster: Cluster) -> Iterator[Metric]:
    """How far the consumer group is behind, and how near retention has come to it."""
    lag = _family("crm_chat_status_group_lag_messages", "Records that the consumer group has not read", "partition")
    headroom = _family(
        "crm_chat_status_retention_headroom_messages",
        "Committed offset minus log start: 0 or less after the log has moved means records were lost unread",
        "partition",
    )
    places = figures.partitions(cluster.client, cluster.reader, cluster.topic)
    for partition in places:
        lag.add_metric([str(partition.partition)], partition.lag)
        if partition.headroom is not None:
            headroom.add_metric([str(partition.partition)], partition.headroom)
    yield lag
    yield headroom
    yield _gauge(
        "crm_chat_status_group_lag_seconds",
        "Seconds since the oldest record that the consumer group has not read, or 0",
        figures.oldest_unread_seconds(cluster.reader, cluster.topic, places),
    )


def installations(tx: Transaction, settings: Bitrix24Settings) -> Iterator[Metric]:
    """Installations whose finish step has not arrived."""
    found = list_installations.figures(tx, settings)
    yield _gauge("crm_installations_stale", "Installations that are new beyond the default TTL", found["stale_count"])
    yield _gauge(
        "crm_installations_unclear", "New installations whose portal gave no clear answer", found["unclear_count"]
    )
    yield _gauge(
        "crm_installations_anomalies", "New installations that the sweep must leave alone", found["anomaly_count"]
    )


MAIN: Final[list[Callable[[Transaction], Iterable[Metric]]]] = [bookings, deferred]
EVERYWHERE: Final[list[Callable[[Transaction, Place], Iterable[Metric]]]] = [outbox, jobs, prunable]
KAFKA: Final[list[Callable[[Cluster], Iterable[Metric]]]] = [group]


def read_database(database: Database, place: Place) -> list[Metric]:
    """Run every collector of the main database in one read-only transaction."""
    try:
        tx = database.begin(read_only=True)
        found = [metric for collector in MAIN for metric in collector(tx)]
        found += [metric for queue in EVERYWHERE for metric in queue(tx, place)]
        database.rollback()
    except BaseException:
        database.close()
        raise
    return found


def read_kafka(cluster: Cluster) -> list[Metric]:
    """Run every collector of Kafka."""
    return [metric for collector in KAFKA for metric in collector(cluster)]


def read_installations(database: Database, settings: Bitrix24Settings, place: Place | None) -> list[Metric]:
    """Read the installations' figures, where they live, in one read-only transaction; none where nobody uses Bitrix24.

    A place says that this database is another than the main one: its queues are read then as well.
    """
    try:
        tx = database.begin(read_only=True)
        found = [metric for queue in EVERYWHERE for metric in queue(tx, place)] if place is not None else []
        if bitrix24_tables.exist(tx, settings):
            found += installations(tx, settings)
        database.rollback()
    except BaseException:
        database.close()
        raise
    return found


@dataclass(slots=True)
class OpenLetters:
    """Counts open dead letters as `dlq list` does, when the topic or the ledger has changed."""

    database: Database
    open_reader: Callable[[], TopicReader]
    _floors: Mapping[int, int] = field(default_factory=dict)
    _counted: tuple[object, ...] | None = None
    _count: int = 0

    def read(self) -> list[Metric]:
        """Read the topic beside its ledger. Raises what the two raise."""
        reader = self.open_reader()
        try:
            tx = self.database.begin(read_only=True)
            if self._state(tx, reader) != self._counted:
                # The state first: what is committed between the two is in the count, and counted again next time.
                self._floors = floors(tx, reader)
                state = self._state(tx, reader)
                found = list_dead_letters.query(tx, reader, list_dead_letters.Options(), lambda _: None)
                self._counted, self._count = state, found["open_count"]
            self.database.rollback()
        except BaseException:
            # Another server may answer next, or the same one from a backup.
            self._counted = None
            self.database.close()
            raise
        finally:
            reader.close()
        return [_gauge("crm_chat_status_dlq_open", "Dead letters that nobody has resolved", self._count)]

    def _state(self, tx: Transaction, reader: TopicReader) -> tuple[object, ...]:
        """What the count goes by: the topic as it is, and what is closed in it since the floors were found."""
        return reader.topic.id, reader.first, reader.ends, closed_count(tx, reader, self._floors)


class Exporter(Collector):
    """Takes a snapshot of every source when a scrape finds the last one too old."""

    def __init__(
        self,
        sources: Mapping[str, Callable[[], list[Metric]]],
        log: Log,
        *,
        max_age: float = MAX_AGE,
        timeout: float = TIMEOUT,
    ) -> None:
        self._readers = [_Reader(name, read, log) for name, read in sources.items()]
        self._max_age = max_age
        self._timeout = timeout
        self._lock = Lock()
        self._taken_at: float | None = None
        self._snapshot: list[Metric] = []

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry need not read the sources to know this collector."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The snapshot, no older than the cache allows."""
        with self._lock:
            now = time.monotonic()
            if self._taken_at is None or now - self._taken_at >= self._max_age:
                self._snapshot = self._take(now + self._timeout)
                self._taken_at = time.monotonic()
            return list(self._snapshot)

    @property
    def ready(self) -> bool:
        """Whether a scrape has been answered, or can be: the sources may be down, that is what it reports."""
        if self._taken_at is None:
            self.collect()
        return True

    def _take(self, deadline: float) -> list[Metric]:
        for reader in self._readers:
            reader.start()
        up = _family("crm_scrape_up", "Whether the source answered the last snapshot", "source")
        found: dict[str, Metric] = {}
        for reader in self._readers:
            metrics = reader.result(deadline)
            up.add_metric([reader.name], int(metrics is not None))
            for metric in metrics or ():
                # Of two databases: a family is shown once.
                if metric.name in found:
                    found[metric.name].samples += metric.samples
                else:
                    found[metric.name] = metric
        return [up, *found.values()]


class _Reader:
    """Reads one source in a thread, so that a source that hangs holds up nobody; one read at a time."""

    def __init__(self, name: str, read: Callable[[], list[Metric]], log: Log) -> None:
        self.name = name
        self._read = read
        self._log = log
        self._thread: Thread | None = None
        self._result: list[Metric] | None = None
        self._failing = False

    def start(self) -> None:
        """Begin to read, unless the last read still hangs."""
        if self._thread is None or not self._thread.is_alive():
            self._result = None
            self._thread = Thread(target=self._run, name=f"read {self.name}", daemon=True)
            self._thread.start()

    def result(self, deadline: float) -> list[Metric] | None:
        """What was read, or None: it failed, or has not ended by the deadline (of the monotonic clock)."""
        assert self._thread is not None  # noqa: S101  started just before
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._tell("no answer in time")
            return None
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._read()
        except (psycopg.Error, CrmctlError) as error:
            explained = postgres.translate(error) if isinstance(error, psycopg.Error) else error
            self._tell(str(explained))
        else:
            if self._failing:
                self._failing = False
                self._log.info("source answers again", source=self.name)

    def _tell(self, reason: str) -> None:
        if not self._failing:
            self._failing = True
            self._log.warning("source does not answer", source=self.name, reason=reason)


def _gauge(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, value=value)


def _family(name: str, documentation: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, labels=labels)
