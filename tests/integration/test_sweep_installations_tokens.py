"""A renewal uses a refresh token up: what becomes of its pair where the new one could not be stored."""

import json
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from crmctl.dev import bitrix24_tables
from crmctl.dev.bitrix24_portal import OAUTH_HOST, Bitrix24StandIn, Mood, Reply, app_info
from tests.expire_support import column, rows
from tests.installations_support import (
    HOUR,
    PairIds,
    check,
    events,
    insert_pair,
    journal,
    let_renew,
    make_due,
    start_sweep,
    statuses,
    verify,
)
from tests.support import Database

MONTH = timedelta(days=31)
LEASES = "select installation_id from crm.installation_checks where claimed_by is not null"


@pytest.fixture
def connection(database: Database) -> psycopg.Connection[Any]:
    connection = database.connect()
    bitrix24_tables.create(connection)
    return connection


def expired_pair(
    connection: psycopg.Connection[Any], portal: Bitrix24StandIn, age: timedelta = MONTH, **account: object
) -> PairIds:
    """A pair whose token has to be renewed, and whose portal says that the application is installed."""
    pair = insert_pair(connection, age=age, token_age=HOUR, account=account)
    let_renew(portal, pair)
    portal.portals[pair.domain] = app_info(installed=True)
    return pair


def found(database: Database, portal: Bitrix24StandIn) -> dict[str, tuple[str, str]]:
    """What a run finds of each installation: its reason and the outcome."""
    result = verify(database, portal)
    assert result.exit_code == 0, result.stderr
    return {row["installation_id"]: (row["reason"], row["outcome"]) for row in result.json["installations"]}


def assert_lost(
    database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn, pair: PairIds
) -> None:
    """However old it is, and however often it is looked at, the pair stays as it is; until it has tokens again."""
    for _ in range(2):
        make_due(connection)
        assert found(database, portal) == {str(pair.installation_id): ("TOKEN_LOST", "left")}
        assert statuses(connection, pair) == ("new", "new")
    assert events(connection, pair) == []
    (grant,) = (grant for grant in portal.grants if grant.member_id == pair.member_id)
    connection.execute(
        "update b24lib_bitrix24_accounts set authtoken_refresh_token = %s where id = %s",
        (grant.refresh_token, pair.account_id),
    )
    make_due(connection)
    assert found(database, portal) == {str(pair.installation_id): ("TOKEN_MISSING_HERE", "blocked")}


def test_an_answer_that_comes_after_the_patience_of_a_signal_is_a_lost_token(
    database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
) -> None:
    pair, other = expired_pair(connection, portal), insert_pair(connection)
    portal.portals[other.domain] = app_info(installed=True)
    renewed = threading.Event()

    def answer_after_the_end() -> None:
        renewed.set()
        time.sleep(6)

    portal.after_renewal = answer_after_the_end
    env = portal.settings | {"CRMCTL_BITRIX24__REQUEST_TIMEOUT": "20s"}
    with start_sweep(database, "--verify-portal", env=env) as process:
        assert renewed.wait(20)
        process.terminate()
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 143, stderr
    assert column(connection, LEASES) == [pair.installation_id]
    portal.after_renewal = lambda: None
    make_due(connection)
    assert found(database, portal) == {
        str(pair.installation_id): ("TOKEN_LOST", "left"),
        str(other.installation_id): ("TOKEN_MISSING_HERE", "blocked"),
    }
    assert_lost(database, connection, portal, pair)


def test_a_renewal_without_an_answer_keeps_its_claim_where_the_run_fails(
    database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
) -> None:
    pair, stored = expired_pair(connection, portal), expired_pair(connection, portal)
    (grant,) = (grant for grant in portal.grants if grant.member_id == pair.member_id)
    grant.reply = Reply(mood=Mood.TIMEOUT)
    with psycopg.connect(database.url) as holder:
        holder.execute("lock table b24lib_journal in exclusive mode")
        assert verify(database, portal, CRMCTL_DATABASE__LOCK_TIMEOUT="300ms").exit_code == 75
    assert column(connection, LEASES) == [pair.installation_id]
    assert statuses(connection, stored) == ("new", "new")


# The end of the page's grant on the accounts, and what is left of it.
LACKING = {
    "no column of the token": (
        "updated_at_utc,\n    authtoken_access_token, authtoken_refresh_token, authtoken_expires, authtoken_expires_in",
        "updated_at_utc",
    ),
    "only one of them": ("authtoken_access_token, authtoken_refresh_token, authtoken_expires, ", ""),
}


@pytest.mark.parametrize("lacking", LACKING)
def test_a_role_that_may_not_store_tokens_renews_none(
    database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn, lacking: str
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "stale-installations.md").read_text()
    grants = page.split("```sql\n")[1].split("```")[0]
    full, rest = LACKING[lacking]
    assert grants.count(full) == 1
    pairs = [expired_pair(connection, portal) for _ in range(3)]
    connection.execute("create role crmctl_reader nologin")
    try:
        connection.execute("revoke all on schema public from public")
        connection.execute("grant usage on schema public to crmctl_reader")
        connection.execute(grants.replace(full, rest).replace("ROLE", "crmctl_reader").encode())
        as_role = Database(f"{database.url}{'&' if '?' in database.url else '?'}options=-crole%3Dcrmctl_reader")
        result = verify(as_role, portal)
        assert (result.exit_code, result.json["error"]["code"]) == (78, "CRMCTL_GRANT_MISSING")
        assert "b24lib_bitrix24_accounts" in result.json["error"]["message"] + result.json["error"]["hint"]
        assert portal.asked(OAUTH_HOST) == []
        assert column(connection, LEASES) == []
        assert {statuses(connection, pair) for pair in pairs} == {("new", "new")}
    finally:
        connection.execute("drop owned by crmctl_reader")
        connection.execute("drop role crmctl_reader")


