"""`crmctl bookings list`: reads bookings, changes nothing."""

from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from crmctl.adapters.postgres import Transaction
from crmctl.sql import load

STATEMENTS: Final = load("bookings")


@dataclass(frozen=True, slots=True)
class Options:
    """What to list; no statuses means the active ones, by deadline."""

    due: bool = False
    statuses: tuple[str, ...] = ()
    tenant_id: UUID | None = None
    limit: int = 50


def query(tx: Transaction, options: Options) -> dict[str, Any]:
    """Return `{"bookings": [{id, tenant_id, deal_id, property_object_id, status, deadline, overdue, version}]}`."""
    params: dict[str, object] = {"tenant_id": options.tenant_id, "limit": options.limit}
    if options.statuses:
        rows = tx.all(STATEMENTS["list_by_status"], {**params, "statuses": list(options.statuses)})
    else:
        rows = tx.all(STATEMENTS["list_active"], {**params, "due": options.due})
    return {"bookings": [row["booking"] for row in rows]}
