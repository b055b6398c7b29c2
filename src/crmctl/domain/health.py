"""What `doctor` and `status` say of one thing that they looked at, and of a server's whole side."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from crmctl.domain.errors import CrmctlError


class Verdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what was found and, unless it is ok, the fix. `error` gives a failure its exit code."""

    name: str
    result: Verdict
    detail: str
    fix: str | None = None
    error: CrmctlError | None = None

    def document(self) -> dict[str, str | None]:
        """The check as it is printed."""
        return {"name": self.name, "result": self.result.value, "detail": self.detail, "fix": self.fix}


def ok(name: str, detail: str) -> Check:
    """Nothing to do."""
    return Check(name, Verdict.OK, detail)


def warning(name: str, detail: str, fix: str) -> Check:
    """Something that somebody should know, and that stops nothing."""
    return Check(name, Verdict.WARNING, detail, fix)


def failed(name: str, error: CrmctlError) -> Check:
    """What keeps crmctl's work from being done; the error's message and hint say what and how to mend it."""
    return Check(name, Verdict.FAILED, error.message, error.hint, error)


def skipped(name: str, why: str) -> Check:
    """Not looked at."""
    return Check(name, Verdict.SKIPPED, why)


def faults(checks: Iterable[Check]) -> list[Check]:
    """The checks that somebody should act on, failures first."""
    order = (Verdict.FAILED, Verdict.WARNING)
    return sorted((c for c in checks if c.result in order), key=lambda check: order.index(check.result))
