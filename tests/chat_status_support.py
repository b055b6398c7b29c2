"""What the tests of `chat-status …` share: topics and a group of their own, messenger's events, what a run left."""

import json
import re
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from uuid import UUID

from confluent_kafka import Consumer, TopicPartition

from crmctl.dev.kafka_mock import PARTITIONS
from crmctl.dev.messenger import ChatStatusChanged
from tests.expire_support import Connection, rows, scalar
from tests.kafka_fixtures import Kafka, MakeTopic, Outgoing, Record
from tests.prefork import run_crmctl
from tests.support import CallResult, Database, insert_deal, start_crmctl

# What a broker without news keeps a consumer waiting for; its default of half a second adds up.
IMPATIENT: Final = {"fetch.wait.max.ms": "10"}
# The mock cluster notices that a member has left only when its session is over.
MOCK_SESSION: Final = {"session.timeout.ms": "6000", "heartbeat.interval.ms": "1000"}


class Deal(NamedTuple):
    """A deal's id, whether it exists or not, and its tenant."""

    id: UUID
    tenant_id: UUID

    def event(self, status: str, **fields: Any) -> ChatStatusChanged:
        """Messenger's event about this deal's chat."""
        return ChatStatusChanged(**{"deal_id": self.id, "tenant_id": self.tenant_id, "status": status, **fields})


class Letter(NamedTuple):
    """A record of the dead-letter topic and its `x-` headers; a header that comes twice is not in there."""

    record: Record
    headers: dict[str, str]

    @property
    def code(self) -> str:
        return self.headers["x-dlq-error-code"]

    @property
    def reason(self) -> str:
        return self.headers["x-dlq-reason"]

    @property
    def source(self) -> tuple[int, int]:
        """Partition and offset of the original record."""
        return int(self.headers["x-original-partition"]), int(self.headers["x-original-offset"])


