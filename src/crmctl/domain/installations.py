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


class Reason(StrEnum):
    """Why a verdict was reached. The value is stable: it stands in the table, the journal and the event."""

    TTL_EXPIRED = "TTL_EXPIRED"
    # The portal or the OAuth server says it plainly.
    APPLICATION_NOT_INSTALLED = "APPLICATION_NOT_INSTALLED"
    TOKEN_MISSING_HERE = "TOKEN_MISSING_HERE"  # noqa: S105
    WIZARD_UNFINISHED = "WIZARD_UNFINISHED"
    # Nobody can tell.
    TIMEOUT = "TIMEOUT"
    UNREACHABLE = "UNREACHABLE"
    SERVER_ERROR = "SERVER_ERROR"
    UNEXPECTED_ANSWER = "UNEXPECTED_ANSWER"
    REDIRECTED = "REDIRECTED"
    ADDRESS_REFUSED = "ADDRESS_REFUSED"
    RATE_LIMITED = "RATE_LIMITED"
    TOKEN_INVALID = "TOKEN_INVALID"  # noqa: S105
    TOKEN_MISSING = "TOKEN_MISSING"  # noqa: S105
    TOKEN_LOST = "TOKEN_LOST"  # noqa: S105
    TOKEN_CHANGED = "TOKEN_CHANGED"  # noqa: S105
    NOT_REFRESHED = "NOT_REFRESHED"
    CLIENT_REFUSED = "CLIENT_REFUSED"
    MEMBER_MISMATCH = "MEMBER_MISMATCH"
    PORTAL_DELETED = "PORTAL_DELETED"
    PAYMENT_REQUIRED = "PAYMENT_REQUIRED"
    OTHER_ERROR = "OTHER_ERROR"
    # Something is wrong with the rows themselves.
    ACCOUNT_MISSING = "ACCOUNT_MISSING"
    ACCOUNT_NOT_NEW = "ACCOUNT_NOT_NEW"
    ACCOUNT_NOT_MASTER = "ACCOUNT_NOT_MASTER"
    MEMBER_MISSING = "MEMBER_MISSING"
    TOKEN_ALREADY_SET = "TOKEN_ALREADY_SET"  # noqa: S105
    TWO_LIVE_INSTALLATIONS = "TWO_LIVE_INSTALLATIONS"
    TWO_LIVE_MASTERS = "TWO_LIVE_MASTERS"
    WRITE_FAILED = "WRITE_FAILED"


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
# One bad answer on the thirtieth day does not end an install that nobody had asked about before.
_UNCLEAR_ANSWERS: Final = 3


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
    transition = _transition(pair, finding.verdict, policy, ttl, attempts)
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


def _transition(pair: Pair, verdict: Verdict, policy: Policy, ttl: timedelta, attempts: int) -> Transition | None:
    if policy.action is Action.ALERT or verdict is Verdict.ANOMALY:
        return None
    if verdict is Verdict.NOT_VERIFIED:
        return CASCADE if policy.action is Action.DELETE else BLOCK
    if verdict is Verdict.NOT_INSTALLED:
        return CASCADE
    if verdict is Verdict.UNCLEAR and attempts < _UNCLEAR_ANSWERS:
        return None
    return BLOCK if pair.age >= ttl else None


_EXPLANATIONS: Final[Mapping[Reason, str]] = {
    Reason.TTL_EXPIRED: "the finish step did not arrive in time; the portal was not asked",
    Reason.APPLICATION_NOT_INSTALLED: "the application is not installed on the portal",
    Reason.TOKEN_MISSING_HERE: "installed on the portal, but no application token arrived: no event can be verified",
    Reason.WIZARD_UNFINISHED: "the portal still waits for the application to finish its installation",
    Reason.TIMEOUT: "the portal did not answer in time",
    Reason.UNREACHABLE: "the portal cannot be reached",
    Reason.SERVER_ERROR: "the portal answered with a server error",
    Reason.UNEXPECTED_ANSWER: "the portal's answer is not one that Bitrix24 documents",
    Reason.REDIRECTED: "the portal redirects elsewhere, which is not followed",
    Reason.ADDRESS_REFUSED: "the portal's domain is no public address, and was not connected to",
    Reason.RATE_LIMITED: "the portal asks for fewer requests",
    Reason.TOKEN_INVALID: "the portal or the OAuth server does not accept the stored tokens any more",
    Reason.TOKEN_MISSING: "the account holds no tokens",
    Reason.TOKEN_LOST: "the last run ended before it could store the token that it was given",
    Reason.TOKEN_CHANGED: "somebody else renewed the token at the same time",
    Reason.NOT_REFRESHED: "the access token has expired, and a dry run renews none",
    Reason.CLIENT_REFUSED: "the OAuth server does not accept the application's own credentials for it",
    Reason.MEMBER_MISMATCH: "the OAuth server answered for another portal",
    Reason.PORTAL_DELETED: "the portal is deleted or switched off",
    Reason.PAYMENT_REQUIRED: "the portal's plan or trial has ended",
    Reason.OTHER_ERROR: "the portal answered with an error that says nothing about the application",
    Reason.ACCOUNT_MISSING: "there is no account with the installation's account id",
    Reason.ACCOUNT_NOT_NEW: "its account is not new",
    Reason.ACCOUNT_NOT_MASTER: "its account is no master account",
    Reason.MEMBER_MISSING: "its account has no member id",
    Reason.TOKEN_ALREADY_SET: "an application token is set although the installation is new",
    Reason.TWO_LIVE_INSTALLATIONS: "the member has another installation that is not deleted",
    Reason.TWO_LIVE_MASTERS: "the member has another master account that is new or active",
    Reason.WRITE_FAILED: "PostgreSQL refused the change of this pair",
}


def explain(reason: Reason) -> str:
    """The reason as a sentence for people, without its full stop."""
    return _EXPLANATIONS[reason]
