"""bitrix24-php-lib's tables in a database of their own: everything that serves the sweep works there as well."""

from collections.abc import Iterator
from typing import Any, Final

import psycopg
import pytest
from psycopg import sql

from crmctl.dev import bitrix24_tables
from crmctl.dev.postgres import PostgresServer
from crmctl.domain.databases import DatabaseName
from crmctl.domain.grants import Kind
from crmctl.domain.jobs import NAMES
from tests.chat_status_support import metric
from tests.expire_support import rows, scalar
from tests.installations_support import insert_pair, statuses
from tests.integration.test_metrics_serve import scrape, serving
from tests.kafka_fixtures import Kafka, MakeTopic
from tests.prefork import run_crmctl
from tests.roles_support import Roles
from tests.support import CallResult, Database

REASON: Final = "the portals are being moved"
NOWHERE: Final = "postgresql://u:hunter2@127.0.0.1:1/portals"
IN_BOTH: Final = {"relay-outbox", "prune"}


class World:
    """Two databases and a broker, as an operator's shell has them."""

    def __init__(self, main: Database, portals: Database, brokers: str) -> None:
        self.main = main
        self.portals = portals
        self.env = {
            "CRMCTL_INSTALLATIONS_DATABASE_URL": portals.url,
            "CRMCTL_KAFKA__BOOTSTRAP_SERVERS": brokers,
        }

    def run(self, *args: str, code: int = 0, url: str | None = None) -> Any:
        """The document of a command that ends with this code."""
        result = self.call(*args, "-o", "json", url=url)
        assert result.exit_code == code, result.stderr
        return result.json

    def call(self, *args: str, url: str | None = None) -> CallResult:
        """Run a command, with another address of the second database where one is given."""
        other = {"CRMCTL_INSTALLATIONS_DATABASE_URL": url} if url else {}
        return run_crmctl(*args, database=self.main, env=self.env | other)

    def sweep(self) -> Any:
        return self.run("installations", "sweep")


@pytest.fixture
def portals(postgres_server: PostgresServer, template_database: str) -> Iterator[Database]:
    name = sql.Identifier("portals_of_their_own")
    with psycopg.connect(postgres_server.url(), autocommit=True) as admin:
        admin.execute(sql.SQL("drop database if exists {} with (force)").format(name))
        admin.execute(sql.SQL("create database {} template {}").format(name, sql.Identifier(template_database)))
    own = Database(postgres_server.url("portals_of_their_own"))
    bitrix24_tables.create(own.connect())
    yield own
    own.close()
    with psycopg.connect(postgres_server.url(), autocommit=True) as admin:
        admin.execute(sql.SQL("drop database {} with (force)").format(name))


@pytest.fixture
def world(database: Database, portals: Database, kafka: Kafka) -> World:
    return World(database, portals, kafka.bootstrap_servers)


def test_from_the_sweep_to_its_event_its_record_its_pause_and_its_figures(
    world: World, kafka: Kafka, make_topic: MakeTopic
) -> None:
    pair = insert_pair(world.portals.connect())
    run_id = world.sweep()["run_id"]

    topic = make_topic()
    world.portals.connect().execute("update crm.outbox_messages set topic = %s", (topic,))
    (message,) = world.run("outbox", "list", "--database", "installations")["messages"]
    assert message["topic"] == topic
    assert world.run("outbox", "list")["messages"] == []
    assert world.run("outbox", "relay")["published_count"] == 0
    assert world.run("outbox", "relay", "--drain", "--database", "installations")["published_count"] == 1
    assert [record.key for record in kafka.read(topic)] == [str(pair.installation_id).encode()]

    runs = world.run("runs", "list", "--database", "installations")["runs"]
    assert [run["job"] for run in runs] == ["relay-outbox", "sweep-installations"]
    assert world.run("runs", "show", run_id, "--database", "installations")["job"] == "sweep-installations"
    assert world.run("runs", "list")["runs"] == []
    assert "the other --database" in world.run("runs", "show", run_id, code=10)["error"]["hint"]

    world.run("jobs", "pause", "sweep-installations", "--reason", REASON)
    late = insert_pair(world.portals.connect())
    assert (world.sweep()["skipped"], world.sweep()["pause_reason"]) == ("paused", REASON)
    assert statuses(world.portals.connect(), late) == ("new", "new")

    with serving(world.main, world.env) as (_, port):
        text = scrape(port)
    assert metric(text, "crm_scrape_up", source="installations") == 1
    assert metric(text, "crm_installations_stale") == 1
    assert metric(text, "crm_outbox_pending", database="main") == 0
    assert metric(text, "crm_outbox_pending", database="installations") == 0
    assert metric(text, "crm_job_paused", job="sweep-installations", database="installations") == 1
    assert metric(text, "crm_job_paused", job="sweep-installations", database="main") is None
    success = "crm_job_last_success_timestamp_seconds"
    assert metric(text, success, job="sweep-installations", database="installations") is not None
    assert metric(text, success, job="relay-outbox", database="installations") is not None

    world.run("jobs", "resume", "sweep-installations")
    assert world.sweep()["blocked_count"] == 1


