"""`installations sweep --verify-portal` against a stand-in for Bitrix24: each row of the verdict table."""

import itertools
import json
import re
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

from crmctl.dev import bitrix24_tables
from crmctl.dev.bitrix24_portal import CLIENT_SECRET, OAUTH_HOST, Bitrix24StandIn, Mood, Reply, Request, app_info, error
from crmctl.jobs.ask_portals import PAUSE
from tests.expire_support import column, fingerprints, log_lines, rows, runs, scalar
from tests.installations_support import (
    HOUR,
    check,
    events,
    insert_pair,
    journal,
    let_renew,
    make_due,
    start_sweep,
    statuses,
    sweep,
    verify,
)
from tests.integration.test_sweep_installations import assert_audit, pairs_digest
from tests.support import CallResult, Database

DAY = timedelta(days=1)


@pytest.fixture
def connection(database: Database) -> psycopg.Connection[Any]:
    connection = database.connect()
    bitrix24_tables.create(connection)
    return connection


def verdict_of(result: CallResult) -> tuple[str, str, str]:
    (row,) = result.json["installations"]
    return row["verdict"], row["reason"], row["outcome"]


NOT_INSTALLED = ("not-installed", "APPLICATION_NOT_INSTALLED", "deleted")


@pytest.mark.parametrize(
    ("reply", "age", "verdict"),
    [
        (app_info(installed=True), 2 * HOUR, ("installed", "TOKEN_MISSING_HERE", "blocked")),
        (app_info(installed=True, cloud=False), 2 * HOUR, ("installed", "TOKEN_MISSING_HERE", "blocked")),
        (app_info(installed=False), 2 * HOUR, ("unfinished", "WIZARD_UNFINISHED", "left")),
        (app_info(installed=False, cloud=False), 23 * HOUR, ("unfinished", "WIZARD_UNFINISHED", "left")),
        (app_info(installed=False), 25 * HOUR, ("unfinished", "WIZARD_UNFINISHED", "blocked")),
        (error("NOT_INSTALLED", status=401), 2 * HOUR, NOT_INSTALLED),
        (error("APPLICATION_NOT_FOUND", status=404), 2 * HOUR, NOT_INSTALLED),
        (error("ERROR_OAUTH", "Application not installed", status=401), 2 * HOUR, NOT_INSTALLED),
        (error("ERROR_OAUTH", "Unable to get application", status=401), 2 * HOUR, ("unclear", "OTHER_ERROR", "left")),
        (error("QUERY_LIMIT_EXCEEDED", status=503), 2 * HOUR, ("unclear", "RATE_LIMITED", "left")),
        (error("PORTAL_DELETED", status=403), 2 * HOUR, ("unclear", "PORTAL_DELETED", "left")),
        (error("PAYMENT_REQUIRED", status=401), 2 * HOUR, ("unclear", "PAYMENT_REQUIRED", "left")),
        (error("ACCESS_DENIED"), 2 * HOUR, ("unclear", "OTHER_ERROR", "left")),
        (Reply(500), 2 * HOUR, ("unclear", "SERVER_ERROR", "left")),
        (Reply(200, {"result": {}}), 2 * HOUR, ("unclear", "UNEXPECTED_ANSWER", "left")),
        (Reply(404), 2 * HOUR, ("unclear", "UNEXPECTED_ANSWER", "left")),
        (Reply(mood=Mood.TIMEOUT), 2 * HOUR, ("unclear", "TIMEOUT", "left")),
        (Reply(mood=Mood.TRICKLE), 2 * HOUR, ("unclear", "TIMEOUT", "left")),
        (Reply(mood=Mood.BROKEN), 2 * HOUR, ("unclear", "UNREACHABLE", "left")),
        (Reply(mood=Mood.REDIRECT), 2 * HOUR, ("unclear", "REDIRECTED", "left")),
        (Reply(mood=Mood.NOT_JSON), 2 * HOUR, ("unclear", "UNEXPECTED_ANSWER", "left")),
        (Reply(mood=Mood.HUGE), 2 * HOUR, ("unclear", "UNEXPECTED_ANSWER", "left")),
    ],
)
def test_a_row_of_the_verdict_table(
    database: Database,
    connection: psycopg.Connection[Any],
    portal: Bitrix24StandIn,
    reply: Reply,
    age: timedelta,
    verdict: tuple[str, str, str],
) -> None:
    pair = insert_pair(connection, age=age)
    portal.portals[pair.domain] = reply
    result = verify(database, portal, "--strict")
    assert verdict_of(result) == verdict, result.stderr
    status = "new" if verdict[2] == "left" else verdict[2]
    assert statuses(connection, pair) == (status, status)
    assert result.exit_code == (3 if verdict[0] == "unclear" else 0)
    assert bool(check(connection, pair)["next_check_at"]) == (verdict[2] == "left")
    assert check(connection, pair)["claimed_until"] is None
    assert len(events(connection, pair)) == (verdict[2] != "left")
    assert len(journal(connection, pair)) == 1
    assert_audit(connection, pair.installation_id, result)
    assert all(request.secret is None for request in portal.requests)


