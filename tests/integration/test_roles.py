"""`crmctl db roles`: what each role may do, what none may, and what a job says that lacks a grant."""

import subprocess
import sys
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from psycopg.errors import InsufficientPrivilege

from crmctl.dev import bitrix24_tables
from crmctl.dev.bitrix24_portal import Bitrix24StandIn, app_info
from crmctl.dev.bitrix24_tables import Naming
from crmctl.domain.grants import GRANTS, Kind, tables
from tests.chat_status_support import Chat
from tests.dlq_support import letter, place, send_letters
from tests.expire_support import column, expire, insert_due, rows, scalar
from tests.installations_support import insert_pair, journal, let_renew, statuses, sweep, verify
from tests.kafka_fixtures import Kafka, MakeTopic
from tests.prefork import run_crmctl
from tests.relay_support import count, extend, insert_booked, insert_events, relay, rsa_signer, tenant_of
from tests.roles_support import Roles
from tests.support import CallResult, Database

KINDS: Final = pytest.mark.parametrize("kind", list(Kind))


@pytest.fixture
def roles(database: Database) -> Roles:
    return Roles.make(database)


def acl(database: Database, roles: Roles) -> list[dict[str, Any]]:
    """Everything that is granted to the roles."""
    return rows(
        database.connect(),
        """
        select r.rolname, r.rolcanlogin, c.relname, a.privilege_type, null::text as attname
        from pg_class c cross join lateral aclexplode(c.relacl) a join pg_roles r on r.oid = a.grantee
        where starts_with(r.rolname, %s)
        union all
        select r.rolname, r.rolcanlogin, c.relname, a.privilege_type, t.attname
        from pg_attribute t cross join lateral aclexplode(t.attacl) a
        join pg_class c on c.oid = t.attrelid join pg_roles r on r.oid = a.grantee
        where starts_with(r.rolname, %s)
        order by 1, 3, 4, 5
        """,
        roles.prefix,
        roles.prefix,
    )


class TestTheRoles:
    def test_are_groups_that_cannot_log_in(self, database: Database, roles: Roles) -> None:
        found = rows(
            database.connect(),
            "select rolname, rolcanlogin, rolsuper, rolcreaterole from pg_roles where starts_with(rolname, %s)",
            roles.prefix,
        )
        assert {row["rolname"] for row in found} == {roles.name(kind) for kind in Kind}
        assert not any(row["rolcanlogin"] or row["rolsuper"] or row["rolcreaterole"] for row in found)

    def test_a_second_run_changes_nothing_and_says_so(self, database: Database, roles: Roles) -> None:
        before = acl(database, roles)
        again = run_crmctl("db", "roles", "--prefix", roles.prefix, database=database)
        assert (again.exit_code, again.stdout) == (0, "nothing to do\n")
        document = run_crmctl("db", "roles", "--prefix", roles.prefix, "-o", "json", database=database).json
        assert document == {"dry_run": False, "statements": []}
        assert acl(database, roles) == before

    def test_a_dry_run_prints_sql_that_does_the_same(self, database: Database) -> None:
        prefix = f"dry_{uuid.uuid4().hex[:8]}_"
        dry = run_crmctl("db", "roles", "--prefix", prefix, "--dry-run", database=database)
        assert dry.exit_code == 0
        connection = database.connect()
        assert rows(connection, "select from pg_roles where starts_with(rolname, %s)", prefix) == []
        connection.execute(dry.stdout.encode())
        again = run_crmctl("db", "roles", "--prefix", prefix, database=database)
        assert again.stdout == "nothing to do\n"

    def test_two_at_once_do_it_once(self, database: Database) -> None:
        prefix = f"race_{uuid.uuid4().hex[:8]}_"
        command = [sys.executable, "-m", "crmctl", "db", "roles", "--prefix", prefix, "-o", "json"]
        racing = [
            subprocess.Popen(command, env={"CRMCTL_DATABASE_URL": database.url}, stdout=subprocess.PIPE, cwd="/")
            for _ in range(3)
        ]
        for process in racing:
            process.communicate(timeout=60)
        assert [process.returncode for process in racing] == [0, 0, 0]

    def test_what_was_granted_on_top_is_taken_back_and_what_belongs_to_it_stays(
        self, database: Database, roles: Roles
    ) -> None:
        before = acl(database, roles)
        connection = database.connect()
        connection.execute(f"grant update, delete on crm.deals to {roles.name(Kind.CHAT)}".encode())
        connection.execute(f"revoke select on crm.bookings from {roles.name(Kind.READONLY)}".encode())
        assert acl(database, roles) != before
        mended = run_crmctl("db", "roles", "--prefix", roles.prefix, database=database)
        assert mended.exit_code == 0, mended.stderr
        assert acl(database, roles) == before

    @pytest.mark.parametrize("naming", ["default", "underscore"])
    def test_columns_that_are_not_there_are_left_out(self, database: Database, naming: Naming) -> None:
        """The token's columns have two spellings, of which a database has one."""
        connection = database.connect()
        bitrix24_tables.create(connection, naming)
        roles = Roles.make(database)
        before = acl(database, roles)
        wider = f"grant update on b24lib_bitrix24_accounts to {roles.name(Kind.INSTALLATIONS)}"
        connection.execute(wider.encode())
        mended = run_crmctl("db", "roles", "--prefix", roles.prefix, database=database)
        assert mended.exit_code == 0, mended.stderr
        assert acl(database, roles) == before
        prefix = "authtoken_" if naming == "default" else "auth_token_"
        granted = {row["attname"] for row in before if row["relname"] == "b24lib_bitrix24_accounts" and row["attname"]}
        tokens = {f"{prefix}{name}" for name in ("access_token", "refresh_token", "expires", "expires_in")}
        assert granted == {"status", "comment", "updated_at_utc"} | tokens

    def test_cannot_be_made_without_the_right_to(self, database: Database, roles: Roles) -> None:
        result = run_crmctl("db", "roles", "--prefix", "other_", "-o", "json", database=roles.login(Kind.MAINTENANCE))
        assert result.exit_code == 78
        assert "permission denied to create role" in result.json["error"]["message"]


