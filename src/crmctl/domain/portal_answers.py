"""What Bitrix24's answers mean for a stale installation: app.info of a portal, and the renewal of a token.

Only what says it plainly counts as "not installed"; whatever is not listed here is unclear. Nothing of an
answer's text goes further than this module: a portal could put a token into it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from crmctl.domain.installation_reasons import Reason
from crmctl.domain.installations import INSTALLED, NOT_INSTALLED, UNFINISHED, Finding, unclear

# The columns of bitrix24-php-lib are varchar(255).
_LONGEST_TOKEN: Final = 255


class Failure(StrEnum):
    """Why there is no answer to read. UNREACHABLE: nothing was sent; BROKEN: perhaps it was."""

    TIMEOUT = "TIMEOUT"
    UNREACHABLE = "UNREACHABLE"
    BROKEN = "BROKEN"
    ADDRESS_REFUSED = "ADDRESS_REFUSED"
    REDIRECTED = "REDIRECTED"
    UNREADABLE = "UNREADABLE"


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer whose body is a JSON object, or why there is none. The body may hold tokens: no repr of it."""

    status: int = 0
    body: Mapping[str, Any] = field(default_factory=dict, repr=False)
    failure: Failure | None = None

    @property
    def error(self) -> str:
        """Bitrix24's error code in upper case, empty where there is none."""
        code = self.body.get("error")
        return str(code).upper() if isinstance(code, str | int) and code else ""

    @property
    def transient(self) -> bool:
        """Whether asking again at once may help: a lost connection, or a server error that names no cause."""
        return self.failure in (Failure.UNREACHABLE, Failure.BROKEN) or (self.status >= 500 and not self.error)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A renewed pair of tokens. `expires`: unix seconds, or None where only `expires_in` (seconds) was given."""

    access_token: str = field(repr=False)
    refresh_token: str = field(repr=False)
    expires: int | None
    expires_in: int


class TokenRefused(StrEnum):
    """The portal does not take the access token: it may be renewed."""

    EXPIRED = "EXPIRED"


_FAILURES: Final[Mapping[Failure, Reason]] = {
    Failure.TIMEOUT: Reason.TIMEOUT,
    Failure.UNREACHABLE: Reason.UNREACHABLE,
    Failure.BROKEN: Reason.UNREACHABLE,
    Failure.ADDRESS_REFUSED: Reason.ADDRESS_REFUSED,
    Failure.REDIRECTED: Reason.REDIRECTED,
    Failure.UNREADABLE: Reason.UNEXPECTED_ANSWER,
}
_NOT_INSTALLED: Final = frozenset({"NOT_INSTALLED", "APPLICATION_NOT_FOUND"})
_TOKEN_REFUSED: Final = frozenset({"EXPIRED_TOKEN", "INVALID_TOKEN", "NO_AUTH_FOUND"})
_REASONS: Final[Mapping[str, Reason]] = {
    "QUERY_LIMIT_EXCEEDED": Reason.RATE_LIMITED,
    "OPERATION_TIME_LIMIT": Reason.RATE_LIMITED,
    "OVERLOAD_LIMIT": Reason.RATE_LIMITED,
    "PORTAL_DELETED": Reason.PORTAL_DELETED,
    "PAYMENT_REQUIRED": Reason.PAYMENT_REQUIRED,
    "ACCESS_DENIED": Reason.OTHER_ERROR,
    "INVALID_GRANT": Reason.TOKEN_INVALID,
    "EXPIRED_TOKEN": Reason.TOKEN_INVALID,
    "INVALID_TOKEN": Reason.TOKEN_INVALID,
    "NO_AUTH_FOUND": Reason.TOKEN_INVALID,
    "INVALID_CLIENT": Reason.CLIENT_REFUSED,
    "WRONG_CLIENT": Reason.CLIENT_REFUSED,
}


def read_app_info(answer: Answer) -> Finding | TokenRefused:
    """What a portal's answer to app.info says. Cloud portals and self-hosted ones alike: only INSTALLED is read."""
    if answer.error in _TOKEN_REFUSED and answer.failure is None:
        return TokenRefused.EXPIRED
    if (finding := _read_error(answer)) is not None:
        return finding
    result = answer.body.get("result")
    installed = result.get("INSTALLED") if isinstance(result, dict) else None
    if installed is True:
        return INSTALLED
    return UNFINISHED if installed is False else unclear(Reason.UNEXPECTED_ANSWER)


def read_renewal(answer: Answer, member_id: str) -> Tokens | Finding:
    """What the OAuth server's answer to a renewal says; tokens of another member are never taken."""
    if (finding := _read_error(answer)) is not None:
        return finding
    body = answer.body
    access, refresh = body.get("access_token"), body.get("refresh_token")
    if not (_is_token(access) and _is_token(refresh)):
        return unclear(Reason.UNEXPECTED_ANSWER)
    if body.get("member_id") != member_id:
        return unclear(Reason.MEMBER_MISMATCH)
    expires_in = _seconds(body.get("expires_in"))
    return Tokens(str(access), str(refresh), _seconds(body.get("expires")), 3600 if expires_in is None else expires_in)


def _read_error(answer: Answer) -> Finding | None:
    if answer.failure is not None:
        return unclear(_FAILURES[answer.failure])
    if answer.error:
        return _read_code(answer)
    if answer.status >= 500:
        return unclear(Reason.SERVER_ERROR)
    if answer.status == 429:
        return unclear(Reason.RATE_LIMITED)
    return None if answer.status == 200 else unclear(Reason.UNEXPECTED_ANSWER)


def _read_code(answer: Answer) -> Finding:
    if answer.error in _NOT_INSTALLED:
        return NOT_INSTALLED
    description = str(answer.body.get("error_description", "")).strip().rstrip(".").lower()
    if answer.error == "ERROR_OAUTH" and description == "application not installed":
        return NOT_INSTALLED
    return unclear(_REASONS.get(answer.error, Reason.OTHER_ERROR))


def _is_token(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_TOKEN and value.isascii() and value.isprintable()


def _seconds(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    try:
        number = int(value)
    except ValueError:
        return None
    return number if 0 < number < 2**40 else None
