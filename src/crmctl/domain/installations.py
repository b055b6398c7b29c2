"""Stale installations: bitrix24-php-lib's transition rules, and what a verdict makes of a pair (source 000).

A pair is an ApplicationInstallation and its master Bitrix24Account. The finish step (ONAPPINSTALL) is the only
way to finish an install: nothing here leads to `active`. What the library's entities would refuse, and a pair
of which only one row moves, cannot be expressed: `Path` and `Transition` refuse to be made.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Final
from uuid import UUID

from crmctl.domain.installation_reasons import Reason


class Status(StrEnum):
    """The statuses of both aggregates that we know. A row may hold another: that row is not ours to touch."""

    NEW = "new"
    ACTIVE = "active"
    BLOCKED = "blocked"
    DELETED = "deleted"


class Aggregate(StrEnum):
    """Whose rules a path follows."""

    INSTALLATION = "ApplicationInstallation"
    ACCOUNT = "Bitrix24Account"


# The steps that the library's entities allow, without those to `active`, which are not the sweep's to make.
_STEPS: Final[Mapping[Aggregate, frozenset[tuple[Status, Status]]]] = {
    Aggregate.INSTALLATION: frozenset(
        {
            (Status.NEW, Status.BLOCKED),
            (Status.ACTIVE, Status.BLOCKED),
            (Status.ACTIVE, Status.DELETED),
            (Status.BLOCKED, Status.DELETED),
        }
    ),
    Aggregate.ACCOUNT: frozenset(
        {
            (Status.NEW, Status.BLOCKED),
            (Status.ACTIVE, Status.BLOCKED),
            (Status.BLOCKED, Status.BLOCKED),
            (Status.NEW, Status.DELETED),
            (Status.ACTIVE, Status.DELETED),
        }
    ),
}


@dataclass(frozen=True, slots=True)
class Path:
    """The statuses that one row goes through in a single transition, its present one first.

    Raises ValueError for a step that the library's entity would refuse.
    """

    aggregate: Aggregate
    statuses: tuple[Status, ...]

    def __post_init__(self) -> None:
        if len(self.statuses) < 2:
            raise ValueError("a path has a beginning and an end")
        for step in zip(self.statuses, self.statuses[1:], strict=False):
            if step not in _STEPS[self.aggregate]:
                raise ValueError(f"{self.aggregate} does not go from {step[0]} to {step[1]}")

    @property
    def start(self) -> Status:
        """Where the row must be."""
        return self.statuses[0]

    @property
    def end(self) -> Status:
        """Where the row ends."""
        return self.statuses[-1]


@dataclass(frozen=True, slots=True)
class Transition:
    """Both rows of a pair move together, from `new` to the same status. Raises ValueError for anything else."""

    installation: Path
    account: Path

    def __post_init__(self) -> None:
        if (self.installation.aggregate, self.account.aggregate) != (Aggregate.INSTALLATION, Aggregate.ACCOUNT):
            raise ValueError("a transition has one path for each row of the pair")
        if {self.installation.start, self.account.start} != {Status.NEW}:
            raise ValueError("only a pair of which both rows are new is swept")
        if self.installation.end != self.account.end:
            raise ValueError("both rows of a pair end in the same status")

    @property
    def end(self) -> Status:
        """Where both rows end."""
        return self.installation.end


BLOCK: Final = Transition(
    Path(Aggregate.INSTALLATION, (Status.NEW, Status.BLOCKED)),
    Path(Aggregate.ACCOUNT, (Status.NEW, Status.BLOCKED)),
)
CASCADE: Final = Transition(
    Path(Aggregate.INSTALLATION, (Status.NEW, Status.BLOCKED, Status.DELETED)),
    Path(Aggregate.ACCOUNT, (Status.NEW, Status.DELETED)),
)


class Action(StrEnum):
    """The values of `--action`: what becomes of a pair that was not verified. `alert` never changes a row."""

    BLOCK = "block"
    DELETE = "delete"
    ALERT = "alert"


class Verdict(StrEnum):
    """What is known of a stale pair."""

    NOT_VERIFIED = "not-verified"
    NOT_INSTALLED = "not-installed"
    INSTALLED = "installed"
    UNFINISHED = "unfinished"
    UNCLEAR = "unclear"
    ANOMALY = "anomaly"


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict with its reason."""

    verdict: Verdict
    reason: Reason


NOT_VERIFIED: Final = Finding(Verdict.NOT_VERIFIED, Reason.TTL_EXPIRED)
NOT_INSTALLED: Final = Finding(Verdict.NOT_INSTALLED, Reason.APPLICATION_NOT_INSTALLED)
INSTALLED: Final = Finding(Verdict.INSTALLED, Reason.TOKEN_MISSING_HERE)
UNFINISHED: Final = Finding(Verdict.UNFINISHED, Reason.WIZARD_UNFINISHED)


def unclear(reason: Reason) -> Finding:
    """Nobody can tell, for this reason."""
    return Finding(Verdict.UNCLEAR, reason)


