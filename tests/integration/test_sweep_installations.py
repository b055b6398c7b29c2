"""`installations sweep` without asking portals: what it takes, what it changes, what it writes about it."""

import ipaddress
import re
from datetime import UTC, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from crmctl.dev import bitrix24_tables
from crmctl.dev.bitrix24_tables import CURRENT, OLDER, Names, Naming
from crmctl.domain.events import INSTALLATION_MARKED_STALE
from tests.expire_support import fingerprints, log_lines, rows, runs, scalar
from tests.installations_support import (
    HOUR,
    TOPIC,
    check,
    events,
    held,
    insert_pair,
    journal,
    make_due,
    statuses,
    sweep,
)
from tests.kafka_fixtures import Kafka, MakeTopic
from tests.prefork import run_crmctl
from tests.relay_support import envelope, relay
from tests.support import CallResult, Database


@pytest.fixture
def connection(database: Database) -> psycopg.Connection[Any]:
    connection = database.connect()
    bitrix24_tables.create(connection)
    return connection


def test_a_stale_pair_is_blocked(database: Database, connection: psycopg.Connection[Any]) -> None:
    pair = insert_pair(connection)
    result = sweep(database)
    assert result.exit_code == 0, result.stderr
    assert statuses(connection, pair) == ("blocked", "blocked")
    assert result.json["blocked_count"] == 1
    assert result.json["verdicts"] == {"not-verified": 1}
    assert sweep(database).json["checked_count"] == 0


def test_action_delete_is_the_cascade(database: Database, connection: psycopg.Connection[Any]) -> None:
    pair = insert_pair(connection)
    assert sweep(database, "--action", "delete").json["deleted_count"] == 1
    assert statuses(connection, pair) == ("deleted", "deleted")


def test_action_alert_changes_nothing_and_says_so(database: Database, connection: psycopg.Connection[Any]) -> None:
    pair = insert_pair(connection)
    result = sweep(database, "--action", "alert", "--strict")
    assert (result.exit_code, result.json["alert_count"]) == (3, 1)
    assert statuses(connection, pair) == ("new", "new")
    assert events(connection, pair) == []
    assert len(journal(connection, pair)) == 1
    (line,) = log_lines(result, "stale installation")
    assert (line["level"], line["installation_id"]) == ("warning", str(pair.installation_id))
    # The next look at it is later, but a run that acts does not wait for that.
    assert sweep(database, "--action", "alert").json["checked_count"] == 0
    assert sweep(database).json["blocked_count"] == 1


def test_what_is_not_stale_is_left(database: Database, connection: psycopg.Connection[Any]) -> None:
    young = insert_pair(connection, age=HOUR - timedelta(minutes=1))
    ahead = insert_pair(connection, age=-HOUR)
    others = [
        insert_pair(connection, installation={"status": status}, account={"status": status})
        for status in ("active", "blocked", "deleted", "needReinstall")
    ]
    before = fingerprints(connection)
    assert sweep(database).json["checked_count"] == 0
    assert fingerprints(connection) == before
    assert statuses(connection, young) == statuses(connection, ahead) == ("new", "new")
    assert [statuses(connection, pair)[0] for pair in others] == ["active", "blocked", "deleted", "needReinstall"]


def test_ttl_of_less_than_5_minutes_is_a_usage_error(database: Database, connection: psycopg.Connection[Any]) -> None:
    pair = insert_pair(connection)
    assert sweep(database, "--ttl", "4m59s").exit_code == 2
    assert sweep(database, "--unclear-ttl", "30m").exit_code == 2
    assert sweep(database, "--verify-portal", "--action", "delete").exit_code == 2
    assert statuses(connection, pair) == ("new", "new")
    assert sweep(database, "--ttl", "5m").json["blocked_count"] == 1


