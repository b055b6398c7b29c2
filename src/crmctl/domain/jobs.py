"""The jobs by the names that `job_runs`, `job_pauses`, logs and metrics have them under; the role and place of each."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from crmctl.domain.databases import DatabaseName
from crmctl.domain.errors import UsageError
from crmctl.domain.grants import Kind


@dataclass(frozen=True, slots=True)
class JobEntry:
    """One job: its name, the command that runs it, the kind of role whose grants it needs, and where it has work."""

    name: str
    command: str
    kind: Kind
    databases: tuple[DatabaseName, ...] = (DatabaseName.MAIN,)


_EVERYWHERE: Final = tuple(DatabaseName)
JOBS: Final = (
    JobEntry("expire-bookings", "bookings expire", Kind.BOOKINGS),
    JobEntry("extend-booking", "bookings extend", Kind.BOOKINGS),
    JobEntry("relay-outbox", "outbox relay", Kind.RELAY, _EVERYWHERE),
    JobEntry("consume-chat-status", "chat-status consume", Kind.CHAT),
    JobEntry("replay-dead-letters", "dlq replay", Kind.DEAD_LETTERS),
    JobEntry("discard-dead-letters", "dlq discard", Kind.DEAD_LETTERS),
    JobEntry("sweep-installations", "installations sweep", Kind.INSTALLATIONS, (DatabaseName.INSTALLATIONS,)),
    JobEntry("prune", "prune", Kind.MAINTENANCE, _EVERYWHERE),
)
NAMES: Final = tuple(job.name for job in JOBS)


def kind_of(name: str) -> Kind:
    """The role that a job runs in; what is no job reads only."""
    return next((job.kind for job in JOBS if job.name == name), Kind.READONLY)


def names_in(database: DatabaseName, configured: Collection[DatabaseName]) -> tuple[str, ...]:
    """The jobs that run in this database; where there is no other, all of them."""
    if len(configured) == 1:
        return NAMES
    return tuple(job.name for job in JOBS if database in job.databases)


def known(name: str) -> str:
    """Return the name if it is a job's. Raises UsageError, which lists them."""
    if name not in NAMES:
        raise UsageError(f"no such job: {name}", hint=f"the jobs are {', '.join(NAMES)}")
    return name
