"""What a job is to the wrapper that runs it: a start, a batch, and what to say of it."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Generic, Protocol, TypeVar
from uuid import UUID

from crmctl.adapters.postgres import Transaction
from crmctl.domain.errors import CrmctlError
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

    def cap(self, seconds: float) -> float:
        """So many seconds, or as many as are left where that is less."""
        return seconds if self._end is None else max(0.0, min(seconds, self._end - self._clock()))


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Run:
    """What every batch of one run shares.

    `traceparent` is the W3C trace context of the run; `stopping` says that a signal asks a graceful job to
    finish what it has begun and to begin nothing new.
    """

    id: UUID
    traceparent: str
    budget: Budget = field(default_factory=lambda: Budget(None))
    stopping: Callable[[], bool] = _never

    def wait(self, seconds: float) -> None:
        """Sleep, but not on while a signal asks to stop."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self.stopping():
            time.sleep(min(left, 0.1))


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

    @property
    def failure(self) -> CrmctlError | None:
        """What stopped the batch half-way: its work is committed, and then the run ends with this error."""
        ...

    def counts(self) -> Mapping[str, int]:
        """The figures of the whole run so far, by their documented names."""
        ...

    def document(self) -> Mapping[str, object]:
        """The result as it is printed."""
        ...


O = TypeVar("O", contravariant=True)  # noqa: E741
P = TypeVar("P", bound=Progress)


def say_nothing(_log: Log, _before: object, _after: object) -> None:
    """The `log` of a job whose batches need no lines of their own."""


@dataclass(frozen=True, slots=True)
class Job(Generic[O, P]):
    """One subcommand.

    `batch(transaction, run, options, before)` does one transaction's work and returns the progress after it; it
    neither commits nor prints. `prepare(run, options, before)` is for what must come before a batch with no
    transaction open: it returns the progress that the batch starts from, is not repeated when the batch is, and is
    not interrupted by a signal but watches `run.stopping`. `log` is told of each committed batch. A `graceful`
    batch is not interrupted either. `guards` are session limits of this job's own.
    """

    name: str
    actor: str
    start: Callable[[O], P]
    batch: Callable[[Transaction, Run, O, P], P]
    prepare: Callable[[Run, O, P], P] | None = None
    log: Callable[[Log, P, P], None] = say_nothing
    graceful: bool = False
    guards: Mapping[str, timedelta] = field(default_factory=dict)