class TestTheAudit:
    @pytest.mark.parametrize("action", ["block", "delete", "alert"])
    def test_everything_that_is_written_agrees(
        self, database: Database, connection: psycopg.Connection[Any], action: str
    ) -> None:
        pair = insert_pair(connection, age=timedelta(hours=3), installation={"comment": "was here"})
        result = sweep(database, "--action", action, "--ttl", "90m")
        assert_audit(connection, pair.installation_id, result)

    def test_a_journal_row_meets_the_librarys_constraints(
        self, database: Database, connection: psycopg.Connection[Any]
    ) -> None:
        pair = insert_pair(connection)
        sweep(database)
        (row,) = journal(connection, pair)
        assert row["id"].version == 7
        written = row["created_at_utc"].replace(tzinfo=UTC).timestamp()
        assert abs((row["id"].int >> 80) / 1000 - written) < 1
        assert re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?", row["label"])
        assert len(row["label"]) <= 63
        assert row["level"] in {"emergency", "alert", "critical", "error", "warning", "notice", "info", "debug"}
        assert len(row["context_ip_address"]) == 16
        mapped = ipaddress.IPv6Address(row["context_ip_address"]).ipv4_mapped
        assert mapped is not None
        assert mapped.is_loopback
        assert row["message"].strip()
        assert row["member_id"] == pair.member_id
        assert row["context_bitrix24_user_id"] is None

    def test_the_event_has_exactly_the_fields_of_its_contract(
        self, database: Database, connection: psycopg.Connection[Any]
    ) -> None:
        pair = insert_pair(connection)
        sweep(database)
        (event,) = events(connection, pair)
        assert set(event["payload"]) == set(INSTALLATION_MARKED_STALE.payload_fields)
        assert (event["topic"], event["key"], event["aggregate_type"], event["contract_version"]) == (
            TOPIC,
            str(pair.installation_id),
            "ApplicationInstallation",
            1,
        )
        assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", event["headers"]["traceparent"])
        assert event["payload"]["OccurredAt"].endswith("+00:00")

    def test_the_run_is_recorded_with_its_counts(self, database: Database, connection: psycopg.Connection[Any]) -> None:
        insert_pair(connection)
        result = sweep(database)
        (run,) = runs(connection)
        assert (str(run["run_id"]), run["job"], run["outcome"]) == (
            result.json["run_id"],
            "sweep-installations",
            "committed",
        )
        assert (run["counts"]["blocked_count"], run["counts"]["deleted_count"]) == (1, 0)

    def test_no_token_is_shown_anywhere(self, database: Database, connection: psycopg.Connection[Any]) -> None:
        pair = insert_pair(connection)
        outputs = [
            sweep(database, env={"CRMCTL_LOG_LEVEL": "debug"}),
            run_crmctl("installations", "list", "-o", "json", database=database),
            run_crmctl("installations", "show", str(pair.installation_id), "-o", "json", database=database),
        ]
        text = "".join(result.stdout + result.stderr for result in outputs)
        assert pair.access_token not in text
        assert pair.refresh_token not in text


def assert_audit(connection: psycopg.Connection[Any], installation_id: UUID, result: CallResult) -> None:
    """Result, check, comment, journal and event tell the same of an installation."""
    (told,) = [row for row in result.json["installations"] if row["installation_id"] == str(installation_id)]
    (remembered,) = rows(
        connection, "select * from crm.installation_checks where installation_id = %s", installation_id
    )
    (written,) = rows(
        connection,
        """
        select i.status, i.comment, a.status as account_status, a.comment as account_comment, i.bitrix_24_account_id
        from b24lib_application_installations i
        join b24lib_bitrix24_accounts a on a.id = i.bitrix_24_account_id
        where i.id = %s
        """,
        installation_id,
    )
    journalled = rows(
        connection, "select * from b24lib_journal where application_installation_id = %s", installation_id
    )[-1]
    facts = (told["verdict"], told["reason"], told["ttl_seconds"], told["age_seconds"], result.json["run_id"])
    assert (
        remembered["verdict"],
        remembered["reason"],
        remembered["ttl_seconds"],
        remembered["age_seconds"],
        str(remembered["run_id"]),
    ) == facts
    context = journalled["context_payload"]
    assert (
        context["verdict"],
        context["reason"],
        context["ttl_seconds"],
        context["age_seconds"],
        context["run_id"],
    ) == facts
    found = rows(connection, "select payload from crm.outbox_messages where aggregate_id = %s", str(installation_id))
    if told["outcome"] == "left":
        assert found == []
        assert written["status"] == written["account_status"] == "new"
        return
    payload = found[-1]["payload"]
    assert (
        payload["Verdict"],
        payload["Reason"],
        payload["TtlSeconds"],
        payload["AgeSeconds"],
        payload["RunId"],
    ) == facts
    assert (payload["InstallationFromStatus"], payload["AccountFromStatus"]) == ("new", "new")
    assert payload["InstallationToStatus"] == payload["AccountToStatus"] == told["outcome"] == written["status"]
    assert payload["AccountId"] == str(written["bitrix_24_account_id"])
    assert written["comment"] == written["account_comment"] == journalled["message"]
    verdict, reason, ttl, age, run_id = facts
    assert f"verdict={verdict} reason={reason} age={age}s ttl={ttl}s run={run_id}" in written["comment"]