class TestTheTableOfGrants:
    def test_covers_every_table_for_the_read_only_role_and_names_no_other(self, database: Database) -> None:
        ours = set(column(database.connect(), "select 'crm.' || tablename from pg_tables where schemaname = 'crm'"))
        readable = {grant.table for grant in GRANTS[Kind.READONLY]}
        assert ours <= readable
        # What may be missing: bitrix24-php-lib's tables, which can live in another database.
        elsewhere = {table for table in tables() if not table.startswith("crm.")}
        assert set(tables()) - elsewhere <= ours

    def test_says_of_the_sweep_what_its_page_says(self, database: Database) -> None:
        connection = database.connect()
        bitrix24_tables.create(connection)
        roles = Roles.make(database)
        ours, by_hand = roles.name(Kind.INSTALLATIONS), f"{roles.prefix}by_hand"
        page = (Path(__file__).parents[2] / "docs" / "stale-installations.md").read_text(encoding="utf-8")
        grants = page.split("```sql\n")[1].split("```")[0]
        connection.execute(f"create role {by_hand} nologin; {grants.replace('ROLE', by_hand)}".encode())
        granted = [(row.pop("rolname"), tuple(row.values())) for row in acl(database, roles)]
        assert [what for role, what in granted if role == by_hand] == [what for role, what in granted if role == ours]

    @KINDS
    def test_gives_no_role_more_than_it_says(self, database: Database, roles: Roles, kind: Kind) -> None:
        """Whoever may connect may use what is PUBLIC's: nothing of ours is."""
        with psycopg.connect(roles.login(kind)) as connection:
            held = {
                (row["tablename"], row["privilege"])
                for row in rows(
                    connection,
                    """
                    select 'crm.' || t.tablename as tablename, p.privilege
                    from pg_tables t
                    cross join unnest(array['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE']) p (privilege)
                    where t.schemaname = 'crm'
                        and has_table_privilege(format('%%I.%%I', t.schemaname, t.tablename), p.privilege)
                        and %s
                    """,
                    True,
                )
            }
        said = {(grant.table, grant.privilege) for grant in GRANTS[kind] if not grant.columns}
        assert held <= said