class TestAPause:
    def test_is_set_where_the_job_runs_and_nowhere_else(self, world: World) -> None:
        names = ("sweep-installations", "relay-outbox", "expire-bookings")
        assert world.run("jobs", "pause", *names, "--reason", REASON)["paused"] == sorted(names)
        assert paused(world.main) == {"relay-outbox", "expire-bookings"}
        assert paused(world.portals) == {"relay-outbox", "sweep-installations"}
        assert world.run("jobs", "resume", *names)["resumed"] == sorted(names)
        assert paused(world.main) == paused(world.portals) == set()

    def test_of_all_jobs_reaches_both_databases(self, world: World) -> None:
        assert world.run("jobs", "pause", "--all", "--reason", REASON)["paused"] == sorted(NAMES)
        assert paused(world.main) == set(NAMES) - {"sweep-installations"}
        assert paused(world.portals) == {"sweep-installations", *IN_BOTH}
        assert world.sweep()["skipped"] == "paused"
        assert world.run("prune", "--database", "installations")["skipped"] == "paused"
        assert world.run("outbox", "relay", "--database", "installations")["skipped"] == "paused"
        assert world.run("jobs", "resume", "--all")["resumed"] == sorted(NAMES)
        assert paused(world.main) == paused(world.portals) == set()

    def test_of_one_database_leaves_the_other_alone(self, world: World) -> None:
        world.run("jobs", "pause", "relay-outbox", "--reason", REASON, "--database", "installations")
        assert (paused(world.main), paused(world.portals)) == (set(), {"relay-outbox"})
        again = world.run("jobs", "pause", "relay-outbox", "--reason", REASON)
        assert (again["paused"], again["already_paused"]) == (["relay-outbox"], [])
        world.run("jobs", "resume", "--all", "--database", "main")
        assert (paused(world.main), paused(world.portals)) == (set(), {"relay-outbox"})

    @pytest.mark.parametrize(("job", "where"), [("sweep-installations", "main"), ("expire-bookings", "installations")])
    def test_where_the_job_does_not_run_is_refused(self, world: World, job: str, where: str) -> None:
        arguments = ("jobs", "pause", job, "--reason", REASON, "--database", where)
        error = world.run(*arguments, code=2)["error"]
        assert f"{job} does not run in the {where} database" in error["message"]
        assert paused(world.main) == paused(world.portals) == set()

    def test_that_cannot_reach_both_pauses_nothing_and_names_the_setting(self, world: World) -> None:
        arguments = ("jobs", "pause", "--all", "--reason", REASON)
        error = world.run(*arguments, code=69, url=NOWHERE)["error"]
        assert "CRMCTL_INSTALLATIONS_DATABASE_URL" in error["hint"]
        assert paused(world.main) == set()
        assert world.run(*arguments, "--database", "main", url=NOWHERE)["paused"]

    def test_is_listed_from_where_it_is(self, world: World) -> None:
        world.run("jobs", "pause", "sweep-installations", "--reason", REASON)
        listed = world.run("jobs", "list")["jobs"]
        assert [(row["job"], row["database"]) for row in listed if row["paused"]] == [
            ("sweep-installations", "installations")
        ]
        places = [(row["job"], row["database"]) for row in listed]
        assert len(set(places)) == len(places)
        assert {job for job, database in places if database == "installations"} == {"sweep-installations", *IN_BOTH}
        assert "installations" in world.call("jobs", "list").stdout
        assert {row["database"] for row in world.run("jobs", "list", "--database", "main")["jobs"]} == {"main"}


def paused(database: Database) -> set[str]:
    return {row["job"] for row in rows(database.connect(), "select job from crm.job_pauses")}


def test_one_database_under_both_names_is_one(world: World) -> None:
    same = world.main.url
    assert world.run("jobs", "pause", "--all", "--reason", REASON, url=same)["paused"] == sorted(NAMES)
    assert [row["job"] for row in world.run("jobs", "list", url=same)["jobs"]] == list(NAMES)


@pytest.mark.parametrize("which", DatabaseName)
def test_a_login_that_is_refused_names_the_setting_that_it_came_from(world: World, which: DatabaseName) -> None:
    wrong = psycopg.conninfo.make_conninfo(world.main.url, password="hunter2")
    result = run_crmctl("jobs", "list", "-o", "json", database=world.main, env=world.env | {which.setting: wrong})
    assert result.exit_code == 78
    assert f"check {which.setting} " in result.json["error"]["hint"]
    assert "hunter2" not in result.stdout + result.stderr