class TestAnomaliesAreLeftAndAlerted:
    @pytest.mark.parametrize(
        ("account", "reason"),
        [
            ({"status": "active"}, "ACCOUNT_NOT_NEW"),
            ({"status": "blocked"}, "ACCOUNT_NOT_NEW"),
            ({"status": "deleted"}, "ACCOUNT_NOT_NEW"),
            ({"application_token": "token"}, "TOKEN_ALREADY_SET"),
            ({"is_master_account": None}, "ACCOUNT_NOT_MASTER"),
            ({"is_master_account": False}, "ACCOUNT_NOT_MASTER"),
            ({"member_id": ""}, "MEMBER_MISSING"),
        ],
    )
    def test_of_the_account(
        self, database: Database, connection: psycopg.Connection[Any], account: dict[str, object], reason: str
    ) -> None:
        pair = insert_pair(connection, account=account)
        before = statuses(connection, pair)
        result = sweep(database, "--action", "delete", "--strict")
        assert (result.exit_code, result.json["alert_count"], result.json["left_count"]) == (3, 1, 1)
        assert statuses(connection, pair) == before
        assert (check(connection, pair)["verdict"], check(connection, pair)["reason"]) == ("anomaly", reason)
        assert events(connection, pair) == []
        (line,) = log_lines(result, "stale installation")
        assert (line["level"], line["reason"]) == ("warning", reason)

    def test_of_the_installations_token(self, database: Database, connection: psycopg.Connection[Any]) -> None:
        pair = insert_pair(connection, installation={"application_token": "token"})
        assert sweep(database).json["installations"][0]["reason"] == "TOKEN_ALREADY_SET"
        assert statuses(connection, pair) == ("new", "new")

    def test_an_empty_token_is_none(self, database: Database, connection: psycopg.Connection[Any]) -> None:
        pair = insert_pair(connection, installation={"application_token": ""}, account={"application_token": ""})
        assert sweep(database).json["blocked_count"] == 1
        assert statuses(connection, pair) == ("blocked", "blocked")

    def test_an_installation_without_its_account(self, database: Database, connection: psycopg.Connection[Any]) -> None:
        pair = insert_pair(connection, without_account=True)
        result = sweep(database)
        assert result.json["installations"][0]["reason"] == "ACCOUNT_MISSING"
        assert statuses(connection, pair) == ("new", None)
        assert journal(connection, pair) == []

    @pytest.mark.parametrize("status", ["new", "active", "blocked", "needReinstall"])
    def test_two_live_installations_of_one_member(
        self, database: Database, connection: psycopg.Connection[Any], status: str
    ) -> None:
        pair = insert_pair(connection)
        other = insert_pair(
            connection,
            installation={"status": status},
            account={"status": status, "member_id": pair.member_id},
        )
        result = sweep(database)
        assert {row["reason"] for row in result.json["installations"]} == {"TWO_LIVE_INSTALLATIONS"}
        assert statuses(connection, pair) == ("new", "new")
        assert statuses(connection, other)[0] == status

    @pytest.mark.parametrize("status", ["new", "active"])
    def test_another_live_master_of_the_member(
        self, database: Database, connection: psycopg.Connection[Any], status: str
    ) -> None:
        pair = insert_pair(connection)
        insert_pair(
            connection,
            installation={"status": "deleted"},
            account={"status": status, "member_id": pair.member_id},
        )
        assert sweep(database).json["installations"][0]["reason"] == "TWO_LIVE_MASTERS"
        assert statuses(connection, pair) == ("new", "new")

    def test_a_blocked_account_that_a_reinstall_left_behind_is_none(
        self, database: Database, connection: psycopg.Connection[Any]
    ) -> None:
        pair = insert_pair(connection)
        insert_pair(
            connection,
            installation={"status": "deleted"},
            account={"status": "blocked", "member_id": pair.member_id},
        )
        assert sweep(database).json["blocked_count"] == 1

    def test_they_do_not_fill_the_batch(self, database: Database, connection: psycopg.Connection[Any]) -> None:
        for _ in range(6):
            insert_pair(connection, age=timedelta(days=2), account={"status": "active"})
        good = insert_pair(connection)
        assert sweep(database, "--batch-size", "3").json["alert_count"] == 3
        assert sweep(database, "--batch-size", "3").json["alert_count"] == 3
        assert sweep(database, "--batch-size", "3").json["blocked_count"] == 1
        assert statuses(connection, good) == ("blocked", "blocked")
        assert sweep(database).json["checked_count"] == 0
        make_due(connection)
        again = sweep(database, "--drain", "--batch-size", "2").json
        assert (again["alert_count"], again["batches"], again["has_more"]) == (6, 4, False)
        assert scalar(connection, "select min(attempts) from crm.installation_checks where verdict = 'anomaly'") == 2


