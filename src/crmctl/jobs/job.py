"""What a job is to the wrapper that runs it: a start, a batch, and what to say of it."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Generic, Protocol, TypeVar
from uuid import UUID

from crmctl.adapters.postgres import Transaction
from crmctl.telemetry.logs import Log


class Budget:
    """The time that a run may spend, measured by a monotonic clock from the moment it is made."""

    def __init__(self, limit: timedelta | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = None if limit is None else clock() + limit.total_seconds()

    @property
    def spent(self) -> bool:
        """Whether no further work should be started."""
        return self._end is not None and self._clock() >= self._end


@dataclass(frozen=True, slots=True)
class Run:
    """What every batch of one run shares. `traceparent` is the W3C trace context of the run."""

    id: UUID
    traceparent: str
    budget: Budget = field(default_factory=lambda: Budget(None))


class Progress(Protocol):
    """Where a run stands after a batch: immutable, so that a batch that rolls back leaves no trace in it."""

    @property
    def more(self) -> bool:
        """Whether another batch should follow."""
        ...

    @property
    def needs_person(self) -> bool:
        """Whether some rows need a person to look at them (exit 3 with `--strict`)."""
        ...

    def counts(self) -> Mapping[str, int]:
        """The figures of the whole run so far, by their documented names."""
        ...

    def document(self) -> Mapping[str, object]:
        """The result as it is printed."""
        ...


O = TypeVar("O", contravariant=True)  # noqa: E741
P = TypeVar("P", bound=Progress)


@dataclass(frozen=True, slots=True)
class Job(Generic[O, P]):
    """One subcommand.

    `batch(transaction, run, options, before)` does one transaction's work and returns the progress after it; it
    neither commits nor prints. `changed` are the counts that make a batch worth a `job_runs` row. `log` is told
    of each committed batch.
    """

    name: str
    actor: str
    start: Callable[[O], P]
    batch: Callable[[Transaction, Run, O, P], P]
    log: Callable[[Log, P, P], None]
