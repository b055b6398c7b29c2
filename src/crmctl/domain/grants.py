"""Who may do what in the database: one table of grants, from which `crmctl db roles` makes the roles.

The least that each kind of work needs, and nothing else: no role may UPDATE or DELETE the timeline, the chat role may
UPDATE two columns of deals, and the installations role may not write what finishes an install, the application token. A
table or a column that is not there (of a newer schema, of bitrix24-php-lib in a database of its own or under another
naming strategy) is left out.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

SCHEMA: Final = "crm"


class Kind(StrEnum):
    """The kinds of work; a role's name is the prefix and this."""

    BOOKINGS = "bookings"
    RELAY = "relay"
    CHAT = "chat"
    INSTALLATIONS = "installations"
    DEAD_LETTERS = "dead_letters"
    MAINTENANCE = "maintenance"
    READONLY = "readonly"


class Atom(NamedTuple):
    """The smallest grant: a privilege on a table (`schema.table`) or, with a column, on that column of it."""

    table: str
    privilege: str
    column: str = ""


@dataclass(frozen=True, slots=True)
class Grant:
    """A privilege on one table, or on some columns of it."""

    table: str
    privilege: str
    columns: tuple[str, ...] = ()

    @property
    def atoms(self) -> frozenset[Atom]:
        """The grant, column by column."""
        return frozenset(Atom(self.table, self.privilege, column) for column in self.columns or ("",))

    def __str__(self) -> str:
        columns = f" ({', '.join(self.columns)})" if self.columns else ""
        return f"{self.privilege}{columns} on {self.table}"


def _on(table: str, *privileges: str, **columns: tuple[str, ...]) -> tuple[Grant, ...]:
    """Grants on one table: whole ones by name, those on columns as `update=(…)`."""
    name = table if "." in table else f"{SCHEMA}.{table}"
    whole = [Grant(name, privilege.upper()) for privilege in privileges]
    return (*whole, *(Grant(name, privilege.upper(), names) for privilege, names in columns.items()))


# Every job looks at the schema's revisions and at its pause, and leaves its record.
_EVERY_JOB: Final = (
    *_on("crmctl_schema_version", "select"),
    *_on("crmctl_compatibility", "select"),
    *_on("job_pauses", "select"),
    *_on("job_runs", "select", "insert"),
)
_CHAT: Final = (
    *_EVERY_JOB,
    *_on("deals", "select", update=("chat_status", "updated_at")),
    *_on("deal_chat_positions", "select", "insert", "update"),
    *_on("processed_messages", "select", "insert"),
    *_on("deferred_messages", "select", "insert", "update", "delete"),
)
# What a renewal stores, as either of Doctrine's naming strategies spells it: a database has one of them.
_TOKEN: Final = tuple(
    prefix + column
    for prefix in ("authtoken_", "auth_token_")
    for column in ("access_token", "refresh_token", "expires", "expires_in")
)

GRANTS: Final[Mapping[Kind, tuple[Grant, ...]]] = {
    Kind.BOOKINGS: (
        *_EVERY_JOB,
        *_on(
            "bookings",
            "select",
            update=("status", "expired_at", "booking_expires_at", "extensions_count", "version", "updated_at"),
        ),
        *_on("deals", select=("id",)),
        *_on("deal_timeline_events", "insert"),
        *_on("outbox_messages", "insert"),
        *_on("deal_notifications", "insert"),
        *_on("extension_requests", "select", "insert", update=("result",)),
    ),
    Kind.RELAY: (
        *_EVERY_JOB,
        *_on("outbox_messages", "select", update=("published_at", "attempts", "last_error", "next_attempt_at")),
    ),
    Kind.CHAT: _CHAT,
    Kind.INSTALLATIONS: (
        *_EVERY_JOB,
        *_on("installation_checks", "select", "insert", "update"),
        *_on("outbox_messages", "insert"),
        *_on("public.b24lib_application_installations", "select", update=("status", "comment", "update_at_utc")),
        *_on("public.b24lib_bitrix24_accounts", "select", update=("status", "comment", "updated_at_utc", *_TOKEN)),
        *_on("public.b24lib_journal", "insert"),
    ),
    Kind.DEAD_LETTERS: (*_CHAT, *_on("dlq_resolutions", "select", "insert", "update")),
    Kind.MAINTENANCE: (
        *_EVERY_JOB,
        *_on("job_runs", "delete"),
        *_on("job_pauses", "insert", "update", "delete"),
        # The rows' places, by which prune walks, are readable with the whole table only.
        *_on("outbox_messages", "select", "delete"),
        *_on("processed_messages", "select", "delete"),
    ),
    Kind.READONLY: tuple(
        grant
        for table in (
            "bookings",
            "crmctl_compatibility",
            "crmctl_schema_version",
            "deal_chat_positions",
            "deal_notifications",
            "deal_timeline_events",
            "deals",
            "deferred_messages",
            "dlq_resolutions",
            "extension_requests",
            "installation_checks",
            "job_pauses",
            "job_runs",
            "outbox_messages",
            "processed_messages",
            "public.b24lib_application_installations",
            "public.b24lib_bitrix24_accounts",
            "public.b24lib_journal",
        )
        for grant in _on(table, "select")
    ),
}


def tables() -> tuple[str, ...]:
    """Every table that a grant is about."""
    return tuple(sorted({grant.table for grants in GRANTS.values() for grant in grants}))


def atoms(kind: Kind, there: Mapping[str, Collection[str]]) -> frozenset[Atom]:
    """What a role of this kind is granted, on the tables that are there and on such columns as they have."""
    return frozenset(
        atom
        for grant in GRANTS[kind]
        for atom in grant.atoms
        if atom.table in there and (not atom.column or atom.column in there[atom.table])
    )


def grouped(atoms: Iterable[Atom]) -> list[Grant]:
    """The grants that make these atoms up, in the order of their tables; a whole table stands for its columns."""
    columns: dict[tuple[str, str], list[str]] = {}
    for atom in sorted(atoms):
        columns.setdefault((atom.table, atom.privilege), []).append(atom.column)
    return [Grant(*key, () if "" in names else tuple(names)) for key, names in columns.items()]