class TestBatches:
    def test_drain_goes_on_until_nothing_is_due(self, database: Database, connection: psycopg.Connection[Any]) -> None:
        pairs = [insert_pair(connection) for _ in range(7)]
        one = sweep(database, "--batch-size", "2").json
        assert (one["blocked_count"], one["has_more"]) == (2, True)
        rest = sweep(database, "--batch-size", "2", "--drain").json
        assert (rest["blocked_count"], rest["has_more"]) == (5, False)
        assert {statuses(connection, pair) for pair in pairs} == {("blocked", "blocked")}
        assert scalar(connection, "select count(*) from crm.outbox_messages") == 7

    def test_a_dry_run_changes_nothing_and_tells_the_same(
        self, database: Database, connection: psycopg.Connection[Any]
    ) -> None:
        for _ in range(5):
            insert_pair(connection)
        before = fingerprints(connection), pairs_digest(connection)
        preview = sweep(database, "--dry-run", "--drain", "--batch-size", "2").json
        assert (fingerprints(connection), pairs_digest(connection)) == before
        done = sweep(database, "--drain", "--batch-size", "2").json
        assert (preview["dry_run"], preview["blocked_count"], done["blocked_count"]) == (True, 5, 5)
        assert {row["installation_id"] for row in preview["installations"]} == {
            row["installation_id"] for row in done["installations"]
        }

    @pytest.mark.parametrize("table", [CURRENT.installations, CURRENT.accounts])
    def test_a_row_that_somebody_holds_is_left_alone(
        self, database: Database, connection: psycopg.Connection[Any], table: str
    ) -> None:
        pair, other = insert_pair(connection, age=3 * HOUR), insert_pair(connection)
        with held(database, table, pair.installation_id if table == CURRENT.installations else pair.account_id):
            result = sweep(database)
            assert (result.json["blocked_count"], result.json["skipped_locked_count"]) == (1, 1)
            assert statuses(connection, pair) == ("new", "new")
        assert statuses(connection, other) == ("blocked", "blocked")
        assert sweep(database).json["blocked_count"] == 1

    def test_a_pair_that_cannot_be_written_does_not_hold_up_the_others(
        self, database: Database, connection: psycopg.Connection[Any]
    ) -> None:
        pairs = [insert_pair(connection) for _ in range(5)]
        bad = pairs[2]
        connection.execute(
            f"""
            create function public.refuse() returns trigger language plpgsql as $$
            begin
                if new.id = '{bad.account_id}' then raise exception 'the application says no'; end if;
                return new;
            end $$;
            create trigger refuse before update on b24lib_bitrix24_accounts
                for each row execute function public.refuse()
            """.encode()
        )
        result = sweep(database, "--strict")
        assert (result.exit_code, result.json["blocked_count"], result.json["failed_count"]) == (3, 4, 1)
        assert result.json["failed"][0]["installation_id"] == str(bad.installation_id)
        assert "the application says no" in result.json["failed"][0]["reason"]
        assert statuses(connection, bad) == ("new", "new")
        assert (check(connection, bad)["verdict"], check(connection, bad)["reason"]) == ("anomaly", "WRITE_FAILED")
        assert events(connection, bad) == []
        assert sweep(database).json["checked_count"] == 0

    def test_a_trigger_that_skips_one_row_of_a_pair_leaves_both_as_they_are(
        self, database: Database, connection: psycopg.Connection[Any]
    ) -> None:
        pair = insert_pair(connection)
        connection.execute(
            """
            create function public.skip() returns trigger language plpgsql as 'begin return null; end';
            create trigger skip before update on b24lib_bitrix24_accounts
                for each row execute function public.skip()
            """
        )
        result = sweep(database)
        assert result.json["failed"] == [{"installation_id": str(pair.installation_id), "reason": "UPDATE_SUPPRESSED"}]
        assert statuses(connection, pair) == ("new", "new")


