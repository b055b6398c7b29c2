"""What the tests of `installations sweep` share: pairs, the library's use cases as SQL, and the real binary.

`Library` re-enacts bitrix24-php-lib: its finders' conditions, its entities' guards, and Doctrine's way to write:
read first without locks, then update by id what has changed, in one transaction.
"""

import secrets
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg import sql

from crmctl.dev.bitrix24_portal import Bitrix24StandIn, Grant, Reply
from crmctl.dev.bitrix24_tables import CURRENT, Names, Naming
from tests.expire_support import Connection, rows, scalar
from tests.prefork import run_crmctl
from tests.support import CallResult, Database, start_crmctl

HOUR: Final = timedelta(hours=1)
TOPIC: Final = "pin.crm.application-installation-stale.v1"
APPLICATION: Final = "crmctl sweep-installations"
LIVE: Final = "(status <> 'deleted')"


class NotFoundError(Exception):
    """The library's ApplicationInstallationNotFoundException, or that of an account."""


class RefusedError(Exception):
    """An entity of the library refuses a transition, or a finder finds more than one."""


@dataclass(frozen=True, slots=True)
class PairIds:
    """A pair that a test made, and the portal it belongs to."""

    installation_id: UUID
    account_id: UUID
    member_id: str
    domain: str
    access_token: str
    refresh_token: str


def insert_pair(
    connection: Connection,
    *,
    age: timedelta = 2 * HOUR,
    installation: Mapping[str, object] | None = None,
    account: Mapping[str, object] | None = None,
    without_account: bool = False,
    token_age: timedelta | None = None,
    zone: str = "UTC",
    naming: Naming = "default",
    names: Names = CURRENT,
) -> PairIds:
    """Insert a pending install of this age; its access token is valid for an hour, or ended `token_age` ago."""
    prefix = "authtoken_" if naming == "default" else "auth_token_"
    member = secrets.token_hex(16)
    pair = PairIds(
        uuid.uuid4(), uuid.uuid4(), member, f"p{member[:12]}.test", secrets.token_hex(32), secrets.token_hex(32)
    )
    moment = scalar(connection, "select (clock_timestamp() - %s::interval) at time zone %s", age, zone)
    expires = scalar(connection, "select extract(epoch from clock_timestamp())::bigint")
    expires += -int(token_age.total_seconds()) if token_age is not None else 3600
    if not without_account:
        _insert(
            connection,
            names.accounts,
            {
                "id": pair.account_id,
                "b24_user_id": 1,
                "is_b24_user_admin": True,
                "member_id": member,
                "is_master_account": True,
                "domain_url": pair.domain,
                "status": "new",
                "created_at_utc": moment,
                "updated_at_utc": moment,
                "application_version": 1,
                f"{prefix}access_token": pair.access_token,
                f"{prefix}refresh_token": pair.refresh_token,
                f"{prefix}expires": expires,
                **(account or {}),
            },
        )
    _insert(
        connection,
        names.installations,
        {
            "id": pair.installation_id,
            "status": "new",
            "created_at_utc": moment,
            "update_at_utc": moment,
            "bitrix_24_account_id": pair.account_id,
            "portal_license_family": "ent",
            **(installation or {}),
        },
    )
    return pair


def _insert(connection: Connection, table: str, columns: Mapping[str, object]) -> None:
    statement = sql.SQL("insert into {} ({}) values ({})").format(
        sql.Identifier(table),
        sql.SQL(", ").join(sql.Identifier(name) for name in columns),
        sql.SQL(", ").join(sql.Placeholder(name) for name in columns),
    )
    connection.execute(statement, dict(columns))


def statuses(connection: Connection, pair: PairIds, names: Names = CURRENT) -> tuple[str, str | None]:
    """The statuses of both rows."""
    (row,) = rows(
        connection,
        f"""
        select i.status, a.status as account_status
        from {names.installations} i left join {names.accounts} a on a.id = i.bitrix_24_account_id
        where i.id = %s
        """,
        pair.installation_id,
    )
    return row["status"], row["account_status"]


def check(connection: Connection, pair: PairIds) -> dict[str, Any]:
    """The sweep's memory of an installation."""
    (row,) = rows(connection, "select * from crm.installation_checks where installation_id = %s", pair.installation_id)
    return row


