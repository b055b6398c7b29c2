"""The sweep beside bitrix24-php-lib: its Install, OnAppInstall and Uninstall after a sweep, and across one."""

from datetime import timedelta
from typing import Any

import psycopg
import pytest

from crmctl.dev import bitrix24_tables
from tests.expire_support import log_lines, rows
from tests.installations_support import (
    Library,
    NotFoundError,
    PairIds,
    broken_pairs,
    check,
    insert_pair,
    journal,
    statuses,
    sweep,
)
from tests.support import Database

TOKEN = "application-token"
SWEPT = ("block", "delete")


@pytest.fixture
def connection(database: Database) -> psycopg.Connection[Any]:
    connection = database.connect()
    bitrix24_tables.create(connection)
    return connection


@pytest.fixture
def library(connection: psycopg.Connection[Any]) -> Library:
    return Library(connection)


def swept(database: Database, connection: psycopg.Connection[Any], action: str) -> PairIds:
    pair = insert_pair(connection)
    result = sweep(database, "--action", action)
    assert result.json["blocked_count"] + result.json["deleted_count"] == 1
    return pair


def live(connection: psycopg.Connection[Any], member_id: str) -> list[tuple[str, str]]:
    """The statuses of the member's installations that are not deleted, with their accounts'."""
    return [
        (row["status"], row["account_status"])
        for row in rows(
            connection,
            """
            select i.status, a.status as account_status
            from b24lib_application_installations i
            join b24lib_bitrix24_accounts a on a.id = i.bitrix_24_account_id
            where a.member_id = %s and i.status <> 'deleted'
            """,
            member_id,
        )
    ]


@pytest.mark.parametrize("action", SWEPT)
class TestAfterASweep:
    def test_a_reinstall_makes_exactly_one_live_pair_and_can_be_finished(
        self, database: Database, connection: psycopg.Connection[Any], library: Library, action: str
    ) -> None:
        pair = swept(database, connection, action)
        again = library.install(pair.member_id, pair.domain)
        assert live(connection, pair.member_id) == [("new", "new")]
        assert statuses(connection, again) == ("new", "new")
        library.on_app_install(pair.member_id, TOKEN)
        assert live(connection, pair.member_id) == [("active", "active")]
        assert broken_pairs(connection) == []

    def test_a_reinstall_that_gets_stuck_is_swept_as_well(
        self, database: Database, connection: psycopg.Connection[Any], library: Library, action: str
    ) -> None:
        pair = swept(database, connection, action)
        again = library.install(pair.member_id, pair.domain)
        connection.execute(
            "update b24lib_application_installations set created_at_utc = created_at_utc - interval '2 hours'"
            " where id = %s",
            (again.installation_id,),
        )
        result = sweep(database)
        assert (result.json["blocked_count"], result.json["alert_count"]) == (1, 0)
        assert statuses(connection, again) == ("blocked", "blocked")

    def test_a_late_finish_step_fails_cleanly(
        self, database: Database, connection: psycopg.Connection[Any], library: Library, action: str
    ) -> None:
        pair = swept(database, connection, action)
        before = statuses(connection, pair)
        with pytest.raises(NotFoundError):
            library.on_app_install(pair.member_id, TOKEN)
        assert statuses(connection, pair) == before

    def test_an_uninstall_finds_nothing_and_changes_nothing(
        self, database: Database, connection: psycopg.Connection[Any], library: Library, action: str
    ) -> None:
        pair = swept(database, connection, action)
        before = statuses(connection, pair)
        assert not library.uninstall(pair.member_id, TOKEN)
        assert statuses(connection, pair) == before

    def test_the_reinstalled_application_can_be_uninstalled(
        self, database: Database, connection: psycopg.Connection[Any], library: Library, action: str
    ) -> None:
        pair = swept(database, connection, action)
        library.install(pair.member_id, pair.domain)
        library.on_app_install(pair.member_id, TOKEN)
        assert library.uninstall(pair.member_id, TOKEN)
        assert live(connection, pair.member_id) == []
        assert broken_pairs(connection) == []

    def test_a_finish_step_that_had_read_before_it_wins_and_is_noticed(
        self, database: Database, connection: psycopg.Connection[Any], library: Library, action: str
    ) -> None:
        pair = insert_pair(connection)
        unit = library.read_for_finish(pair.member_id, TOKEN)
        first = sweep(database, "--action", action)
        assert statuses(connection, pair)[0] in ("blocked", "deleted")
        library.flush(unit)
        assert statuses(connection, pair) == ("active", "active")

        second = sweep(database, "--strict")
        assert (second.exit_code, second.json["overridden_count"]) == (3, 1)
        (told,) = second.json["overridden"]
        assert (told["installation_id"], told["swept_by"]) == (str(pair.installation_id), first.json["run_id"])
        assert check(connection, pair)["overridden_at"] is not None
        assert [row["label"] for row in journal(connection, pair)] == [
            "stale-installation",
            "stale-installation-override",
        ]
        assert journal(connection, pair)[-1]["context_payload"]["swept_by"] == first.json["run_id"]
        assert len(log_lines(second, "an installation that was swept is active again")) == 1
        # It is told once, and the pair is not touched again.
        assert sweep(database).json["overridden_count"] == 0
        assert statuses(connection, pair) == ("active", "active")

    def test_a_reinstall_that_had_read_before_it_makes_exactly_one_live_pair(
        self, database: Database, connection: psycopg.Connection[Any], library: Library, action: str
    ) -> None:
        pair = insert_pair(connection)
        current = library.find_installation(pair.member_id)
        assert current is not None
        accounts = library.find_accounts(pair.member_id)
        swept_by = sweep(database, "--action", action)
        assert swept_by.exit_code == 0
        # What Install decided on what it had read: both to deleted.
        for table, row_id in (
            ("b24lib_application_installations", current["id"]),
            ("b24lib_bitrix24_accounts", accounts[0]["id"]),
        ):
            connection.execute(f"update {table} set status = 'deleted' where id = %s".encode(), (row_id,))
        library._insert_pair(pair.member_id, pair.domain)
        assert live(connection, pair.member_id) == [("new", "new")]
        assert broken_pairs(connection) == []
        assert sweep(database).json["overridden_count"] == 0