def pairs_digest(connection: psycopg.Connection[Any]) -> str:
    digest = scalar(
        connection,
        """
        select md5(string_agg(i::text || a::text, '' order by i.id))
        from b24lib_application_installations i join b24lib_bitrix24_accounts a on a.id = i.bitrix_24_account_id
        """,
    )
    assert isinstance(digest, str)
    return digest


class TestNamedInstallations:
    def test_only_they_are_swept_and_the_rest_is_explained(
        self, database: Database, connection: psycopg.Connection[Any]
    ) -> None:
        stale, other, young = insert_pair(connection), insert_pair(connection), insert_pair(connection, age=HOUR / 2)
        active = insert_pair(connection, installation={"status": "active"}, account={"status": "active"})
        named = (stale, young, active)
        result = sweep(database, *(part for pair in named for part in ("--id", str(pair.installation_id))))
        assert result.json["blocked_count"] == 1
        assert {(row["installation_id"], row["reason"]) for row in result.json["not_swept"]} == {
            (str(young.installation_id), "it is younger than the TTL"),
            (str(active.installation_id), "its status is active"),
        }
        assert statuses(connection, other) == ("new", "new")

    def test_one_that_does_not_exist_is_exit_10(self, database: Database, connection: psycopg.Connection[Any]) -> None:
        pair = insert_pair(connection)
        result = sweep(database, "--id", str(UUID(int=7)), "--id", str(pair.installation_id))
        assert (result.exit_code, result.json["error"]["code"]) == (10, "CRM_INSTALLATION_NOT_FOUND")
        assert statuses(connection, pair) == ("new", "new")

    def test_a_named_one_does_not_wait_for_its_next_look(
        self, database: Database, connection: psycopg.Connection[Any]
    ) -> None:
        pair = insert_pair(connection, account={"status": "active"})
        for attempts in (1, 2):
            assert sweep(database, "--id", str(pair.installation_id)).json["alert_count"] == 1
            assert check(connection, pair)["attempts"] == attempts


