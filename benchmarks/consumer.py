"""`crmctl chat-status consume --until-caught-up` beside a transaction per message, at three batch sizes; decode alone;
`crmctl dlq replay` beside the consumer.

Events of a few thousand deals over six partitions, as messenger sends them. Both sides read the same topic of the same
broker and write to the same server; the naive one takes a share of the events and is compared by its rate. Neither
rate counts the start and the joining of the group: both begin when the first transaction is done.
"""

import random
import time
from statistics import median
from typing import Any, Final
from uuid import UUID

import psycopg

from benchmarks.harness import CLEAN_LOG, Figure, Lab, Scale, compare, run_crmctl, say
from crmctl.adapters import kafka
from crmctl.adapters.dead_letters import DeadLetters
from crmctl.adapters.publisher import Publisher
from crmctl.adapters.records import RawRecord
from crmctl.dev.environment import create_topics
from crmctl.dev.kafka import temporary_kafka
from crmctl.dev.messenger import ChatStatusChanged, send
from crmctl.domain.chat_status import RANKS, ErrorCode, Position
from crmctl.domain.chat_status_decoding import decode
from crmctl.domain.topics import CHAT_STATUS_DLQ_TOPIC, CHAT_STATUS_TOPIC
from crmctl.jobs.project_chat_status import MARK_PREFIX
from crmctl.settings import KafkaSettings

_BATCHES: Final = (500, 1000, 5000)
_TARGETS: Final = {1000: 30.0}
_UNIT: Final = "events/s"
_DEALS: Final = 5_000
_NAIVE_SHARE: Final = 60
_REPLAY_TARGET: Final = 0.5
_MEMORY_TARGET_MIB: Final = 192
# Events of the run's first batch, and those after it with the seconds that they took, to the end of the last batch.
_FIRST_TO_LAST: Final = """
    with batches as (
        select batch, finished_at,
               coalesce((counts->>'applied_count')::int, 0) + coalesce((counts->>'stale_count')::int, 0) as events
        from crm.job_runs
        where run_id = %s
    )
    select coalesce(sum(events) filter (where batch = 1), 0)::int,
           coalesce(sum(events) filter (where batch > 1), 0)::int,
           extract(epoch from max(finished_at) - min(finished_at))::float
    from batches
"""