def test_a_reinstall_before_the_ttl_is_the_librarys_own_affair(
    database: Database, connection: psycopg.Connection[Any], library: Library
) -> None:
    pair = insert_pair(connection)
    again = library.install(pair.member_id, pair.domain)
    assert sweep(database).json["checked_count"] == 0
    assert statuses(connection, pair) == ("deleted", "deleted")
    assert statuses(connection, again) == ("new", "new")


def test_a_blocked_account_that_a_reinstall_left_behind_does_not_disturb_the_next_sweep(
    database: Database, connection: psycopg.Connection[Any], library: Library
) -> None:
    pair = insert_pair(connection)
    sweep(database)
    again = library.install(pair.member_id, pair.domain)
    assert statuses(connection, pair) == ("deleted", "blocked")
    connection.execute(
        "update b24lib_application_installations set created_at_utc = created_at_utc - %s where id = %s",
        (timedelta(hours=2), again.installation_id),
    )
    assert sweep(database).json["blocked_count"] == 1
    third = library.install(pair.member_id, pair.domain)
    library.on_app_install(pair.member_id, TOKEN)
    assert statuses(connection, third) == ("active", "active")
    assert broken_pairs(connection) == []


def test_unblocking_by_hand_is_noticed(database: Database, connection: psycopg.Connection[Any]) -> None:
    pair = insert_pair(connection)
    sweep(database)
    for table in ("b24lib_application_installations", "b24lib_bitrix24_accounts"):
        connection.execute(f"update {table} set status = 'active'".encode())
    assert sweep(database).json["overridden_count"] == 1
    assert statuses(connection, pair) == ("active", "active")
