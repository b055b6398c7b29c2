"""Which indexes the sweep's statements use where there are many installations."""

import json
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from crmctl.adapters.postgres import Transaction, array_literal
from crmctl.dev import bitrix24_tables
from crmctl.domain.installations import Policy
from crmctl.jobs import sweep_queue
from crmctl.settings import Bitrix24Settings
from tests.expire_support import column
from tests.support import Database


@pytest.fixture
def connection(database: Database) -> psycopg.Connection[Any]:
    connection = database.connect()
    bitrix24_tables.create(connection)
    connection.execute(
        """
        insert into b24lib_bitrix24_accounts (
            id, b24_user_id, is_b24_user_admin, member_id, is_master_account, domain_url, status, created_at_utc,
            updated_at_utc, application_version, authtoken_access_token, authtoken_refresh_token, authtoken_expires
        )
        select md5('account' || n)::uuid, 1, true, md5(n::text), true, 'p' || n || '.test', 'active', now(), now(), 1,
               'access', 'refresh', 0
        from generate_series(1, 20000) n
        """
    )
    connection.execute(
        """
        insert into b24lib_application_installations
            (id, status, created_at_utc, update_at_utc, bitrix_24_account_id, portal_license_family)
        select md5('installation' || n)::uuid, case when n % 100 = 0 then 'new' else 'active' end,
               now() - interval '1 day', now(), md5('account' || n)::uuid, 'ent'
        from generate_series(1, 20000) n
        """
    )
    connection.execute(
        """
        insert into crm.installation_checks (installation_id, verdict, outcome, attempts)
        select md5('installation' || n)::uuid, 'unclear', case when n <= 20 then 'blocked' else 'left' end, 1
        from generate_series(1, 20000) n
        """
    )
    connection.execute("analyze")
    return connection


@pytest.fixture
def transaction(database: Database, connection: psycopg.Connection[Any]) -> Iterator[Transaction]:
    with psycopg.connect(database.url, row_factory=dict_row) as own:
        now = column(connection, "select now()")[0]
        yield Transaction(own, now)
        own.rollback()


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def explain(tx: Transaction, statement: str, params: dict[str, object]) -> list[dict[str, Any]]:
    """The nodes of a statement's plan."""
    row = tx.one(f"explain (format json) {statement}", params)
    plan = row["QUERY PLAN"]
    return list(nodes((json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]))


IDS = [uuid.uuid5(uuid.NAMESPACE_DNS, str(n)) for n in range(20)]


@pytest.mark.parametrize(
    ("statement", "index"),
    [
        ("same_token", "b24lib_bitrix24_accounts_pkey"),
        ("lock_installations", "b24lib_application_installations_pkey"),
        ("lock_accounts", "b24lib_bitrix24_accounts_pkey"),
        ("store_token", "b24lib_bitrix24_accounts_pkey"),
        ("give_back", "ix_installation_checks_claimed_by"),
        ("find_overridden", "ix_installation_checks_swept"),
        ("write", "b24lib_application_installations_pkey"),
        ("named", "b24lib_application_installations_pkey"),
    ],
)
def test_rows_are_found_by_index(transaction: Transaction, statement: str, index: str) -> None:
    settings = Bitrix24Settings()
    statements = sweep_queue.statements(transaction, settings)
    decisions = [{"installation_id": str(i), "account_id": str(i), "outcome": "blocked"} for i in IDS]
    params: dict[str, object] = {
        "ids": array_literal(IDS),
        "zone": "UTC",
        "run_id": IDS[0],
        "unsettled": array_literal(IDS),
        "account_id": IDS[0],
        "old_refresh_token": "old",
        "access_token": "a",
        "refresh_token": "r",
        "expires": 1,
        "expires_in": 1,
        "decisions": Jsonb(decisions),
        "label": "label",
        "ip_address": b"0" * 16,
        "traceparent": "trace",
    }
    if statement == "write":
        # The planner knows nothing of a JSON document's length, and guesses 100 rows: no index for a small table.
        transaction.execute("set local enable_hashjoin = off")
        transaction.execute("set local enable_mergejoin = off")
    plan = explain(transaction, statements[statement], params)
    assert index in {node.get("Index Name") for node in plan}, plan


def test_every_statement_can_be_explained(transaction: Transaction) -> None:
    settings = Bitrix24Settings()
    statements = sweep_queue.statements(transaction, settings)
    params: dict[str, object] = {
        **sweep_queue.due_params(settings, Policy(), IDS, IDS, 10),
        "lease": "1 minute",
        "run_id": IDS[0],
        "lock": 1,
    }
    for name in ("select_due", "claim", "look", "take_turn", "read_pairs"):
        assert explain(transaction, statements[name], params), name
