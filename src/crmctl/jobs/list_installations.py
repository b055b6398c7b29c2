"""`crmctl installations list`: reads installations, changes nothing."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from crmctl.adapters import bitrix24_tables
from crmctl.adapters.postgres import Transaction
from crmctl.settings import Bitrix24Settings
from crmctl.sql import load


@dataclass(frozen=True, slots=True)
class Options:
    """What to list: all that are not deleted, or those that are stale by this TTL."""

    stale: bool = False
    ttl: timedelta = timedelta(hours=1)
    limit: int = 50


def statements(tx: Transaction, settings: Bitrix24Settings) -> dict[str, str]:
    """The read side's statements with the names of this database's tables in them."""
    raw = load("installations")
    tables = bitrix24_tables.resolve(tx, settings)
    row = tables.fill({"row": raw["row"]})["row"]
    return tables.fill({name: text for name, text in raw.items() if name != "row"}, row=row)


def figures(tx: Transaction, settings: Bitrix24Settings, ttl: timedelta = timedelta(hours=1)) -> dict[str, int]:
    """Return {stale_count, unclear_count, anomaly_count} of the installations that are `new`."""
    return dict(tx.one(statements(tx, settings)["figures"], {"zone": settings.php_timezone, "ttl": ttl}))


def query(tx: Transaction, settings: Bitrix24Settings, options: Options) -> dict[str, Any]:
    """Return `{"installations": [{installation_id, status, account_status, age_seconds, stale, verdict, …}]}`."""
    params = {
        "zone": settings.php_timezone,
        "stale": options.stale,
        "ttl": options.ttl,
        "limit": options.limit,
    }
    return {"installations": tx.all(statements(tx, settings)["list"], params)}
