"""`crmctl outbox relay --drain` beside a relay that publishes one row at a time, and beside the sum of its own parts.

The parts: a bare producer that flushes the same batches, and the same SQL without producing. Every row is about an
aggregate of its own, as the expiry writes them.
"""

import time
from collections.abc import Sequence
from itertools import count
from statistics import median
from typing import Any, Final
from uuid import uuid4

import orjson
import psycopg
from confluent_kafka import KafkaError, Message, Producer
from psycopg.rows import dict_row

from benchmarks.harness import CLEAN_LOG, Figure, Lab, Scale, compare, run_crmctl, say
from crmctl.adapters import kafka
from crmctl.adapters.postgres import Database, Dsn, array_literal
from crmctl.dev.environment import create_topics
from crmctl.dev.kafka import temporary_kafka
from crmctl.domain.topics import BOOKING_EXPIRED_TOPIC
from crmctl.jobs.job_pauses import find_pause
from crmctl.jobs.job_runs import RunRecord
from crmctl.jobs.relay_outbox import LOCK, STATEMENTS, envelope
from crmctl.settings import DatabaseSettings, KafkaSettings

_BATCH: Final = 500
_UNIT: Final = "messages/s"
# The naive relay takes seconds for a few hundred rows.
_NAIVE_SHARE: Final = 40

_FILL: Final = """
    insert into crm.outbox_messages
        (topic, key, aggregate_type, aggregate_id, contract_version, payload, headers)
    select %(topic)s, b.id::text, 'Booking', b.id::text, 1,
           jsonb_build_object('BookingId', b.id, 'TenantId', b.tenant_id, 'DealId', b.deal_id,
                              'PropertyObjectId', b.property_object_id, 'Phase', 'Reserve', 'ExpiredAt', now()),
           jsonb_build_object('traceparent', '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00')
    from (select gen_random_uuid() as id, gen_random_uuid() as tenant_id, gen_random_uuid() as deal_id,
                 gen_random_uuid() as property_object_id
          from generate_series(1, %(rows)s)) b
"""


