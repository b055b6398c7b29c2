"""`crmctl db check`: compares the database with what this version needs, changes nothing.

Revisions say whether our own tables fit; the CRM's core is held against its contract by the catalogue, whoever made it.
A schema that is behind never gets here: opening the transaction already refused it (SchemaError, exit 78).
"""

from typing import Any, Final

from crmctl.adapters.postgres import Transaction
from crmctl.domain import contract
from crmctl.domain.contract import Column, FoundIndex
from crmctl.migrations import SCHEMA, heads
from crmctl.sql import load

STATEMENTS: Final = load("schema")


def query(tx: Transaction) -> dict[str, Any]:
    """Return `{"parts": [{part, revision, expected, state}], "faults": […]}`.

    state is current, ahead or owned-by-crm; `faults` is where the core falls short of its contract.
    """
    found = [row["revision"] for row in tx.all(STATEMENTS["revisions"])]
    parts = []
    for part, head in heads().items():
        mine = [revision for revision in found if revision.startswith(f"{part}_")]
        state = "current" if head in mine else "ahead" if mine else "owned-by-crm"
        parts.append({"part": part, "revision": ", ".join(mine) or None, "expected": head, "state": state})
    return {"parts": parts, "faults": core_faults(tx)}


def core_faults(tx: Transaction) -> list[str]:
    """Say where the core tables fall short of their contract."""
    params = {"schema": SCHEMA, "tables": [table.name for table in contract.TABLES]}
    columns = [Column(**row) for row in tx.all(STATEMENTS["columns"], params)]
    indexes = [FoundIndex(**{**row, "key": tuple(row["key"])}) for row in tx.all(STATEMENTS["indexes"], params)]
    return contract.faults(columns, indexes)
