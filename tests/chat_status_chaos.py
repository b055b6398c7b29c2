"""What the crash and outage tests of `chat-status consume` share.

Consumers as processes, a history of events with all that can be wrong in it, and what must become of it: an oracle
that reads the records one by one, written from source 003 alone and not from crmctl's own rules.
"""

import asyncio
import functools
import json
import random
import signal
import struct
import subprocess
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, NamedTuple
from uuid import UUID

import psycopg
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from crmctl.adapters import migrations
from crmctl.dev.kafka_server import KafkaServer
from crmctl.dev.postgres import PostgresServer
from tests.chat_status_support import Chat, Deal, Letter, outgoing
from tests.expire_support import CHAOS_FULL, Connection, Gate, closed_gate, rows, scalar
from tests.kafka_fixtures import Kafka, Outgoing, Record, create_topic, read_topic
from tests.support import CallResult, Database, insert_deal

APPLICATION: Final = "crmctl consume-chat-status"
# A group that notices within two seconds that a member is dead; the broker must allow it.
QUICK_BROKER: Final = {"group.min.session.timeout.ms": "1000"}
QUICK_GROUP: Final = {
    "session.timeout.ms": "2000",
    "heartbeat.interval.ms": "300",
    "reconnect.backoff.max.ms": "1000",
}
_PATIENCE: Final = 60.0

# Variants of another test, for which the short run has no time.
full_run_only = pytest.mark.skipif(not CHAOS_FULL, reason="only with CRMCTL_TEST_CHAOS=full")


def fresh_database(server: PostgresServer) -> Database:
    """A migrated database of its own on a server; the caller closes it."""
    name = f"chat_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(server.url(), autocommit=True) as admin:
        admin.execute(f"create database {name}".encode())
    migrations.upgrade(server.url(name))
    return Database(server.url(name))


def make_chat(broker: KafkaServer, database: Database, *, partitions: int = 6, dlq_partitions: int = 3) -> Chat:
    """Topics and a group of its own on a broker that the test may restart."""

    def make(name: str | None = None, *, partitions: int = partitions, config: Mapping[str, str] | None = None) -> str:
        name = name or f"test.{uuid.uuid4().hex[:12]}"
        create_topic(broker.bootstrap_servers, name, partitions=partitions, config=config)
        return name

    kafka = Kafka(broker.bootstrap_servers, "apache-kafka")
    return Chat.make(kafka, database, make, partitions=partitions, dlq_partitions=dlq_partitions)