class TestTheLibrarysTables:
    @pytest.mark.parametrize("naming", ["default", "underscore"])
    @pytest.mark.parametrize("names", [CURRENT, OLDER])
    def test_both_naming_strategies_and_older_names(self, database: Database, naming: Naming, names: Names) -> None:
        connection = database.connect()
        bitrix24_tables.create(connection, naming, names)
        pair = insert_pair(connection, naming=naming, names=names)
        env = {
            "CRMCTL_BITRIX24__INSTALLATIONS_TABLE": names.installations,
            "CRMCTL_BITRIX24__ACCOUNTS_TABLE": names.accounts,
            "CRMCTL_BITRIX24__JOURNAL_TABLE": names.journal,
        }
        assert sweep(database, env=env).json["blocked_count"] == 1
        assert statuses(connection, pair, names) == ("blocked", "blocked")
        assert len(journal(connection, pair, names.journal)) == 1
        shown = run_crmctl("installations", "show", str(pair.installation_id), "-o", "json", database=database, env=env)
        assert (shown.exit_code, shown.json["installation"]["status"]) == (0, "blocked")

    def test_a_schema_in_the_name(self, database: Database, connection: psycopg.Connection[Any]) -> None:
        connection.execute("create schema portal")
        connection.execute("alter table b24lib_journal set schema portal")
        pair = insert_pair(connection)
        assert sweep(database).exit_code == 78
        done = sweep(database, env={"CRMCTL_BITRIX24__JOURNAL_TABLE": "portal.b24lib_journal"})
        assert done.json["blocked_count"] == 1
        assert len(journal(connection, pair, "portal.b24lib_journal")) == 1

    @pytest.mark.parametrize("name", ["nothing_of_the_kind", "a b; drop table x", "", "x.y.z.w", '"'])
    def test_a_table_that_is_not_there_is_exit_78(self, database: Database, name: str) -> None:
        bitrix24_tables.create(database.connect())
        result = sweep(database, env={"CRMCTL_BITRIX24__ACCOUNTS_TABLE": name or "?"})
        assert result.exit_code == 78
        assert "CRMCTL_BITRIX24__ACCOUNTS_TABLE" in result.json["error"]["hint"]

    def test_a_table_that_is_not_the_librarys_is_exit_78(self, database: Database) -> None:
        bitrix24_tables.create(database.connect())
        result = sweep(database, env={"CRMCTL_BITRIX24__ACCOUNTS_TABLE": "crm.bookings"})
        assert result.exit_code == 78
        assert "lacks the column" in result.json["error"]["message"]

    @pytest.mark.parametrize("zone", ["Europe/Moscow", "America/New_York", "UTC"])
    def test_phps_time_zone(self, database: Database, connection: psycopg.Connection[Any], zone: str) -> None:
        env = {"CRMCTL_BITRIX24__PHP_TIMEZONE": zone}
        stale = insert_pair(connection, age=HOUR + timedelta(minutes=1), zone=zone)
        young = insert_pair(connection, age=HOUR - timedelta(minutes=1), zone=zone)
        result = sweep(database, env=env)
        assert [row["installation_id"] for row in result.json["installations"]] == [str(stale.installation_id)]
        assert statuses(connection, young) == ("new", "new")
        assert 3600 <= result.json["installations"][0]["age_seconds"] < 3800
        (row,) = rows(
            connection,
            """
            select i.update_at_utc, j.created_at_utc, clock_timestamp() at time zone %s as now
            from b24lib_application_installations i
            join b24lib_journal j on j.application_installation_id = i.id
            where i.id = %s
            """,
            zone,
            stale.installation_id,
        )
        for written in (row["update_at_utc"], row["created_at_utc"]):
            assert abs(row["now"] - written) < timedelta(minutes=5)

    def test_an_unknown_time_zone_is_exit_78(self, database: Database, connection: psycopg.Connection[Any]) -> None:
        insert_pair(connection)
        result = sweep(database, env={"CRMCTL_BITRIX24__PHP_TIMEZONE": "Mars/Olympus"})
        assert (result.exit_code, "Mars/Olympus" in result.json["error"]["message"]) == (78, True)


def test_a_database_of_its_own(database: Database, postgres_server: Any) -> None:
    with psycopg.connect(postgres_server.url(), autocommit=True) as admin:
        admin.execute("drop database if exists portals with (force)")
        admin.execute("create database portals")
    own = Database(postgres_server.url("portals"))
    env = {"CRMCTL_INSTALLATIONS_DATABASE_URL": own.url}
    try:
        bitrix24_tables.create(own.connect())
        pair = insert_pair(own.connect())
        assert sweep(database, env=env).exit_code == 78
        done = run_crmctl("db", "upgrade", "--database", "installations", database=database, env=env)
        assert done.exit_code == 0, done.stderr
        checked = run_crmctl("db", "check", "--database", "installations", "-o", "json", database=database, env=env)
        assert {part["state"] for part in checked.json["parts"]} == {"current"}
        assert sweep(database, env=env).json["blocked_count"] == 1
        assert len(events(own.connect(), pair)) == 1
        assert [run["job"] for run in runs(own.connect())] == ["sweep-installations"]
        assert runs(database.connect()) == []
        listed = run_crmctl("installations", "list", "-o", "json", database=database, env=env)
        assert [row["status"] for row in listed.json["installations"]] == ["blocked"]
    finally:
        own.close()
        with psycopg.connect(postgres_server.url(), autocommit=True) as admin:
            admin.execute("drop database portals with (force)")