def measure(lab: Lab, scale: Scale) -> list[Figure]:
    """Rates by interleaved rounds; every drain is checked to have left nothing unpublished."""
    rates: dict[str, list[float]] = {"relay": [], "naive": [], "producer": [], "sql": []}
    with temporary_kafka() as broker:
        create_topics(broker)
        settings = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
        with lab.database() as url:
            _producer_alone(lab, url, scale.messages, settings)  # the broker's own warming up is in no figure
        for number in range(scale.rounds):
            with lab.database() as url:
                rates["relay"].append(_relay(lab, url, scale.messages, broker.bootstrap_servers))
            with lab.database() as url:
                rates["naive"].append(_naive(lab, url, scale.messages // _NAIVE_SHARE, settings))
            with lab.database() as url:
                rates["sql"].append(_sql_alone(lab, url, scale.messages))
            with lab.database() as url:
                rates["producer"].append(_producer_alone(lab, url, scale.messages, settings))
            say(f"round {number + 1} of {scale.rounds}: relay {rates['relay'][-1]:,.0f} {_UNIT}")
    return [
        compare("outbox relay, batch 500, by one row at a time", rates["relay"], rates["naive"], 20.0, _UNIT),
        _by_parts(rates["relay"], rates["producer"], rates["sql"]),
    ]


def _by_parts(relay: Sequence[float], producer: Sequence[float], sql: Sequence[float]) -> Figure:
    by_round = [(1 / ours) / (1 / bare + 1 / alone) for ours, bare, alone in zip(relay, producer, sql, strict=True)]
    ratio = median(by_round)
    return Figure(
        "outbox relay's time, by its producer and its SQL alone",
        f"{median(relay):,.0f} against {median(producer):,.0f} and {median(sql):,.0f} {_UNIT}",
        f"{ratio:.2f} ({min(by_round):.2f} to {max(by_round):.2f})",
        "≤ 1.30",
        ratio <= 1.3,
    )


def _fill(lab: Lab, url: str, rows: int) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_FILL, {"topic": BOOKING_EXPIRED_TOPIC.name, "rows": rows})
        connection.execute("vacuum (analyze) crm.outbox_messages")
    lab.checkpoint()


def _check(url: str) -> None:
    with psycopg.connect(url) as connection:
        row = connection.execute("select count(*) from crm.outbox_messages where published_at is null").fetchone()
    if row != (0,):
        raise RuntimeError(f"the drain left {row} messages unpublished")


def _relay(lab: Lab, url: str, rows: int, bootstrap_servers: str) -> float:
    _fill(lab, url, rows)
    [report] = run_crmctl(
        "outbox", "relay", "--drain", "--batch-size", str(_BATCH), "--time-budget", "10m", "-o", "json",
        url=url,
        CRMCTL_KAFKA__BOOTSTRAP_SERVERS=bootstrap_servers,
    )  # fmt: skip
    _check(url)
    return rows / (float(report.document["duration_ms"]) / 1000)


def _naive(lab: Lab, url: str, rows: int, settings: KafkaSettings) -> float:
    """Select one, send it, flush, mark it, commit."""
    _fill(lab, url, rows)
    producer = _warm_producer(settings)
    started = time.perf_counter()
    with psycopg.connect(url, row_factory=dict_row) as connection:
        while True:
            row = connection.execute(STATEMENTS["select_fresh"].encode(), {"limit": 1}).fetchone()
            if row is None:
                break
            producer.produce(
                row["topic"], value=envelope(row), key=row["key"], headers=_headers(row), on_delivery=_delivered
            )
            if producer.flush(15):
                raise RuntimeError("the broker did not answer")
            connection.execute(
                "update crm.outbox_messages set published_at = clock_timestamp() where id = %s", (row["id"],)
            )
            connection.commit()
    seconds = time.perf_counter() - started
    _check(url)
    return rows / seconds


def _sql_alone(lab: Lab, url: str, rows: int) -> float:
    """Every statement of the relay, batch by batch, as if each record had been acknowledged."""
    _fill(lab, url, rows)
    database = Database(Dsn(url), DatabaseSettings(), application_name="crmctl bench")
    record = RunRecord(uuid4(), "relay-outbox", "system")
    none: dict[str, list[str]] = {
        name: [] for name in ("refused_ids", "refused_errors", "held", "released_types", "released_ids")
    }
    started = time.perf_counter()
    for number in count(1):
        tx = database.begin()
        find_pause(tx, record.job)
        tx.one(STATEMENTS["take_lock"], {"lock": LOCK})
        tx.all(STATEMENTS["select_retries"], {"limit": _BATCH // 4})
        batch = tx.all(STATEMENTS["select_fresh"], {"limit": _BATCH})
        if not batch:
            break
        tx.one(STATEMENTS["mark"], {**none, "delivered": array_literal([row["id"] for row in batch])})
        record.committed(tx, number, {"published_count": len(batch)})
        database.commit()
    seconds = time.perf_counter() - started
    database.close()
    _check(url)
    return rows / seconds


def _producer_alone(lab: Lab, url: str, rows: int, settings: KafkaSettings) -> float:
    """The same records from memory, flushed after as many as the relay's batches hold."""
    _fill(lab, url, rows)
    with psycopg.connect(url, row_factory=dict_row) as connection:
        fetched = connection.execute(STATEMENTS["select_fresh"].encode(), {"limit": rows}).fetchall()
    records = [(row["topic"], row["key"].encode(), envelope(row), _headers(row)) for row in fetched]
    producer = _warm_producer(settings)
    started = time.perf_counter()
    for begin in range(0, len(records), _BATCH):
        for topic, key, value, headers in records[begin : begin + _BATCH]:
            producer.produce(topic, value=value, key=key, headers=headers, on_delivery=_delivered)
        if producer.flush(15):
            raise RuntimeError("the broker did not answer")
    return rows / (time.perf_counter() - started)


def _warm_producer(settings: KafkaSettings) -> Producer:
    """The relay's producer, which has its producer id, its connections and its topic: a record is acknowledged."""
    producer = kafka.producer(settings, CLEAN_LOG)
    producer.produce(BOOKING_EXPIRED_TOPIC.name, value=b"", key=b"", on_delivery=_delivered)
    if producer.flush(15):
        raise RuntimeError("the broker did not answer")
    return producer


def _delivered(error: KafkaError | None, _message: Message) -> None:
    if error is not None:
        raise RuntimeError(f"a record was not delivered: {error}")


def _headers(row: dict[str, Any]) -> list[tuple[str, str | bytes | None]]:
    return [(name, str(value).encode()) for name, value in orjson.loads(row["headers"]).items()]