@contextmanager
def slow_network(delay: float, target: Callable[[], int]) -> Iterator[int]:
    """A port from which everything goes to another one, and back, so many seconds later."""
    loop = asyncio.new_event_loop()
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(OSError):
            while data := await reader.read(65_536):
                loop.call_later(delay, writer.write, data)
        loop.call_later(delay, writer.close)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target())
        except OSError:
            writer.close()
        else:
            await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    async def close() -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(2 * delay)

    server = loop.run_until_complete(asyncio.start_server(carry, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, name="slow network")
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.run_until_complete(close())
        writers.clear()
        loop.close()


def revive(broker: KafkaServer, chat: Chat) -> None:
    """Start a broker that was killed, and wait until it leads the topics' partitions again."""
    broker.restart()

    def readable() -> bool:
        try:
            return [chat.kafka.read(topic) for topic in (chat.topic, chat.dlq_topic)] != []
        except KafkaException:
            return False

    wait_for(readable, "the topics")


def reconnected(chat: Chat) -> Chat:
    """The same with a new connection, because the server was restarted."""
    chat.connection.close()
    return replace(chat, connection=chat.database.connect())


class Worker:
    """A running `chat-status consume`, with its log read as it comes."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, name=f"log of {name}", daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        """Whether it has not ended; a stopped one has not."""
        return self.process.poll() is None

    def signal(self, signum: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(signum)

    def stop(self) -> None:
        """Freeze it: afterwards not one of its threads runs any more."""
        self.process.send_signal(signal.SIGSTOP)
        wait_for(lambda: self._state() == "T", f"{self.name} to be stopped")

    def say(self, message: str) -> list[dict[str, Any]]:
        """Its log lines so far with this message."""
        return [line for line in list(self.lines) if line.get("message") == message]

    def end(self, timeout: float = 30.0) -> CallResult:
        """Wait for its end and return what it left."""
        self.process.wait(timeout)
        self._reader.join(timeout)
        assert self.process.stdout is not None
        return CallResult(self.process.returncode, self.process.stdout.read(), self.text())

    def kill(self) -> None:
        """Kill it (SIGKILL); that it still ran is asserted."""
        assert self.running, f"{self.name} had ended by itself:\n{self.text()[-3000:]}"
        self.process.kill()
        assert self.end().exit_code == -signal.SIGKILL

    def text(self) -> str:
        """Its log so far."""
        return "\n".join(json.dumps(line) for line in list(self.lines))

    def _state(self) -> str:
        with open(f"/proc/{self.process.pid}/stat", encoding="ascii") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0]

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                self.lines.append(json.loads(line))
            except ValueError:
                self.lines.append({"message": "not JSON", "text": line})


@contextmanager
def worker(
    chat: Chat,
    name: str,
    *args: str,
    options: Mapping[str, str] = QUICK_GROUP,
    env: Mapping[str, str] | None = None,
) -> Iterator[Worker]:
    """Start a consumer whose member of the group is called `name`; killed in the end if it still runs."""
    kafka = {"CRMCTL_KAFKA__OPTIONS": json.dumps({**options, "client.id": name})}
    with chat.start(*args, env=kafka | dict(env or {})) as process:
        started = Worker(name, process)
        try:
            yield started
        finally:
            if started.running:
                process.kill()
            started.end()
            print(f"the log of {name}:\n{started.text()}")  # shown by pytest where the test fails


def wait_for(condition: Callable[[], Any], what: str, seconds: float = _PATIENCE) -> Any:
    """Ask until the condition holds and return its value; an AssertionError with `what` after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.01)
    return value


class Member(NamedTuple):
    """A member of the group as the broker describes it."""

    id: str
    instance: str | None
    partitions: frozenset[int]


