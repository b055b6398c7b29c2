"""`crmctl db roles`: makes the roles of `domain/grants.py` what the table of grants says, in one transaction.

It compares the catalogue with the table and does only what differs, so a second run does nothing. It creates group
roles that cannot log in; a DBA grants them to the users that log in. It never drops a role, and changes nothing of
one but its privileges in our schema and on the tables that are named.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from crmctl.adapters.postgres import Transaction
from crmctl.domain.errors import GrantMissingError
from crmctl.domain.grants import GRANTS, SCHEMA, Atom, Grant, Kind, atoms, grouped, tables
from crmctl.sql import load

STATEMENTS: Final = load("roles")
# The same in every crmctl: "roles" in ASCII.
_LOCK: Final = 0x726F6C6573
_USAGE: Final = Atom("", "USAGE")


@dataclass(frozen=True, slots=True)
class Difference:
    """What one role should have in this database, and what it has; `exists` is whether there is such a role at all."""

    role: str
    exists: bool
    wanted: frozenset[Atom]
    granted: frozenset[Atom]

    @property
    def missing(self) -> frozenset[Atom]:
        """What is to be granted."""
        return self.wanted - self.granted

    @property
    def excess(self) -> frozenset[Atom]:
        """What is to be taken back."""
        return self.granted - self.wanted

    def describe(self, which: Iterable[Atom]) -> list[str]:
        """Grants in words, such as `UPDATE (status) on crm.bookings`."""
        return [_words(grant) for grant in grouped(which)]


def compare(tx: Transaction, prefix: str) -> list[Difference]:
    """Say how each role differs from the table of grants."""
    roles = {f"{prefix}{kind}": kind for kind in Kind}
    scope: Mapping[str, object] = {"roles": list(roles), "tables": list(tables()), "schema": SCHEMA}
    there = {row["table_name"]: row["columns"] for row in tx.all(STATEMENTS["tables"], scope)}
    existing = {row["role"] for row in tx.all(STATEMENTS["roles"], scope)}
    granted: dict[str, set[Atom]] = {role: set() for role in roles}
    for row in tx.all(STATEMENTS["granted"], scope):
        granted[row["role"]].add(Atom(row["table_name"], row["privilege"], row["column_name"]))
    return [
        Difference(role, role in existing, atoms(kind, there) | {_USAGE}, frozenset(granted[role]))
        for role, kind in roles.items()
    ]


def plan(tx: Transaction, prefix: str) -> list[str]:
    """Return the statements that would make the roles what they should be; none when they are."""
    tx.execute(STATEMENTS["take_lock"], {"lock": _LOCK})
    statements: list[sql.Composed] = []
    for difference in compare(tx, prefix):
        role = sql.Identifier(difference.role)
        if not difference.exists:
            statements.append(sql.SQL("create role {} nologin").format(role))
        statements += [_statement("revoke {} on {} from {}", grant, role) for grant in grouped(difference.excess)]
        # Revoking a privilege on a table takes those on its columns along.
        revoked = {(atom.table, atom.privilege) for atom in difference.excess if not atom.column}
        again = {atom for atom in difference.wanted if atom.column and (atom.table, atom.privilege) in revoked}
        granting = grouped(difference.missing | again)
        statements += [_statement("grant {} on {} to {}", grant, role) for grant in granting]
    return [statement.as_string(tx.connection) for statement in statements]


def apply(tx: Transaction, statements: Iterable[str]) -> None:
    """Execute what `plan` returned."""
    for statement in statements:
        tx.execute(statement)


def lacking(tx: Transaction, kind: Kind) -> list[str]:
    """The grants, in words, that the connected role lacks for this kind of work, from wherever it may have them."""
    row = tx.one(STATEMENTS["schema_usage"], {"schema": SCHEMA})
    wanted = sorted(atom for grant in GRANTS[kind] for atom in grant.atoms)
    found = tx.all(
        STATEMENTS["lacking"],
        {
            "tables": [atom.table for atom in wanted],
            "privileges": [atom.privilege for atom in wanted],
            "columns": [atom.column for atom in wanted],
        },
    )
    missing = [Atom(row["table_name"], row["privilege"], row["column_name"]) for row in found]
    return [*([_words(Grant("", "USAGE"))] if row["usage"] is False else []), *map(_words, grouped(missing))]


def missing_error(role: str, group: str, missing: Iterable[str], said: str | None = None) -> GrantMissingError:
    """Say which grants a role lacks, in which group role it would have them, and what PostgreSQL said, if it did."""
    return GrantMissingError(
        f"the database role {role} lacks {'; '.join(missing)}" + (f" ({said})" if said else ""),
        hint=f"as the schema's owner: crmctl db roles; then: grant {group} to {role}",
    )


def _words(grant: Grant) -> str:
    return str(grant) if grant.table else f"{grant.privilege} on schema {SCHEMA}"


def _statement(form: str, grant: Grant, role: sql.Identifier) -> sql.Composed:
    privilege: sql.Composable = sql.SQL(grant.privilege.lower())
    if grant.columns:
        privilege += sql.SQL(" ({})").format(sql.SQL(", ").join(sql.Identifier(name) for name in grant.columns))
    if grant.table:
        target: sql.Composable = sql.SQL("table {}").format(sql.Identifier(*grant.table.split(".", 1)))
    else:
        target = sql.SQL("schema {}").format(sql.Identifier(SCHEMA))
    return sql.SQL(form).format(privilege, target, role)
