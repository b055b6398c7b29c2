"""The states of the world that pages begin from; `<!-- state: NAME -->` names one of these functions."""

import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final
from uuid import UUID

import psycopg
import pytest
from confluent_kafka import TopicPartition
from psycopg import sql

from crmctl.dev import bitrix24_tables
from crmctl.dev.bitrix24_portal import Bitrix24StandIn, Reply, app_info
from crmctl.dev.messenger import ChatStatusChanged
from crmctl.dev.postgres import PostgresServer
from crmctl.domain.chat_status import RETRY_PAUSES
from crmctl.domain.topics import CHAT_STATUS_DLQ_TOPIC, CHAT_STATUS_TOPIC, TOPICS
from crmctl.settings import ChatStatusSettings
from tests.chat_status_support import Chat, Deal, hour_ago_ms, outgoing
from tests.expire_support import insert_due
from tests.installations_support import PairIds, insert_pair
from tests.integration.test_metrics_serve import serving
from tests.kafka_fixtures import Kafka, MakeTopic, Outgoing, delete_topics
from tests.relay_support import insert_booked, insert_event, rsa_signer, tenant_of
from tests.runbook_support import run
from tests.support import Database, insert_booking

CONTRACT_TOPICS: Final = frozenset(topic.name for topic in TOPICS)


@dataclass(slots=True)
class World:
    """What a scenario runs in. `names` maps an operator's blanks to what is filled in, `aliases` real to documented.

    What is in `afterwards` is done in the end, also when a command failed.
    """

    directory: Path
    fixture: Callable[[str], object]
    env: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    aliases: list[tuple[str, str]] = field(default_factory=list)
    afterwards: list[Callable[[], object]] = field(default_factory=list)
    _database: Database | None = None

    def __post_init__(self) -> None:
        """Roles belong to the server, which scenarios share: each has a prefix of its own."""
        prefix = f"r{uuid.uuid4().hex[:8]}_"
        self.env["CRMCTL_DATABASE__ROLE_PREFIX"] = prefix
        self.names |= {
            "crmctl_bookings": f"{prefix}bookings",
            "crm_expire": f"{prefix}login",
            "crm_stage_": f"s{prefix}",
        }
        self.aliases += [(f"s{prefix}", "crm_stage_"), (prefix, "crmctl_")]

    @property
    def database(self) -> Database:
        """The scenario's database, migrated, which crmctl is told of."""
        if self._database is None:
            made = self.fixture("database")
            assert isinstance(made, Database)
            self._database = made
            self.env["CRMCTL_DATABASE_URL"] = made.url
        return self._database

    @property
    def connection(self) -> "psycopg.Connection[object]":
        """A new connection to it."""
        return self.database.connect()

    @property
    def kafka(self) -> Kafka:
        """The session's broker, which crmctl is told of."""
        made = self.fixture("kafka")
        assert isinstance(made, Kafka)
        self.env["CRMCTL_KAFKA__BOOTSTRAP_SERVERS"] = made.bootstrap_servers
        return made

    def crmctl(self, arguments: str) -> None:
        """Run crmctl as a part of the set-up; it must succeed."""
        done = run(f"crmctl {arguments}", directory=self.directory, env=self.env)
        assert done.returncode == 0, done.stderr

    def chat(self) -> Chat:
        """Topics and a group of the scenario's own, which the pages call by their contracts' names."""
        make_topic = self.fixture("make_topic")
        assert callable(make_topic)
        maker: MakeTopic = make_topic
        chat = Chat.make(
            self.kafka,
            self.database,
            maker,
            partitions=CHAT_STATUS_TOPIC.partitions,
            dlq_partitions=CHAT_STATUS_DLQ_TOPIC.partitions,
            dlq_config=CHAT_STATUS_DLQ_TOPIC.config,
        )
        self.env |= chat.env
        settings = ChatStatusSettings()
        self.aliases += [
            (chat.topic, settings.topic),
            (chat.dlq_topic, settings.dlq_topic),
            (chat.group, settings.group),
        ]
        return chat


@dataclass(frozen=True, slots=True)
class State:
    """How to bring a state about, and whether only a real broker can carry it."""

    prepare: Callable[[World], None]
    real_kafka: bool = False


STATES: Final[dict[str, State]] = {}


def state(name: str, *, real_kafka: bool = False) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    """Register a function under the name that pages call its state by."""

    def register(prepare: Callable[[World], None]) -> Callable[[World], None]:
        assert name not in STATES
        STATES[name] = State(prepare, real_kafka)
        return prepare

    return register