class TestTheOAuthServersAnswers:
    @pytest.mark.parametrize(
        ("reply", "verdict"),
        [
            (error("NOT_INSTALLED"), NOT_INSTALLED),
            (error("APPLICATION_NOT_FOUND"), NOT_INSTALLED),
            (error("invalid_grant"), ("unclear", "TOKEN_INVALID", "left")),
            (error("PAYMENT_REQUIRED"), ("unclear", "PAYMENT_REQUIRED", "left")),
            (Reply(502), ("unclear", "SERVER_ERROR", "left")),
            (Reply(mood=Mood.TIMEOUT), ("unclear", "TIMEOUT", "left")),
            (Reply(mood=Mood.REDIRECT), ("unclear", "REDIRECTED", "left")),
        ],
    )
    def test_a_renewal_that_is_refused(
        self,
        database: Database,
        connection: psycopg.Connection[Any],
        portal: Bitrix24StandIn,
        reply: Reply,
        verdict: tuple[str, str, str],
    ) -> None:
        pair = insert_pair(connection, token_age=HOUR)
        let_renew(portal, pair, reply)
        result = verify(database, portal)
        assert verdict_of(result) == verdict
        assert len(portal.asked(OAUTH_HOST)) == 1
        assert portal.asked(pair.domain) == []

    def test_an_expired_token_is_renewed_stored_and_used(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        pair = insert_pair(connection, token_age=HOUR)
        grant = let_renew(portal, pair)
        portal.portals[pair.domain] = app_info(installed=False)
        assert verdict_of(verify(database, portal))[0] == "unfinished"
        (row,) = rows(connection, "select * from b24lib_bitrix24_accounts where id = %s", pair.account_id)
        assert row["authtoken_refresh_token"] == grant.refresh_token != pair.refresh_token
        assert [request.token for request in portal.asked(pair.domain)] == [row["authtoken_access_token"]]
        assert abs(row["authtoken_expires"] - time.time() - 3600) < 60
        assert row["authtoken_expires_in"] is None
        # The next run uses it as it is.
        make_due(connection)
        verify(database, portal)
        assert len(portal.asked(OAUTH_HOST)) == 1

    @pytest.mark.parametrize("code", ["expired_token", "invalid_token"])
    def test_a_token_that_the_portal_calls_expired_is_renewed(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn, code: str
    ) -> None:
        pair = insert_pair(connection)
        let_renew(portal, pair)

        def reply(token: str) -> Reply:
            return error(code, status=401) if token == pair.access_token else app_info(installed=True)

        portal.portals[pair.domain] = reply
        assert verdict_of(verify(database, portal)) == ("installed", "TOKEN_MISSING_HERE", "blocked")

    def test_one_that_is_refused_even_when_new_is_unclear(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        pair = insert_pair(connection)
        let_renew(portal, pair)
        portal.portals[pair.domain] = error("expired_token", status=401)
        assert verdict_of(verify(database, portal)) == ("unclear", "TOKEN_INVALID", "left")

    def test_tokens_of_another_member_are_not_stored(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        pair = insert_pair(connection, token_age=HOUR)
        let_renew(portal, pair).member_id = "another"
        assert verdict_of(verify(database, portal)) == ("unclear", "MEMBER_MISMATCH", "left")
        stored = scalar(
            connection, "select authtoken_refresh_token from b24lib_bitrix24_accounts where id = %s", pair.account_id
        )
        assert stored == pair.refresh_token

    def test_no_tokens_at_all(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        insert_pair(connection, account={"authtoken_access_token": "", "authtoken_refresh_token": ""})
        assert verdict_of(verify(database, portal)) == ("unclear", "TOKEN_MISSING", "left")
        assert portal.requests == []

    def test_somebody_elses_renewal_wins(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        pair = insert_pair(connection, token_age=HOUR)
        let_renew(portal, pair)
        other = database.connect()

        def renew_as_the_application_does() -> None:
            other.execute(
                "update b24lib_bitrix24_accounts set authtoken_refresh_token = 'theirs' where id = %s",
                (pair.account_id,),
            )

        portal.after_renewal = renew_as_the_application_does
        assert verdict_of(verify(database, portal)) == ("unclear", "TOKEN_CHANGED", "left")
        stored = scalar(
            connection, "select authtoken_refresh_token from b24lib_bitrix24_accounts where id = %s", pair.account_id
        )
        assert stored == "theirs"

    def test_both_naming_strategies(self, database: Database, portal: Bitrix24StandIn) -> None:
        connection = database.connect()
        bitrix24_tables.create(connection, "underscore")
        pair = insert_pair(connection, naming="underscore", token_age=HOUR)
        grant = let_renew(portal, pair)
        portal.portals[pair.domain] = app_info(installed=True)
        assert verdict_of(verify(database, portal))[2] == "blocked"
        stored = column(connection, "select auth_token_refresh_token from b24lib_bitrix24_accounts")
        assert stored == [grant.refresh_token]


class TestUnclearOnes:
    def test_they_back_off_and_end_after_the_unclear_ttl(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        pair = insert_pair(connection, age=29 * DAY)
        portal.portals[pair.domain] = error("PORTAL_DELETED")
        pauses = []
        for attempts in (1, 2, 3):
            assert verdict_of(verify(database, portal)) == ("unclear", "PORTAL_DELETED", "left")
            row = check(connection, pair)
            assert row["attempts"] == attempts
            pauses.append(row["next_check_at"] - row["last_checked_at"])
            assert verify(database, portal).json["checked_count"] == 0
            make_due(connection)
        assert pauses == [timedelta(minutes=15), timedelta(minutes=30), timedelta(hours=1)]
        connection.execute(
            "update b24lib_application_installations set created_at_utc = created_at_utc - interval '1 day'"
        )
        result = verify(database, portal)
        assert verdict_of(result) == ("unclear", "PORTAL_DELETED", "blocked")
        assert statuses(connection, pair) == ("blocked", "blocked")
        assert result.json["installations"][0]["ttl_seconds"] == 30 * 86_400
        assert_audit(connection, pair.installation_id, result)

    def test_the_unclear_ttl_is_an_option(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        pair = insert_pair(connection, age=2 * DAY)
        portal.portals[pair.domain] = Reply(500)
        assert verdict_of(verify(database, portal, "--unclear-ttl", "49h"))[2] == "left"
        make_due(connection)
        assert verdict_of(verify(database, portal, "--unclear-ttl", "47h"))[2] == "blocked"

    def test_a_good_answer_begins_the_count_anew(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        pair = insert_pair(connection)
        for reply, attempts in ((Reply(500), 1), (Reply(500), 2), (app_info(installed=False), 1), (Reply(500), 1)):
            portal.portals[pair.domain] = reply
            verify(database, portal)
            assert check(connection, pair)["attempts"] == attempts
            make_due(connection)

    def test_10000_of_them_do_not_hide_10_that_can_be_decided(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        fill_with_unclear(connection, 10_000)
        pairs = [insert_pair(connection) for _ in range(10)]
        for pair in pairs:
            portal.portals[pair.domain] = app_info(installed=True)
        result = verify(database, portal, "--batch-size", "20")
        assert result.json["blocked_count"] == 10
        assert {statuses(connection, pair) for pair in pairs} == {("blocked", "blocked")}
        assert result.json["checked_count"] == 20
        due = "select count(*) from crm.installation_checks where verdict = 'unclear' and next_check_at <= now()"
        assert scalar(connection, due) == 9_990

    def test_anomalies_are_not_asked_about(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        pair = insert_pair(connection, account={"status": "active"})
        orphan = insert_pair(connection, without_account=True)
        result = verify(database, portal)
        assert {row["verdict"] for row in result.json["installations"]} == {"anomaly"}
        assert result.json["alert_count"] == 2
        assert portal.requests == []
        assert (statuses(connection, pair), statuses(connection, orphan)) == (("new", "active"), ("new", None))

    def test_alert_changes_nothing_whatever_the_portal_says(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        pair = insert_pair(connection)
        portal.portals[pair.domain] = error("NOT_INSTALLED")
        result = verify(database, portal, "--action", "alert")
        assert verdict_of(result) == ("not-installed", "APPLICATION_NOT_INSTALLED", "left")
        assert result.json["alert_count"] == 1
        assert statuses(connection, pair) == ("new", "new")


def fill_with_unclear(connection: psycopg.Connection[Any], count: int) -> None:
    """Older pairs whose portals were unclear and are due again; their domains are no public addresses."""
    connection.execute(
        """
        create temporary table filling as
        select gen_random_uuid() as id, gen_random_uuid() as account_id, n, md5(n::text) as member_id
        from generate_series(1, %s) n
        """,
        (count,),
    )
    connection.execute(
        """
        insert into b24lib_bitrix24_accounts (
            id, b24_user_id, is_b24_user_admin, member_id, is_master_account, domain_url, status, created_at_utc,
            updated_at_utc, application_version, authtoken_access_token, authtoken_refresh_token, authtoken_expires
        )
        select account_id, 1, true, member_id, true, '127.0.0.1', 'new', now() at time zone 'UTC' - interval '5 days',
               now() at time zone 'UTC', 1, 'access', 'refresh', 4000000000
        from filling
        """
    )
    connection.execute(
        """
        insert into b24lib_application_installations
            (id, status, created_at_utc, update_at_utc, bitrix_24_account_id, portal_license_family)
        select id, 'new', now() at time zone 'UTC' - interval '5 days', now() at time zone 'UTC', account_id, 'ent'
        from filling
        """
    )
    connection.execute(
        """
        insert into crm.installation_checks (installation_id, verdict, reason, outcome, attempts, next_check_at)
        select id, 'unclear', 'TIMEOUT', 'left', 3, now() - interval '1 minute' from filling
        """
    )
    connection.execute("analyze")


class TestOurOwnCredentials:
    def test_most_refusals_stop_the_run_and_change_nothing(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        pairs = [insert_pair(connection, token_age=HOUR) for _ in range(5)]
        plain = insert_pair(connection)
        portal.portals[plain.domain] = error("NOT_INSTALLED")
        result = verify(database, portal, CRMCTL_BITRIX24__CLIENT_SECRET="an-old-one")
        assert (result.exit_code, result.json["error"]["code"]) == (78, "CRMCTL_CONFIGURATION")
        assert "CLIENT_SECRET" in result.json["error"]["hint"]
        assert {statuses(connection, pair) for pair in (*pairs, plain)} == {("new", "new")}
        assert [(run["outcome"], run["error_code"]) for run in runs(connection)] == [("failed", "CRMCTL_CONFIGURATION")]
        assert column(connection, "select verdict from crm.installation_checks where verdict is not null") == []
        assert column(connection, "select claimed_by from crm.installation_checks where claimed_by is not null") == []
        assert "an-old-one" not in result.stdout + result.stderr

    @pytest.mark.parametrize(("count", "args"), [(1, ()), (2, ()), (8, ("--drain", "--batch-size", "2"))])
    def test_however_few_are_asked_none_is_blocked_for_our_own_fault(
        self,
        database: Database,
        connection: psycopg.Connection[Any],
        portal: Bitrix24StandIn,
        count: int,
        args: tuple[str, ...],
    ) -> None:
        pairs = [insert_pair(connection, age=31 * DAY, token_age=HOUR) for _ in range(count)]
        result = verify(database, portal, *args, CRMCTL_BITRIX24__CLIENT_SECRET="an-old-one")
        assert (result.exit_code, result.json["error"]["code"]) == (78, "CRMCTL_CONFIGURATION")
        assert {statuses(connection, pair) for pair in pairs} == {("new", "new")}
        assert journal(connection, pairs[0]) == events(connection, pairs[0]) == []
        assert column(connection, "select verdict from crm.installation_checks where verdict is not null") == []
        assert column(connection, "select claimed_by from crm.installation_checks where claimed_by is not null") == []
        # With the right secret they are asked again at once.
        for pair in pairs:
            let_renew(portal, pair)
            portal.portals[pair.domain] = app_info(installed=True)
        assert verify(database, portal).json["blocked_count"] == count

    def test_refusals_are_counted_over_the_batches_of_a_run(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        refused = error("invalid_client", status=401)
        for number, reply in enumerate((None, None, refused, refused, refused)):
            pair = insert_pair(connection, age=(10 - number) * HOUR, token_age=HOUR)
            let_renew(portal, pair, reply)
            portal.portals[pair.domain] = app_info(installed=True)
        result = verify(database, portal, "--drain", "--batch-size", "1")
        assert result.exit_code == 78
        # The third refusal of five makes them most; the two before it are told as unclear.
        assert result.json["committed"]["blocked_count"] == 2
        assert result.json["committed"]["left_count"] == 2

    def test_one_that_is_refused_among_good_answers_is_never_blocked_for_it(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        odd, good = (insert_pair(connection, age=31 * DAY, token_age=HOUR) for _ in range(2))
        let_renew(portal, odd, error("invalid_client", status=401))
        let_renew(portal, good)
        portal.portals[good.domain] = app_info(installed=True)
        assert verify(database, portal).json["blocked_count"] == 1
        assert statuses(connection, odd) == ("new", "new")
        assert check(connection, odd)["reason"] == "CLIENT_REFUSED"
        assert check(connection, odd)["next_check_at"] is not None

    def test_it_stops_asking_early(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        for _ in range(80):
            insert_pair(connection, token_age=HOUR)
        result = verify(
            database,
            portal,
            CRMCTL_BITRIX24__CLIENT_SECRET="an-old-one",
            CRMCTL_BITRIX24__CONCURRENCY="4",
        )
        assert result.exit_code == 78
        assert len(portal.asked(OAUTH_HOST)) < 30

    def test_a_few_refusals_among_good_answers_are_unclear(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        for number in range(7):
            pair = insert_pair(connection, token_age=HOUR)
            let_renew(portal, pair, error("invalid_client", status=401) if number < 3 else None)
            portal.portals[pair.domain] = app_info(installed=True)
        result = verify(database, portal)
        assert (result.exit_code, result.json["blocked_count"], result.json["alert_count"]) == (0, 4, 3)

    @pytest.mark.parametrize("missing", ["CRMCTL_BITRIX24__CLIENT_ID", "CRMCTL_BITRIX24__CLIENT_SECRET"])
    def test_none_are_configured(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn, missing: str
    ) -> None:
        insert_pair(connection)
        result = verify(database, portal, **{missing: ""})
        assert (result.exit_code, missing.split("__")[0] in result.json["error"]["hint"]) == (78, True)
        assert portal.requests == []


class TestSecurity:
    @pytest.mark.parametrize(
        "domain",
        ["127.0.0.1", "169.254.169.254", "localhost@evil", "[::1]", "localhost", "portal.example:80", "a.invalid/x"],
    )
    def test_a_domain_that_is_no_public_name_is_unclear_and_gets_no_request(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn, domain: str
    ) -> None:
        pair = insert_pair(connection, account={"domain_url": domain}, token_age=HOUR)
        let_renew(portal, pair)
        result = verify(database, portal, "--strict")
        assert (result.exit_code, verdict_of(result)) == (3, ("unclear", "ADDRESS_REFUSED", "left"))
        assert portal.requests == []

    def test_a_domain_of_localhost_is_not_reached_with_the_port_of_the_stand_in(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        insert_pair(connection, account={"domain_url": portal.address})
        assert verdict_of(verify(database, portal))[1] == "ADDRESS_REFUSED"
        assert portal.requests == []

    def test_a_proxy_in_the_environment_sees_nothing(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        pair = insert_pair(connection, token_age=HOUR)
        let_renew(portal, pair)
        portal.portals[pair.domain] = app_info(installed=True)
        with Bitrix24StandIn() as proxy:
            proxies = dict.fromkeys(
                ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"),
                f"http://{proxy.address}",
            )
            result = verify(database, portal, **proxies)
            assert proxy.requests == []
        assert verdict_of(result)[2] == "blocked"

    def test_the_client_secret_goes_to_the_oauth_server_alone(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        redirected = insert_pair(connection, token_age=HOUR)
        let_renew(portal, redirected, Reply(mood=Mood.REDIRECT, location="http://thief.test/"))
        for number, reply in enumerate((app_info(installed=True), Reply(mood=Mood.REDIRECT), Reply(500))):
            pair = insert_pair(connection, token_age=HOUR if number % 2 else None)
            let_renew(portal, pair)
            portal.portals[pair.domain] = reply
        verify(database, portal)
        assert {request.host for request in portal.requests if request.secret is not None} == {OAUTH_HOST}
        assert portal.asked("thief.test") == portal.asked("elsewhere.test") == []

    def test_no_secret_and_no_token_is_in_any_output(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        tokens = []
        replies = [app_info(installed=True), Reply(500), Reply(mood=Mood.NOT_JSON), error("expired_token")]
        for reply in replies:
            pair = insert_pair(connection, token_age=HOUR)
            tokens += [pair.access_token, pair.refresh_token]
            let_renew(portal, pair)
            portal.portals[pair.domain] = reply
        refused = insert_pair(connection, token_age=HOUR)
        let_renew(portal, refused, error("invalid_grant", f"bad token {refused.refresh_token}"))
        echoing = insert_pair(connection)
        portal.portals[echoing.domain] = lambda token: error(token, token)
        tokens += [refused.refresh_token, echoing.access_token]
        result = verify(database, portal, CRMCTL_LOG_LEVEL="debug")
        tokens += column(connection, "select authtoken_refresh_token from b24lib_bitrix24_accounts")
        tokens += column(connection, "select authtoken_access_token from b24lib_bitrix24_accounts")
        written = json.dumps(rows(connection, "select * from b24lib_journal"), default=str)
        written += json.dumps(rows(connection, "select * from crm.outbox_messages"), default=str)
        written += json.dumps(rows(connection, "select * from crm.installation_checks"), default=str)
        for secret in (CLIENT_SECRET, *tokens):
            assert secret not in result.stdout + result.stderr + written
        assert result.json["checked_count"] == 6

    def test_the_stand_in_beside_a_real_oauth_server_is_exit_78(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        insert_pair(connection)
        result = verify(database, portal, CRMCTL_BITRIX24__OAUTH_URL="https://oauth.bitrix.info")
        assert result.exit_code == 78
        assert portal.requests == []


class TestBetweenClaimAndApply:
    def test_no_transaction_is_open_while_a_portal_is_asked(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        watcher = database.connect()
        seen: list[list[str]] = []
        for _ in range(4):
            pair = insert_pair(connection, token_age=HOUR)
            let_renew(portal, pair)
            portal.portals[pair.domain] = app_info(installed=True)
        lock = threading.Lock()

        def look(_request: Request) -> None:
            with lock:
                seen.append(
                    column(
                        watcher,
                        "select state from pg_stat_activity where datname = current_database()"
                        " and application_name like 'crmctl%' and xact_start is not null",
                    )
                )

        portal.before_answer = look
        assert verify(database, portal, CRMCTL_BITRIX24__CONCURRENCY="1").json["blocked_count"] == 4
        assert len(seen) == 8
        assert [states for states in seen if states] == []

    @pytest.mark.parametrize("how", ["finished", "reinstalled"])
    def test_a_pair_that_changes_meanwhile_is_left_alone(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn, how: str
    ) -> None:
        pair = insert_pair(connection)
        portal.portals[pair.domain] = error("NOT_INSTALLED")
        other = database.connect()
        status = "active" if how == "finished" else "deleted"

        def change(_request: Request) -> None:
            with other.transaction():
                other.execute("update b24lib_application_installations set status = %s", (status,))
                other.execute("update b24lib_bitrix24_accounts set status = %s", (status,))

        portal.before_answer = change
        result = verify(database, portal)
        assert (result.json["finished_count"], result.json["checked_count"]) == (1, 0)
        assert statuses(connection, pair) == (status, status)
        assert events(connection, pair) == journal(connection, pair) == []
        assert column(connection, "select claimed_by from crm.installation_checks where claimed_by is not null") == []

    def test_an_anomaly_that_arises_meanwhile_is_left_alone(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        pair = insert_pair(connection)
        portal.portals[pair.domain] = error("NOT_INSTALLED")
        other = database.connect()

        def reinstall(_request: Request) -> None:
            insert_pair(other, age=timedelta(0), account={"member_id": pair.member_id})

        portal.before_answer = reinstall
        assert verdict_of(verify(database, portal)) == ("anomaly", "TWO_LIVE_INSTALLATIONS", "left")
        assert statuses(connection, pair) == ("new", "new")

    def test_a_lease_that_another_run_holds_is_respected(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        pair = insert_pair(connection)
        portal.portals[pair.domain] = app_info(installed=True)
        connection.execute(
            "insert into crm.installation_checks (installation_id, claimed_until, claimed_by)"
            " values (%s, now() + interval '1 minute', gen_random_uuid())",
            (pair.installation_id,),
        )
        assert verify(database, portal).json["checked_count"] == 0
        assert sweep(database).json["checked_count"] == 0
        named = sweep(database, "--id", str(pair.installation_id)).json["not_swept"]
        assert [row["reason"] for row in named] == ["another run is asking for it"]
        assert portal.requests == []
        make_due(connection)
        assert verify(database, portal).json["blocked_count"] == 1

    def test_a_lease_that_another_run_took_over_meanwhile_is_not_applied(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        pair = insert_pair(connection)
        portal.portals[pair.domain] = error("NOT_INSTALLED")
        other = database.connect()
        portal.before_answer = lambda _request: take_over(other)
        result = verify(database, portal)
        assert (result.json["skipped_locked_count"], result.json["checked_count"]) == (1, 0)
        assert statuses(connection, pair) == ("new", "new")
        # Nor is it given back in the other one's name.
        assert check(connection, pair)["claimed_by"] == UUID(int=5)

    def test_a_portal_that_another_run_is_asking_is_passed_by(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        first, second = insert_pair(connection), insert_pair(connection)
        elsewhere = insert_pair(connection)
        for pair in (first, elsewhere):
            portal.portals[pair.domain] = app_info(installed=True)
        connection.execute(
            "update b24lib_bitrix24_accounts set domain_url = upper(%s) where id = %s",
            (first.domain, second.account_id),
        )
        connection.execute(
            "insert into crm.installation_checks (installation_id, claimed_until, claimed_by)"
            " values (%s, now() + interval '1 minute', gen_random_uuid())",
            (first.installation_id,),
        )
        assert verify(database, portal).json["blocked_count"] == 1
        assert [request.host for request in portal.requests] == [elsewhere.domain]
        assert statuses(connection, second) == ("new", "new")

    def test_a_dry_run_passes_by_a_portal_that_another_run_is_asking(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        claimed, waiting = (insert_pair(connection, account={"domain_url": "one.test"}) for _ in range(2))
        elsewhere = insert_pair(connection)
        for domain in ("one.test", elsewhere.domain):
            portal.portals[domain] = app_info(installed=True)
        connection.execute(
            "insert into crm.installation_checks (installation_id, claimed_until, claimed_by)"
            " values (%s, now() + interval '1 minute', gen_random_uuid())",
            (claimed.installation_id,),
        )
        assert verify(database, portal, "--dry-run").json["blocked_count"] == 1
        assert [request.host for request in portal.requests] == [elsewhere.domain]
        assert statuses(connection, waiting) == ("new", "new")

    def test_an_apply_that_fails_gives_its_claims_back(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        pair = insert_pair(connection)
        portal.portals[pair.domain] = error("NOT_INSTALLED")
        with psycopg.connect(database.url) as holder:
            holder.execute("lock table b24lib_journal in exclusive mode")
            result = verify(database, portal, CRMCTL_DATABASE__LOCK_TIMEOUT="300ms")
        assert (result.exit_code, result.json["error"]["code"]) == (75, "CRMCTL_TRY_AGAIN")
        assert statuses(connection, pair) == ("new", "new")
        assert [(run["outcome"], run["error_code"]) for run in runs(connection)] == [("failed", "CRMCTL_TRY_AGAIN")]
        assert verify(database, portal).json["deleted_count"] == 1

    def test_two_sweeps_at_once_ask_each_portal_once(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        pairs = [insert_pair(connection, token_age=HOUR) for _ in range(40)]
        for pair in pairs:
            let_renew(portal, pair)
            portal.portals[pair.domain] = app_info(installed=True)
        portal.before_answer = lambda _request: time.sleep(0.02)
        args = ("--verify-portal", "--drain", "--batch-size", "5")
        env = portal.settings | {"CRMCTL_BITRIX24__CONCURRENCY": "2"}
        with (
            start_sweep(database, *args, env=env) as first,
            start_sweep(database, *args, env=env) as second,
            start_sweep(database, *args, env=env) as third,
        ):
            results = [json.loads(process.communicate(timeout=120)[0]) for process in (first, second, third)]
        assert sum(result["blocked_count"] for result in results) == 40
        assert [len(portal.asked(pair.domain)) for pair in pairs] == [1] * 40
        assert len(portal.asked(OAUTH_HOST)) == 40
        assert {statuses(connection, pair) for pair in pairs} == {("blocked", "blocked")}

    def test_a_dry_run_claims_nothing_renews_nothing_and_still_asks(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        valid, expired = insert_pair(connection, age=3 * HOUR), insert_pair(connection, token_age=HOUR)
        let_renew(portal, expired)
        portal.portals[valid.domain] = error("NOT_INSTALLED")
        before = fingerprints(connection), pairs_digest(connection)
        result = verify(database, portal, "--dry-run", "--drain", "--batch-size", "1")
        assert (fingerprints(connection), pairs_digest(connection)) == before
        assert {row["installation_id"]: row["reason"] for row in result.json["installations"]} == {
            str(valid.installation_id): "APPLICATION_NOT_INSTALLED",
            str(expired.installation_id): "NOT_REFRESHED",
        }
        assert result.json["deleted_count"] == 1
        assert [request.host for request in portal.requests] == [valid.domain]
        assert runs(connection) == []


def take_over(connection: psycopg.Connection[Any]) -> None:
    """As another run does whose claim came after the lease had run out."""
    connection.execute("update crm.installation_checks set claimed_by = %s", (UUID(int=5),))


def test_the_grants_of_the_page_are_enough_and_no_others_are_needed(
    database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "stale-installations.md").read_text()
    grants = page.split("```sql\n")[1].split("```")[0]
    connection.execute("create role crmctl_sweeper nologin")
    try:
        connection.execute("revoke all on schema public from public")
        connection.execute("grant usage on schema public to crmctl_sweeper")
        connection.execute(grants.replace("ROLE", "crmctl_sweeper").encode())
        pair = insert_pair(connection, token_age=HOUR)
        let_renew(portal, pair)
        portal.portals[pair.domain] = app_info(installed=True)
        as_role = Database(f"{database.url}{'&' if '?' in database.url else '?'}options=-crole%3Dcrmctl_sweeper")
        result = verify(as_role, portal)
        assert result.exit_code == 0, result.stderr
        assert statuses(connection, pair) == ("blocked", "blocked")
        assert scalar(connection, "select count(*) from crm.job_runs where outcome = 'committed'") == 1
    finally:
        connection.execute("drop owned by crmctl_sweeper")
        connection.execute("drop role crmctl_sweeper")


class TestPaceAndTime:
    def test_a_portal_is_asked_twice_a_second_at_the_most(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        domains = ["one.test", "two.test"]
        for domain in domains:
            portal.portals[domain] = lambda token: Reply(500) if token[0] in "01234" else app_info(installed=True)
            for _ in range(6):
                pair = insert_pair(connection, account={"domain_url": domain}, token_age=HOUR)
                let_renew(portal, pair)
        result = verify(database, portal)
        assert result.json["checked_count"] == 12
        for domain in domains:
            moments = [request.at for request in portal.asked(domain)]
            assert len(moments) >= 6
            assert_paced(moments)
        started = min(request.at for request in portal.requests)
        assert max(request.at for request in portal.requests) - started < 13 * PAUSE

    def test_a_portal_that_does_not_answer_is_asked_once_in_a_run(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        portal.portals["silent.test"] = Reply(mood=Mood.TIMEOUT)
        pairs = [insert_pair(connection, account={"domain_url": "silent.test"}) for _ in range(5)]
        result = verify(database, portal)
        assert [row["reason"] for row in result.json["installations"]] == ["TIMEOUT"] * 5
        assert len(portal.asked("silent.test")) == 1
        assert {check(connection, pair)["attempts"] for pair in pairs} == {1}

    def test_the_pace_outlives_a_batch(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        portal.portals["one.test"] = app_info(installed=True)
        for _ in range(5):
            insert_pair(connection, account={"domain_url": "one.test"})
        result = verify(database, portal, "--drain", "--batch-size", "1")
        assert (result.json["blocked_count"], result.json["batches"]) == (5, 6)
        moments = [request.at for request in portal.asked("one.test")]
        assert len(moments) == 5
        assert_paced(moments)

    def test_the_pace_is_counted_from_the_answer(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        portal.portals["slow.test"] = app_info(installed=True)
        portal.before_answer = lambda _request: time.sleep(0.4)
        for _ in range(3):
            insert_pair(connection, account={"domain_url": "slow.test"})
        assert verify(database, portal).json["blocked_count"] == 3
        moments = [request.at for request in portal.asked("slow.test")]
        assert all(later - earlier >= 0.4 + PAUSE for earlier, later in itertools.pairwise(moments))

    def test_a_portal_has_one_pace_however_its_name_is_spelt(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        ascii_name = "xn--e1afmkfd.test"
        portal.portals[ascii_name] = app_info(installed=True)
        for spelling in (ascii_name, "пример.test", "ПРИМЕР.test", " Xn--E1afmkfd.Test "):
            insert_pair(connection, account={"domain_url": spelling})
        result = verify(database, portal)
        assert result.json["blocked_count"] == 4
        moments = [request.at for request in portal.asked(ascii_name)]
        assert len(moments) == 4
        assert_paced(moments)

    def test_a_portal_that_another_run_asked_a_moment_ago_is_not_asked_at_once(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        asked, due = (insert_pair(connection, account={"domain_url": "one.test"}) for _ in range(2))
        elsewhere = insert_pair(connection)
        for domain in ("one.test", elsewhere.domain):
            portal.portals[domain] = app_info(installed=True)
        # In the future, so that it is less than a second ago however long this run takes to start.
        connection.execute(
            "insert into crm.installation_checks (installation_id, verdict, run_id, last_checked_at, next_check_at)"
            " values (%s, 'unclear', gen_random_uuid(), now() + interval '1 minute', now() + interval '1 hour')",
            (asked.installation_id,),
        )
        assert verify(database, portal).json["blocked_count"] == 2
        assert (statuses(connection, asked)[0], statuses(connection, due)[0]) == ("new", "blocked")
        (there,), (here,) = portal.asked("one.test"), portal.asked(elsewhere.domain)
        assert there.at - here.at > PAUSE * 0.8

    def test_a_portal_that_does_not_answer_is_not_asked_again_in_a_later_batch(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        portal.portals["silent.test"] = Reply(mood=Mood.TIMEOUT)
        pairs = [insert_pair(connection, account={"domain_url": "silent.test"}) for _ in range(5)]
        result = verify(database, portal, "--drain", "--batch-size", "1")
        assert [row["reason"] for row in result.json["installations"]] == ["TIMEOUT"] * 5
        assert len(portal.asked("silent.test")) == 1
        assert {check(connection, pair)["verdict"] for pair in pairs} == {"unclear"}

    def test_the_time_budget_ends_it_and_the_rest_is_given_back(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        pairs = [insert_pair(connection) for _ in range(30)]
        for pair in pairs:
            portal.portals[pair.domain] = app_info(installed=True)
        portal.before_answer = lambda _request: time.sleep(0.3)
        result = verify(database, portal, "--time-budget", "1s", CRMCTL_BITRIX24__CONCURRENCY="1")
        assert 0 < result.json["blocked_count"] < 10
        assert result.json["blocked_count"] + result.json["unasked_count"] == 30
        assert column(connection, "select claimed_by from crm.installation_checks where claimed_by is not null") == []
        portal.before_answer = lambda _request: None
        rest = verify(database, portal)
        assert rest.json["blocked_count"] == result.json["unasked_count"]

    def test_sigterm_gives_the_claims_back(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        pairs = [insert_pair(connection) for _ in range(20)]
        arrived = threading.Event()

        def slow(_request: Request) -> None:
            arrived.set()
            time.sleep(0.2)

        portal.before_answer = slow
        for pair in pairs:
            portal.portals[pair.domain] = app_info(installed=True)
        env = portal.settings | {"CRMCTL_BITRIX24__CONCURRENCY": "1"}
        with start_sweep(database, "--verify-portal", env=env) as process:
            assert arrived.wait(20)
            process.terminate()
            stdout, stderr = process.communicate(timeout=20)
        assert process.returncode == 143, stderr
        assert json.loads(stdout)["error"]["code"] == "CRMCTL_INTERRUPTED"
        assert {statuses(connection, pair) for pair in pairs} == {("new", "new")}
        assert column(connection, "select claimed_by from crm.installation_checks where claimed_by is not null") == []

    def test_sigterm_waits_for_a_token_that_is_under_way(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        pair = insert_pair(connection, token_age=HOUR)
        grant = let_renew(portal, pair)
        renewed = threading.Event()

        def answer_late() -> None:
            renewed.set()
            time.sleep(1)

        portal.after_renewal = answer_late
        with start_sweep(database, "--verify-portal", env=portal.settings) as process:
            assert renewed.wait(20)
            process.terminate()
            _, stderr = process.communicate(timeout=20)
        assert process.returncode == 143, stderr
        stored = column(connection, "select authtoken_refresh_token from b24lib_bitrix24_accounts")
        assert stored == [grant.refresh_token]
        assert portal.asked(pair.domain) == []
        assert statuses(connection, pair) == ("new", "new")

    def test_a_token_is_stored_although_the_application_holds_the_account_for_a_while(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        pair = insert_pair(connection, token_age=HOUR)
        grant = let_renew(portal, pair)
        portal.portals[pair.domain] = app_info(installed=False)
        with psycopg.connect(database.url) as holder:

            def hold() -> None:
                holder.execute("select from b24lib_bitrix24_accounts for update")
                threading.Timer(1.5, holder.rollback).start()

            portal.after_renewal = hold
            result = verify(database, portal, CRMCTL_DATABASE__LOCK_TIMEOUT="500ms")
        assert verdict_of(result)[0] == "unfinished", result.stderr
        stored = column(connection, "select authtoken_refresh_token from b24lib_bitrix24_accounts")
        assert stored == [grant.refresh_token]

    def test_alerts_are_in_the_log(
        self, database: Database, connection: psycopg.Connection[Any], portal: Bitrix24StandIn
    ) -> None:
        pair = insert_pair(connection)
        portal.portals[pair.domain] = Reply(503)
        (line,) = log_lines(verify(database, portal), "stale installation")
        assert (line["level"], line["verdict"], line["reason"]) == ("warning", "unclear", "SERVER_ERROR")
        assert re.fullmatch(r"[0-9a-f-]{36}", line["run_id"])


def assert_paced(moments: list[float]) -> None:
    """No second holds more than two of these moments."""
    moments = sorted(moments)
    for first, third in zip(moments, moments[2:], strict=False):
        assert third - first >= 1.0, moments
