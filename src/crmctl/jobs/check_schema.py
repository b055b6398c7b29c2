"""`crmctl db check`: compares the database's revisions with this version's, changes nothing.

A schema that is behind never gets here: opening the transaction already refused it (SchemaError, exit 78).
"""

from typing import Any, Final

from crmctl.adapters.postgres import Transaction
from crmctl.migrations import heads
from crmctl.sql import load

STATEMENTS: Final = load("schema")


def query(tx: Transaction) -> dict[str, Any]:
    """Return `{"parts": [{part, revision, expected, state}]}`; state is current, ahead or owned-by-crm."""
    found = [row["revision"] for row in tx.all(STATEMENTS["revisions"])]
    parts = []
    for part, head in heads().items():
        mine = [revision for revision in found if revision.startswith(f"{part}_")]
        state = "current" if head in mine else "ahead" if mine else "owned-by-crm"
        parts.append({"part": part, "revision": ", ".join(mine) or None, "expected": head, "state": state})
    return {"parts": parts}