@dataclass(frozen=True, slots=True)
class Chat:
    """A source topic, a dead-letter topic and a consumer group that belong to one test, and its database."""

    kafka: Kafka
    database: Database
    topic: str
    dlq_topic: str
    group: str
    connection: Connection

    @classmethod
    def make(
        cls,
        kafka: Kafka,
        database: Database,
        make_topic: MakeTopic,
        *,
        partitions: int = PARTITIONS,
        dlq_partitions: int = PARTITIONS,
        dlq_config: Mapping[str, str] | None = None,
    ) -> "Chat":
        """Create the topics; with other partitions or settings than the defaults it needs a real broker."""
        return cls(
            kafka,
            database,
            make_topic(partitions=partitions),
            make_topic(partitions=dlq_partitions, config=dlq_config),
            f"test-{uuid.uuid4()}",
            database.connect(),
        )

    @property
    def env(self) -> dict[str, str]:
        """The settings under which crmctl works on these topics."""
        return {
            "CRMCTL_KAFKA__BOOTSTRAP_SERVERS": self.kafka.bootstrap_servers,
            "CRMCTL_KAFKA__OPTIONS": json.dumps(IMPATIENT if self.kafka.is_real else IMPATIENT | MOCK_SESSION),
            "CRMCTL_CHAT_STATUS__TOPIC": self.topic,
            "CRMCTL_CHAT_STATUS__DLQ_TOPIC": self.dlq_topic,
            "CRMCTL_CHAT_STATUS__GROUP": self.group,
            "CRMCTL_CHAT_STATUS__DLQ_GROUP": f"{self.group}-dlq",
        }

    def deal(self, **overrides: Any) -> Deal:
        """Insert a deal; an override names a column."""
        deal = Deal(overrides.pop("id", None) or uuid.uuid4(), overrides.pop("tenant_id", None) or uuid.uuid4())
        insert_deal(self.connection, id=deal.id, tenant_id=deal.tenant_id, **overrides)
        return deal

    def missing_deal(self) -> Deal:
        """A deal that nobody has inserted yet."""
        return Deal(uuid.uuid4(), uuid.uuid4())

    def send(self, *events: ChatStatusChanged | Outgoing, partition: int = -1, **settings: Any) -> list[Record]:
        """Produce as messenger does, keyed by deal, or to one partition; returns the records as they arrived."""
        records = [event if isinstance(event, Outgoing) else outgoing(event, partition=partition) for event in events]
        return self.kafka.produce(self.topic, records, partitioner="murmur2_random", **settings)

    def consume(self, *args: str, env: Mapping[str, str] | None = None, database: str | None = None) -> CallResult:
        """Run `chat-status consume --until-caught-up -o json` to its end."""
        arguments = ("chat-status", "consume", "--until-caught-up", "-o", "json", *args)
        return run_crmctl(*arguments, database=database or self.database, env=self.env | dict(env or {}))

    def consumed(self, *args: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Run the consumer as `consume` does and return the result document; it must be caught up."""
        result = self.consume(*args, env=env)
        assert result.exit_code == 0, result.stderr
        assert result.json["caught_up"] is True
        document: dict[str, Any] = result.json
        return document

    def start(self, *args: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start `chat-status consume -o json`, which goes on until SIGTERM; use it as a context manager."""
        arguments = ("chat-status", "consume", "-o", "json", *args)
        return start_crmctl(*arguments, database=self.database, env=self.env | dict(env or {}))

    @contextmanager
    def running(self, *args: str, env: Mapping[str, str] | None = None) -> Iterator["subprocess.Popen[str]"]:
        """As `start`, but what still runs at the end of the block is killed: a test that fails must not wait for it."""
        with self.start(*args, env=env) as consumer:
            try:
                yield consumer
            finally:
                consumer.kill()

    def run(self, *args: str, env: Mapping[str, str] | None = None) -> CallResult:
        """Run another `crmctl chat-status … -o json`."""
        arguments = ("chat-status", *args, "-o", "json")
        return run_crmctl(*arguments, database=self.database, env=self.env | dict(env or {}))

    def letters(self) -> list[Letter]:
        """Every dead letter, in the order of the source."""
        records = self.kafka.read(
            self.dlq_topic, **{name.replace(".", "_"): value for name, value in IMPATIENT.items()}
        )
        return sorted((_letter(record) for record in records), key=lambda letter: letter.source)

    def status(self, deal: Deal) -> str:
        """The chat status that the deal has now."""
        status = scalar(self.connection, "select chat_status from crm.deals where id = %s", deal.id)
        assert isinstance(status, str)
        return status

    def deal_rows(self) -> dict[UUID, dict[str, Any]]:
        """All columns of all deals, by id."""
        return {row["id"]: row for row in rows(self.connection, "select * from crm.deals")}

    def marks(self) -> set[UUID]:
        """The message ids that are marked as processed."""
        found = rows(self.connection, "select key from crm.processed_messages")
        assert all(row["key"].startswith("crm:deal-chat-status:") for row in found)
        return {UUID(row["key"].removeprefix("crm:deal-chat-status:")) for row in found}

    def deferred(self) -> list[dict[str, Any]]:
        """What waits for its deal, by position."""
        return rows(self.connection, 'select * from crm.deferred_messages order by topic_id, partition, "offset"')

    def let_pauses_pass(self) -> None:
        """Time passes for what waits: its next attempt is due now."""
        rows(self.connection, "update crm.deferred_messages set next_attempt_at = now()")

    def committed(self, *, replay: bool = False) -> dict[int, int]:
        """The committed offsets of the group, or of the replay's, by partition; those without one are missing."""
        topic, group = (self.dlq_topic, f"{self.group}-dlq") if replay else (self.topic, self.group)
        consumer = Consumer({"bootstrap.servers": self.kafka.bootstrap_servers, "group.id": group})
        try:
            numbers = consumer.list_topics(topic, timeout=30).topics[topic].partitions
            found = consumer.committed([TopicPartition(topic, number) for number in numbers], timeout=30)
            return {entry.partition: entry.offset for entry in found if entry.offset >= 0}
        finally:
            consumer.close()


def outgoing(event: ChatStatusChanged, *, partition: int = -1, **changes: Any) -> Outgoing:
    """The record that messenger sends for an event; a change names a field of Outgoing."""
    return Outgoing(**{"value": event.value(), "key": str(event.deal_id), "partition": partition, **changes})


def edited(event: ChatStatusChanged, *, payload: Mapping[str, Any] | None = None, **envelope: Any) -> bytes:
    """The event's value with fields of its envelope or payload replaced; `...` removes a field."""
    document = json.loads(event.value())
    for target, changes in ((document, envelope), (document["Payload"], payload or {})):
        for name, value in changes.items():
            if value is ...:
                target.pop(name, None)
            else:
                target[name] = value
    return json.dumps(document).encode()


def log_lines(result: CallResult | str, message: str | None = None) -> list[dict[str, Any]]:
    """The JSON log lines of a run, or those with one message."""
    text = result if isinstance(result, str) else result.stderr
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    return lines if message is None else [line for line in lines if line["message"] == message]


def hour_ago_ms() -> int:
    """An hour ago in milliseconds since 1970; a broker deletes what is older than a week."""
    return round(time.time() - 3600) * 1000


def metric(exposition: str, name: str, **labels: str) -> float | None:
    """The value of one sample of a /metrics page; None where there is none."""
    shown = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    found = re.search(rf"^{re.escape(name + ('{' + shown + '}' if shown else ''))} (\S+)$", exposition, re.MULTILINE)
    return None if found is None else float(found[1])


def _letter(record: Record) -> Letter:
    names = [name for name, _ in record.headers]
    once = {name: value for name, value in record.headers if name.startswith("x-") and names.count(name) == 1}
    return Letter(record, {name: (value or b"").decode() for name, value in once.items()})