@dataclass(frozen=True, slots=True)
class Pair:
    """An installation and its account as they stand in the tables.

    `account_status` is None where there is no account. `live_installations` and `live_masters` count the
    member's, this pair's own included: an installation lives until it is deleted, an account while it is new or
    active. `token_set`: either row has an application token that is not empty.
    """

    installation_id: UUID
    account_id: UUID
    installation_status: str
    account_status: str | None
    member_id: str | None
    is_master: bool | None
    token_set: bool
    live_installations: int
    live_masters: int
    age: timedelta


@dataclass(frozen=True, slots=True)
class Policy:
    """How long a pair may wait. All three are ages of the installation."""

    action: Action = Action.BLOCK
    ttl: timedelta = timedelta(hours=1)
    unfinished_ttl: timedelta = timedelta(hours=24)
    unclear_ttl: timedelta = timedelta(days=30)

    def is_stale(self, pair: Pair) -> bool:
        """Whether the sweep looks at the pair at all: `new`, and older than the TTL."""
        return pair.installation_status == Status.NEW and pair.age >= self.ttl


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a pair: a transition, or None and a next look at it after `next_check_in`.

    `ttl` is the one of the three that decided; `attempts` counts looks in a row with the same verdict; `alert`
    means that a person should look at it.
    """

    pair: Pair
    finding: Finding
    ttl: timedelta
    attempts: int
    transition: Transition | None = None
    alert: bool = False
    next_check_in: timedelta | None = None

    @property
    def outcome(self) -> str:
        """`left`, `blocked` or `deleted`."""
        return "left" if self.transition is None else self.transition.end.value


SHORTEST_TTL: Final = timedelta(minutes=5)
_FIRST_BACKOFF: Final = timedelta(minutes=15)
_LONGEST_BACKOFF: Final = timedelta(hours=24)
_UNFINISHED_PAUSE: Final = timedelta(hours=1)
# What we brought about ourselves is not held against a pair: however old it is, it waits.
_OUR_OWN_DOING: Final = frozenset({Reason.CLIENT_REFUSED, Reason.TOKEN_LOST})


def anomaly(pair: Pair) -> Finding | None:
    """What is wrong with the rows themselves, so that no verdict of a portal may move them."""
    reason = None
    if pair.account_status is None:
        reason = Reason.ACCOUNT_MISSING
    elif pair.account_status != Status.NEW:
        reason = Reason.ACCOUNT_NOT_NEW
    elif pair.token_set:
        reason = Reason.TOKEN_ALREADY_SET
    elif not pair.is_master:
        reason = Reason.ACCOUNT_NOT_MASTER
    elif not (pair.member_id or "").strip():
        reason = Reason.MEMBER_MISSING
    elif pair.live_installations > 1:
        reason = Reason.TWO_LIVE_INSTALLATIONS
    elif pair.live_masters > 1:
        reason = Reason.TWO_LIVE_MASTERS
    return None if reason is None else Finding(Verdict.ANOMALY, reason)


def decide(pair: Pair, finding: Finding, policy: Policy, *, attempts: int) -> Decision:
    """Apply the table of docs/stale-installations.md to a stale pair; its anomalies come before any finding.

    `attempts` counts this look as well. Raises ValueError for a pair that is not stale: that is the caller's to
    sort out.
    """
    if not policy.is_stale(pair):
        raise ValueError(f"installation {pair.installation_id} is not stale")
    finding = anomaly(pair) or finding
    ttl = _ttl(finding.verdict, policy)
    transition = _transition(pair, finding, policy, ttl)
    if transition is not None:
        return Decision(pair, finding, ttl, attempts, transition)
    pause = _UNFINISHED_PAUSE if finding.verdict is Verdict.UNFINISHED else backoff(attempts)
    if finding.verdict in (Verdict.UNFINISHED, Verdict.UNCLEAR) and ttl > pair.age:
        pause = min(pause, ttl - pair.age)
    alert = finding.verdict is not Verdict.UNFINISHED or pair.age >= ttl
    return Decision(pair, finding, ttl, attempts, alert=alert, next_check_in=pause)


def backoff(attempts: int) -> timedelta:
    """How long to wait after so many looks in a row that changed nothing: 15 min, doubled each time, up to 24 h."""
    doublings = min(max(attempts, 1) - 1, 10)
    return min(_FIRST_BACKOFF * (1 << doublings), _LONGEST_BACKOFF)


def _ttl(verdict: Verdict, policy: Policy) -> timedelta:
    if verdict is Verdict.UNFINISHED:
        return policy.unfinished_ttl
    return policy.unclear_ttl if verdict is Verdict.UNCLEAR else policy.ttl


def _transition(pair: Pair, finding: Finding, policy: Policy, ttl: timedelta) -> Transition | None:
    if policy.action is Action.ALERT or finding.verdict is Verdict.ANOMALY or finding.reason in _OUR_OWN_DOING:
        return None
    if finding.verdict is Verdict.NOT_VERIFIED:
        return CASCADE if policy.action is Action.DELETE else BLOCK
    if finding.verdict is Verdict.NOT_INSTALLED:
        return CASCADE
    return BLOCK if pair.age >= ttl else None