REFUSALS = {
    "raises": "raise exception 'no new token here'; return null;",
    "skips the row": "return null;",
}


def refuse_new_tokens(connection: psycopg.Connection[Any], pair: PairIds, how: str) -> None:
    """A trigger of the application that lets one account keep its token."""
    connection.execute(
        f"""
        create function public.keep_token() returns trigger language plpgsql as $$
        begin
            if new.authtoken_refresh_token is distinct from old.authtoken_refresh_token then
                {REFUSALS[how]}
            end if;
            return new;
        end $$;
        create trigger keep_token before update on b24lib_bitrix24_accounts
            for each row when (old.id = '{pair.account_id}') execute function public.keep_token()
        """.encode()
    )


@pytest.mark.parametrize("how", REFUSALS)
def test_a_token_that_postgresql_refuses_to_store_is_lost_and_holds_up_no_other(
    database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn, how: str
) -> None:
    pair = expired_pair(connection, portal)
    others = [expired_pair(connection, portal) for _ in range(3)]
    refuse_new_tokens(connection, pair, how)
    result = verify(database, portal, "--strict")
    assert result.exit_code == 3, result.stderr
    assert {statuses(connection, other) for other in others} == {("blocked", "blocked")}
    assert statuses(connection, pair) == ("new", "new")
    (told,) = (row for row in result.json["installations"] if row["installation_id"] == str(pair.installation_id))
    assert (told["verdict"], told["reason"], told["outcome"]) == ("unclear", "TOKEN_LOST", "left")
    (failed,) = result.json["failed"]
    assert (failed["installation_id"], result.json["failed_count"]) == (str(pair.installation_id), 1)
    assert ("no new token here" in failed["reason"]) == (how == "raises")
    assert check(connection, pair)["reason"] == "TOKEN_LOST"
    assert [json.loads(row["context_payload"])["reason"] for row in as_text(connection, pair)] == ["TOKEN_LOST"]
    assert len(journal(connection, pair)) == 1
    assert column(connection, LEASES) == []
    connection.execute("drop trigger keep_token on b24lib_bitrix24_accounts")
    assert_lost(database, connection, portal, pair)


def as_text(connection: psycopg.Connection[Any], pair: PairIds) -> list[dict[str, Any]]:
    return rows(
        connection,
        "select context_payload::text from b24lib_journal where application_installation_id = %s",
        pair.installation_id,
    )


def test_a_lost_token_is_remembered_although_the_run_fails_after_it(
    database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
) -> None:
    pair, stored = expired_pair(connection, portal), expired_pair(connection, portal)
    refuse_new_tokens(connection, pair, "raises")
    with psycopg.connect(database.url) as holder:
        holder.execute("lock table b24lib_journal in exclusive mode")
        assert verify(database, portal, CRMCTL_DATABASE__LOCK_TIMEOUT="300ms").exit_code == 75
    # The claim that a run left is what tells the next one; what was stored is given back at once.
    assert column(connection, LEASES) == [pair.installation_id]
    assert statuses(connection, stored) == ("new", "new")
    connection.execute("drop trigger keep_token on b24lib_bitrix24_accounts")
    assert found(database, portal) == {str(stored.installation_id): ("TOKEN_MISSING_HERE", "blocked")}
    assert_lost(database, connection, portal, pair)


def test_a_lost_token_is_remembered_although_its_row_is_held_when_the_batch_is_applied(
    database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
) -> None:
    pair = expired_pair(connection, portal)
    refuse_new_tokens(connection, pair, "raises")
    with psycopg.connect(database.url) as holder:

        def hold() -> None:
            holder.execute("select from b24lib_application_installations for update")

        portal.after_renewal = hold
        assert verify(database, portal).json["skipped_locked_count"] == 1
    portal.after_renewal = lambda: None
    assert column(connection, LEASES) == [pair.installation_id]
    connection.execute("drop trigger keep_token on b24lib_bitrix24_accounts")
    assert_lost(database, connection, portal, pair)


def test_a_token_that_was_invalid_before_a_run_died_is_not_called_lost(
    database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
) -> None:
    pair = insert_pair(connection, age=timedelta(days=29), token_age=HOUR)
    assert found(database, portal) == {str(pair.installation_id): ("TOKEN_INVALID", "left")}
    # As a run leaves it that is killed while it asks.
    connection.execute(
        "update crm.installation_checks"
        " set claimed_by = gen_random_uuid(), claimed_until = now(), next_check_at = now()"
    )
    assert found(database, portal) == {str(pair.installation_id): ("TOKEN_INVALID", "left")}
