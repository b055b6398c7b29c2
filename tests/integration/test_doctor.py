"""`crmctl doctor` and `crmctl status`: each fault is named with its fix, by both, in text and JSON, and in time."""

import json
import os
import signal
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from crmctl.dev import bitrix24_tables
from crmctl.dev.bitrix24_portal import Bitrix24StandIn, error
from crmctl.dev.kafka import temporary_kafka
from crmctl.dev.kafka_server import KafkaServer
from crmctl.dev.postgres import temporary_server
from crmctl.domain.grants import Kind
from crmctl.domain.topics import BOOKING_EXPIRED_TOPIC, CHAT_STATUS_DLQ_TOPIC
from crmctl.jobs import examine_database, examine_dead_letters, examine_installations, examine_kafka
from crmctl.migrations import heads
from tests.chat_status_support import hour_ago_ms
from tests.expire_support import Connection, expire, finish, insert_due, rows, wait_until
from tests.installations_support import insert_pair, verify
from tests.kafka_fixtures import Kafka, Outgoing, create_topic
from tests.prefork import run_crmctl
from tests.relay_support import insert_event
from tests.roles_support import Roles
from tests.support import CallResult, Database, insert_booking, run_process, start_crmctl

# A broker of its own: the topics of the contracts come and go.
pytestmark = pytest.mark.real_kafka(embedded=True)

FAKE_CLOCK: Final = Path(__file__).parents[1] / "fakeclock"
NOWHERE: Final = "127.0.0.1:1"
SECONDS: Final = 10.0


@pytest.fixture(scope="module")
def broker() -> Iterator[KafkaServer]:
    with temporary_kafka() as server:
        create_topics(server)
        yield server


def create_topics(broker: KafkaServer) -> None:
    made = run_crmctl("topics", "create", env={"CRMCTL_KAFKA__BOOTSTRAP_SERVERS": broker.bootstrap_servers})
    assert made.exit_code == 0, made.stderr