@state("a laptop")
def laptop(world: World) -> None:
    """A checkout with its .venv, and nothing configured."""
    bin_directory = world.directory / ".venv" / "bin"
    bin_directory.mkdir(parents=True)
    script = bin_directory / "crmctl"
    done = run("command -v crmctl", directory=world.directory, env={})
    script.symlink_to(done.stdout.strip())
    world.afterwards.append(lambda: run("crmctl dev down --purge", directory=world.directory, env={}))


@state("new servers", real_kafka=True)
def new_servers(world: World) -> None:
    """An empty database, and a Kafka without our topics: not one that somebody else gave us."""
    new_database(world)
    without_topics(world)


@state("nothing to do", real_kafka=True)
def nothing_to_do(world: World) -> None:
    """An empty schema without roles, all topics, no consumer ever."""
    _ = world.database
    world.chat()
    create_topics(world)


@state("figures are served", real_kafka=True)
def figures_are_served(world: World) -> None:
    """As above, with Bitrix24's tables. `crmctl metrics serve` listens on port 9464; METRIC is one that it exports."""
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    nothing_to_do(world)
    bitrix24_tables.create(world.connection)
    server = serving(world.database, world.env)
    _, port = server.__enter__()
    world.afterwards.append(lambda: server.__exit__(None, None, None))
    world.names |= {"9464": str(port), "METRIC": "crm_outbox_pending"}


@state("a broker that does not answer", real_kafka=True)
def broker_away(world: World) -> None:
    """The database is well, and nobody listens where Kafka should be."""
    nothing_to_do(world)
    world.env["CRMCTL_KAFKA__BOOTSTRAP_SERVERS"] = "127.0.0.1:1"


@state("bookings that nobody expires", real_kafka=True)
def forgotten_bookings(world: World) -> None:
    """A reserve has been due for ten minutes."""
    nothing_to_do(world)
    insert_due(world.connection, overdue=timedelta(minutes=10))


@state("a password that was changed")
def changed_password(world: World) -> None:
    """The DSN in the shell has the old one."""
    world.env["CRMCTL_DATABASE_URL"] = psycopg.conninfo.make_conninfo(world.database.url, password="the old one")


@state("rows that nobody pruned")
def unpruned_rows(world: World) -> None:
    """Three messages were published, and two marks written, 40 days ago."""
    connection = world.connection
    for number in range(3):
        insert_event(connection, TOPICS[0].name, f"booking-{number}")
    connection.execute("update crm.outbox_messages set published_at = now() - interval '40 days'")
    connection.execute("""
        insert into crm.processed_messages (key, processed_at)
        select 'crm:deal-chat-status:' || gen_random_uuid(), now() - interval '40 days'
        from generate_series(1, 2)
    """)


@state("overdue bookings")
def overdue_bookings(world: World) -> None:
    """Two reserves and a booking that are due."""
    connection = world.connection
    insert_booking(connection)
    insert_booking(connection, status="AwaitingPayment")
    insert_booking(connection, status="Booked")


@state("a job that failed", real_kafka=True)
def failed_job(world: World) -> None:
    """Bookings are due, and the last run of expire-bookings was rolled back."""
    nothing_to_do(world)
    overdue_bookings(world)
    world.connection.execute("""
        insert into crm.job_runs
            (run_id, batch, job, actor, started_at, finished_at, outcome, error_code, error, version, host)
        values
            (gen_random_uuid(), 1, 'expire-bookings', 'system', now(), now(), 'failed', 'CRMCTL_TRY_AGAIN',
             'waited too long for a lock', '0.1.0', 'expire-bookings-29738211-x7k2p')
    """)


@state("a paused job")
def paused_job(world: World) -> None:
    """Somebody has paused relay-outbox."""
    _ = world.database
    world.crmctl("jobs pause relay-outbox --reason 'Kafka is being upgraded' --by olga@ops-1")


@state("a stale installation")
def stale_installation(world: World) -> None:
    """INSTALLATION_ID was begun two hours ago and never finished; its portal answers, but not clearly."""
    _install(world)


@state("an unclear installation")
def unclear_installation(world: World) -> None:
    """The sweep has asked the portal of INSTALLATION_ID in vain; by now the portal answers."""
    portal, pair = _install(world)
    portal.portals[pair.domain] = Reply(503)
    world.crmctl("installations sweep --verify-portal")
    portal.portals[pair.domain] = app_info(installed=True)


