"""`crmctl doctor` and `crmctl status`: one look at the database and at Kafka, side by side, that always comes back.

Each server's side is a Part: a thread fills in its checks and figures, in a fixed order. What a thread has not said by
the deadline is a failure of the check that it hangs in, and the rest of its checks are skipped.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any, Final, TypeVar

import psycopg

from crmctl.adapters import postgres
from crmctl.domain.databases import DatabaseName
from crmctl.domain.errors import CrmctlError, UnavailableError
from crmctl.domain.health import Check, failed, skipped

T = TypeVar("T")

# Seconds from the start of the look: with the start of the process it stays below ten.
DEADLINE: Final = 8.0


@dataclass(slots=True)
class Part:
    """One server's side. `figures` maps a queue's name to its figures; a queue that could not be read is missing.

    What it tells names its database, and commands that reach it, unless that is the main one.
    """

    names: tuple[str, ...]
    database: DatabaseName = DatabaseName.MAIN
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, check: Check) -> None:
        """Note the result of the next check."""
        self.checks.append(check)

    def broken(self, name: str) -> bool:
        """Whether a check has failed."""
        return any(check.name == name and check.error is not None for check in self.checks)

    def attempt(self, name: str, step: Callable[[], T]) -> T | None:
        """Return what the step returns, or None: what it raised is then the failure of this check."""
        try:
            return step()
        except (psycopg.Error, CrmctlError) as error:
            self.fail(name, error)
            return None

    def fail(self, name: str, error: psycopg.Error | CrmctlError) -> None:
        """Note that a check failed."""
        explained = postgres.translate(error) if isinstance(error, psycopg.Error) else error
        if isinstance(explained, psycopg.Error):
            explained = CrmctlError(f"unexpected error ({postgres.describe(explained)})", hint="report it")
        self.add(failed(name, explained))

    def complete(self, why: str) -> list[Check]:
        """The checks, in their order; those that were not reached are skipped, and `why` says so."""
        done = {check.name: check for check in self.checks}
        return [self._told(done.get(name) or skipped(name, why)) for name in self.names]

    def _told(self, check: Check) -> Check:
        if self.database is DatabaseName.MAIN:
            return check
        return replace(check, name=f"{check.name} ({self.database})", fix=check.fix and self.database.aim(check.fix))


def examine(work: Mapping[str, tuple[Part, Callable[[Part], None]]], seconds: float = DEADLINE) -> list[Check]:
    """Run each part in a thread of its own, and return all checks when they are done or the time is up."""
    end = time.monotonic() + seconds
    threads = {
        name: Thread(target=look, args=(part,), name=f"examine {name}", daemon=True)
        for name, (part, look) in work.items()
    }
    for thread in threads.values():
        thread.start()
    checks: list[Check] = []
    for name, (part, _) in work.items():
        threads[name].join(max(0.0, end - time.monotonic()))
        if threads[name].is_alive():
            late = replace(part, checks=list(part.checks))
            stuck = next((n for n in late.names if n not in {check.name for check in late.checks}), None)
            if stuck is not None:
                error = UnavailableError(f"no answer within {seconds:.0f} s", hint="look at the server and the network")
                late.add(failed(stuck, error))
            checks += late.complete(f"{name} did not answer in time")
        else:
            checks += part.complete(f"{name} could not be looked at")
    return checks
