"""10,000 candidates on 3,000 portals, of which one in twenty does not answer: bounded time, memory and pace."""

import os
import random
import subprocess
import sys
from collections import defaultdict
from typing import Any, Final

import psycopg
import pytest

from crmctl.dev import bitrix24_tables
from crmctl.dev.bitrix24_portal import Bitrix24StandIn, Mood, Reply, app_info
from tests.acceptance.conftest import ChaosTable
from tests.expire_support import CHAOS_FULL, column, scalar
from tests.support import Database

_MEGABYTE: Final = 1 << 20
SILENT: Final = Reply(mood=Mood.TIMEOUT)


@pytest.fixture
def connection(database: Database) -> psycopg.Connection[Any]:
    connection = database.connect()
    bitrix24_tables.create(connection)
    return connection


pytestmark = pytest.mark.chaos

_INSTALLATIONS, _PORTALS = (10_000, 3_000) if CHAOS_FULL else (1_000, 300)


@pytest.mark.parametrize(
    ("how", "args"), [("one batch", ["--batch-size", str(_INSTALLATIONS)]), ("batches of 100", ["--drain"])]
)
def test_many_candidates_on_many_portals(
    database: Database, connection: psycopg.Connection[Any], chaos_table: ChaosTable, how: str, args: list[str]
) -> None:
    installations, portals = _INSTALLATIONS, _PORTALS
    budget = 50 if CHAOS_FULL else 8
    fill(connection, installations, portals)
    silent = set(random.Random(5).sample(range(portals), portals // 20))
    with chaos_table.row(f"sweep of many portals, 5% silent, {how}") as row, Bitrix24StandIn() as stand_in:
        for number in range(portals):
            stand_in.portals[f"portal-{number}.test"] = SILENT if number in silent else app_info(installed=True)
        result = run_measured(
            database,
            stand_in.settings | {"CRMCTL_BITRIX24__CONCURRENCY": "32", "CRMCTL_BITRIX24__REQUEST_TIMEOUT": "1s"},
            *args,
            "--time-budget",
            f"{budget}s",
        )
        assert result["exit_code"] == 0, result["stderr"]
        assert result["seconds"] < budget + 15
        assert result["peak_bytes"] <= 128 * _MEGABYTE
        moments = defaultdict(list)
        for request in stand_in.requests:
            moments[request.host].append(request.at)
        for host in moments:
            times = sorted(moments[host])
            assert len(times) == 1 or stand_in.portals[host] is not SILENT, host
            assert all(third - first >= 1.0 for first, third in zip(times, times[2:], strict=False)), host
        blocked = scalar(connection, "select count(*) from b24lib_application_installations where status = 'blocked'")
        assert blocked > installations // 10
        assert blocked == scalar(connection, "select count(*) from crm.outbox_messages")
        assert blocked == scalar(connection, "select count(*) from b24lib_bitrix24_accounts where status = 'blocked'")
        assert column(connection, "select 1 from crm.installation_checks where claimed_by is not null limit 1") == []
        row.interruptions, row.due = f"{portals} portals", installations
        row.outcome = (
            f"{blocked} decided in {result['seconds']:.0f} s, {result['peak_bytes'] // _MEGABYTE} MB at the most"
        )


def fill(connection: psycopg.Connection[Any], installations: int, portals: int) -> None:
    """Stale pairs, each of a member of its own, spread over the portals' domains."""
    connection.execute(
        """
        create temporary table filling as
        select gen_random_uuid() as id, gen_random_uuid() as account_id, n, md5(n::text) as member_id
        from generate_series(1, %s) n
        """,
        (installations,),
    )
    connection.execute(
        """
        insert into b24lib_bitrix24_accounts (
            id, b24_user_id, is_b24_user_admin, member_id, is_master_account, domain_url, status, created_at_utc,
            updated_at_utc, application_version, authtoken_access_token, authtoken_refresh_token, authtoken_expires
        )
        select account_id, 1, true, member_id, true, 'portal-' || n %% %s || '.test', 'new',
               now() at time zone 'UTC' - interval '2 hours', now() at time zone 'UTC', 1,
               md5('access' || n), md5('refresh' || n), 4000000000
        from filling
        """,
        (portals,),
    )
    connection.execute(
        """
        insert into b24lib_application_installations
            (id, status, created_at_utc, update_at_utc, bitrix_24_account_id, portal_license_family)
        select id, 'new', now() at time zone 'UTC' - interval '2 hours', now() at time zone 'UTC', account_id, 'ent'
        from filling
        """
    )
    connection.execute("analyze")


_MEASURE: Final = """
import json, resource, subprocess, sys, time
started = time.monotonic()
done = subprocess.run([sys.executable, "-m", "crmctl", *sys.argv[1:]], capture_output=True, text=True)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps({"exit_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr[-2000:],
                  "seconds": time.monotonic() - started, "peak_bytes": peak}))
"""


def run_measured(database: Database, env: dict[str, str], *args: str) -> dict[str, Any]:
    """Sweep with --verify-portal; returns exit code, seconds and the peak of resident memory of that process."""
    import json

    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, "installations", "sweep", "--verify-portal", "-o", "json", *args],
        env=os.environ | {"CRMCTL_DATABASE_URL": database.url, "CRMCTL_LOG_LEVEL": "error"} | env,
        cwd="/",
        capture_output=True,
        encoding="utf-8",
        timeout=180,
        check=True,
    )
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured
