"""The dead letters of `chat-status consume`: the original byte for byte, our headers once, nothing passed over."""

import re
import socket
import struct
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
from confluent_kafka import Producer, TopicCollection
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from crmctl.adapters.dead_letters import DeadLetters, Stopped
from crmctl.adapters.publisher import Publisher
from crmctl.adapters.records import RawRecord
from crmctl.dev.messenger import ChatStatusChanged
from crmctl.domain.chat_status import ErrorCode, Position
from crmctl.domain.topics import CHAT_STATUS_DLQ_TOPIC
from tests.chat_status_support import Chat, Letter, hour_ago_ms, log_lines, metric, outgoing
from tests.expire_support import finish, rows, wait_until
from tests.integration.test_chat_status_metrics import free_port, get, listening_on
from tests.kafka_fixtures import Kafka, MakeTopic, Outgoing, Record
from tests.support import Database, insert_deal

OURS: Final = (
    "x-dlq-reason",
    "x-dlq-error-code",
    "x-source-topic",
    "x-original-offset",
    "x-source-topic-id",
    "x-original-partition",
    "x-original-timestamp",
    "x-dlq-group",
    "x-dlq-attempts",
    "x-dlq-failed-at",
)
# Repeated names in their order, a null value, an empty one, bytes that are no text, a name that is no identifier.
HEADERS: Final = (
    ("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ("again", b"1"),
    ("null", None),
    ("again", b"2"),
    ("", b"no name"),
    ("again", b"1"),
    ("empty", b""),
    ("bytes", bytes(range(256))),
    ("имя с пробелом", "значение".encode()),
    ("x-custom", b"kept"),
)
FORGED: Final = (
    ("x-dlq-reason", b"forged"),
    ("x-original-offset", b"99"),
    ("x-original-offset", None),
    ("x-dlq-attempts", b"\xff"),
)


@pytest.fixture
def chat(kafka: Kafka, database: Database, make_topic: MakeTopic) -> Chat:
    return Chat.make(kafka, database, make_topic)


def send(chat: Chat, *records: Outgoing) -> list[Record]:
    """Produce records to partition 0; returns them as the topic has them."""
    chat.kafka.produce(chat.topic, records)
    return [record for record in chat.kafka.read(chat.topic, fetch_wait_max_ms=10) if record.partition == 0]


def assert_original_is_kept(letter: Letter, source: Record, *, without: Sequence[str] = ()) -> None:
    """Key, value, headers in their order and then ours, each once, with where the record came from."""
    record = letter.record
    assert (record.key, record.value) == (source.key, source.value)
    kept = tuple(header for header in source.headers if header[0] not in without)
    assert record.headers[: len(kept)] == kept
    assert tuple(name for name, _ in record.headers[len(kept) :]) == OURS
    assert letter.headers.items() >= {
        ("x-source-topic", source.topic),
        ("x-original-partition", str(source.partition)),
        ("x-original-offset", str(source.offset)),
        ("x-original-timestamp", str(source.timestamp_ms)),
    }


def test_the_original_is_kept_byte_for_byte_and_each_header_of_ours_is_there_once(chat: Chat) -> None:
    keys: tuple[bytes | None, ...] = (b"deal", None, b"", bytes(range(256)))
    values: tuple[bytes | None, ...] = (b"\x00\xff garbage", None, b"", b'{"MessageId":1}')
    first = hour_ago_ms()
    records = [
        Outgoing(value, key, headers, partition=0, timestamp_ms=first + number)
        for number, (value, key, headers) in enumerate(
            (value, key, headers) for value in values for key in keys for headers in (HEADERS, FORGED + HEADERS)
        )
    ]
    sources = send(chat, *records)
    assert [(r.key, r.value, r.headers) for r in sources] == [(o.key, o.value, o.headers) for o in records]
    before = datetime.now(UTC)
    document = chat.consumed()
    assert document["dead_lettered_count"] == len(records) == 32
    letters = chat.letters()
    for letter, source in zip(letters, sources, strict=True):
        assert_original_is_kept(letter, source, without=OURS)
        assert letter.code == "CRM_CHAT_STATUS_MALFORMED"
        assert (letter.headers["x-dlq-group"], letter.headers["x-dlq-attempts"]) == (chat.group, "0")
        failed_at = datetime.fromisoformat(letter.headers["x-dlq-failed-at"])
        assert before - timedelta(minutes=1) < failed_at < datetime.now(UTC) + timedelta(minutes=1)
    topic_ids = {letter.headers["x-source-topic-id"] for letter in letters}
    if chat.kafka.is_real:
        admin = chat.kafka.admin()
        described = admin.describe_topics(TopicCollection([chat.topic]))[chat.topic].result(30)
        assert topic_ids == {str(described.topic_id)}


def test_the_contracts_page_lists_these_headers_in_their_order_and_what_the_topic_must_be() -> None:
    page = (Path(__file__).parents[2] / "docs" / "contracts.md").read_text(encoding="utf-8")
    section = page.split(f"## `{CHAT_STATUS_DLQ_TOPIC.name}`")[1].split("\n## ")[0]
    assert tuple(re.findall(r"^\| `(x-[a-z-]+)` \|", section, re.MULTILINE)) == OURS
    assert f"at least {CHAT_STATUS_DLQ_TOPIC.partitions}." in section
    for name in ("retention.ms", "cleanup.policy"):
        assert f"`{name}={CHAT_STATUS_DLQ_TOPIC.config[name]}`" in section
    mebibytes = int(CHAT_STATUS_DLQ_TOPIC.config["max.message.bytes"]) >> 20
    assert f"`max.message.bytes` at least {mebibytes} MiB" in section
    assert all(f"`{code}`" in section for code in ErrorCode)


def test_a_record_that_waited_in_the_database_comes_out_as_it_went_in(chat: Chat) -> None:
    event = chat.missing_deal().event("Ready")
    key = b"\xff\x00 key"
    (source,) = send(chat, outgoing(event, key=key, headers=FORGED + HEADERS, partition=0, timestamp_ms=hour_ago_ms()))
    chat.consumed()
    assert (chat.letters(), len(chat.deferred())) == ([], 1)
    rows(chat.connection, "update crm.deferred_messages set attempts = 4, next_attempt_at = now()")
    chat.send(chat.deal().event("Ready"), partition=1)
    chat.consumed()
    (letter,) = chat.letters()
    assert_original_is_kept(letter, source, without=OURS)
    assert (letter.code, letter.headers["x-dlq-attempts"]) == ("CRM_DEAL_NOT_FOUND", "5")
    assert letter.reason == "the deal was still missing after 5 retries"


def test_a_null_key_is_kept_while_a_record_waits(chat: Chat) -> None:
    event = chat.missing_deal().event("Ready")
    (source,) = send(chat, Outgoing(event.value(), None, partition=0))
    chat.consumed()
    (row,) = chat.deferred()
    assert (row["key"], bytes(row["value"]), row["timestamp_ms"]) == (None, source.value, source.timestamp_ms)


def test_a_dead_letter_is_not_marked_so_the_message_applies_once_its_cause_is_gone(chat: Chat) -> None:
    deal = chat.deal()
    event = deal.event("Ready")
    tenant_id = uuid.uuid4()
    rows(chat.connection, "update crm.deals set tenant_id = %s", tenant_id)
    chat.send(event)
    assert chat.consumed()["dead_lettered_count"] == 1
    assert chat.marks() == set()
    rows(chat.connection, "update crm.deals set tenant_id = %s", deal.tenant_id)
    chat.send(event)
    assert chat.consumed()["applied_count"] == 1
    assert chat.status(deal) == "Ready"
    assert len(chat.letters()) == 1


class Signalled:
    """A dead-letter topic that is there, and a signal that has arrived."""

    def list_topics(self, timeout: float) -> Any:
        return SimpleNamespace(topics={"dlq": None})


def test_a_write_that_a_signal_cut_short_says_so_and_not_that_kafka_did_not_acknowledge() -> None:
    publisher = Publisher(lambda: cast(Producer, Signalled()))
    letter = RawRecord(Position("id", 0, 1), "topic", b"key", b"value", (), 0), ErrorCode.MALFORMED, "garbage", 0
    with pytest.raises(Stopped):
        DeadLetters(publisher, "dlq", "group").write([letter], lambda: True)


def test_letters_of_one_key_are_in_one_partition_in_the_order_of_the_source(chat: Chat) -> None:
    deals = [chat.deal() for _ in range(8)]
    chat.send(*(deal.event(f"Unknown {number}") for number in range(5) for deal in deals))
    chat.consumed()
    letters = [Letter(letter.record, letter.headers) for letter in chat.letters()]
    in_dlq = sorted(letters, key=lambda letter: (letter.record.partition, letter.record.offset))
    for deal in deals:
        own = [letter for letter in in_dlq if letter.record.key == str(deal.id).encode()]
        assert [letter.reason for letter in own] == [f'Status "Unknown {number}" is not known' for number in range(5)]
        assert len({letter.record.partition for letter in own}) == 1
    # Where messenger's own client puts a key, as far as both topics have as many partitions.
    assert all(letter.record.partition == letter.source[0] for letter in letters)


def test_thousands_of_bad_records_with_one_key_in_a_batch_are_written_once_each(chat: Chat) -> None:
    """Letters of one key wait for each other; a batch of them must still end, and not begin again for ever."""
    bad = [Outgoing(b"garbage", b"the same for all", partition=0)] * 3_000
    follower = chat.deal()
    chat.kafka.produce(chat.topic, [*bad, outgoing(follower.event("Ready"), partition=0)], linger_ms=5)
    document = chat.consumed("--batch-size", "5000")
    assert (document["dead_lettered_count"], document["applied_count"]) == (3_000, 1)
    assert [letter.source[1] for letter in chat.letters()] == list(range(3_000))
    assert chat.status(follower) == "Ready"


class SlowCluster:
    """What `confluent_kafka.Producer` is to the publisher, 20 ms away: all that is queued arrives in one round trip."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queue: list[tuple[bytes, Callable[[None, object], None]]] = []
        self.arrived: list[bytes] = []

    def list_topics(self, timeout: float) -> Any:
        return SimpleNamespace(topics={"dlq": None})

    def produce(self, topic: str, value: bytes, key: bytes, headers: object, on_delivery: Any) -> None:
        self.queue.append((value, on_delivery))

    def flush(self, timeout: float) -> int:
        self.now += 0.02
        for value, on_delivery in self.queue:
            self.arrived.append(value)
            on_delivery(None, None)
        self.queue.clear()
        return 0


def test_a_batch_of_letters_with_one_key_is_written_in_time_also_where_the_cluster_is_20_ms_away() -> None:
    """Else the write is given up after 10 s and begun again, for ever, and every attempt leaves its letters."""
    cluster = SlowCluster()
    publisher = Publisher(lambda: cast(Producer, cluster), delivery_timeout=10, clock=lambda: cluster.now)
    values = [b"%d" % number for number in range(1_000)]
    letters = [
        (RawRecord(Position("id", 0, number), "topic", b"key", value, (), 0), ErrorCode.MALFORMED, "garbage", 0)
        for number, value in enumerate(values)
    ]
    DeadLetters(publisher, "dlq", "group").write(letters, lambda: False)
    assert cluster.arrived == values


@pytest.mark.real_kafka
def test_a_dead_letter_topic_with_1_partition_serves_a_source_with_12(
    kafka: Kafka, database: Database, make_topic: MakeTopic
) -> None:
    chat = Chat.make(kafka, database, make_topic, partitions=12, dlq_partitions=1)
    good = [chat.deal() for _ in range(12)]
    for partition, deal in enumerate(good):
        chat.send(Outgoing(b"garbage", str(partition), partition=partition), partition=partition)
        chat.send(deal.event("Ready"), partition=partition)
    document = chat.consumed()
    assert (document["applied_count"], document["dead_lettered_count"]) == (12, 12)
    letters = chat.letters()
    assert [letter.source for letter in letters] == [(partition, 0) for partition in range(12)]
    assert {letter.record.partition for letter in letters} == {0}
    assert chat.committed() == dict.fromkeys(range(12), 2)


@pytest.mark.real_kafka
def test_what_the_dead_letter_topic_refuses_is_not_passed_over_and_the_log_says_why(
    kafka: Kafka, database: Database, make_topic: MakeTopic
) -> None:
    chat = Chat.make(kafka, database, make_topic, dlq_config={"max.message.bytes": "2000"})
    before, after = chat.deal(), chat.deal()
    chat.send(before.event("Ready"), partition=0)
    assert chat.consumed()["applied_count"] == 1
    chat.send(Outgoing(b"x" * 10_000, "big", partition=0))
    chat.send(after.event("Ready"), partition=0)

    result = chat.consume()
    assert (result.exit_code, result.json["error"]["code"]) == (69, "CRMCTL_UNAVAILABLE")
    assert f"{chat.dlq_topic} refuses 1 dead letters: MSG_SIZE_TOO_LARGE" in result.json["error"]["message"]
    assert "topics check" in result.json["error"]["hint"]
    assert [line["reason"] for line in log_lines(result, "run failed")] == [result.json["error"]["message"]]
    assert chat.committed()[0] == 1
    assert chat.letters() == []

    with chat.running() as consumer:
        assert consumer.stderr is not None
        line = next(line for line in consumer.stderr if "waiting to try again" in line)
        consumer.terminate()
        stopped = finish(consumer)
    assert "MSG_SIZE_TOO_LARGE" in line
    assert stopped.exit_code == 0
    assert chat.committed()[0] == 1

    take_larger_letters(chat)
    document = chat.consumed()
    assert (document["applied_count"], document["dead_lettered_count"]) == (1, 1)
    assert [letter.source for letter in chat.letters()] == [(0, 1)]
    assert chat.status(after) == "Ready"
    assert chat.committed()[0] == 3


def take_larger_letters(chat: Chat) -> None:
    resource = ConfigResource(
        ResourceType.TOPIC,
        chat.dlq_topic,
        incremental_configs=[ConfigEntry("max.message.bytes", "100000", incremental_operation=AlterConfigOpType.SET)],
    )
    admin = chat.kafka.admin()
    admin.incremental_alter_configs([resource])[resource].result(30)


@pytest.mark.real_kafka
@pytest.mark.parametrize("kind", ["malformed", "unknown"])
def test_while_one_letter_is_refused_the_others_are_written_and_counted_once(
    kafka: Kafka, database: Database, make_topic: MakeTopic, kind: str
) -> None:
    chat = Chat.make(kafka, database, make_topic, dlq_config={"max.message.bytes": "2000"})
    deal = chat.deal()
    large: dict[str, ChatStatusChanged | Outgoing] = {
        "malformed": Outgoing(b"x" * 10_000, "big", partition=0),
        "unknown": deal.event("Unknown", failure_reason="x" * 10_000),
    }
    bad = [Outgoing(b"garbage", str(number), partition=0) for number in range(10)]
    chat.send(*bad, *(deal.event("Unknown") for _ in range(10)), large[kind], partition=0)
    count = {"malformed": 10, "unknown": 20}[kind]  # an event is decided when the malformed records are done
    port = free_port()
    with chat.running(env=listening_on(port)) as consumer:
        assert consumer.stderr is not None
        waiting = [next(line for line in consumer.stderr if "refuses 1 dead letters" in line) for _ in range(3)]
        assert len(waiting) == 3
        assert len(chat.letters()) == count
        assert metric(get(port, "/metrics")[1], "crm_chat_status_dlq_total") == count
        take_larger_letters(chat)
        wait_until(lambda: chat.committed().get(0) == 21, "the batch to be done")
        consumer.terminate()
        result = finish(consumer)
    assert result.json["dead_lettered_count"] == 21
    assert [letter.source for letter in chat.letters()] == [(0, offset) for offset in range(21)]


@pytest.mark.real_kafka
def test_without_a_dead_letter_topic_nothing_is_passed_over(chat: Chat) -> None:
    deal = chat.deal()
    chat.send(Outgoing(b"garbage", "key", partition=0))
    chat.send(deal.event("Ready"), partition=0)
    result = chat.consume(env={"CRMCTL_CHAT_STATUS__DLQ_TOPIC": "pin.crm.absent"})
    assert result.exit_code == 69
    assert "topic pin.crm.absent does not exist" in result.json["error"]["message"]
    assert chat.committed().get(0, 0) == 0
    assert chat.consumed()["applied_count"] == 1


# --- a record that no Python client can make --------------------------------------------------------------------------


@pytest.mark.real_kafka
def test_header_names_that_are_not_utf_8_neither_stop_the_consumer_nor_their_event(chat: Chat) -> None:
    deal, other, late = chat.deal(), chat.deal(), chat.missing_deal()
    headers = [(b"latin-1 \xe9", b"1"), (b"traceparent", b"nonsense"), (b"NUL \0 inside", b"2")]
    produce_raw(chat, deal.event("Ready").value(), headers)
    produce_raw(chat, b"garbage", headers)
    produce_raw(chat, late.event("Ready").value(), headers)
    chat.send(other.event("Ready"), partition=0)
    result = chat.consume()
    assert result.exit_code == 0, result.stderr[-2000:]
    assert (chat.status(deal), chat.status(other)) == ("Ready", "Ready")
    (letter,) = chat.letters()
    assert (letter.source, letter.record.value) == ((0, 1), b"garbage")
    insert_deal(chat.connection, id=late.id, tenant_id=late.tenant_id)
    chat.let_pauses_pass()
    assert chat.consumed()["applied_count"] == 1
    assert chat.status(late) == "Ready"


def produce_raw(chat: Chat, value: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Produce one record to partition 0 through the wire protocol (Produce v7, record batch v2)."""
    fields = b"\0" + varint(0) + varint(0) + varint(-1) + sized(value) + varint(len(headers))
    record = fields + b"".join(sized(name) + sized(content) for name, content in headers)
    now = round(time.time() * 1000)
    body = struct.pack(">hiqqqhii", 0, 0, now, now, -1, -1, -1, 1) + sized(record)
    batch = struct.pack(">ibI", -1, 2, crc32c(body)) + body
    records = struct.pack(">qi", 0, len(batch)) + batch
    topic = chat.topic.encode()
    request = (
        struct.pack(">hhih", 0, 7, 1, -1)
        + struct.pack(">hhi", -1, -1, 30_000)
        + struct.pack(">ih", 1, len(topic))
        + topic
        + struct.pack(">iii", 1, 0, len(records))
        + records
    )
    host, port = chat.kafka.bootstrap_servers.split(",")[0].split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection, connection.makefile("rb") as answers:
        connection.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", answers.read(4))
        answer = answers.read(size)
    # Correlation id, one topic, its name, one partition, its number, and then the error code.
    (error,) = struct.unpack_from(">h", answer, 4 + 4 + 2 + len(topic) + 4 + 4)
    assert error == 0, f"the broker refuses the record: {error}"


def sized(content: bytes) -> bytes:
    return varint(len(content)) + content


def varint(number: int) -> bytes:
    number = (number << 1) ^ (number >> 63)
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def crc32c(content: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