@state("a contradictory installation")
def contradictory_installation(world: World) -> None:
    """INSTALLATION_ID has no account, and the sweep has left it alone."""
    _install(world, without_account=True)
    world.crmctl("installations sweep --verify-portal")


def _install(world: World, *, without_account: bool = False) -> tuple[Bitrix24StandIn, PairIds]:
    connection = world.connection
    bitrix24_tables.create(connection)
    pair = insert_pair(connection, without_account=without_account)
    world.names["INSTALLATION_ID"] = str(pair.installation_id)
    world.aliases.append((pair.domain, "portal.example"))
    portal = Bitrix24StandIn()
    portal.__enter__()
    world.afterwards.append(lambda: portal.__exit__(None, None, None))
    world.env |= portal.settings
    return portal, pair


@state("poison bookings")
def poison_bookings(world: World) -> None:
    """A due reserve, and one whose deal is gone: BOOKING_ID."""
    connection = world.connection
    insert_booking(connection)
    world.names["BOOKING_ID"] = str(insert_booking(connection, deal=False))


@state("a booking without a deadline")
def no_deadline(world: World) -> None:
    """A reserve whose deadline is infinity: BOOKING_ID."""
    booking = insert_booking(world.connection, reserve_expires_at="infinity")
    world.names["BOOKING_ID"] = str(booking)


@state("a booking that somebody holds")
def held_booking(world: World) -> None:
    """Another session has locked the one booking that is due."""
    booking = insert_booking(world.connection)
    holder = world.database.connect(autocommit=False)
    holder.execute("select from crm.bookings where id = %s for update", (booking,))


@state("a manager and a booking")
def manager_and_booking(world: World) -> None:
    """BOOKING_ID is Booked until tomorrow; the file `token` holds the token of a manager of its tenant."""
    _give_token(world, insert_booked(world.connection))


@state("a manager and an expired booking")
def manager_and_expired_booking(world: World) -> None:
    """BOOKING_ID has expired before the manager came."""
    _give_token(world, insert_booking(world.connection, status="BookingExpired"))


def _give_token(world: World, booking: UUID) -> None:
    token = rsa_signer().token(tenant_of(world.connection, booking))
    (world.directory / "token").write_text(token)
    world.env |= rsa_signer().settings
    world.names["BOOKING_ID"] = str(booking)


@state("unpublished messages", real_kafka=True)
def unpublished_messages(world: World) -> None:
    """Three bookings have expired, and nothing has been published."""
    overdue_bookings(world)
    create_topics(world)
    world.crmctl("bookings expire --drain")


@state("a message that the broker refuses", real_kafka=True)
def refused_message(world: World) -> None:
    """One message is too large for any topic, and another one of its booking waits behind it."""
    connection = world.connection
    create_topics(world)
    topic = TOPICS[0].name
    insert_event(connection, topic, "booking-1", 1, size=2_000_000)
    insert_event(connection, topic, "booking-1", 2)
    world.crmctl("outbox relay --drain")


@state("a message whose topic is missing", real_kafka=True)
def message_without_topic(world: World) -> None:
    """Somebody has deleted the topic of one message; another one of its booking waits behind it."""
    connection = world.connection
    without_topics(world)
    topic = TOPICS[0].name
    insert_event(connection, topic, "booking-1", 1)
    insert_event(connection, topic, "booking-1", 2)
    world.crmctl("outbox relay --drain")


@state("unread events", real_kafka=True)
def unread_events(world: World) -> None:
    """Three events of messenger are unread, in partitions 0, 1 and 2, and no consumer runs."""
    chat = world.chat()
    for partition in range(3):
        deal = chat.deal()
        event = outgoing(deal.event("Ready"), partition=partition, timestamp_ms=hour_ago_ms())
        chat.kafka.produce(chat.topic, [event])


@state("everything is read", real_kafka=True)
def everything_is_read(world: World) -> None:
    """Three events have been read and applied; no consumer runs."""
    unread_events(world)
    world.crmctl("chat-status consume --until-caught-up")


@state("a restored database", real_kafka=True)
def restored_database(world: World) -> None:
    """The database is as it was at TIMESTAMP, two hours ago; the group has read what came since."""
    everything_is_read(world)
    create_topics(world)
    connection = world.connection
    connection.execute("truncate crm.processed_messages, crm.deal_chat_positions")
    connection.execute("update crm.deals set chat_status = 'Pending'")
    world.names["TIMESTAMP"] = (datetime.now(UTC) - timedelta(hours=2)).isoformat()


