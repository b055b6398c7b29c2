"""kill -9 at any moment of a sweep: no half-swept pair, no transition out of a lost token, and a rerun completes."""

import random
import signal
import threading
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from crmctl.dev import bitrix24_tables
from crmctl.dev.bitrix24_portal import OAUTH_HOST, Bitrix24StandIn, app_info
from tests.acceptance.conftest import ChaosTable
from tests.expire_support import Connection, column, rows, scaled, wait_until
from tests.installations_support import (
    APPLICATION,
    HOUR,
    broken_pairs,
    check,
    insert_pair,
    let_renew,
    make_due,
    start_sweep,
    statuses,
    verify,
)
from tests.support import Database


@pytest.fixture
def connection(database: Database) -> psycopg.Connection[Any]:
    connection = database.connect()
    bitrix24_tables.create(connection)
    return connection


def sessions(connection: Connection) -> list[Any]:
    return column(
        connection,
        "select pid from pg_stat_activity where application_name = %s and datname = current_database()",
        APPLICATION,
    )


@pytest.mark.chaos
def test_kills_at_random_moments(
    database: Database, connection: Connection, portal: Bitrix24StandIn, chaos_table: ChaosTable
) -> None:
    target, dice, kills = scaled(30, least=5), random.Random(4), 0
    portal.before_answer = lambda _request: time.sleep(0.01)
    env = portal.settings | {"CRMCTL_BITRIX24__CONCURRENCY": "4"}
    slow_down(connection)
    with chaos_table.row("sweep killed with SIGKILL") as row:
        pairs = []
        while kills < target:
            for _ in range(30):
                pair = insert_pair(connection, token_age=HOUR if dice.random() < 0.6 else None)
                let_renew(portal, pair)
                portal.portals[pair.domain] = app_info(installed=True)
                pairs.append(pair)
            with start_sweep(database, "--verify-portal", "--drain", "--batch-size", "10", env=env) as process:
                wait_until(lambda: sessions(connection) or process.poll() is not None, "its session")
                time.sleep(dice.uniform(0, 0.5))
                process.kill()
                process.communicate(timeout=20)
            kills += process.returncode == -signal.SIGKILL
            wait_until(lambda: not sessions(connection), "the end of its sessions")
            assert broken_pairs(connection) == []
            assert_audited(connection)
            make_due(connection)
        last = verify(database, portal, "--drain", "--batch-size", "200")
        assert last.exit_code == 0, last.stderr
        outcomes = Counter(statuses(connection, pair) for pair in pairs)
        lost = [pair for pair in pairs if statuses(connection, pair) == ("new", "new")]
        for pair in lost:
            assert (check(connection, pair)["verdict"], check(connection, pair)["reason"]) == (
                "unclear",
                "TOKEN_LOST",
            )
        # At most one token is under way on each of the connections of a run that is killed.
        assert len(lost) <= 4 * kills
        assert outcomes[("blocked", "blocked")] == len(pairs) - len(lost)
        assert_audited(connection)
        row.interruptions, row.due = f"{kills} kills", len(pairs)
        row.outcome = f"{outcomes[('blocked', 'blocked')]} swept whole, {len(lost)} tokens lost and unclear"


def assert_audited(connection: Connection) -> None:
    """Whatever moved has its event, its journal row and its check, once each, and nothing else has an event."""
    broken = rows(
        connection,
        """
        select i.id, i.status, c.outcome, e.events, j.entries
        from b24lib_application_installations i
        left join crm.installation_checks c on c.installation_id = i.id
        left join (select aggregate_id, count(*) as events from crm.outbox_messages group by 1) e
            on e.aggregate_id = i.id::text
        left join (
            select application_installation_id, count(*) as entries
            from b24lib_journal where context_payload ->> 'outcome' <> 'left' group by 1
        ) j on j.application_installation_id = i.id
        where (i.status <> 'new') is distinct from (coalesce(e.events, 0) = 1)
            or (i.status <> 'new') is distinct from (coalesce(j.entries, 0) = 1)
            or (i.status <> 'new') is distinct from (coalesce(c.outcome, 'left') = i.status)
        """,
    )
    assert broken == []


def slow_down(connection: Connection) -> None:
    """Spread the writes of a sweep over some tens of milliseconds, so that kills fall between them."""
    connection.execute(
        """
        create function public.slow_down() returns trigger language plpgsql as $$
        begin
            perform pg_sleep(0.02);
            return null;
        end $$;
        create trigger slow_down after update on b24lib_application_installations
            for each statement execute function public.slow_down();
        create trigger slow_down after update on b24lib_bitrix24_accounts
            for each statement execute function public.slow_down();
        create trigger slow_down after insert on crm.installation_checks
            for each statement execute function public.slow_down();
        create trigger slow_down after insert on crm.job_runs
            for each statement execute function public.slow_down()
        """
    )


def test_a_token_that_was_lost_in_the_one_window_is_unclear_and_moves_nothing(
    database: Database, connection: Connection, portal: Bitrix24StandIn
) -> None:
    # So old that any other unclear answer would end it.
    pair = insert_pair(connection, age=timedelta(days=31), token_age=HOUR)
    let_renew(portal, pair)
    portal.portals[pair.domain] = app_info(installed=True)
    renewed, kill = threading.Event(), threading.Event()

    def answer_only_after_the_kill() -> None:
        renewed.set()
        kill.wait(20)

    portal.after_renewal = answer_only_after_the_kill
    with start_sweep(database, "--verify-portal", env=portal.settings) as process:
        assert renewed.wait(20)
        process.kill()
        process.communicate(timeout=20)
        kill.set()
    wait_until(lambda: not sessions(connection), "the end of its sessions")

    # Until the lease runs out nobody asks; then the used-up token is told from one that is merely invalid.
    assert verify(database, portal).json["checked_count"] == 0
    for attempts in (1, 2):
        make_due(connection)
        result = verify(database, portal)
        (told,) = result.json["installations"]
        assert (told["verdict"], told["reason"], told["outcome"]) == ("unclear", "TOKEN_LOST", "left")
        assert check(connection, pair)["attempts"] == attempts
        assert statuses(connection, pair) == ("new", "new")
    assert len(portal.asked(OAUTH_HOST)) == 3


def test_a_kill_while_portals_are_asked_leaves_leases_that_run_out(
    database: Database, connection: Connection, portal: Bitrix24StandIn
) -> None:
    pairs = [insert_pair(connection) for _ in range(3)]
    for pair in pairs:
        portal.portals[pair.domain] = app_info(installed=True)
    asked, go_on = threading.Event(), threading.Event()

    def hold(_request: object) -> None:
        asked.set()
        go_on.wait(20)

    portal.before_answer = hold
    with start_sweep(database, "--verify-portal", "--time-budget", "5s", env=portal.settings) as process:
        assert asked.wait(20)
        process.kill()
        process.communicate(timeout=20)
        go_on.set()
    wait_until(lambda: not sessions(connection), "the end of its sessions")
    leases = column(connection, "select claimed_until - now() from crm.installation_checks")
    assert len(leases) == 3
    assert max(leases) < timedelta(minutes=2)
    assert {statuses(connection, pair) for pair in pairs} == {("new", "new")}
    make_due(connection)
    assert verify(database, portal).json["blocked_count"] == 3