def journal(connection: Connection, pair: PairIds, table: str = CURRENT.journal) -> list[dict[str, Any]]:
    """The journal rows of an installation in the order of their writing."""
    return rows(
        connection,
        f"select * from {table} where application_installation_id = %s order by created_at_utc, id",
        pair.installation_id,
    )


def events(connection: Connection, pair: PairIds) -> list[dict[str, Any]]:
    """The outbox messages of an installation."""
    return rows(
        connection,
        "select * from crm.outbox_messages where aggregate_id = %s order by position",
        str(pair.installation_id),
    )


def sweep(
    database: Database | str, *args: str, env: Mapping[str, str] | None = None, timeout: float = 60.0
) -> CallResult:
    """Run `crmctl installations sweep -o json` to its end."""
    return run_crmctl("installations", "sweep", "-o", "json", *args, database=database, env=env, timeout=timeout)


def start_sweep(database: Database | str, *args: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start `crmctl installations sweep -o json`; use it as a context manager."""
    return start_crmctl("installations", "sweep", "-o", "json", *args, database=database, env=env)


def verify(database: Database | str, portal: Bitrix24StandIn, *args: str, **env: str) -> CallResult:
    """Sweep with --verify-portal against a stand-in."""
    return sweep(database, "--verify-portal", *args, env=portal.settings | env)


def let_renew(portal: Bitrix24StandIn, pair: PairIds, reply: Reply | None = None) -> Grant:
    """Make the stand-in's OAuth server know a pair's refresh token; with `reply` it answers that instead."""
    grant = Grant(pair.member_id, pair.refresh_token, reply)
    portal.grants.append(grant)
    return grant


def make_due(connection: Connection) -> None:
    """Let every next look be due, and every lease run out, as time does."""
    connection.execute(
        "update crm.installation_checks set next_check_at = next_check_at - interval '40 days',"
        " claimed_until = claimed_until - interval '1 day'"
    )


def broken_pairs(connection: Connection) -> list[dict[str, Any]]:
    """Pairs of which one row moved alone, and members with more than one `new` master account."""
    return rows(
        connection,
        """
        select i.id::text as what, i.status, a.status as account_status
        from b24lib_application_installations i
        join b24lib_bitrix24_accounts a on a.id = i.bitrix_24_account_id
        where (i.status, a.status) not in (
            ('new', 'new'), ('active', 'active'), ('blocked', 'blocked'), ('deleted', 'deleted'),
            -- what a reinstall leaves: the library's account ignores an uninstall while it is blocked
            ('deleted', 'blocked')
        )
        union all
        select a.member_id, 'two new masters', null
        from b24lib_bitrix24_accounts a
        where a.is_master_account and a.status = 'new'
        group by a.member_id
        having count(*) > 1
        """,
    )


@dataclass(slots=True)
class Unit:
    """Entities that the library has read: what they were, and what they are to be written as."""

    installation_id: UUID
    account_id: UUID
    installation: dict[str, object] = field(default_factory=dict)
    accounts: dict[UUID, dict[str, object]] = field(default_factory=dict)


class Library:
    """bitrix24-php-lib's Install, OnAppInstall and Uninstall."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def find_installation(self, member_id: str) -> dict[str, Any] | None:
        """findByBitrix24AccountMemberId: the one that is not deleted, through its master account."""
        found = rows(
            self._connection,
            """
            select i.*
            from b24lib_application_installations i
            left join b24lib_bitrix24_accounts a on i.bitrix_24_account_id = a.id and a.is_master_account = true
            where a.member_id = %s and a.is_master_account = true and i.status <> 'deleted'
            """,
            member_id,
        )
        if len(found) > 1:
            raise RefusedError("more than one installation of the member")
        return found[0] if found else None

    def find_accounts(self, member_id: str, status: str | None = None) -> list[dict[str, Any]]:
        """findByMemberId."""
        return rows(
            self._connection,
            "select * from b24lib_bitrix24_accounts where member_id = %s and (%s::text is null or status = %s)",
            member_id,
            status,
            status,
        )

    def install(self, member_id: str, domain: str) -> PairIds:
        """Install without a token: what is there is uninstalled and flushed, then a new pair is written."""
        current = self.find_installation(member_id)
        if current is not None:
            changes: dict[str, object] = {"status": "deleted"}
            if current["status"] == "new":
                changes["comment"] = "reinstall before finish"
            unit = Unit(current["id"], current["bitrix_24_account_id"], changes)
            for account in self.find_accounts(member_id):
                if account["status"] in ("new", "active"):
                    unit.accounts[account["id"]] = {"status": "deleted"}
            self.flush(unit)
        return self._insert_pair(member_id, domain)

    def _insert_pair(self, member_id: str, domain: str) -> PairIds:
        with self._connection.transaction():
            return insert_pair(
                self._connection, age=timedelta(0), account={"member_id": member_id, "domain_url": domain}
            )

    def read_for_finish(self, member_id: str, token: str) -> Unit:
        """OnAppInstall until its flush: raises NotFoundError unless the install is pending."""
        installation = self.find_installation(member_id)
        if installation is None or installation["status"] not in ("new", "active"):
            raise NotFoundError("pending application installation not found")
        if installation["status"] == "active":
            return Unit(installation["id"], installation["bitrix_24_account_id"])
        masters = [account for account in self.find_accounts(member_id, "new") if account["is_master_account"]]
        if not masters:
            raise NotFoundError("new master account not found")
        if len(masters) > 1:
            raise RefusedError("more than one new master account")
        changes: dict[str, object] = {"status": "active", "application_token": token}
        return Unit(installation["id"], masters[0]["id"], dict(changes), {masters[0]["id"]: dict(changes)})

    def on_app_install(self, member_id: str, token: str = "application-token") -> None:
        """OnAppInstall as a whole."""
        self.flush(self.read_for_finish(member_id, token))

    def uninstall(self, member_id: str, token: str) -> bool:
        """Uninstall: finds by token among new and active; whether there was anything to uninstall."""
        found = rows(
            self._connection,
            "select * from b24lib_application_installations"
            " where application_token = %s and status in ('new', 'active')",
            token,
        )
        if not found:
            return False
        if found[0]["status"] == "new":
            raise RefusedError("an installation does not go from new to deleted")
        unit = Unit(found[0]["id"], found[0]["bitrix_24_account_id"], {"status": "deleted"})
        for account in self.find_accounts(member_id):
            if account["status"] in ("new", "active"):
                unit.accounts[account["id"]] = {"status": "deleted"}
        self.flush(unit)
        return True

    def flush(self, unit: Unit, *, pause: float = 0.0, account_first: bool = False) -> None:
        """Write what has changed by id, without looking at the status, in one transaction.

        `pause` (seconds) is made after each update, with the locks held.
        """
        with self._connection.transaction():
            self.write(unit, pause=pause, account_first=account_first)

    def write(self, unit: Unit, *, pause: float = 0.0, account_first: bool = False) -> None:
        """The updates of a flush, in the transaction that is open."""
        updates = [
            ("b24lib_bitrix24_accounts", "updated_at_utc", account_id, changes)
            for account_id, changes in unit.accounts.items()
        ]
        if unit.installation:
            installation = (
                "b24lib_application_installations",
                "update_at_utc",
                unit.installation_id,
                unit.installation,
            )
            updates.insert(len(updates) if account_first else 0, installation)
        for update in updates:
            self._update(*update)
            time.sleep(pause)

    def _update(self, table: str, moment: str, row_id: UUID, changes: Mapping[str, object]) -> None:
        self._connection.execute(
            sql.SQL("update {} set {}, {} = now() at time zone 'UTC' where id = {}").format(
                sql.Identifier(table),
                sql.SQL(", ").join(
                    sql.SQL("{} = {}").format(sql.Identifier(name), sql.Literal(value))
                    for name, value in changes.items()
                ),
                sql.Identifier(moment),
                sql.Literal(row_id),
            )
        )


@contextmanager
def held(database: Database, table: str, row_id: UUID) -> Iterator[None]:
    """Another session that holds one row's lock."""
    with psycopg.connect(database.url) as holder:
        statement = sql.SQL("select from {} where id = %s for update").format(sql.Identifier(table))
        assert holder.execute(statement, (row_id,)).fetchone() is not None
        yield
        holder.rollback()