@state("a CRM that owns its tables")
def crm_that_owns_its_tables(world: World) -> None:
    """A database with the core tables only, which nobody's revision speaks of, and one due reserve in it."""
    url = new_database(world)
    world.crmctl("db upgrade --only core")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("delete from crm.crmctl_schema_version")
        insert_booking(connection)


@state("an event without its deal", real_kafka=True)
def event_without_deal(world: World) -> None:
    """One event of a deal that the CRM does not have has been read."""
    _defer(world)


@state("an event whose deal has come", real_kafka=True)
def event_whose_deal_has_come(world: World) -> None:
    """As above, but the deal is there by now, the event's next retry is due, and no consumer runs."""
    chat, deal = _defer(world)
    chat.deal(id=deal.id, tenant_id=deal.tenant_id)
    world.connection.execute("update crm.deferred_messages set next_attempt_at = now()")


def _defer(world: World) -> tuple[Chat, Deal]:
    chat = world.chat()
    deal = chat.missing_deal()
    _send(chat, deal, "Ready")
    world.crmctl("chat-status consume --until-caught-up")
    return chat, deal


@state("events that cannot be applied", real_kafka=True)
def events_that_cannot_be_applied(world: World) -> None:
    """Two events are unread: one has a status that nobody knows, one is no JSON."""
    chat = world.chat()
    _send(chat, chat.deal(), "Closed")
    chat.kafka.produce(chat.topic, [Outgoing(b"garbage", "key", partition=0)])


@state("dead letters", real_kafka=True)
def dead_letters(world: World) -> None:
    """Three letters of the consumer: a deal that was missing and exists now, an unknown status, and no JSON at all."""
    chat = world.chat()
    missing = chat.missing_deal()
    chat.send(_keyed(missing.event("Ready")))
    chat.consumed()
    for _ in RETRY_PAUSES:
        chat.let_pauses_pass()
        chat.consumed()
    chat.deal(id=missing.id, tenant_id=missing.tenant_id)
    for event in (_keyed(chat.deal().event("Closed")), Outgoing(b"garbage", _KEY, partition=0)):
        chat.send(event)
        chat.consumed()


@state("lost letters", real_kafka=True)
def lost_letters(world: World) -> None:
    """Two letters were open when somebody deleted their records; a replay had tried one of them."""
    chat = world.chat()
    chat.send(Outgoing(b"garbage", _KEY, partition=0))
    chat.consumed()
    world.crmctl("dlq replay")
    chat.send(Outgoing(b"more of it", _KEY, partition=0))
    chat.consumed()
    gone = TopicPartition(chat.dlq_topic, 0, 2)
    admin = chat.kafka.admin()
    admin.delete_records([gone])[gone].result(30)


# Whatever has it stands in partition 0 of the dead-letter topic.
_KEY: Final = "key-1"


def _keyed(event: ChatStatusChanged) -> Outgoing:
    return outgoing(event, key=_KEY, partition=0)


def _send(chat: Chat, deal: Deal, status: str) -> None:
    chat.send(deal.event(status), partition=0)


def new_database(world: World) -> str:
    """An empty database, which crmctl is told of; returns its URL."""
    server = world.fixture("postgres_server")
    assert isinstance(server, PostgresServer)
    name = f"new_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    world.env["CRMCTL_DATABASE_URL"] = server.url(name)
    return server.url(name)


def without_topics(world: World) -> None:
    """The topics of the contracts are not there, and are gone again when the scenario has ended."""
    kafka = world.kafka
    if kafka.kind == "external":
        pytest.skip("it would remove topics from a Kafka that is not the tests' own")
    delete_topics(kafka.bootstrap_servers, CONTRACT_TOPICS)
    world.afterwards.append(lambda: delete_topics(kafka.bootstrap_servers, CONTRACT_TOPICS))


def create_topics(world: World) -> None:
    """The topics of the contracts are there; those that were not are gone again when the scenario has ended."""
    kafka = world.kafka
    missing = CONTRACT_TOPICS - set(kafka.admin().list_topics(timeout=30).topics)
    world.afterwards.append(lambda: delete_topics(kafka.bootstrap_servers, missing))
    world.crmctl("topics create")