class World:
    """A healthy database and cluster that belong to one test, and the two commands that look at them."""

    def __init__(self, database: Database, broker: KafkaServer) -> None:
        self.database = database
        self.kafka = Kafka(broker.bootstrap_servers, "apache-kafka")
        self.connection: Connection = database.connect()
        self.topic = f"source-{uuid.uuid4().hex[:8]}"
        create_topic(broker.bootstrap_servers, self.topic, partitions=2)
        self.env: dict[str, str] = {
            "CRMCTL_KAFKA__BOOTSTRAP_SERVERS": broker.bootstrap_servers,
            "CRMCTL_CHAT_STATUS__TOPIC": self.topic,
            "CRMCTL_CHAT_STATUS__GROUP": f"group-{self.topic}",
            "CRMCTL_CHAT_STATUS__DLQ_GROUP": f"group-{self.topic}-dlq",
        }

    def run(self, *args: str, url: str | None = None, env: Mapping[str, str] | None = None) -> CallResult:
        """Run a command and hold it to its time."""
        started = time.monotonic()
        environment = self.env | dict(env or {})
        result = run_crmctl(*args, database=url or self.database, env=environment)
        assert time.monotonic() - started < SECONDS
        assert "Traceback" not in result.stderr
        return result

    def fault(
        self, name: str, code: int, *, url: str | None = None, env: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The one fault of that name, which doctor and status report alike, with the exit code of both."""
        doctor = self.run("doctor", "-o", "json", url=url, env=env)
        (found,) = [check for check in doctor.json["checks"] if check["name"] == name]
        assert found["result"] in ("failed", "warning"), doctor.json
        assert found["fix"]
        assert doctor.exit_code == code, doctor.json
        status = self.run("status", "-o", "json", url=url, env=env)
        assert status.exit_code == code
        (same,) = [fault for fault in status.json["faults"] if fault["name"] == name]
        assert (same["result"], same["fix"]) == (found["result"], found["fix"])
        for command in ("doctor", "status"):
            shown = self.run(command, url=url, env=env)
            assert shown.exit_code == code
            assert found["fix"] in shown.stdout
        result: dict[str, Any] = found
        return result


@pytest.fixture
def world(database: Database, broker: KafkaServer) -> World:
    return World(database, broker)


# --- what is well -----------------------------------------------------------------------------------------------------


def test_a_healthy_system_is_0_and_every_check_is_there(world: World) -> None:
    insert_due(world.connection)
    result = world.run("doctor", "-o", "json")
    assert result.exit_code == 0, result
    checks = {check["name"]: check["result"] for check in result.json["checks"]}
    assert tuple(checks) == (
        "settings",
        *examine_database.CHECKS,
        *examine_kafka.CHECKS,
        *examine_dead_letters.CHECKS,
        *examine_installations.CHECKS,
    )
    assert set(checks.values()) <= {"ok", "skipped"}
    assert all(check["detail"] for check in result.json["checks"])
    status = world.run("status", "-o", "json")
    assert (status.exit_code, status.json["faults"], status.json["unreachable"]) == (0, [], [])
    document = status.json
    assert document["bookings"]["phases"]["Reserve"]["due_count"] == 1
    assert document["outbox"]["pending_count"] == 0
    assert document["group"]["lag_messages"] == 0
    assert document["deferred"]["deferred_count"] == 0
    assert len(document["jobs"]) >= 5
    assert "No faults." in world.run("status").stdout


def test_the_roles_are_checked_where_there_are_any(world: World) -> None:
    roles = Roles.make(world.database)
    (grants,) = [
        check
        for check in world.run("doctor", "-o", "json", url=roles.login(Kind.READONLY)).json["checks"]
        if check["name"] == "grants"
    ]
    assert (grants["result"], "reads only" in grants["detail"]) == ("ok", True)
    status = world.run("status", "-o", "json", url=roles.login(Kind.READONLY))
    assert (status.exit_code, status.json["faults"]) == (0, [])
    assert all(status.json[queue] is not None for queue in ("bookings", "outbox", "deferred", "group", "jobs"))


def test_open_letters_and_installs_that_are_unclear_are_warnings_with_their_figures(world: World) -> None:
    bitrix24_tables.create(world.connection)
    pair = insert_pair(world.connection, age=timedelta(hours=2))
    letters = f"letters-{uuid.uuid4().hex[:8]}"
    create_topic(world.kafka.bootstrap_servers, letters, partitions=3)
    env = {"CRMCTL_CHAT_STATUS__DLQ_TOPIC": letters}
    assert world.run("status", "-o", "json", env=env).json["installations"]["stale_count"] == 1
    with Bitrix24StandIn() as portal:
        portal.portals[pair.domain] = error("INTERNAL", status=500)
        assert verify(world.database, portal).exit_code == 0
    world.kafka.produce(letters, ["no event"])
    status = world.run("status", "-o", "json", env=env).json
    assert status["dead_letters"] == {"open_count": 1, "lost_count": 0}
    assert status["installations"] == {"stale_count": 1, "unclear_count": 1, "anomaly_count": 0}
    faults = {fault["name"]: fault for fault in status["faults"]}
    assert "crmctl dlq list" in faults["dead-letters"]["fix"]
    assert "crmctl installations list" in faults["installations"]["fix"]
    shown = world.run("status", env=env).stdout
    assert "Dead letters: open, lost" in shown


def test_credentials_that_bitrix24_does_not_know_are_a_fault(world: World) -> None:
    with Bitrix24StandIn() as portal:
        good = world.run("doctor", "-o", "json", env=portal.settings)
        assert {c["name"]: c["result"] for c in good.json["checks"]}["portal credentials"] == "ok"
        wrong = portal.settings | {"CRMCTL_BITRIX24__CLIENT_SECRET": "not-the-secret"}
        found = world.fault("portal credentials", 78, env=wrong)
        assert "refuses" in found["detail"]
        assert "not-the-secret" not in str(found)


def test_watch_prints_one_document_a_line_until_a_signal(world: World) -> None:
    arguments = ("status", "--watch", "--interval", "200ms", "-o", "json")
    with start_crmctl(*arguments, database=world.database, env=world.env) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        insert_due(world.connection)
        documents = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGTERM)
        result = finish(process)
    assert result.exit_code == 0, result.stderr
    assert first["bookings"]["phases"]["Reserve"]["due_count"] == 0
    assert documents[-1]["bookings"]["phases"]["Reserve"]["due_count"] == 1
    assert documents[-1]["checked_at"] > first["checked_at"]


# --- PostgreSQL -------------------------------------------------------------------------------------------------------


def with_parts(url: str, **changes: str) -> str:
    parts = {**psycopg.conninfo.conninfo_to_dict(url), **changes}
    return psycopg.conninfo.make_conninfo(**parts)  # type: ignore[arg-type]


def test_postgresql_down(world: World) -> None:
    fault = world.fault("database", 69, url=f"postgresql://u:p@{NOWHERE}/crm")
    assert "cannot reach PostgreSQL" in fault["detail"]
    status = world.run("status", "-o", "json", url=f"postgresql://u:p@{NOWHERE}/crm").json
    assert status["unreachable"] == ["database"]
    assert (status["bookings"], status["jobs"]) == (None, None)
    assert status["group"]["lag_messages"] == 0


def test_a_wrong_password(world: World) -> None:
    url = with_parts(world.database.url, password="hunter2")
    fault = world.fault("database", 78, url=url)
    assert "password authentication failed" in fault["detail"]
    result = world.run("doctor", url=url)
    assert "hunter2" not in result.stdout + result.stderr


def test_a_schema_that_is_behind(world: World) -> None:
    world.connection.execute("delete from crm.crmctl_schema_version where version_num like 'bookkeeping%'")
    fault = world.fault("schema", 78)
    assert "behind" in fault["detail"]
    assert "crmctl db upgrade" in fault["fix"]


def test_no_schema_at_all(world: World) -> None:
    world.connection.execute("drop schema crm cascade")
    fault = world.fault("schema", 78)
    assert "crmctl db upgrade" in fault["fix"]
    checks = {check["name"]: check["result"] for check in world.run("doctor", "-o", "json").json["checks"]}
    assert [checks[name] for name in ("jobs", "bookings", "outbox", "deferred")] == ["skipped"] * 4


def test_a_schema_that_is_ahead_is_a_warning(world: World) -> None:
    world.connection.execute(
        "update crm.crmctl_schema_version set version_num = 'bookkeeping_9999' where version_num = %s",
        (heads()["bookkeeping"],),
    )
    fault = world.fault("schema", 0)
    assert (fault["result"], "bookkeeping_9999" in fault["detail"]) == ("warning", True)


def test_a_core_column_that_is_missing(world: World) -> None:
    world.connection.execute("alter table crm.bookings drop column booking_expires_at")
    fault = world.fault("contract", 78)
    assert "crm.bookings.booking_expires_at does not exist" in fault["detail"]
    status = world.run("status", "-o", "json").json
    assert status["bookings"] is None
    assert status["outbox"]["pending_count"] == 0


def test_a_server_that_is_read_only(world: World) -> None:
    name = psycopg.conninfo.conninfo_to_dict(world.database.url)["dbname"]
    world.connection.execute(f"alter database {name} set default_transaction_read_only = on".encode())
    fault = world.fault("writable", 78)
    assert "read-only" in fault["detail"]


def test_a_standby(world: World) -> None:
    with temporary_server() as server:
        assert run_crmctl("db", "upgrade", database=server.url()).exit_code == 0
        server.stop()
        (server.data / "standby.signal").touch()
        os.chown(server.data / "standby.signal", server.data.stat().st_uid, server.data.stat().st_gid)
        server.start(fsync=False, dies_with_parent=True)
        fault = world.fault("writable", 75, url=server.url())
        assert "standby" in fault["detail"]
        assert world.run("status", "-o", "json", url=server.url()).json["outbox"]["pending_count"] == 0


@pytest.mark.parametrize(("offset", "result", "code"), [("7200", "failed", 78), ("-60", "warning", 0)])
def test_clocks_that_differ(world: World, offset: str, result: str, code: int) -> None:
    skewed = {"PYTHONPATH": str(FAKE_CLOCK), "FAKE_CLOCK_OFFSET_SECONDS": offset}
    fault = world.fault("clock", code, env=skewed)
    assert fault["result"] == result
    assert "clock" in fault["fix"]


def test_a_grant_that_a_job_will_need_is_named_beforehand(world: World) -> None:
    roles = Roles.make(world.database)
    world.connection.execute(f"revoke insert on crm.outbox_messages from {roles.name(Kind.BOOKINGS)}".encode())
    arguments = ("doctor", "--job", "expire-bookings", "-o", "json")
    result = world.run(*arguments, url=roles.login(Kind.BOOKINGS))
    (grants,) = [check for check in result.json["checks"] if check["name"] == "grants"]
    assert grants["result"] == "failed"
    assert "INSERT on crm.outbox_messages" in grants["detail"]
    assert "crmctl db roles" in grants["fix"]
    assert result.exit_code == 78
    insert_due(world.connection)
    assert expire(roles.login(Kind.BOOKINGS)).exit_code == 78


def test_a_role_of_another_kind_is_told_what_it_lacks_for_a_job(world: World) -> None:
    roles = Roles.make(world.database)
    result = world.run("doctor", "--job", "relay-outbox", "-o", "json", url=roles.login(Kind.BOOKINGS))
    (grants,) = [check for check in result.json["checks"] if check["name"] == "grants"]
    assert "SELECT on crm.outbox_messages" in grants["detail"]
    assert world.run("doctor", "--job", "no-such-job").exit_code == 2


def test_roles_that_lack_a_grant_and_roles_that_have_too_many(world: World) -> None:
    roles = Roles.make(world.database)
    env = {"CRMCTL_DATABASE__ROLE_PREFIX": roles.prefix}
    checks = {c["name"]: c["result"] for c in world.run("doctor", "-o", "json", env=env).json["checks"]}
    assert (checks["roles"], checks["grants"]) == ("ok", "ok")
    world.connection.execute(f"grant delete on crm.deal_timeline_events to {roles.name(Kind.CHAT)}".encode())
    fault = world.fault("roles", 0, env=env)
    assert "DELETE on crm.deal_timeline_events" in fault["detail"]
    world.connection.execute(f"revoke insert on crm.outbox_messages from {roles.name(Kind.BOOKINGS)}".encode())
    fault = world.fault("roles", 78, env=env)
    assert f"{roles.name(Kind.BOOKINGS)} lacks INSERT on crm.outbox_messages" in fault["detail"]
    # The user of that role is told of its own lack, without naming a job.
    assert (
        "INSERT on crm.outbox_messages" in world.fault("grants", 78, url=roles.login(Kind.BOOKINGS), env=env)["detail"]
    )
    mended = world.run("db", "roles", env=env)
    assert mended.exit_code == 0, mended.stderr
    assert world.run("doctor", env=env).exit_code == 0


def test_the_user_of_a_job_may_ask_as_well(world: World) -> None:
    roles = Roles.make(world.database)
    result = world.run("doctor", "--job", "relay-outbox", "-o", "json", url=roles.login(Kind.RELAY))
    assert result.exit_code == 0, result.json
    checks = {check["name"]: check for check in result.json["checks"]}
    assert (checks["grants"]["result"], checks["outbox"]["result"]) == ("ok", "ok")
    assert checks["bookings"]["result"] == "skipped"
    assert "crmctl_readonly" in checks["bookings"]["detail"]


def test_a_user_without_any_grant_is_told_so(world: World) -> None:
    world.connection.execute("create role nobody_at_all login password 'x'")
    url = with_parts(world.database.url, user="nobody_at_all", password="x")
    try:
        fault = world.fault("grants", 78, url=url)
    finally:
        world.connection.execute("drop role nobody_at_all")
    assert "USAGE on schema crm" in fault["detail"]


# --- queues -----------------------------------------------------------------------------------------------------------


def age_outbox(world: World) -> None:
    insert_event(world.connection, BOOKING_EXPIRED_TOPIC.name, "a-1")
    world.connection.execute("update crm.outbox_messages set created_at = now() - interval '10 minutes'")


def test_an_outbox_that_is_stuck(world: World) -> None:
    age_outbox(world)
    fault = world.fault("outbox", 75)
    assert "stuck" in fault["detail"]
    assert "crmctl outbox relay --drain" in fault["fix"]


def test_an_outbox_that_is_stuck_behind_a_refusal(world: World) -> None:
    age_outbox(world)
    world.connection.execute("update crm.outbox_messages set next_attempt_at = now() + interval '1 hour', attempts = 3")
    assert "crmctl outbox list --held" in world.fault("outbox", 75)["fix"]


def test_a_paused_job_is_a_warning_and_explains_what_waits(world: World) -> None:
    age_outbox(world)
    world.connection.execute("insert into crm.job_pauses values ('relay-outbox', 'Kafka is upgraded', 'night shift')")
    assert "crmctl jobs resume relay-outbox" in world.fault("outbox", 75)["fix"]
    rows(world.connection, "delete from crm.outbox_messages")
    fault = world.fault("jobs", 0)
    assert fault["result"] == "warning"
    assert "Kafka is upgraded" in fault["detail"]
    assert "night shift" in fault["detail"]


def test_a_job_whose_last_run_failed_is_a_warning(world: World) -> None:
    assert expire(world.database, "--id", "00000000-0000-4000-8000-000000000001").exit_code == 10
    assert "crmctl runs list --failed --job expire-bookings" in world.fault("jobs", 0)["fix"]


def test_bookings_that_should_have_expired(world: World) -> None:
    insert_due(world.connection, overdue=timedelta(minutes=30))
    fault = world.fault("bookings", 75)
    assert "crmctl bookings expire --drain" in fault["fix"]


def test_bookings_that_can_never_expire_are_a_warning(world: World) -> None:
    insert_booking(world.connection, reserve_expires_at="infinity")
    insert_booking(world.connection, status="Booked", booking_expires_at=None)
    fault = world.fault("bookings", 0)
    assert "2 active bookings can never expire" in fault["detail"]


# --- Kafka ------------------------------------------------------------------------------------------------------------


def test_a_broker_that_is_down(world: World) -> None:
    fault = world.fault("kafka", 69, env={"CRMCTL_KAFKA__BOOTSTRAP_SERVERS": NOWHERE})
    assert "CRMCTL_KAFKA__BOOTSTRAP_SERVERS" in fault["fix"]
    status = world.run("status", "-o", "json", env={"CRMCTL_KAFKA__BOOTSTRAP_SERVERS": NOWHERE}).json
    assert (status["unreachable"], status["group"]) == (["kafka"], None)
    assert status["outbox"]["pending_count"] == 0


def test_a_topic_that_is_missing(world: World, broker: KafkaServer) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    admin.delete_topics([BOOKING_EXPIRED_TOPIC.name])[BOOKING_EXPIRED_TOPIC.name].result(30)
    wait_until(lambda: BOOKING_EXPIRED_TOPIC.name not in admin.list_topics(timeout=10).topics, "the removal")
    try:
        fault = world.fault("topics", 78)
        assert f"{BOOKING_EXPIRED_TOPIC.name}: it does not exist" in fault["detail"]
        assert "crmctl topics create" in fault["fix"]
    finally:
        create_topics(broker)


def test_messengers_topic_missing(world: World) -> None:
    fault = world.fault("topics", 78, env={"CRMCTL_CHAT_STATUS__TOPIC": "no.such.topic"})
    assert "no.such.topic: it does not exist" in fault["detail"]
    assert "messenger" in fault["fix"]


def test_too_few_partitions(world: World, broker: KafkaServer) -> None:
    name = f"dlq-{uuid.uuid4().hex[:8]}"
    create_topic(broker.bootstrap_servers, name, partitions=1, config=dict(CHAT_STATUS_DLQ_TOPIC.config))
    fault = world.fault("topics", 78, env={"CRMCTL_CHAT_STATUS__DLQ_TOPIC": name})
    assert f"{name}: 1 partitions, 3 are asked for" in fault["detail"]
    assert f"--alter --topic {name} --partitions" in fault["fix"]


def test_a_consumer_that_is_stopped(world: World) -> None:
    world.kafka.produce(world.topic, [Outgoing(value=b"{}", partition=0, timestamp_ms=hour_ago_ms())])
    fault = world.fault("group", 75)
    assert "the consumer is stopped" in fault["detail"]
    assert "crmctl chat-status consume" in fault["fix"]
    assert world.run("status", "-o", "json").json["group"]["lag_messages"] == 1


def test_a_consumer_that_is_between_two_runs_is_a_warning(world: World) -> None:
    world.kafka.produce(world.topic, [Outgoing(value=b"{}", partition=0)])
    assert world.fault("group", 0)["result"] == "warning"


def test_a_consumer_that_is_behind(world: World) -> None:
    """It is a member of the group, and stands still: it is paused."""
    world.kafka.produce(world.topic, [Outgoing(value=b"{}", partition=0, timestamp_ms=hour_ago_ms())])
    world.connection.execute("insert into crm.job_pauses values ('consume-chat-status', 'a test', 'night shift')")
    with start_crmctl("chat-status", "consume", database=world.database, env=world.env) as consumer:
        try:

            def joined() -> bool:
                status = world.run("status", "-o", "json").json["group"]
                return status is not None and status["members"] == 1

            wait_until(joined, "the consumer to join", seconds=60)
            fault = world.fault("group", 75)
        finally:
            consumer.kill()
    assert "the consumer is behind: 1 records are unread" in fault["detail"]


def test_retention_that_took_unread_records(world: World, broker: KafkaServer) -> None:
    world.kafka.produce(world.topic, [Outgoing(value=b"{}", partition=0) for _ in range(5)])
    consumed = world.run("chat-status", "rewind", "--to", "1", "--partition", "0", "--yes")
    assert consumed.exit_code == 0, consumed.stderr
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    place = TopicPartition(world.topic, 0, 4)
    admin.delete_records([place])[place].result()
    fault = world.fault("group", 78)
    assert "retention took records" in fault["detail"]
    assert "partition 0: 3" in fault["detail"]


# --- whatever happens -------------------------------------------------------------------------------------------------


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_servers_that_say_nothing_hold_nobody_up(world: World, silent: str) -> None:
    url = f"postgresql://u:p@{silent}/crm"
    for command in ("doctor", "status"):
        result = world.run(command, "-o", "json", url=url, env={"CRMCTL_KAFKA__BOOTSTRAP_SERVERS": silent})
        assert result.exit_code == 69
        faults = result.json["checks"] if command == "doctor" else result.json["faults"]
        assert {check["name"] for check in faults if check["result"] == "failed"} == {"database", "kafka"}


def test_a_table_that_somebody_locks_is_a_failure_of_that_check_alone(world: World) -> None:
    with psycopg.connect(world.database.url) as holder:
        holder.execute("lock table crm.outbox_messages in access exclusive mode")
        fault = world.fault("outbox", 75)
        assert "lock" in fault["detail"]


def test_the_worst_failure_gives_the_code(world: World) -> None:
    url = f"postgresql://u:p@{NOWHERE}/crm"
    assert world.run("doctor", url=url, env={"CRMCTL_CHAT_STATUS__TOPIC": "no.such.topic"}).exit_code == 78


def test_settings_that_cannot_be_read(world: World) -> None:
    result = world.run("doctor", "-o", "json", env={"CRMCTL_LOG_LEVEL": "loud"})
    assert result.exit_code == 78
    first, *others = result.json["checks"]
    assert (first["name"], first["result"]) == ("settings", "failed")
    assert "CRMCTL_LOG_LEVEL" in first["detail"]
    assert {check["result"] for check in others} == {"skipped"}


def test_nothing_configured_names_dev_up(tmp_path: Path) -> None:
    result = run_process("doctor", "-o", "json", cwd=tmp_path)
    assert result.exit_code == 78
    checks = {check["name"]: check for check in result.json["checks"]}
    assert "crmctl dev up" in checks["database"]["fix"]
    assert "crmctl dev up" in checks["kafka"]["fix"]
    assert list(tmp_path.iterdir()) == []


def test_an_operation_that_the_kafka_user_lacks_is_a_warning(database: Database) -> None:
    settings = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with temporary_kafka(settings=settings) as server:
        create_topics(server)
        world = World(database, server)
        assert {c["name"]: c["result"] for c in world.run("doctor", "-o", "json").json["checks"]}["acls"] == "ok"
        admin = AdminClient({"bootstrap.servers": server.bootstrap_servers})
        bindings = [
            AclBinding(
                ResourceType.TOPIC,
                BOOKING_EXPIRED_TOPIC.name,
                ResourcePatternType.LITERAL,
                "User:ANONYMOUS",
                "*",
                operation,
                permission,
            )
            for operation, permission in (
                (AclOperation.ALL, AclPermissionType.ALLOW),
                (AclOperation.WRITE, AclPermissionType.DENY),
            )
        ]
        for made in admin.create_acls(bindings).values():
            made.result(30)
        found = world.fault("acls", 0)
        assert f"WRITE on {BOOKING_EXPIRED_TOPIC.name}" in found["detail"]