class TestReading:
    def test_list_and_show_tell_why(self, database: Database, connection: psycopg.Connection[Any]) -> None:
        stale = insert_pair(connection)
        young = insert_pair(connection, age=HOUR / 2)
        odd = insert_pair(connection, account={"status": "active"})
        insert_pair(connection, installation={"status": "deleted"}, account={"status": "deleted"})

        listed = run_crmctl("installations", "list", "-o", "json", database=database).json["installations"]
        assert {row["installation_id"]: row["stale"] for row in listed} == {
            str(stale.installation_id): True,
            str(young.installation_id): False,
            str(odd.installation_id): True,
        }
        only = run_crmctl("installations", "list", "--stale", "-o", "json", database=database).json["installations"]
        assert {row["installation_id"] for row in only} == {str(stale.installation_id), str(odd.installation_id)}

        def why(pair: Any) -> str:
            shown = run_crmctl("installations", "show", str(pair.installation_id), "-o", "json", database=database)
            return "; ".join(shown.json["why"])

        assert why(stale) == "stale: it is new, and older than the TTL of 1h"
        assert why(young) == "not stale: it is younger than the TTL of 1h"
        assert "the sweep leaves it alone: its account is not new" in why(odd)

        sweep(database)
        assert why(stale).startswith("not stale: its status is blocked; last verdict: the finish step did not arrive")
        shown = run_crmctl("installations", "show", str(stale.installation_id), "-o", "json", database=database).json
        assert shown["installation"]["verdict"] == "not-verified"
        assert [row["label"] for row in shown["journal"]] == ["stale-installation"]
        assert shown["events"][0]["payload"]["InstallationToStatus"] == "blocked"

    def test_tables_for_people(self, database: Database, connection: psycopg.Connection[Any]) -> None:
        pair = insert_pair(connection)
        assert run_crmctl("installations", "sweep", "--dry-run", database=database).stdout.startswith("Looked at")
        listed = run_crmctl("installations", "list", database=database)
        assert str(pair.installation_id) in listed.stdout
        shown = run_crmctl("installations", "show", str(pair.installation_id), database=database)
        assert "stale: it is new" in shown.stdout

    def test_show_of_one_that_does_not_exist_is_exit_10(
        self, database: Database, connection: psycopg.Connection[Any]
    ) -> None:
        shown = run_crmctl("installations", "show", str(UUID(int=9)), "-o", "json", database=database)
        assert (shown.exit_code, shown.json["error"]["code"]) == (10, "CRM_INSTALLATION_NOT_FOUND")


def test_its_event_arrives_in_kafka(
    database: Database, connection: psycopg.Connection[Any], kafka: Kafka, make_topic: MakeTopic
) -> None:
    pair = insert_pair(connection)
    done = sweep(database, "--action", "delete")
    (event,) = events(connection, pair)
    topic = make_topic()
    connection.execute("update crm.outbox_messages set topic = %s", (topic,))
    assert relay(database, kafka.bootstrap_servers).json["published_count"] == 1
    (record,) = kafka.read(topic)
    assert record.key == str(pair.installation_id).encode()
    sent = envelope(record)
    assert (sent["AggregateType"], sent["AggregateId"], sent["ContractVersion"], sent["MessageId"]) == (
        "ApplicationInstallation",
        str(pair.installation_id),
        1,
        str(event["id"]),
    )
    assert (sent["Payload"]["RunId"], sent["Payload"]["InstallationToStatus"]) == (done.json["run_id"], "deleted")
