"""Why the sweep reached a verdict, as a stable code and as a sentence (docs/stale-installations.md lists them)."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


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
    Reason.TOKEN_LOST: "a renewal used the stored token up, and the new one was not stored",
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