@functools.cache
def _admin(bootstrap_servers: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": bootstrap_servers, "reconnect.backoff.max.ms": 500, "log_level": 0})


def members(chat: Chat) -> dict[str, Member]:
    """The group's members by the names of their workers; none while the broker cannot say."""
    admin = _admin(chat.kafka.bootstrap_servers)
    try:
        description = admin.describe_consumer_groups([chat.group], request_timeout=10)[chat.group].result()
    except KafkaException:
        _admin.cache_clear()  # a client that has lost its broker for a while may not find it again for longer
        return {}
    found = {}
    for member in description.members:
        own = {p.partition for p in (member.assignment.topic_partitions if member.assignment else ())}
        found[member.client_id] = Member(member.member_id, member.group_instance_id, frozenset(own))
    return found


def wait_for_members(chat: Chat, *names: str, seconds: float = _PATIENCE) -> dict[str, Member]:
    """Wait until exactly these workers are members, own every partition between them, and none owns nothing."""

    def settled() -> dict[str, Member] | None:
        found = members(chat)
        owned = [number for member in found.values() for number in member.partitions]
        complete = sorted(owned) == list(range(_partition_count(chat.kafka.bootstrap_servers, chat.topic)))
        return found if found.keys() == set(names) and complete and all(m.partitions for m in found.values()) else None

    found: dict[str, Member] = wait_for(settled, f"{names} to share the partitions", seconds)
    return found


@functools.cache
def _partition_count(bootstrap_servers: str, topic: str) -> int:
    _admin.cache_clear()
    return len(_admin(bootstrap_servers).list_topics(topic, timeout=20).topics[topic].partitions)


@functools.cache
def _reader(bootstrap_servers: str, group: str) -> Consumer:
    return Consumer(
        {"bootstrap.servers": bootstrap_servers, "group.id": group, "reconnect.backoff.max.ms": 500, "log_level": 0}
    )


def committed_offsets(chat: Chat) -> dict[int, int]:
    """The group's committed offsets of this moment, asked for without joining it.

    Not by an AdminClient: it crashes the process while the group's coordinator is moving (librdkafka #5040).
    """
    reader = _reader(chat.kafka.bootstrap_servers, chat.group)
    count = _partition_count(chat.kafka.bootstrap_servers, chat.topic)
    asked = [TopicPartition(chat.topic, number) for number in range(count)]
    deadline = time.monotonic() + 20
    while True:
        try:
            return {p.partition: p.offset for p in reader.committed(asked, timeout=20) if p.offset >= 0}
        except KafkaException as error:
            # The coordinator has just been elected, or is still reading.
            late = time.monotonic() > deadline
            if late or not (error.args[0].retriable() or error.args[0].code() == KafkaError.NOT_COORDINATOR):
                raise
            time.sleep(0.05)


def generations(chat: Chat) -> list[int]:
    """Every generation that the group has had, as the broker wrote it into __consumer_offsets."""
    found = []
    for record in read_topic(chat.kafka.bootstrap_servers, "__consumer_offsets"):
        if record.key is None or record.value is None or struct.unpack_from(">h", record.key)[0] != 2:
            continue
        (length,) = struct.unpack_from(">h", record.key, 2)
        if record.key[4 : 4 + length].decode() == chat.group:
            found.append(_generation(record.value))
    return found


def _generation(value: bytes) -> int:
    """GroupMetadataValue: a version, the protocol type, the generation; from version 4 on strings are compact."""
    (version,) = struct.unpack_from(">h", value)
    if version >= 4:
        length, at = value[2] - 1, 3
    else:
        (length,) = struct.unpack_from(">h", value, 2)
        at = 4
    assert value[at : at + length] in (b"consumer", b"")
    (generation,) = struct.unpack_from(">i", value, at + length)
    assert isinstance(generation, int)
    return generation


def sessions(connection: Connection, condition: str = "true") -> list[dict[str, Any]]:
    """The consumers' sessions in this database that satisfy a condition on pg_stat_activity."""
    return rows(
        connection,
        f"""
        select pid, state, wait_event_type, wait_event, query
        from pg_stat_activity
        where application_name = '{APPLICATION}' and datname = current_database() and ({condition})
        """,
    )


# What happened to the projection, step by step ------------------------------------------------------------------------


def record_changes(connection: Connection) -> None:
    """From now on note each event that a deal's status is from, with that status, and each change of the status."""
    connection.execute("create schema if not exists crm_test")
    connection.execute(
        """
        create table crm_test.changes (
            number bigint generated always as identity primary key,
            deal_id uuid, partition integer, "offset" bigint, chat_status text
        )
        """
    )
    connection.execute(
        """
        create function crm_test.note_change() returns trigger language plpgsql as $$
        begin
            insert into crm_test.changes (deal_id, partition, "offset", chat_status)
            select new.deal_id, new.partition, new."offset", d.chat_status
            from crm.deals d where d.id = new.deal_id;
            return null;
        end $$
        """
    )
    connection.execute(
        "create trigger note_change after insert or update on crm.deal_chat_positions "
        "for each row execute function crm_test.note_change()"
    )
    connection.execute(
        """
        create table crm_test.updates (
            number bigint generated always as identity primary key, deal_id uuid, was text, became text
        )
        """
    )
    connection.execute(
        """
        create function crm_test.note_update() returns trigger language plpgsql as $$
        begin
            insert into crm_test.updates (deal_id, was, became) values (new.id, old.chat_status, new.chat_status);
            return null;
        end $$
        """
    )
    connection.execute(
        "create trigger note_update after update on crm.deals for each row execute function crm_test.note_update()"
    )


# A history of events, with all that can be wrong in it ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cast:
    """The deals of a history: those that exist, appear later, never appear, or are soft-deleted."""

    there: list[Deal]
    late: list[Deal]
    never: list[Deal]
    deleted: list[Deal]

    @classmethod
    def of(cls, count: int, *, plain: bool = False) -> "Cast":
        """So many deals; all of them are there with `plain`."""
        deals = [Deal(uuid.uuid4(), uuid.uuid4()) for _ in range(count)]
        if plain:
            return cls(deals, [], [], [])
        late, never, deleted = count // 8, max(1, count // 50), max(1, count // 40)
        return cls(
            deals[late + never + deleted :],
            deals[:late],
            deals[late : late + never],
            deals[late + never : late + never + deleted],
        )

    @property
    def deals(self) -> list[Deal]:
        """All of them, in no special order."""
        return [*self.there, *self.late, *self.never, *self.deleted]

    def insert(self, connection: Connection) -> None:
        """Insert those that are there from the beginning."""
        with connection.transaction():
            for deal in self.there:
                insert_deal(connection, id=deal.id, tenant_id=deal.tenant_id)
            for deal in self.deleted:
                insert_deal(connection, id=deal.id, tenant_id=deal.tenant_id, deleted_at=datetime.now(UTC))


Kind = Literal["event", "mismatch", "unknown", "malformed"]


class Line(NamedTuple):
    """One record to send, and what it says."""

    kind: Kind
    record: Outgoing
    deal: Deal
    message_id: UUID | None = None
    status: str = ""


_STATUSES: Final = ("Pending", "Provisioning", "Failed", "Ready")
_GARBAGE: Final = (b"", b"null", b"[]", b"{", b"\xff\xfe", b'{"MessageId": 7}', b"[" * 5_000, b'"text"')


def history(cast: Cast, count: int, dice: random.Random, *, plain: bool = False) -> list[Line]:
    """So many records: each deal's chat comes and goes on its own, and everything that can be wrong is.

    A tenth are resent events with the MessageId they had. With `plain` there are no wrong ones.
    """
    lines: list[Line] = []
    sent: list[Line] = []
    left: Counter[Deal] = Counter()
    while len(lines) < count:
        if sent and dice.random() < 0.1:
            lines.append(dice.choice(sent[-2_000:]))
            continue
        deal = dice.choice(cast.deals)
        left[deal] += 1
        line = _line(deal, left[deal], dice, plain=plain)
        if line.kind != "malformed":
            sent.append(line)
        lines.append(line)
    return lines


def _line(deal: Deal, number: int, dice: random.Random, *, plain: bool) -> Line:
    fate = 1.0 if plain else dice.random()
    if fate < 0.01:
        # Each with an end of its own: a record is told by its bytes.
        value = dice.choice(_GARBAGE) + b" " * dice.randrange(1, 30) + uuid.uuid4().hex.encode()
        return Line("malformed", Outgoing(value, str(deal.id)), deal)
    weights = (1, 10, 8, 1 if number < 6 else 4)
    event = deal.event(
        dice.choices(_STATUSES, weights)[0],
        # Diagnostics only: the partition's order decides, whatever the clocks of messenger said.
        changed_at=datetime(2026, 11, 1, tzinfo=UTC) + timedelta(seconds=dice.randrange(86_400)),
    )
    kind: Kind = "event"
    if fate < 0.02:
        kind, event = "unknown", deal.event(dice.choice(("Archived", "ready", "")))
    elif fate < 0.03:
        kind, event = "mismatch", Deal(deal.id, uuid.uuid4()).event(event.status)
    return Line(kind, outgoing(event), deal, event.message_id, event.status)


# What must become of it -----------------------------------------------------------------------------------------------

_RANK: Final = {"Pending": 0, "Provisioning": 1, "Failed": 1, "Ready": 2}
Place = tuple[int, int]


@dataclass(slots=True)
class Expected:
    """What a consumer that reads the records one by one, each exactly once, leaves.

    `steps` are the events of each deal that its status is from, in their order: those that `applied`, and those that
    confirmed what it was. A `once` group is one message that was sent again: at
    least one of its records is a dead letter, and whether the others are depends on when they were read.
    """

    statuses: dict[UUID, str] = field(default_factory=dict)
    steps: dict[UUID, dict[Place, str]] = field(default_factory=lambda: defaultdict(dict))
    applied: int = 0
    marks: set[UUID] = field(default_factory=set)
    letters: dict[Place, str] = field(default_factory=dict)
    once: dict[UUID, tuple[str, set[Place]]] = field(default_factory=dict)
    records: dict[Place, Record] = field(default_factory=dict)

    def take(self, deal_id: UUID, place: Place, status: str) -> None:
        """An event of a deal that is there, in the order of its partition (INV-CHAT-1)."""
        now = self.statuses[deal_id]
        if _RANK[status] > _RANK[now] or (_RANK[status] == _RANK[now] and status != now):
            self.applied += 1
            self.statuses[deal_id] = status
            self.steps[deal_id][place] = status
        elif status == now != "Ready":
            self.steps[deal_id][place] = status


def expect(cast: Cast, lines: Sequence[Line], records: Iterable[Record]) -> Expected:
    """Read the topic's records in the order of their partitions; all `late` deals are there by then."""
    said = {_bytes(line.record.value): line for line in lines}
    result = Expected({deal.id: "Pending" for deal in (*cast.there, *cast.late, *cast.deleted)})
    late, never, deleted = ({deal.id for deal in deals} for deals in (cast.late, cast.never, cast.deleted))
    for record in records:
        place = (record.partition, record.offset)
        line = said[record.value]
        result.records[place] = record
        if line.message_id is None:
            result.letters[place] = "CRM_CHAT_STATUS_MALFORMED"
        elif line.message_id in result.marks:
            continue
        elif line.kind == "unknown":
            result.letters[place] = "CRM_CHAT_STATUS_UNKNOWN"
        elif line.deal.id in never:
            result.once.setdefault(line.message_id, ("CRM_DEAL_NOT_FOUND", set()))[1].add(place)
        elif line.deal.id in deleted:
            result.marks.add(line.message_id)
        elif line.kind == "mismatch" and line.deal.id in late:
            # Sent again while the first one waits for its deal, it is a duplicate; later it is another mismatch.
            result.once.setdefault(line.message_id, ("CRM_CHAT_STATUS_TENANT_MISMATCH", set()))[1].add(place)
        elif line.kind == "mismatch":
            result.letters[place] = "CRM_CHAT_STATUS_TENANT_MISMATCH"
        else:
            result.marks.add(line.message_id)
            result.take(line.deal.id, place, line.status)
    return result


def _bytes(value: bytes | str | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def assert_projection(connection: Connection, expected: Expected) -> None:
    """The deals, the marks and every step that was recorded on the way are the oracle's; nothing waits any more."""
    statuses = {row["id"]: row["chat_status"] for row in rows(connection, "select id, chat_status from crm.deals")}
    wrong = {deal: (statuses.get(deal), s) for deal, s in expected.statuses.items() if statuses.get(deal) != s}
    assert wrong == {}, "deals that are (found, expected)"
    assert statuses.keys() == expected.statuses.keys()
    assert scalar(connection, "select count(*) from crm.deferred_messages") == 0
    marks = {UUID(key.rpartition(":")[2]) for key in (r["key"] for r in rows(connection, _MARKS))}
    assert marks == expected.marks
    assert_steps(connection, expected)
    for deal, steps in expected.steps.items():
        last = rows(connection, 'select partition, "offset" from crm.deal_chat_positions where deal_id = %s', deal)
        assert [(row["partition"], row["offset"]) for row in last] == [max(steps)]
    # Each event counts in the transaction that marks it: twice applied would be twice counted.
    assert applied_count(connection) == expected.applied


_MARKS: Final = "select key from crm.processed_messages"


def applied_count(connection: Connection) -> int:
    """How many events the committed batches say they applied."""
    count = scalar(
        connection,
        """
        select coalesce(sum((counts ->> 'applied_count')::int), 0) from crm.job_runs
        where job = 'consume-chat-status' and outcome = 'committed'
        """,
    )
    assert isinstance(count, int)
    return count


def assert_steps(connection: Connection, expected: Expected) -> None:
    """No deal ever went back: each recorded step is the oracle's, later than the one before."""
    before: dict[UUID, Place] = {}
    for row in rows(connection, "select * from crm_test.changes order by number"):
        deal, place = row["deal_id"], (row["partition"], row["offset"])
        assert expected.steps[deal].get(place) == row["chat_status"], (deal, place)
        assert before.get(deal, (-1, -1)) < place, f"{deal} went from {before.get(deal)} back to {place}"
        before[deal] = place
    # A batch in which a deal comes back to where it was has a step, and changes nothing.
    idle = "select * from crm_test.updates where was = became or was = 'Ready'"
    assert rows(connection, idle) == []


def assert_letters(letters: Sequence[Letter], expected: Expected, topic: str) -> None:
    """Every record that can never be applied is a dead letter at least once, with its bytes; no other record is."""
    found: dict[Place, set[str]] = defaultdict(set)
    for letter in letters:
        record = expected.records[letter.source]
        assert (letter.record.key, letter.record.value) == (record.key, record.value)
        assert letter.headers["x-source-topic"] == topic
        found[letter.source].add(letter.code)
    for place, code in expected.letters.items():
        assert found.pop(place, set()) == {code}, place
    for message_id, (code, places) in expected.once.items():
        codes = [found.pop(place, set()) for place in places]
        assert set().union(*codes) == {code}, message_id
    assert dict(found) == {}, "records that are no dead letters"


def assert_nothing_is_skipped(chat: Chat, lines: Sequence[Line]) -> int:
    """No offset is committed past a record that is neither in the database nor a dead letter; returns how many
    records the committed offsets cover. The offsets are read first: what is handled stays handled.
    """
    committed = committed_offsets(chat)
    with psycopg.connect(chat.database.url, autocommit=True) as connection:
        known = {
            row["id"]
            for row in rows(
                connection,
                """
                select split_part(key, ':', 3)::uuid as id from crm.processed_messages
                union all select message_id from crm.deferred_messages
                """,
            )
        }
    letters = chat.letters()
    lettered = {letter.source for letter in letters}
    said = {_bytes(line.record.value): line.message_id for line in lines}
    records = {(record.partition, record.offset): record for record in chat.kafka.read(chat.topic)}
    # The second of two records with one MessageId is a duplicate while the first waits, which may be dead by now.
    known |= {said[records[place].value] for place in lettered} - {None}
    covered = [place for place in records if place[1] < committed.get(place[0], 0)]
    skipped = [place for place in covered if place not in lettered and said[records[place].value] not in known]
    assert skipped == [], f"committed {committed}"
    return len(covered)


# Moments to be killed or stopped at, and the end of a test ------------------------------------------------------------

# Whoever waits at a gate does so for as long as the test likes.
PATIENT: Final = {
    "CRMCTL_DATABASE__LOCK_TIMEOUT": "60s",
    "CRMCTL_DATABASE__STATEMENT_TIMEOUT": "60s",
    "CRMCTL_DATABASE__IDLE_IN_TRANSACTION_TIMEOUT": "60s",
}
IDLE: Final = "state like 'idle in transaction%'"


def small_history(chat: Chat) -> tuple[Cast, list[Line]]:
    """A sent history with one of each fault, that fits into one batch; only deleted deals are missing."""
    cast, dice = Cast.of(60), random.Random(5)
    cast = replace(cast, there=[*cast.there, *cast.late, *cast.never], late=[], never=[])
    lines = history(cast, 300, dice)
    first = cast.there[0]
    extra = [
        Line("malformed", Outgoing(b"no event", str(first.id)), first),
        line_of(first, "unknown", "Archived"),
        line_of(Deal(first.id, cast.there[1].tenant_id), "mismatch", "Ready"),
    ]
    lines = [line_of(first, "event", "Provisioning"), *extra, *lines]
    cast.insert(chat.connection)
    chat.send(*(line.record for line in lines))
    return cast, lines


def line_of(deal: Deal, kind: Literal["event", "mismatch", "unknown"], status: str) -> Line:
    event = deal.event(status)
    return Line(kind, outgoing(event), deal, event.message_id, status)


@contextmanager
def locked_deal(chat: Chat, deal: Deal) -> Iterator[None]:
    """Another session that edits the deal, for as long as the block goes on."""
    with psycopg.connect(chat.database.url) as editor:
        editor.execute("update crm.deals set version = version where id = %s", [deal.id])
        yield
        editor.rollback()


@contextmanager
def locked_schema(chat: Chat) -> Iterator[None]:
    """Whoever begins a transaction waits until the block ends, before it takes any lock of its own."""
    with psycopg.connect(chat.database.url) as holder:
        holder.execute("lock table crm.crmctl_schema_version in access exclusive mode")
        yield
        holder.rollback()


@contextmanager
def gate_in_write(chat: Chat) -> Iterator[Gate]:
    """A gate before the first deal's change: whoever waits there has written its dead letters, and nothing else."""
    with closed_gate(chat.database) as gate:
        chat.connection.execute(
            """
            create function crm_test.gate_in_write() returns trigger language plpgsql as $$
            begin
                perform crm_test.pass_gate();
                return null;
            end $$
            """
        )
        chat.connection.execute(
            "create trigger gate_in_write before update on crm.deals "
            "for each statement execute function crm_test.gate_in_write()"
        )
        yield gate


IN_THE_COMMIT: Final = "wait_event = 'SyncRep'"


@dataclass(slots=True)
class CommitGate:
    """Whether the server lets commits through: while it does not, it waits for a standby that never comes."""

    url: str

    def close(self) -> None:
        """Hold up every commit of other sessions that wrote something."""
        self._configure("alter system set synchronous_standby_names = 'nobody'", "nobody")

    def open(self) -> None:
        """Let all commits through."""
        self._configure("alter system reset synchronous_standby_names", "")

    def _configure(self, statement: str, expected: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as admin:
            admin.execute(statement.encode())
            admin.execute("select pg_reload_conf()")
        with psycopg.connect(self.url, autocommit=True) as observer:
            wait_for(lambda: scalar(observer, "show synchronous_standby_names") == expected, "the reload")


@contextmanager
def gate_in_commit(chat: Chat) -> Iterator[CommitGate]:
    """A gate in every COMMIT: what waits there is durable, not visible yet, and nobody was told."""
    gate = CommitGate(chat.database.url)
    gate.close()
    try:
        yield gate
    finally:
        gate.open()


def stop(consumer: Worker, *, within: float = 5.0) -> int:
    """Ask it to end (SIGTERM) and return its exit code; it must not take longer."""
    asked = time.monotonic()
    consumer.signal(signal.SIGTERM)
    code = consumer.end(within + 5).exit_code
    took = time.monotonic() - asked
    assert took < within, f"it took {took:.1f} s"
    return code


def wait_until_read(chat: Chat, count: int, seconds: float = _PATIENCE) -> None:
    """Wait until the group's committed offsets cover so many records."""
    wait_for(lambda: sum(committed_offsets(chat).values()) >= count, f"{count} records to be read", seconds)


def drain(chat: Chat) -> None:
    """Consume to the end, as often as it takes until nothing waits for a deal that never comes."""
    for _ in range(20):
        chat.let_pauses_pass()
        chat.consumed()
        if not chat.deferred():
            return
    raise AssertionError(f"{len(chat.deferred())} events still wait")


def assert_as_expected(chat: Chat, cast: Cast, lines: list[Line]) -> Expected:
    """The end of every test: projection, marks, steps, dead letters and offsets are what they must be."""
    records = chat.kafka.read(chat.topic)
    expected = expect(cast, lines, records)
    assert_projection(chat.connection, expected)
    assert_letters(chat.letters(), expected, chat.topic)
    ends = Counter(record.partition for record in records)
    assert {number: offset for number, offset in committed_offsets(chat).items() if offset} == dict(ends)
    return expected