def measure(lab: Lab, scale: Scale) -> list[Figure]:
    """Rates by interleaved rounds; the projections of all sides are compared in the end."""
    rates: dict[str, list[float]] = {"naive": [], "decode": [], **{str(size): [] for size in _BATCHES}}
    rates["replay"] = []
    peaks: list[float] = []
    replay_peaks: list[float] = []
    with temporary_kafka() as broker:
        create_topics(broker)
        settings = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
        events = _events(lab, scale.events)
        send(broker.bootstrap_servers, events)
        rates["decode"].append(_decode_alone(events))
        _send_letters(settings, events[: scale.letters])
        for number in range(scale.rounds):
            states = []
            for size in _BATCHES:
                with lab.database() as url:
                    rate, peak = _consume(lab, url, size, number, scale.events, broker.bootstrap_servers)
                    rates[str(size)].append(rate)
                    peaks.append(peak)
                    states.append(_state(url))
            if states.count(states[0]) != len(states):
                raise RuntimeError("the projection depends on the batch size")
            with lab.database() as url:
                rate, peak = _replay(lab, url, number, scale.letters, broker.bootstrap_servers)
                rates["replay"].append(rate)
                replay_peaks.append(peak)
            with lab.database() as url:
                rates["naive"].append(_naive(lab, url, scale.events // _NAIVE_SHARE, number, settings))
            say(f"round {number + 1} of {scale.rounds}: consume 1000: {rates['1000'][-1]:,.0f} {_UNIT}")
    figures = [
        compare(
            f"chat-status consume, batch {size}, by a transaction per message",
            rates[str(size)],
            rates["naive"],
            _TARGETS.get(size),
            _UNIT,
        )
        for size in _BATCHES
    ]
    decoding = [rates["decode"][0]] * scale.rounds
    figures.append(compare("decode alone, by chat-status consume, batch 1000", decoding, rates["1000"], None, _UNIT))
    figures.append(
        compare("dlq replay, by chat-status consume, batch 1000", rates["replay"], rates["1000"], _REPLAY_TARGET, _UNIT)
    )
    figures.append(_memory("peak memory of the consumer", peaks))
    figures.append(_memory(f"peak memory of dlq list and dlq replay, {scale.letters:,} letters", replay_peaks))
    return figures


def _memory(what: str, peaks: list[float]) -> Figure:
    peak = max(peaks)
    met = peak <= _MEMORY_TARGET_MIB
    return Figure(what, f"{peak:,.1f} MiB", "", f"≤ {_MEMORY_TARGET_MIB} MiB", met)


def _send_letters(settings: KafkaSettings, events: list[ChatStatusChanged]) -> None:
    """Dead letters of events, written as the consumer writes them."""
    publisher = Publisher(lambda: kafka.producer(settings, CLEAN_LOG))
    letters = DeadLetters(publisher, CHAT_STATUS_DLQ_TOPIC.name, "bench")
    for start in range(0, len(events), 1000):
        raws = [
            RawRecord(
                position=Position("bench", number % 6, number),
                topic=CHAT_STATUS_TOPIC.name,
                key=str(event.deal_id).encode(),
                value=event.value(),
                headers=(),
                timestamp_ms=0,
            )
            for number, event in enumerate(events[start : start + 1000], start)
        ]
        letters.write([(raw, ErrorCode.DEAL_NOT_FOUND, "the deal is missing", 5) for raw in raws], lambda: False)


def _replay(lab: Lab, url: str, number: int, expected: int, bootstrap_servers: str) -> tuple[float, float]:
    """List all letters, then replay them; the replay's rate, and the larger peak of the two."""
    lab.checkpoint()
    settings: dict[str, Any] = {
        "CRMCTL_KAFKA__BOOTSTRAP_SERVERS": bootstrap_servers,
        "CRMCTL_CHAT_STATUS__DLQ_GROUP": f"bench-replay-{number}",
        "CRMCTL_LOG_LEVEL": "error",
    }
    [listing] = run_crmctl("dlq", "list", "-o", "json", url=url, **settings)
    if listing.document["listed_count"] != expected:
        raise RuntimeError(f"{listing.document['listed_count']} of {expected} letters were listed")
    [report] = run_crmctl("dlq", "replay", "-o", "json", url=url, **settings)
    return _rate_after_first(url, report.document["run_id"], expected), max(listing.peak_mib, report.peak_mib)


def _rate_after_first(url: str, run_id: str, expected: int) -> float:
    """Events per second of a run, from the end of its first transaction to the end of its last."""
    with psycopg.connect(url) as connection:
        first, later, seconds = connection.execute(_FIRST_TO_LAST, (run_id,)).fetchone() or (0, 0, 0)
    if first + later != expected:
        raise RuntimeError(f"{first + later} of {expected} events are in job_runs")
    return float(later / seconds)


def _events(lab: Lab, count: int) -> list[ChatStatusChanged]:
    with lab.database() as url, psycopg.connect(url) as connection:
        deals: list[tuple[UUID, UUID]] = connection.execute(
            "select id, tenant_id from crm.deals where chat_status = 'Pending' order by id limit %s", (_DEALS,)
        ).fetchall()
    dice = random.Random(4)
    statuses = ["Provisioning"] * 10 + ["Failed"] * 9 + ["Ready"]
    return [ChatStatusChanged(*dice.choice(deals), dice.choice(statuses)) for _ in range(count)]


def _consume(lab: Lab, url: str, size: int, number: int, expected: int, bootstrap_servers: str) -> tuple[float, float]:
    lab.checkpoint()
    [report] = run_crmctl(
        "chat-status", "consume", "--until-caught-up", "--batch-size", str(size), "-o", "json",
        url=url,
        CRMCTL_KAFKA__BOOTSTRAP_SERVERS=bootstrap_servers,
        CRMCTL_CHAT_STATUS__GROUP=f"bench-{size}-{number}",
        CRMCTL_LOG_LEVEL="error",
    )  # fmt: skip
    document = report.document
    handled = document["applied_count"] + document["stale_count"]
    if handled != expected:
        raise RuntimeError(f"{handled} of {expected} events were handled")
    return _rate_after_first(url, document["run_id"], expected), report.peak_mib


def _state(url: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(
            "select d.id, d.chat_status from crm.deals d"
            " join crm.deal_chat_positions p on p.deal_id = d.id order by d.id"
        ).fetchall()


def _naive(lab: Lab, url: str, events: int, number: int, settings: KafkaSettings) -> float:
    """For each message: look for its mark, lock the deal, decide, write, commit, then commit its offset."""
    lab.checkpoint()
    consumer = kafka.consumer(settings, CLEAN_LOG, group=f"bench-naive-{number}")
    consumer.subscribe([CHAT_STATUS_TOPIC.name])
    done, started = 0, time.perf_counter()
    with psycopg.connect(url) as connection:
        while done < events:
            message = consumer.poll(30)
            if message is None or message.error() is not None:
                raise RuntimeError("the naive consumer got nothing")
            value = message.value()
            assert isinstance(value, bytes)
            event = decode(value, Position("", 0, 0))
            key = MARK_PREFIX + event.message_id
            if connection.execute("select from crm.processed_messages where key = %s", (key,)).fetchone() is None:
                row = connection.execute(
                    "select chat_status from crm.deals where id = %s for no key update", (event.deal_id,)
                ).fetchone()
                assert row is not None
                assert event.status is not None
                if RANKS[event.status] >= RANKS[row[0]] and row[0] not in {"Ready", event.status}:
                    connection.execute(
                        "update crm.deals set chat_status = %s, updated_at = now() where id = %s",
                        (event.status, event.deal_id),
                    )
                connection.execute("insert into crm.processed_messages (key) values (%s)", (key,))
            connection.commit()
            consumer.commit(message=message, asynchronous=False)
            done += 1
            if done == 1:
                started = time.perf_counter()  # joining the group is not counted
    seconds = time.perf_counter() - started
    consumer.close()
    return (events - 1) / seconds


def _decode_alone(events: list[ChatStatusChanged]) -> float:
    values = [event.value() for event in events]
    position = Position("", 0, 0)
    runs = []
    for _ in range(3):
        started = time.perf_counter()
        for value in values:
            decode(value, position)
        runs.append(len(values) / (time.perf_counter() - started))
    return median(runs)