def test_prune_deletes_there(world: World) -> None:
    insert_pair(world.portals.connect())
    world.sweep()
    published = "update crm.outbox_messages set published_at = now() - interval '90 days'"
    world.portals.connect().execute(published)
    assert world.run("prune")["outbox_count"] == 0
    assert world.run("prune", "--database", "installations")["outbox_count"] == 1
    assert scalar(world.portals.connect(), "select count(*) from crm.outbox_messages") == 0


def test_its_relay_and_its_prune_need_no_other_database(world: World) -> None:
    """Their Secret has one address."""
    for command in (("outbox", "relay"), ("prune",)):
        done = run_crmctl(*command, "--database", "installations", "-o", "json", env=world.env)
        assert done.exit_code == 0, done.stderr
    missing = run_crmctl("prune", "-o", "json", env=world.env)
    assert (missing.exit_code, "CRMCTL_DATABASE_URL" in missing.json["error"]["hint"]) == (78, True)


class TestRoles:
    def test_are_granted_there(self, world: World) -> None:
        roles = Roles.make(world.portals)
        shown = world.run("db", "roles", "--prefix", roles.prefix, "--database", "installations")
        assert shown["statements"] == []
        assert world.run("db", "roles", "--prefix", roles.prefix, "--dry-run")["statements"]

    def test_that_lack_a_grant_there_are_named_with_its_database(self, world: World) -> None:
        roles = Roles.make(world.portals)
        world.portals.connect().execute(
            sql.SQL("revoke insert on crm.outbox_messages from {}").format(
                sql.Identifier(roles.name(Kind.INSTALLATIONS))
            )
        )
        insert_pair(world.portals.connect())
        url = roles.login(Kind.INSTALLATIONS)
        error = world.run("installations", "sweep", code=78, url=url)["error"]
        assert "INSERT on crm.outbox_messages" in error["message"]
        assert "crmctl db roles --database installations" in error["hint"]
        asked = world.run("doctor", "--job", "sweep-installations", code=78, url=url)["checks"]
        (grants,) = [check for check in asked if check["name"].startswith("grants")]
        assert "INSERT on crm.outbox_messages" in grants["detail"]


def test_a_schema_that_is_behind_there_names_the_command_that_mends_it(world: World) -> None:
    world.portals.connect().execute("delete from crm.crmctl_schema_version where version_num like 'bookkeeping%'")
    error = world.run("installations", "sweep", code=78)["error"]
    assert "crmctl db upgrade --database installations" in error["hint"]


@pytest.mark.real_kafka
class TestDoctor:
    def test_looks_where_the_sweep_runs(self, world: World) -> None:
        world.portals.connect().execute("delete from crm.crmctl_schema_version where version_num like 'bookkeeping%'")
        checks = by_name(self.doctor(world, "--job", "sweep-installations"))
        assert checks["schema (installations)"]["result"] == "failed"
        assert "crmctl db upgrade --database installations" in checks["schema (installations)"]["fix"]
        assert "schema" not in checks

    def test_and_status_see_its_outbox_and_its_pause(self, world: World) -> None:
        insert_pair(world.portals.connect())
        world.sweep()
        world.portals.connect().execute("update crm.outbox_messages set created_at = now() - interval '1 hour'")
        world.run("jobs", "pause", "sweep-installations", "--reason", REASON)
        checks = by_name(self.doctor(world))
        assert checks["outbox"]["result"] == checks["jobs"]["result"] == "ok"
        assert "crmctl outbox relay --drain --database installations" in checks["outbox (installations)"]["fix"]
        assert REASON in checks["jobs (installations)"]["detail"]
        status = world.call("status", "-o", "json").json
        assert (status["outbox"]["pending_count"], status["installations_outbox"]["pending_count"]) == (0, 1)
        assert [row["job"] for row in status["jobs"] if row["paused"]] == ["sweep-installations"]
        assert "Installations' outbox" in world.call("status").stdout

    def test_names_that_database_when_it_is_away(self, world: World) -> None:
        checks = by_name(self.doctor(world, url=NOWHERE))
        assert checks["database"]["result"] == "ok"
        assert "CRMCTL_INSTALLATIONS_DATABASE_URL" in checks["database (installations)"]["fix"]

    def doctor(self, world: World, *args: str, url: str | None = None) -> list[dict[str, str]]:
        result = world.call("doctor", *args, "-o", "json", url=url)
        assert result.exit_code in (69, 75, 78), result.stderr
        found: list[dict[str, str]] = result.json["checks"]
        return found


def by_name(checks: list[dict[str, str]]) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in checks}
