"""The exit codes, and the one mapping from a failure to its code (docs/exit-codes.md)."""

from enum import IntEnum

from crmctl.domain import errors


class Exit(IntEnum):
    """What the process tells its caller; CronJobs act on these numbers."""

    OK = 0
    BUG = 1
    USAGE = 2
    NEEDS_PERSON = 3
    NOT_FOUND = 10
    FORBIDDEN = 11
    INVALID_STATE = 12
    UNAVAILABLE = 69
    OUTPUT_FAILED = 74
    TRY_AGAIN = 75
    CONFIGURATION = 78


_BY_ERROR: dict[type[errors.CrmctlError], Exit] = {
    errors.UsageError: Exit.USAGE,
    errors.BookingNotFoundError: Exit.NOT_FOUND,
    errors.LetterNotFoundError: Exit.NOT_FOUND,
    errors.RunNotFoundError: Exit.NOT_FOUND,
    errors.InstallationNotFoundError: Exit.NOT_FOUND,
    errors.BookingForbiddenError: Exit.FORBIDDEN,
    errors.BookingInvalidStateError: Exit.INVALID_STATE,
    errors.GroupActiveError: Exit.INVALID_STATE,
    errors.UnavailableError: Exit.UNAVAILABLE,
    errors.TryAgainError: Exit.TRY_AGAIN,
    errors.ConfigurationError: Exit.CONFIGURATION,
}


def exit_code(error: BaseException) -> int:
    """The exit code for a failure: 128 + signal for an interruption, 1 for what nobody expected."""
    if isinstance(error, errors.InterruptedRunError):
        return 128 + error.signum
    for kind in type(error).__mro__:
        if kind in _BY_ERROR:
            return _BY_ERROR[kind]
    return Exit.BUG