class TestNobody:
    @KINDS
    @pytest.mark.parametrize(
        "statement",
        ["update crm.deal_timeline_events set type = 'x'", "delete from crm.deal_timeline_events"],
        ids=["update", "delete"],
    )
    def test_changes_the_timeline(self, roles: Roles, kind: Kind, statement: str) -> None:
        with psycopg.connect(roles.login(kind)) as connection, pytest.raises(InsufficientPrivilege):
            connection.execute(statement.encode())

    @KINDS
    def test_changes_the_schema(self, roles: Roles, kind: Kind) -> None:
        with psycopg.connect(roles.login(kind)) as connection, pytest.raises(InsufficientPrivilege):
            connection.execute("create table crm.mine (id integer)")

    @pytest.mark.parametrize(
        "statement",
        [
            "update crm.deals set status = 'Won'",
            "update crm.deals set version = version + 1",
            "update crm.deals set deleted_at = now()",
            "delete from crm.deals",
            "update crm.bookings set status = 'Booked'",
        ],
    )
    def test_in_the_chat_role_changes_more_than_the_chat_status(self, roles: Roles, statement: str) -> None:
        with psycopg.connect(roles.login(Kind.CHAT), autocommit=True) as connection:
            with pytest.raises(InsufficientPrivilege):
                connection.execute(statement.encode())
            connection.execute("update crm.deals set chat_status = 'Ready', updated_at = now()")

    @pytest.mark.parametrize(
        "statement",
        [
            "update b24lib_application_installations set status = 'active', application_token = 'made up'",
            "update b24lib_bitrix24_accounts set status = 'active', application_token = 'made up'",
            "update b24lib_application_installations set bitrix_24_account_id = gen_random_uuid()",
            "update b24lib_bitrix24_accounts set member_id = 'another'",
            "update b24lib_bitrix24_accounts set domain_url = 'another.test'",
            "update b24lib_bitrix24_accounts set is_master_account = false",
            "delete from b24lib_application_installations",
            "insert into b24lib_bitrix24_accounts (id) values (gen_random_uuid())",
            "select from b24lib_journal",
            "update b24lib_journal set message = 'another'",
            "delete from b24lib_journal",
        ],
    )
    def test_in_the_installations_role_finishes_an_install_or_rewrites_one(
        self, database: Database, statement: str
    ) -> None:
        connection = database.connect()
        bitrix24_tables.create(connection)
        insert_pair(connection)
        url = Roles.make(database).login(Kind.INSTALLATIONS)
        with psycopg.connect(url) as sweeping, pytest.raises(InsufficientPrivilege):
            sweeping.execute(statement.encode())

    @pytest.mark.parametrize("table", ["bookings", "deals", "outbox_messages", "job_runs", "job_pauses"])
    def test_in_the_read_only_role_writes(self, roles: Roles, table: str) -> None:
        with psycopg.connect(roles.login(Kind.READONLY), autocommit=True) as connection:
            connection.execute(f"select * from crm.{table}".encode())
            with pytest.raises(InsufficientPrivilege):
                connection.execute(f"delete from crm.{table}".encode())


