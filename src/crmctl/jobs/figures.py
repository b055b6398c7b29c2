"""The figures by which crmctl's queues are judged: read once, shown by `status` and `doctor`, exported as metrics."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient

from crmctl.adapters import groups
from crmctl.adapters.postgres import Transaction
from crmctl.domain.bookings import PHASES, Phase
from crmctl.domain.databases import DatabaseName
from crmctl.domain.jobs import NAMES
from crmctl.jobs import job_pauses
from crmctl.sql import load

# A CronJob of a minute has had two chances by then.
OVERDUE_AFTER: Final = timedelta(minutes=3)


def _statements(phase: Phase) -> dict[str, str]:
    names = {
        "deadline": phase.deadline,
        "index": phase.index,
        "statuses": ", ".join(f"'{status}'" for status in phase.statuses),
    }
    terms = {"deadline": phase.deadline, "base": phase.base, "duration": phase.duration}
    defect = load("expire_bookings")["defect"].format(**terms)
    return {name: load("figures")[name].format(**names, defect=defect) for name in ("due", "never_expire")}


STATEMENTS: Final = load("figures")
BY_PHASE: Final = {phase.name: _statements(phase) for phase in PHASES}


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """One timer: rows that are due, those that should have been expired by now, the age of the oldest in seconds."""

    due_count: int
    overdue_count: int
    oldest_due_seconds: float
    never_expire_count: int


@dataclass(frozen=True, slots=True)
class BookingFigures:
    """Both timers, and what the last run that left a record could not expire."""

    phases: dict[str, PhaseFigures]
    poison_count: int

    @property
    def overdue_count(self) -> int:
        """Of both phases."""
        return sum(phase.overdue_count for phase in self.phases.values())

    @property
    def never_expire_count(self) -> int:
        """Of both phases."""
        return sum(phase.never_expire_count for phase in self.phases.values())


@dataclass(frozen=True, slots=True)
class OutboxFigures:
    """What waits to be published, what waits behind a refusal, and the age of the oldest of both in seconds."""

    pending_count: int
    held_count: int
    oldest_unpublished_seconds: float


@dataclass(frozen=True, slots=True)
class DeferredFigures:
    """Chat-status events that wait for their deal, and the age of the oldest in seconds."""

    deferred_count: int
    oldest_deferred_seconds: float


@dataclass(frozen=True, slots=True)
class JobFigures:
    """One job in one database: its pause, and when it last committed a batch and last failed."""

    job: str
    database: DatabaseName
    paused: bool
    paused_by: str | None
    paused_at: datetime | None
    pause_reason: str | None
    last_success_at: datetime | None
    last_failure_at: datetime | None


@dataclass(frozen=True, slots=True)
class PartitionFigures:
    """One partition of the consumer's source; `headroom` is committed minus log start: below 0, records were lost."""

    partition: int
    committed_offset: int | None
    log_start_offset: int
    end_offset: int

    @property
    def lag(self) -> int:
        """Records that the group has not read; those that are gone cannot be counted."""
        return self.end_offset - max(self.committed_offset or 0, self.log_start_offset)

    @property
    def headroom(self) -> int | None:
        """Records that retention may still take before it takes an unread one; None where nothing was committed."""
        return None if self.committed_offset is None else self.committed_offset - self.log_start_offset


def bookings(tx: Transaction) -> BookingFigures:
    """Read both timers."""
    phases = {
        name: PhaseFigures(
            **tx.one(statements["due"], {"overdue_after": OVERDUE_AFTER}), **tx.one(statements["never_expire"])
        )
        for name, statements in BY_PHASE.items()
    }
    return BookingFigures(phases, tx.one(STATEMENTS["poison"])["poison_count"])


def outbox(tx: Transaction) -> OutboxFigures:
    """Read the outbox."""
    return OutboxFigures(**tx.one(STATEMENTS["outbox"]))


def deferred(tx: Transaction) -> DeferredFigures:
    """Read what waits for its deal."""
    return DeferredFigures(**tx.one(STATEMENTS["deferred"]))


def jobs(tx: Transaction, names: Sequence[str] = NAMES, database: DatabaseName = DatabaseName.MAIN) -> list[JobFigures]:
    """Read the pauses of the jobs that run in this database, and their last runs."""
    rows = job_pauses.query(tx, names, database)
    return [JobFigures(**{name: value for name, value in row.items() if name != "command"}) for row in rows]


def oldest_prunable_seconds(tx: Transaction, names: Sequence[str]) -> float:
    """The age of the oldest run record that prune will delete one day, or 0."""
    return float(tx.one(STATEMENTS["prunable"], {"jobs": list(names)})["oldest_prunable_seconds"])


def oldest_unread_seconds(reader: Consumer, topic: str, places: Sequence[PartitionFigures]) -> float:
    """The age by Kafka's timestamp of the oldest record that the group has not read, or 0; `reader` never joins it."""
    unread = {
        place.partition: max(place.committed_offset or 0, place.log_start_offset) for place in places if place.lag
    }
    stamps = groups.timestamps(reader, topic, unread) if unread else {}
    return max(0.0, time.time() - min(stamps.values()) / 1000) if stamps else 0.0


def partitions(client: AdminClient, reader: Consumer, topic: str) -> list[PartitionFigures]:
    """Read the place of the reader's group in each partition; none where the topic does not exist.

    Raises UnavailableError or ConfigurationError.
    """
    numbers = groups.partitions(client, topic)
    if not numbers:
        return []
    first = groups.offsets(client, topic, numbers, "earliest")
    ends = groups.offsets(client, topic, numbers, "latest")
    committed = groups.committed(reader, topic, numbers)
    return [PartitionFigures(n, committed.get(n), first[n], ends[n]) for n in numbers]
