"""The sweep's queue: its statements with this database's table names in them, and its rows."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from crmctl.adapters import bitrix24_tables
from crmctl.adapters.postgres import Transaction, array_literal
from crmctl.domain.events import INSTALLATION_MARKED_STALE
from crmctl.domain.installations import Pair, Policy
from crmctl.settings import Bitrix24Settings
from crmctl.sql import load


def statements(tx: Transaction, settings: Bitrix24Settings) -> dict[str, str]:
    """The sweep's statements with the names of this database's tables in them."""
    raw = load("sweep_installations")
    tables = bitrix24_tables.resolve(tx, settings)
    return tables.fill(
        raw,
        **tables.fill({name: raw[name] for name in ("due", "elsewhere")}),
        topic=INSTALLATION_MARKED_STALE.topic,
        aggregate_type=INSTALLATION_MARKED_STALE.aggregate_type,
        contract_version=str(INSTALLATION_MARKED_STALE.contract_version),
    )


def due_params(
    settings: Bitrix24Settings, policy: Policy, ids: Sequence[UUID], passed: Iterable[UUID], limit: int
) -> dict[str, object]:
    """The parameters of the block `due`, with the limit."""
    return {
        "zone": settings.php_timezone,
        "ttl": policy.ttl,
        "ids": array_literal(ids) if ids else None,
        "passed": array_literal(list(passed)),
        "impatient": False,
        "limit": limit,
    }


def read_pair(row: Mapping[str, Any]) -> Pair:
    """A row of `read_pairs`."""
    return Pair(
        installation_id=row["installation_id"],
        account_id=row["account_id"],
        installation_status=row["installation_status"],
        account_status=row["account_status"] if row["has_account"] else None,
        member_id=row["member_id"],
        is_master=row["is_master"],
        token_set=row["token_set"],
        live_installations=row["live_installations"],
        live_masters=row["live_masters"],
        age=timedelta(seconds=int(row["age_seconds"])),
    )