class TestUnderItsOwnRole:
    def test_the_expiry_expires(self, database: Database, roles: Roles) -> None:
        insert_due(database.connect())
        result = expire(roles.login(Kind.BOOKINGS), "--drain")
        assert (result.exit_code, result.json["reserve_expired_count"]) == (0, 1), result.stderr

    def test_the_expiry_records_its_failure(self, database: Database, roles: Roles) -> None:
        connection = database.connect()
        result = expire(roles.login(Kind.BOOKINGS), "--id", "00000000-0000-4000-8000-000000000001")
        assert result.exit_code == 10
        assert scalar(connection, "select outcome from crm.job_runs") == "failed"

    def test_an_extension_extends(self, database: Database, roles: Roles) -> None:
        connection = database.connect()
        booking_id = insert_booked(connection)
        token = rsa_signer().token(tenant_of(connection, booking_id))
        result = extend(roles.login(Kind.BOOKINGS), booking_id, token=token)
        assert (result.exit_code, result.json["extensions_count"]) == (0, 1), result.stderr

    def test_the_relay_publishes(self, database: Database, roles: Roles, kafka: Kafka, make_topic: MakeTopic) -> None:
        insert_events(database.connect(), make_topic(), aggregates=3)
        result = relay(roles.login(Kind.RELAY), kafka.bootstrap_servers, "--drain")
        assert (result.exit_code, result.json["published_count"]) == (0, 3), result.stderr
        assert count(database.connect(), "published_at is null") == 0

    @pytest.mark.parametrize("kind", [Kind.CHAT, Kind.DEAD_LETTERS])
    def test_the_consumer_applies_and_defers(
        self, database: Database, roles: Roles, kafka: Kafka, make_topic: MakeTopic, kind: Kind
    ) -> None:
        chat = Chat.make(kafka, database, make_topic)
        deal, missing = chat.deal(), chat.missing_deal()
        chat.send(deal.event("Ready"), missing.event("Ready"))
        result = chat.consume(database=roles.login(kind))
        assert result.exit_code == 0, result.stderr
        assert (result.json["applied_count"], result.json["deferred_count"]) == (1, 1)
        assert chat.status(deal) == "Ready"

    def test_dead_letters_are_replayed_and_discarded_and_read(
        self, database: Database, roles: Roles, kafka: Kafka, make_topic: MakeTopic
    ) -> None:
        chat = Chat.make(kafka, database, make_topic)
        deal = chat.deal()
        applied, given_up = send_letters(chat, letter(deal.event("Ready")), letter(chat.missing_deal().event("Ready")))
        writer, reader = roles.login(Kind.DEAD_LETTERS), roles.login(Kind.READONLY)

        def run(url: str, *args: str) -> CallResult:
            result = run_crmctl("dlq", *args, "-o", "json", database=url, env=chat.env)
            assert result.exit_code == 0, result.stderr
            return result

        assert run(reader, "list").json["open_count"] == 2
        assert run(reader, "show", place(applied)).json["replay"]["outcome"] == "applied"
        assert run(writer, "replay").json["applied_count"] == 1
        assert run(writer, "discard", place(given_up), "--reason", "a test", "--yes").json["discarded_count"] == 1
        assert run(reader, "list", "--summary").json["open_count"] == 0
        assert chat.status(deal) == "Ready"

    def test_the_sweep_blocks_and_installations_are_read(self, database: Database) -> None:
        connection = database.connect()
        bitrix24_tables.create(connection)
        roles = Roles.make(database)
        pair = insert_pair(connection, age=timedelta(hours=2))
        swept = sweep(roles.login(Kind.INSTALLATIONS))
        assert swept.exit_code == 0, swept.stderr
        assert statuses(connection, pair) == ("blocked", "blocked")
        for command in (("list",), ("show", str(pair.installation_id))):
            result = run_crmctl("installations", *command, "-o", "json", database=roles.login(Kind.READONLY))
            assert result.exit_code == 0, result.stderr

    @pytest.mark.parametrize("naming", ["default", "underscore"])
    def test_the_sweep_asks_portals_and_renews_a_token(self, database: Database, naming: Naming) -> None:
        connection = database.connect()
        bitrix24_tables.create(connection, naming)
        roles = Roles.make(database)
        pair = insert_pair(connection, token_age=timedelta(hours=1), naming=naming)
        with Bitrix24StandIn() as portal:
            renewed = let_renew(portal, pair)
            portal.portals[pair.domain] = app_info(installed=True)
            swept = verify(roles.login(Kind.INSTALLATIONS), portal)
        assert swept.exit_code == 0, swept.stderr
        assert swept.json["blocked_count"] == 1
        assert statuses(connection, pair) == ("blocked", "blocked")
        assert renewed.refresh_token != pair.refresh_token
        assert len(journal(connection, pair)) == 1

    def test_prune_and_pauses_belong_to_maintenance(self, database: Database, roles: Roles) -> None:
        connection = database.connect()
        insert_events(connection, "any")
        connection.execute("update crm.outbox_messages set published_at = now() - interval '90 days'")
        url = roles.login(Kind.MAINTENANCE)
        result = run_crmctl("prune", "-o", "json", database=url)
        assert (result.exit_code, result.json["outbox_count"]) == (0, 1), result.stderr
        assert run_crmctl("jobs", "pause", "prune", "--reason", "a test", database=url).exit_code == 0
        assert run_crmctl("jobs", "resume", "prune", database=url).exit_code == 0

    @pytest.mark.parametrize(
        "command",
        [
            ("bookings", "list"),
            ("bookings", "list", "--status", "Booked"),
            ("outbox", "list"),
            ("outbox", "list", "--all"),
            ("runs", "list"),
            ("jobs", "list"),
            ("db", "check"),
        ],
        ids=" ".join,
    )
    def test_what_reads_runs_in_the_read_only_role(self, roles: Roles, command: tuple[str, ...]) -> None:
        result = run_crmctl(*command, "-o", "json", database=roles.login(Kind.READONLY))
        assert result.exit_code == 0, result.stderr

    @pytest.mark.real_kafka
    def test_the_lag_is_shown_in_the_read_only_role(
        self, database: Database, roles: Roles, kafka: Kafka, make_topic: MakeTopic
    ) -> None:
        chat = Chat.make(kafka, database, make_topic)
        chat.send(chat.deal().event("Ready"))
        result = run_crmctl("chat-status", "lag", "-o", "json", database=roles.login(Kind.READONLY), env=chat.env)
        assert result.exit_code == 0, result.stderr
        assert sum(row["lag_messages"] for row in result.json["partitions"]) == 1

    def test_a_booking_and_a_run_are_shown_in_the_read_only_role(self, database: Database, roles: Roles) -> None:
        booking_id = insert_due(database.connect())
        run_id = expire(database).json["run_id"]
        for command in (("bookings", "show", str(booking_id)), ("runs", "show", run_id)):
            result = run_crmctl(*command, "-o", "json", database=roles.login(Kind.READONLY))
            assert result.exit_code == 0, result.stderr


