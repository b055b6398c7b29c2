"""Every failure that crmctl explains. One tree; a class is a kind of failure, its docstring says when.

A message says what happened, to which id, and what to do next. The exit code of each class is in
`cli/exits.py` and in no other place.
"""

from typing import ClassVar


class CrmctlError(Exception):
    """A failure with a stable code and a message for the person who ran the command.

    `hint` is the next step, `details` are extra fields for the JSON error document (JSON scalars only).
    """

    code: ClassVar[str] = "CRMCTL_ERROR"
    http_status: ClassVar[int | None] = None

    def __init__(self, message: str, *, hint: str | None = None, **details: str | int | None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details


class UsageError(CrmctlError):
    """The command line asks for something that makes no sense; nothing was started."""

    code = "CRMCTL_USAGE"


class ConfigurationError(CrmctlError):
    """Settings are missing or wrong, or the server is not set up for this command."""

    code = "CRMCTL_CONFIGURATION"


class SchemaError(ConfigurationError):
    """The database's schema does not fit this version of crmctl."""

    code = "CRMCTL_SCHEMA"


class GrantMissingError(ConfigurationError):
    """The database role lacks grants that this command needs; the message names each."""

    code = "CRMCTL_GRANT_MISSING"


class UnavailableError(CrmctlError):
    """A server that crmctl needs cannot be reached, or the connection to it was lost."""

    code = "CRMCTL_UNAVAILABLE"


class TryAgainError(CrmctlError):
    """Nothing is wrong that time will not mend: locks, serialization retries spent, a standby."""

    code = "CRMCTL_TRY_AGAIN"


class LetterNotFoundError(CrmctlError):
    """The dead-letter topic holds no such record."""

    code = "CRM_DLQ_LETTER_NOT_FOUND"


class BookingForbiddenError(CrmctlError):
    """The actor's token is not valid, lacks the permission, or is another tenant's (UC-BKG-003)."""

    code = "CRM_BOOKING_FORBIDDEN"
    http_status = 403


class BookingNotFoundError(CrmctlError):
    """No booking has that id, as far as the caller may know (UC-BKG-003)."""

    code = "CRM_BOOKING_NOT_FOUND"
    http_status = 404


class BookingInvalidStateError(CrmctlError):
    """The booking is not Booked any more, or never was (INV-BKG-6)."""

    code = "CRM_BOOKING_INVALID_STATE"
    http_status = 409


class RunNotFoundError(CrmctlError):
    """There is no record of that run: it had nothing to do, or its record was pruned."""

    code = "CRMCTL_RUN_NOT_FOUND"


class InstallationNotFoundError(CrmctlError):
    """No installation has that id."""

    code = "CRM_INSTALLATION_NOT_FOUND"
    http_status = 404


class GroupActiveError(CrmctlError):
    """A consumer group that still has members cannot be moved."""

    code = "CRMCTL_GROUP_ACTIVE"


class InterruptedRunError(CrmctlError):
    """SIGINT or SIGTERM arrived; what was not committed was rolled back."""

    code = "CRMCTL_INTERRUPTED"

    def __init__(self, message: str, *, signum: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint, signal=signum)
        self.signum = signum
