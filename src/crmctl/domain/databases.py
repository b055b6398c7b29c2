"""The databases by the names that `--database`, metrics and `jobs list` have them under.

There is one, unless bitrix24-php-lib's tables live in another: then the sweep runs there, with an outbox, pauses and
records of its own.
"""

from enum import StrEnum
from typing import Final

# What is told to be run by a hint, and takes `--database`.
_COMMANDS: Final = (
    "crmctl db roles",
    "crmctl db upgrade",
    "crmctl outbox list --held",
    "crmctl outbox relay --drain",
    "crmctl runs list --failed",
)


class DatabaseName(StrEnum):
    """A database of ours."""

    MAIN = "main"
    INSTALLATIONS = "installations"

    @property
    def setting(self) -> str:
        """The setting that says where it is."""
        return "CRMCTL_DATABASE_URL" if self is DatabaseName.MAIN else "CRMCTL_INSTALLATIONS_DATABASE_URL"

    def aim(self, hint: str) -> str:
        """The hint with its commands made to reach this database."""
        if self is DatabaseName.MAIN or "--database" in hint:
            return hint
        for command in _COMMANDS:
            hint = hint.replace(command, f"{command} --database {self}")
        return hint