class TestAMissingGrant:
    @pytest.mark.parametrize(
        ("revoked", "named"),
        [
            ("insert on crm.deal_timeline_events", "INSERT on crm.deal_timeline_events"),
            ("insert on crm.outbox_messages", "INSERT on crm.outbox_messages"),
            ("update (version) on crm.bookings", "UPDATE (version) on crm.bookings"),
            ("select on crm.job_pauses", "SELECT on crm.job_pauses"),
            ("insert on crm.job_runs", "INSERT on crm.job_runs"),
            ("usage on schema crm", "USAGE on schema crm"),
        ],
        ids=lambda text: text.split(" on ")[-1],
    )
    def test_is_named_by_the_job_that_needs_it(
        self, database: Database, roles: Roles, revoked: str, named: str
    ) -> None:
        connection = database.connect()
        insert_due(connection)
        connection.execute(f"revoke {revoked} from {roles.name(Kind.BOOKINGS)}".encode())
        result = expire(roles.login(Kind.BOOKINGS))
        assert result.exit_code == 78
        error = result.json["error"]
        assert error["code"] == "CRMCTL_GRANT_MISSING"
        assert named in error["message"]
        assert roles.user(Kind.BOOKINGS) in error["message"]
        assert "crmctl db roles" in error["hint"]
        assert named in result.stderr
        assert scalar(connection, "select count(*) from crm.outbox_messages") == 0

    def test_is_named_by_a_list(self, database: Database, roles: Roles) -> None:
        database.connect().execute(f"revoke select on crm.bookings from {roles.name(Kind.READONLY)}".encode())
        result = run_crmctl("bookings", "list", "-o", "json", database=roles.login(Kind.READONLY))
        assert result.exit_code == 78
        assert "SELECT on crm.bookings" in result.json["error"]["message"]

    def test_is_named_by_the_relay_and_nothing_is_published(
        self, database: Database, roles: Roles, kafka: Kafka, make_topic: MakeTopic
    ) -> None:
        topic = make_topic()
        insert_events(database.connect(), topic)
        database.connect().execute(f"revoke select on crm.outbox_messages from {roles.name(Kind.RELAY)}".encode())
        result = relay(roles.login(Kind.RELAY), kafka.bootstrap_servers)
        assert result.exit_code == 78
        assert "SELECT on crm.outbox_messages" in result.json["error"]["message"]
        assert kafka.read(topic) == []

    def test_is_named_by_the_consumer_and_no_offset_is_committed(
        self, database: Database, roles: Roles, kafka: Kafka, make_topic: MakeTopic
    ) -> None:
        chat = Chat.make(kafka, database, make_topic)
        chat.send(chat.deal().event("Ready"))
        connection = database.connect()
        connection.execute(f"revoke update (chat_status) on crm.deals from {roles.name(Kind.CHAT)}".encode())
        result = chat.consume(database=roles.login(Kind.CHAT))
        assert result.exit_code == 78
        assert "UPDATE (chat_status) on crm.deals" in result.json["error"]["message"]
        assert not any(chat.committed().values())

    def test_of_another_kind_of_work_is_named_in_full(self, database: Database, roles: Roles) -> None:
        insert_due(database.connect())
        result = expire(roles.login(Kind.READONLY))
        assert result.exit_code == 78
        assert "INSERT on crm.outbox_messages" in result.json["error"]["message"]
