"""`crmctl chat-status consume` on real servers: AC-1 to AC-7 of source 003, every case of its table, deferral, grants.

AC-8, the full replay, is in test_chat_status_groups.py.
"""

import json
import signal
import subprocess
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, Final, cast
from uuid import UUID

import psycopg
import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from crmctl.adapters.dead_letters import DeadLetters
from crmctl.adapters.postgres import Database as Transactions
from crmctl.adapters.publisher import Publisher
from crmctl.adapters.record_source import RecordSource
from crmctl.adapters.records import RawRecord, Topic
from crmctl.dev import messenger
from crmctl.dev.messenger import ChatStatusChanged
from crmctl.domain.chat_status import Decision, ErrorCode, Position
from crmctl.domain.chat_status_decoding import decode
from crmctl.domain.grants import Kind
from crmctl.jobs.consume_chat_status import Consumption, Options
from crmctl.jobs.job import Run
from crmctl.jobs.project_chat_status import Batch, DeadLettersFirst, Scope, project
from crmctl.settings import DatabaseSettings
from crmctl.telemetry import logs
from crmctl.telemetry.metrics import ChatStatusMetrics
from crmctl.telemetry.tracing import Tracing
from tests.chat_status_support import Chat, Deal, edited, log_lines, outgoing
from tests.expire_support import Connection, closed_gate, fingerprints, finish, rows, runs, scalar, wait_until
from tests.kafka_fixtures import Kafka, MakeTopic, Outgoing
from tests.prefork import run_crmctl
from tests.roles_support import Roles
from tests.support import CallResult, Database, insert_booking, insert_deal
from tests.unit.test_chat_status_decoding import CASES

APPLICATION: Final = "crmctl consume-chat-status"
LONG_AGO: Final = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def chat(kafka: Kafka, database: Database, make_topic: MakeTopic) -> Chat:
    return Chat.make(kafka, database, make_topic)


def counts(document: Mapping[str, Any]) -> dict[str, int]:
    """The figures of a result document that are not 0."""
    return {name.removesuffix("_count"): n for name, n in document.items() if name.endswith("_count") and n}


def changed_columns(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


def end_of(chat: Chat) -> dict[int, int]:
    """The offset behind the last record of each partition that has records."""
    ends: dict[int, int] = {}
    for record in chat.kafka.read(chat.topic, fetch_wait_max_ms=10):
        ends[record.partition] = record.offset + 1
    return ends


def assert_acknowledged(chat: Chat) -> None:
    committed = chat.committed()
    assert {number: committed.get(number) for number in end_of(chat)} == end_of(chat)


# --- the acceptance criteria of source 003 ----------------------------------------------------------------------------


def test_ac_1_an_event_that_advances_the_rank_is_applied_and_acknowledged(chat: Chat) -> None:
    deal, other = chat.deal(updated_at=LONG_AGO), chat.deal(updated_at=LONG_AGO)
    before = chat.deal_rows()
    sent = deal.event("Provisioning")
    chat.send(sent)
    document = chat.consumed()
    after = chat.deal_rows()
    assert counts(document) == {"applied": 1}
    assert changed_columns(before[deal.id], after[deal.id]) == {"chat_status", "updated_at"}
    assert after[deal.id]["chat_status"] == "Provisioning"
    (run,) = runs(chat.connection)
    assert after[deal.id]["updated_at"] == run["started_at"]
    assert (run["job"], run["actor"], run["outcome"], str(run["run_id"])) == (
        "consume-chat-status",
        "system",
        "committed",
        document["run_id"],
    )
    assert run["counts"] == {"applied_count": 1}
    assert after[other.id] == before[other.id]
    assert chat.marks() == {sent.message_id}
    assert chat.letters() == []
    assert_acknowledged(chat)


def test_ac_2_ready_absorbs_late_events_which_are_acknowledged_and_marked(chat: Chat) -> None:
    deal = chat.deal(chat_status="Ready", updated_at=LONG_AGO)
    before = chat.deal_rows()
    late = [deal.event("Provisioning"), deal.event("Failed"), deal.event("Ready"), deal.event("Pending")]
    chat.send(*late)
    assert counts(chat.consumed()) == {"stale": 4}
    assert chat.deal_rows() == before
    assert chat.marks() == {event.message_id for event in late}
    assert_acknowledged(chat)


def test_ac_3_provisioning_and_failed_replace_each_other(chat: Chat) -> None:
    deal, back = chat.deal(chat_status="Provisioning"), chat.deal(chat_status="Failed")
    chat.send(deal.event("Failed", failure_reason="no room"), back.event("Failed"), back.event("Provisioning"))
    assert counts(chat.consumed()) == {"applied": 2, "stale": 1}
    assert (chat.status(deal), chat.status(back)) == ("Failed", "Provisioning")
    assert_acknowledged(chat)


def test_ac_4_a_message_that_was_processed_changes_nothing_when_it_comes_again(chat: Chat) -> None:
    deal = chat.deal()
    first, second = deal.event("Provisioning"), deal.event("Failed")
    chat.send(first, second)
    chat.consumed()
    before = chat.deal_rows()
    in_another_spelling = edited(first, MessageId=f"{{{str(first.message_id).upper()}}}")
    chat.send(first, outgoing(first, value=in_another_spelling), second)
    assert counts(chat.consumed()) == {"duplicate": 3}
    assert chat.deal_rows() == before
    assert chat.status(deal) == "Failed"
    assert_acknowledged(chat)


def test_ac_5_an_event_of_another_tenant_is_a_dead_letter_and_not_applied(chat: Chat) -> None:
    deal = chat.deal()
    before = chat.deal_rows()
    sent = deal.event("Ready", tenant_id=uuid.uuid4())
    chat.send(sent)
    result = chat.consume()
    assert counts(result.json) == {"dead_lettered": 1}
    (letter,) = chat.letters()
    assert letter.code == "CRM_CHAT_STATUS_TENANT_MISMATCH"
    assert letter.record.value == sent.value()
    assert chat.deal_rows() == before
    assert chat.marks() == set()
    assert [line["level"] for line in log_lines(result, "dead-lettered")] == ["error"]
    assert_acknowledged(chat)


def test_ac_6_an_unknown_status_is_a_dead_letter(chat: Chat) -> None:
    deal, missing = chat.deal(), chat.missing_deal()
    before = chat.deal_rows()
    number = deal.event("Ready")
    chat.send(
        deal.event("Archived"), missing.event("Archived"), outgoing(number, value=edited(number, payload={"Status": 3}))
    )
    assert counts(chat.consumed()) == {"dead_lettered": 3}
    letters = chat.letters()
    assert {letter.code for letter in letters} == {"CRM_CHAT_STATUS_UNKNOWN"}
    assert Counter(letter.reason for letter in letters) == {
        'Status "Archived" is not known': 2,
        "Status 3 is not known": 1,
    }
    assert chat.deal_rows() == before
    assert (chat.marks(), chat.deferred()) == (set(), [])
    assert_acknowledged(chat)


def test_ac_7_an_event_waits_for_its_deal_and_is_a_dead_letter_when_the_retries_are_spent(chat: Chat) -> None:
    early, lost, other = chat.missing_deal(), chat.missing_deal(), chat.deal()
    waits, never = early.event("Provisioning"), lost.event("Ready")
    chat.send(waits, never)
    result = chat.consume()
    assert counts(result.json) == {"deferred": 2}
    assert {line["DealId"] for line in log_lines(result, "deal-not-found")} == {str(early.id), str(lost.id)}
    assert {row["message_id"] for row in chat.deferred()} == {waits.message_id, never.message_id}
    assert_acknowledged(chat)

    insert_deal(chat.connection, id=early.id, tenant_id=early.tenant_id)
    rows(chat.connection, "update crm.deferred_messages set attempts = 4, next_attempt_at = now()")
    chat.send(other.event("Ready"))
    assert counts(chat.consumed()) == {"applied": 2, "dead_lettered": 1}
    assert chat.status(early) == "Provisioning"
    (letter,) = chat.letters()
    assert (letter.code, letter.headers["x-dlq-attempts"]) == ("CRM_DEAL_NOT_FOUND", "5")
    assert letter.record.value == never.value()
    assert chat.deferred() == []
    assert chat.marks() == {waits.message_id} | chat.marks() - {never.message_id}


# --- the rest of the table --------------------------------------------------------------------------------------------


@pytest.mark.real_kafka  # the mock cluster drops records when there are some MB of them
def test_every_record_of_the_contracts_table_meets_its_fate_and_the_next_one_is_handled(chat: Chat) -> None:
    cases = {name: chat.deal() for name in CASES}
    followers = {name: chat.deal() for name in CASES}
    for name, case in CASES.items():
        event = cases[name].event("Ready")
        follower = outgoing(followers[name].event("Ready"), partition=0)
        chat.send(Outgoing(case.change(event), key=name, partition=0), follower, message_max_bytes=4_000_000)
    result = chat.consume()
    assert result.exit_code == 0, result.stderr[-2000:]
    letters = chat.letters()
    codes = {letter.record.key: letter.code for letter in letters}
    assert max(len(letter.reason.encode()) for letter in letters) <= 1_000
    assert {name: codes.get(name.encode()) for name in CASES} == {name: case.code for name, case in CASES.items()}
    applied = {name for name, deal in cases.items() if chat.status(deal) == "Ready"}
    assert applied == {name for name, case in CASES.items() if case.code is None}
    assert {chat.status(deal) for deal in followers.values()} == {"Ready"}
    assert_acknowledged(chat)
    assert max(len(line) for line in result.stderr.splitlines()) < 16_000
    assert {line["level"] for line in log_lines(result)} == {"info", "warning", "error"}


def test_a_message_that_waits_or_comes_twice_in_one_batch_is_a_duplicate(chat: Chat) -> None:
    deal, missing = chat.deal(), chat.missing_deal()
    twice, waits = deal.event("Provisioning"), missing.event("Provisioning")
    chat.send(twice, twice, waits, waits)
    assert counts(chat.consumed()) == {"applied": 1, "deferred": 1, "duplicate": 2}
    chat.send(waits)
    assert chat.consumed()["duplicate_count"] == 1
    assert len(chat.deferred()) == 1
    assert chat.marks() == {twice.message_id}


def test_another_contract_version_is_warned_of_once_and_the_event_is_applied(chat: Chat) -> None:
    deal = chat.deal()
    sent = deal.event("Ready", contract_version=2)
    chat.send(sent, sent)
    result = chat.consume()
    assert counts(result.json) == {"applied": 1, "duplicate": 1}
    assert chat.status(deal) == "Ready"
    (line,) = log_lines(result, "contract mismatch")
    assert (line["level"], line["MessageId"], str(line["payload.Version"])) == ("warning", str(sent.message_id), "2")


def test_an_event_of_a_soft_deleted_deal_is_skipped_warned_of_and_marked(chat: Chat) -> None:
    deal = chat.deal(deleted_at=LONG_AGO)
    before = chat.deal_rows()
    sent, foreign = deal.event("Ready"), deal.event("Ready", tenant_id=uuid.uuid4())
    chat.send(sent, foreign)
    result = chat.consume()
    assert counts(result.json) == {"soft_deleted": 2}
    assert chat.deal_rows() == before
    assert chat.marks() == {sent.message_id, foreign.message_id}
    assert chat.letters() == []
    lines = log_lines(result, "skipped-soft-deleted")
    assert [(line["level"], line["DealId"]) for line in lines] == [("warning", str(deal.id))] * 2


def test_a_deal_in_a_terminal_status_takes_the_chat_status(chat: Chat) -> None:
    deals = [chat.deal(status=status, updated_at=LONG_AGO) for status in ("Completed", "Cancelled")]
    before = chat.deal_rows()
    chat.send(*(deal.event("Failed") for deal in deals))
    chat.consumed()
    after = chat.deal_rows()
    for deal in deals:
        assert after[deal.id]["chat_status"] == "Failed"
        assert changed_columns(before[deal.id], after[deal.id]) == {"chat_status", "updated_at"}


def test_of_deals_only_chat_status_and_updated_at_change_and_only_where_an_event_was_applied(chat: Chat) -> None:
    columns: list[dict[str, Any]] = [
        {"chat_status": "Provisioning", "version": 7},
        {"chat_status": "Ready", "version": 8},
        {"deleted_at": LONG_AGO, "version": 9},
        {"status": "Completed", "version": 10},
        {"version": 11},
    ]
    deals = [chat.deal(updated_at=LONG_AGO, **overrides) for overrides in columns]
    untouched = [chat.deal(updated_at=LONG_AGO) for _ in range(20)]
    before = chat.deal_rows()
    chat.send(*(deal.event(status) for status in ("Failed", "Provisioning", "Failed") for deal in deals))
    chat.consumed()
    after = chat.deal_rows()
    applied = {deals[0].id, deals[3].id, deals[4].id}
    for deal in (*deals, *untouched):
        expected = {"chat_status", "updated_at"} if deal.id in applied else set()
        assert changed_columns(before[deal.id], after[deal.id]) == expected
    assert scalar(chat.connection, "select count(*) from crm.outbox_messages") == 0
    assert scalar(chat.connection, "select count(*) from crm.deal_timeline_events") == 0


REFUSALS: Final = {
    "P0001": "raise exception 'this deal is frozen'",
    "P0001 with 5 MB of text": "raise exception '%', repeat('x', 5 * 1024 * 1024)",
    "23514": "raise exception using errcode = 'check_violation', message = 'not this one'",
    "22012": "perform 1 / 0",
}


def refuse(connection: Connection, deals: Mapping[str, Deal], timing: str = "before") -> None:
    """PostgreSQL refuses every change of these deals' chat status, each in its own way."""
    branches = "".join(
        f"if new.id = '{deal.id}' then {REFUSALS[name]}; end if; ".replace("%", "%%") for name, deal in deals.items()
    ).replace("%%", "%")
    constraint = "constraint " if timing == "after" else ""
    late = "deferrable initially deferred " if timing == "after" else ""
    connection.execute(
        f"""
        create function public.refuse() returns trigger language plpgsql as $$
        begin {branches} return new; end $$;
        create {constraint}trigger refuse {timing} update on crm.deals
            {late}for each row execute function public.refuse();
        """.encode()
    )


def test_what_postgresql_refuses_is_a_dead_letter_each_and_all_others_are_applied(chat: Chat) -> None:
    refused = {name: chat.deal() for name in REFUSALS}
    healthy = [chat.deal() for _ in range(60)]
    refuse(chat.connection, refused)
    before = chat.deal_rows()
    sent = [
        (deal, deal.event(status)) for status in ("Provisioning", "Failed") for deal in (*healthy, *refused.values())
    ]
    chat.send(*(event for _, event in sent))
    result = chat.consume()
    assert result.exit_code == 0, result.stderr[-2000:]
    assert counts(result.json) == {"applied": 120, "dead_lettered": 8}
    assert {chat.status(deal) for deal in healthy} == {"Failed"}
    after = chat.deal_rows()
    assert all(after[deal.id] == before[deal.id] for deal in refused.values())
    letters = chat.letters()
    assert {letter.code for letter in letters} == {"CRM_CHAT_STATUS_APPLY_FAILED"}
    reasons = {name: {x.reason for x in letters if x.record.key == str(refused[name].id).encode()} for name in REFUSALS}
    assert reasons["P0001"] == {"P0001: this deal is frozen"}
    assert reasons["23514"] == {"23514: not this one"}
    assert reasons["22012"] == {"22012: division by zero"}
    (long,) = reasons["P0001 with 5 MB of text"]
    assert long.startswith("P0001: xxx")
    assert len(long.encode()) <= 1_000
    assert chat.marks() == {event.message_id for deal, event in sent if deal in healthy}
    placed = {row["deal_id"] for row in rows(chat.connection, "select deal_id from crm.deal_chat_positions")}
    assert placed == {deal.id for deal in healthy}
    assert max(len(line) for line in result.stderr.splitlines()) < 16_000
    assert_acknowledged(chat)


def test_what_postgresql_would_refuse_only_at_commit_is_a_dead_letter_too(chat: Chat) -> None:
    refused, healthy = chat.deal(), [chat.deal() for _ in range(5)]
    refuse(chat.connection, {"23514": refused}, timing="after")
    chat.send(*(deal.event("Ready") for deal in (*healthy, refused)))
    result = chat.consume()
    assert result.exit_code == 0, result.stderr[-2000:]
    assert {chat.status(deal) for deal in healthy} == {"Ready"}
    assert chat.status(refused) == "Pending"
    assert [letter.code for letter in chat.letters()] == ["CRM_CHAT_STATUS_APPLY_FAILED"]


# --- the loop ---------------------------------------------------------------------------------------------------------


def test_events_as_messenger_produces_them_are_folded_in_order_whatever_the_batch_size(chat: Chat) -> None:
    deals = [chat.deal() for _ in range(4)]
    statuses = ("Provisioning", "Failed", "Provisioning", "Failed", "Failed", "Provisioning")
    events = [deal.event(status) for status in statuses for deal in deals]
    assert messenger.send(chat.kafka.bootstrap_servers, events, topic=chat.topic) == 24
    document = chat.consumed("--batch-size", "1")
    assert counts(document) == {"applied": 20, "stale": 4}
    assert document["batches"] == 24
    assert {chat.status(deal) for deal in deals} == {"Provisioning"}


def test_until_caught_up_ends_at_the_end_that_it_saw_though_messenger_goes_on(chat: Chat) -> None:
    """A producer that never leaves the consumer a poll without records."""
    deal, noise = chat.deal(), chat.deal()
    chat.send(deal.event("Ready"))
    enough = 400
    sent: list[int] = []
    producer = Producer({"bootstrap.servers": chat.kafka.bootstrap_servers, "linger.ms": 0})
    done = threading.Event()

    def go_on() -> None:
        while not done.wait(0.02) and len(sent) < enough:
            producer.produce(chat.topic, noise.event("Provisioning").value(), str(noise.id).encode())
            producer.flush(10)
            sent.append(1)

    with ThreadPoolExecutor() as pool:
        going = pool.submit(go_on)
        try:
            result = chat.consume()
        finally:
            done.set()
            going.result()
    assert result.exit_code == 0
    assert chat.status(deal) == "Ready"
    assert len(sent) < enough, "the consumer ended only when the producer did"


def test_an_empty_topic_is_caught_up_at_once(chat: Chat) -> None:
    document = chat.consumed()
    assert (counts(document), document["batches"]) == ({}, 0)
    assert runs(chat.connection) == []


def test_until_caught_up_retries_what_is_due_also_when_there_is_nothing_new(chat: Chat) -> None:
    """A CronJob's run of a moment: more deals are due than one batch takes."""
    deals = [chat.missing_deal() for _ in range(5)]
    chat.send(*(deal.event("Ready") for deal in deals))
    chat.consumed()
    assert len(chat.deferred()) == 5
    for deal in deals:
        insert_deal(chat.connection, id=deal.id, tenant_id=deal.tenant_id)
    chat.let_pauses_pass()
    assert counts(chat.consumed("--batch-size", "2")) == {"applied": 5}
    assert {chat.status(deal) for deal in deals} == {"Ready"}
    assert chat.deferred() == []


def test_a_dry_run_says_what_the_run_then_does_and_changes_nothing(chat: Chat) -> None:
    deals, late, missing = [chat.deal() for _ in range(5)], chat.missing_deal(), chat.missing_deal()
    chat.send(late.event("Provisioning"))
    chat.consumed()
    chat.deal(id=late.id, tenant_id=late.tenant_id)
    chat.let_pauses_pass()
    twice = deals[0].event("Ready")
    chat.send(
        twice,
        twice,
        deals[0].event("Failed"),
        *(deal.event(status) for deal in deals[1:] for status in ("Provisioning", "Failed")),
        missing.event("Ready"),
        Deal(deals[1].id, uuid.uuid4()).event("Ready"),
        Outgoing("no event", "x"),
        deals[2].event("Archived"),
    )
    before, offsets = fingerprints(chat.connection), chat.committed()
    foreseen = [chat.consumed("--dry-run", "--batch-size", size) for size in ("2", "1000")]
    assert (fingerprints(chat.connection), chat.committed(), chat.letters()) == (before, offsets, [])
    real = chat.consumed()
    names = [name for name in real if name.endswith("_count")]
    assert [[document[name] for name in names] for document in foreseen] == [[real[name] for name in names]] * 2
    assert real["applied_count"] == 10
    assert (real["duplicate_count"], real["dead_lettered_count"], real["deferred_count"]) == (1, 3, 1)


def test_sigterm_ends_the_loop_with_0_and_the_result(chat: Chat) -> None:
    deal = chat.deal()
    chat.send(deal.event("Ready"))
    with chat.running() as consumer:
        wait_until(lambda: chat.status(deal) == "Ready", "the event to be applied")
        consumer.send_signal(signal.SIGTERM)
        result = finish(consumer)
    assert result.exit_code == 0, result.stderr
    assert counts(result.json) == {"applied": 1}
    assert result.json["caught_up"] is False
    assert_acknowledged(chat)


def test_the_time_budget_ends_the_loop_with_0(chat: Chat) -> None:
    with chat.running("--time-budget", "1s") as consumer:
        result = finish(consumer)
    assert (result.exit_code, result.json["caught_up"]) == (0, False)


AWAY: Final = {
    "postgresql": {"CRMCTL_DATABASE_URL": "postgresql://crm:secret@127.0.0.1:1/crm"},
    "the dead-letter topic": {"CRMCTL_CHAT_STATUS__DLQ_TOPIC": "pin.crm.absent"},
}


@pytest.mark.real_kafka
@pytest.mark.parametrize("away", AWAY)
def test_the_time_budget_ends_the_wait_for_what_is_away_with_69(chat: Chat, away: str) -> None:
    chat.send(Outgoing(b"garbage", "key"), chat.deal().event("Ready"))
    with chat.running("--time-budget", "5s", env=AWAY[away]) as consumer:
        result = finish(consumer, timeout=20)
    assert (result.exit_code, result.json["error"]["code"]) == (69, "CRMCTL_UNAVAILABLE")
    pauses = [line["seconds"] for line in log_lines(result, "waiting to try again")]
    assert pauses[:2] == [1.0, 2.0]
    assert sum(pauses) <= 5, "the last one is as long as what was left"
    assert not any(chat.committed().values())


@pytest.mark.real_kafka
def test_a_topic_that_does_not_exist_is_a_configuration_error(chat: Chat) -> None:
    result = chat.consume(env={"CRMCTL_CHAT_STATUS__TOPIC": "pin.messenger.absent"})
    assert (result.exit_code, result.json["error"]["code"]) == (78, "CRMCTL_CONFIGURATION")
    assert "pin.messenger.absent does not exist" in result.json["error"]["message"]


def test_without_postgresql_until_caught_up_exits_69_and_commits_nothing(chat: Chat) -> None:
    deal = chat.deal()
    chat.send(deal.event("Ready"))
    result = chat.consume(database="postgresql://crm:secret@127.0.0.1:1/crm")
    assert (result.exit_code, result.json["error"]["code"]) == (69, "CRMCTL_UNAVAILABLE")
    assert "secret" not in result.stdout + result.stderr
    assert chat.committed() == {}
    assert counts(chat.consumed()) == {"applied": 1}


@dataclass(slots=True)
class Message:
    """A record as confluent_kafka hands it out, or the end of a partition."""

    number: int
    position: int
    timestamp_ms: int = 0
    is_end: bool = False
    size: int = 0

    def partition(self) -> int:
        return self.number

    def offset(self) -> int:
        return self.position

    def timestamp(self) -> tuple[int, int]:
        return 1, self.timestamp_ms

    def error(self) -> KafkaError | None:
        return KafkaError(KafkaError._PARTITION_EOF) if self.is_end else None

    def value(self) -> bytes | None:
        return bytes(self.size) or None

    def key(self) -> None:
        return None

    def __len__(self) -> int:
        return self.size

    headers = key


@dataclass(slots=True)
class Member:
    """What `confluent_kafka.Consumer` is to the record source: it hands out what the test gave it."""

    ahead: list[Message]
    committed: dict[int, int] = field(default_factory=dict)
    paused: set[int] = field(default_factory=set)

    def consume(self, limit: int, seconds: float) -> list[Message]:
        ready = [message for message in self.ahead if message.number not in self.paused]
        taken = ready[:limit]
        self.ahead = [message for message in self.ahead if message not in taken]
        return taken

    def commit(self, offsets: list[TopicPartition], asynchronous: bool) -> None:
        self.committed |= {entry.partition: entry.offset for entry in offsets}

    def pause(self, partitions: list[TopicPartition]) -> None:
        self.paused |= {entry.partition for entry in partitions}

    def resume(self, partitions: list[TopicPartition]) -> None:
        self.paused -= {entry.partition for entry in partitions}


def source_of(member: Member, *partitions: int) -> RecordSource:
    """A record source to which these partitions were assigned."""
    topic = Topic("topic", "id", len(partitions))
    assigned: dict[int, int | None] = dict.fromkeys(partitions)
    return RecordSource(cast(Consumer, member), cast(AdminClient, None), topic, "group", logs.configure(), assigned)


def held(looks: int) -> Callable[[], bool]:
    """Whether to stop, for a hold that looks at its partitions so often."""
    left = iter([False] * looks)
    return lambda: next(left, True)


def test_a_record_that_comes_while_the_batch_is_held_is_not_acknowledged_with_the_batch() -> None:
    """It is kept for the next poll, and a crash must not lose it."""
    member = Member([Message(0, 5)])
    source = source_of(member, 0, 1)
    assert [record.position.offset for record in source.poll(10, 0)] == [5]
    member.ahead = [Message(1, 7), Message(1, 8)]
    source.hold(60, held(2))
    source.commit()
    assert member.committed.get(0) == 6
    assert member.committed.get(1, 7) == 7
    assert [record.position.offset for record in source.poll(10, 0)] == [7]
    assert [record.position.offset for record in source.poll(10, 0)] == [8]
    source.commit()
    assert member.committed == {0: 6, 1: 9}


def test_a_batch_ends_at_8_mib_and_what_was_read_beyond_is_the_next_one() -> None:
    sizes = [3, 3, 3, 9, 1]
    member = Member([Message(0, number, size=size << 20) for number, size in enumerate(sizes)])
    source = source_of(member, 0)
    source.joined = True
    batches = []
    for _ in range(4):
        batches.append([record.position.offset for record in source.poll(10, 0)])
        source.commit()
        assert member.committed == {0: batches[-1][-1] + 1}
        assert source.at_end({0: 5}) is (batches[-1] == [4])
    assert batches == [[0, 1], [2], [3], [4]]


def test_a_hold_reads_one_record_of_each_partition_and_none_of_those_that_have_some_in_hand() -> None:
    member = Member([Message(0, 5), Message(0, 6)])
    source = source_of(member, 0, 1, 2)
    source.poll(1, 0)
    member.ahead += [Message(1, 7), Message(1, 8), Message(2, 9)]
    for _ in range(2):
        source.hold(60, held(10))
    assert member.ahead == [Message(0, 6), Message(1, 8)]
    assert [record.position[1:] for record in source.poll(10, 0)] == [(1, 7), (2, 9)]
    assert member.paused == set()


def test_the_oldest_unread_record_is_known_while_the_broker_stalls_and_gone_at_the_end_of_its_partition_only() -> None:
    member = Member([Message(0, 5, 1_000), Message(0, 6, 2_000)])
    source = source_of(member, 0)
    source.poll(10, 0)
    assert source.oldest_unread_ms == 1_000
    source.commit()
    source.poll(10, 0)
    assert source.oldest_unread_ms == 2_000, "nothing came, but the end was not reached"
    member.ahead = [Message(0, 7, is_end=True)]
    source.poll(10, 0)
    assert source.oldest_unread_ms is None


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_oldest_unread_record_is_that_of_the_partition_that_is_furthest_behind(order: tuple[int, int]) -> None:
    messages = {0: Message(0, 5, 1_000), 1: Message(1, 5, 9_000)}
    member = Member([messages[number] for number in order])
    source = source_of(member, 0, 1)
    source.poll(10, 0)
    member.ahead = [Message(1, 6, is_end=True)]
    source.poll(10, 0)
    assert source.oldest_unread_ms == 1_000, "in hand"
    source.commit()
    assert source.oldest_unread_ms == 1_000, "more may follow it"
    member.ahead = [Message(1, 6, 9_500)]
    source.poll(10, 0)
    source.commit()
    assert source.oldest_unread_ms == 1_000, "another partition goes on"
    member.ahead = [Message(0, 6, is_end=True)]
    source.poll(10, 0)
    assert source.oldest_unread_ms == 9_500


def test_a_record_that_comes_to_an_idle_topic_while_it_is_held_is_the_oldest_unread_one() -> None:
    member = Member([])
    source = source_of(member, 0, 1)
    member.ahead = [Message(1, 7, 3_000)]
    source.hold(60, held(3))
    assert source.oldest_unread_ms == 3_000
    source.commit()
    assert source.oldest_unread_ms == 3_000, "it was read, and not handled"


def test_a_signal_while_dead_letters_are_in_hand_ends_the_run_with_what_it_did_and_no_failure(
    database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    class Source(RecordSource):
        def subscribe(self, stopping: Callable[[], bool]) -> None:
            self.joined = True

        def end_offsets(self) -> dict[int, int]:
            return {0: 6}

    class Cluster:
        def list_topics(self, timeout: float) -> Any:
            return SimpleNamespace(topics={"dlq": None})

    member = Member([Message(0, 5)])  # a tombstone is malformed
    log = logs.configure()
    transactions = Transactions(database.url, DatabaseSettings(), application_name=APPLICATION)
    consumption = Consumption(
        source=Source(
            cast(Consumer, member), cast(AdminClient, None), Topic("topic", "id", 1), "group", log, {0: None}
        ),
        database=transactions,
        dead_letters=DeadLetters(Publisher(lambda: cast(Producer, Cluster())), "dlq", "group"),
        metrics=ChatStatusMetrics(),
        tracing=Tracing(),
        log=log,
        group="group",
        run=Run(uuid.uuid4(), "", stopping=lambda: not member.ahead),
        options=Options(until_caught_up=True),
    )
    document = consumption.consume().document()
    transactions.close()
    assert member.committed == {}
    assert (document["caught_up"], document["dead_lettered_count"]) == (False, 0)
    assert "acknowledge" not in capsys.readouterr().err


# --- transactions of the producer -------------------------------------------------------------------------------------


def produce_in_transaction(chat: Chat, *events: ChatStatusChanged, abort: bool, partition: int = 0) -> None:
    producer = Producer({"bootstrap.servers": chat.kafka.bootstrap_servers, "transactional.id": str(uuid.uuid4())})
    producer.init_transactions(30)
    producer.begin_transaction()
    for event in events:
        producer.produce(chat.topic, event.value(), str(event.deal_id).encode(), partition)
    producer.flush(30)
    if abort:
        producer.abort_transaction(30)
    else:
        producer.commit_transaction(30)


@pytest.mark.real_kafka
def test_aborted_events_are_not_applied_and_markers_at_the_end_do_not_keep_the_run_from_ending(chat: Chat) -> None:
    deal, aborted, malformed = chat.deal(), chat.deal(), chat.deal()
    produce_in_transaction(chat, deal.event("Provisioning"), abort=False, partition=0)
    produce_in_transaction(chat, aborted.event("Ready"), malformed.event("Nonsense"), abort=True, partition=0)
    produce_in_transaction(chat, aborted.event("Ready"), abort=True, partition=1)
    assert counts(chat.consumed()) == {"applied": 1}
    assert [chat.status(d) for d in (deal, aborted, malformed)] == ["Provisioning", "Pending", "Pending"]
    assert chat.letters() == []
    # Record and marker; two records and a marker. The run has read up to there, so nothing is left to lag behind.
    assert {number: offset for number, offset in chat.committed().items() if offset} == {0: 5, 1: 2}


@pytest.mark.real_kafka
def test_events_of_an_open_transaction_are_not_waited_for_and_are_applied_after_its_commit(chat: Chat) -> None:
    deal, before = chat.deal(), chat.deal()
    chat.send(before.event("Ready"), partition=0)
    producer = Producer({"bootstrap.servers": chat.kafka.bootstrap_servers, "transactional.id": str(uuid.uuid4())})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(chat.topic, deal.event("Ready").value(), str(deal.id).encode(), 0)
    producer.flush(30)
    assert counts(chat.consumed()) == {"applied": 1}
    assert (chat.status(before), chat.status(deal)) == ("Ready", "Pending")
    producer.commit_transaction(30)
    assert counts(chat.consumed()) == {"applied": 1}
    assert chat.status(deal) == "Ready"


# --- events whose deal is missing -------------------------------------------------------------------------------------


def test_one_missing_deal_never_delays_the_other_deals_of_its_partition(chat: Chat) -> None:
    """Measured in positions: all around the waiting events is applied and acknowledged in the same run."""
    missing, others = chat.missing_deal(), [chat.deal() for _ in range(30)]
    events = [missing.event("Provisioning")]
    for number, deal in enumerate(others):
        events.append(deal.event("Ready"))
        if number % 10 == 5:
            events.append(missing.event("Failed" if number % 20 == 5 else "Provisioning"))
    chat.send(*events, partition=0)
    assert counts(chat.consumed("--batch-size", "4")) == {"applied": 30, "deferred": 4}
    assert {chat.status(deal) for deal in others} == {"Ready"}
    assert chat.committed()[0] == len(events)
    waiting = {row["offset"] for row in chat.deferred()}
    assert waiting == {number for number, event in enumerate(events) if event.deal_id == missing.id}
    applied = {row["offset"] for row in rows(chat.connection, 'select "offset" from crm.deal_chat_positions')}
    assert waiting | applied == set(range(len(events)))


def test_the_events_of_a_deal_that_appears_later_apply_in_order_also_after_a_restart(chat: Chat) -> None:
    deal = chat.missing_deal()
    queue = [deal.event(status) for status in ("Provisioning", "Failed", "Provisioning")]
    chat.send(*queue)
    chat.consumed("--batch-size", "2")
    assert len(chat.deferred()) == 3
    insert_deal(chat.connection, id=deal.id, tenant_id=deal.tenant_id)
    new = deal.event("Failed", failure_reason="later")
    chat.send(new)
    result = chat.consume(env={"CRMCTL_LOG_LEVEL": "debug"})
    assert counts(result.json) == {"applied": 4}
    applied = log_lines(result, "applied")
    assert [line["MessageId"] for line in applied] == [str(event.message_id) for event in (*queue, new)]
    assert [line["FromStatus"] for line in applied] == ["Pending", "Provisioning", "Failed", "Provisioning"]
    assert chat.status(deal) == "Failed"
    assert chat.deferred() == []


@dataclass(slots=True)
class Projection:
    """The transaction of a batch on a real database, at a moment of the test's choosing, as the consumer runs it."""

    database: Database
    topic_id: str = "topic"
    partitions: tuple[int, ...] = (0,)
    letters: list[Decision] = field(default_factory=list)
    _offset: int = 0

    def batch(self, *events: ChatStatusChanged, now: datetime, partition: int = 0, limit: int = 100) -> dict[UUID, str]:
        """Project new events and what is due; returns the outcome of each message."""
        raws = [self._record(event, partition) for event in events]
        decoded = tuple(decode(raw.value, raw.position) for raw in raws)
        batch = Batch(decoded, {raw.position: raw for raw in raws})
        scope = Scope("group", "messenger", self.topic_id, 4, self.partitions)
        transactions = Transactions(self.database.url, DatabaseSettings(), application_name=APPLICATION)
        condemned: dict[Position, tuple[ErrorCode, str]] = {}
        try:
            while True:
                try:
                    plan = project(transactions.begin(), scope, batch, now, condemned, retry_limit=limit)
                    transactions.commit()
                except DeadLettersFirst as first:
                    transactions.rollback()
                    for raw, decision in first.letters:
                        condemned[raw.position] = (decision.code or ErrorCode.APPLY_FAILED, decision.reason)
                        self.letters.append(decision)
                else:
                    return {UUID(d.event.message_id): d.outcome.value for d in plan.decisions}
        finally:
            transactions.close()

    def _record(self, event: ChatStatusChanged, partition: int) -> RawRecord:
        position = Position(self.topic_id, partition, self._offset)
        self._offset += 1
        return RawRecord(position, "messenger", str(event.deal_id).encode(), event.value(), (("h", None),), 1)


T0: Final = datetime(2026, 11, 29, 12, tzinfo=UTC)


def attempts(connection: Connection) -> dict[UUID, tuple[int, float]]:
    """Of each waiting message: the retries that failed, and the seconds from T0 to the next."""
    found = rows(connection, "select message_id, attempts, next_attempt_at from crm.deferred_messages")
    return {row["message_id"]: (row["attempts"], (row["next_attempt_at"] - T0).total_seconds()) for row in found}


def test_retries_come_after_5_10_30_60_and_120_seconds_and_then_the_event_alone_is_a_dead_letter(
    database: Database,
) -> None:
    connection, projection = database.connect(), Projection(database)
    deal = Deal(uuid.uuid4(), uuid.uuid4())
    first, second = deal.event("Provisioning"), deal.event("Failed")
    projection.batch(first, now=T0)
    assert attempts(connection) == {first.message_id: (0, 5)}
    projection.batch(second, now=T0 + timedelta(seconds=4))
    assert attempts(connection) == {first.message_id: (0, 5), second.message_id: (0, 9)}
    # The whole queue is looked at when its first event is due; each event keeps its own times.
    schedule = [(5, 1, 15), (15, 2, 45), (45, 3, 105), (105, 4, 225)]
    for at, failed, following in schedule:
        projection.batch(now=T0 + timedelta(seconds=at) - timedelta(microseconds=1))
        assert attempts(connection)[first.message_id] == (failed - 1, at)
        projection.batch(now=T0 + timedelta(seconds=at))
        assert attempts(connection)[first.message_id] == (failed, following)
    assert attempts(connection)[second.message_id][0] < 4
    assert projection.letters == []
    projection.batch(now=T0 + timedelta(seconds=225))
    (letter,) = projection.letters
    assert (letter.event.message_id, letter.code, letter.attempts) == (str(first.message_id), "CRM_DEAL_NOT_FOUND", 5)
    assert letter.reason == "the deal was still missing after 5 retries"
    assert set(attempts(connection)) == {second.message_id}
    assert scalar(connection, "select count(*) from crm.processed_messages") == 0

    insert_deal(connection, id=deal.id, tenant_id=deal.tenant_id)
    projection.batch(now=T0 + timedelta(hours=1))
    assert scalar(connection, "select chat_status from crm.deals") == "Failed"
    assert len(projection.letters) == 1


def test_a_retry_that_finds_the_deal_applies_its_queue_in_order_at_whatever_times_it_is_due(database: Database) -> None:
    connection, projection = database.connect(), Projection(database)
    deal = Deal(uuid.uuid4(), uuid.uuid4())
    events = [deal.event(status) for status in ("Provisioning", "Failed", "Provisioning", "Failed")]
    for seconds, event in enumerate(events):
        projection.batch(event, now=T0 + timedelta(seconds=seconds))
    insert_deal(connection, id=deal.id, tenant_id=deal.tenant_id)
    assert projection.batch(now=T0 + timedelta(seconds=4)) == {}
    decided = projection.batch(now=T0 + timedelta(seconds=5))
    assert decided == {event.message_id: "applied" for event in events}
    assert scalar(connection, "select chat_status from crm.deals") == "Failed"
    assert scalar(connection, 'select "offset" from crm.deal_chat_positions') == 3
    assert attempts(connection) == {}


def test_retries_of_partitions_that_are_not_ours_are_left_alone(database: Database) -> None:
    connection = database.connect()
    theirs, ours = Projection(database, partitions=(2,)), Projection(database, partitions=(0, 1, 3))
    deal = Deal(uuid.uuid4(), uuid.uuid4())
    event = deal.event("Ready")
    theirs.batch(event, now=T0, partition=2)
    insert_deal(connection, id=deal.id, tenant_id=deal.tenant_id)
    assert ours.batch(now=T0 + timedelta(hours=1)) == {}
    assert attempts(connection) == {event.message_id: (0, 5)}
    assert theirs.batch(now=T0 + timedelta(hours=1)) == {event.message_id: "applied"}


@pytest.mark.parametrize(("topic_id", "partition"), [("topic", 9), ("re-created", 2)])
def test_retries_of_a_partition_that_no_longer_exists_belong_to_the_owner_of_partition_0(
    database: Database, topic_id: str, partition: int
) -> None:
    connection = database.connect()
    deal = Deal(uuid.uuid4(), uuid.uuid4())
    event = deal.event("Ready")
    Projection(database, topic_id=topic_id).batch(event, now=T0, partition=partition)
    insert_deal(connection, id=deal.id, tenant_id=deal.tenant_id)
    others, first = Projection(database, partitions=(1, 2, 3)), Projection(database, partitions=(0, 1))
    assert others.batch(now=T0 + timedelta(seconds=5)) == {}
    assert first.batch(now=T0 + timedelta(seconds=5)) == {event.message_id: "applied"}
    assert scalar(connection, "select chat_status from crm.deals") == "Ready"


def test_a_batch_takes_no_more_retries_than_its_limit_and_the_longest_due_first(database: Database) -> None:
    connection, projection = database.connect(), Projection(database)
    deals = [Deal(uuid.uuid4(), uuid.uuid4()) for _ in range(5)]
    events = [deal.event("Ready") for deal in deals]
    for seconds, event in enumerate(events):
        projection.batch(event, now=T0 + timedelta(seconds=seconds))
    for deal in deals:
        insert_deal(connection, id=deal.id, tenant_id=deal.tenant_id)
    later = T0 + timedelta(hours=1)
    reached = [set(projection.batch(now=later, limit=2)) for _ in range(3)]
    ids = [event.message_id for event in events]
    assert reached == [set(ids[:2]), set(ids[2:4]), set(ids[4:])]


# --- the chat role, and others at work on the same deals --------------------------------------------------------------


@pytest.fixture
def chat_role(database: Database) -> str:
    """The address of the database for a user with the chat role of `crmctl db roles`, and no other."""
    return Roles.make(database).login(Kind.CHAT)


def test_the_consumer_does_all_its_work_with_the_grants_of_the_chat_role(chat: Chat, chat_role: str) -> None:
    deal, deleted, refused = chat.deal(), chat.deal(deleted_at=LONG_AGO), chat.deal()
    missing, lost = chat.missing_deal(), chat.missing_deal()
    refuse(chat.connection, {"P0001": refused})
    chat.send(*(d.event("Provisioning") for d in (deal, deleted, refused, missing, lost)))
    chat.send(deal.event("Failed"), deal.event("Nonsense"), deal.event("Ready", tenant_id=uuid.uuid4()))
    result = chat.consume(database=chat_role)
    assert result.exit_code == 0, result.stderr
    assert counts(result.json) == {"applied": 2, "soft_deleted": 1, "deferred": 2, "dead_lettered": 3}
    insert_deal(chat.connection, id=missing.id, tenant_id=missing.tenant_id)
    rows(chat.connection, "update crm.deferred_messages set attempts = 4, next_attempt_at = now()")
    chat.send(missing.event("Ready"))
    result = chat.consume(database=chat_role)
    assert counts(result.json) == {"applied": 2, "dead_lettered": 1}
    assert (chat.status(deal), chat.status(missing)) == ("Failed", "Ready")


def test_the_chat_role_cannot_touch_any_other_column_of_a_deal(chat: Chat, chat_role: str) -> None:
    chat.deal()
    with psycopg.connect(chat_role, autocommit=True) as connection:
        connection.execute("update crm.deals set chat_status = 'Ready', updated_at = now()")
        for column in ("status", "version", "tenant_id", "deleted_at", "created_at"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(f"update crm.deals set {column} = {column}".encode())


def waits_for_a_lock(connection: Connection, kind: str) -> bool:
    return bool(
        scalar(
            connection,
            "select count(*) from pg_stat_activity where application_name = %s and datname = current_database() "
            "and wait_event_type = 'Lock' and wait_event = %s",
            APPLICATION,
            kind,
        )
    )


def test_an_edit_that_holds_the_deal_is_waited_for_and_neither_change_is_lost(chat: Chat) -> None:
    deal, other = chat.deal(updated_at=LONG_AGO), chat.deal()
    chat.send(deal.event("Ready"), other.event("Ready"))
    editor = chat.database.connect(autocommit=False)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(chat.consume)
        # The consumer's transaction begins before the edit's statement, and ends behind it.
        editor.execute("select from crm.deals where id = %s for update", (deal.id,))
        wait_until(lambda: waits_for_a_lock(chat.connection, "transactionid"), "the consumer to wait for the deal")
        edit = "update crm.deals set status = 'Completed', version = version + 1, updated_at = clock_timestamp()"
        (edited_at,) = editor.execute(f"{edit} where id = %s returning updated_at".encode(), (deal.id,)).fetchone() or (
            0,
        )
        editor.commit()
        result = running.result()
    assert result.exit_code == 0, result.stderr
    row = chat.deal_rows()[deal.id]
    assert (row["status"], row["version"], row["chat_status"]) == ("Completed", 2, "Ready")
    assert row["updated_at"] >= edited_at, "updated_at went back in time"
    assert counts(result.json) == {"applied": 2}


@contextmanager
def consumer_at_the_gate(chat: Chat, deal: Deal) -> Iterator[tuple[Callable[[], None], "subprocess.Popen[str]"]]:
    """A consumer that has locked the deals of its batch and stands in the middle of its write."""
    with closed_gate(chat.database) as gate:
        chat.connection.execute(
            f"""
            create function crm_test.gate_in_chat_write() returns trigger language plpgsql as $$
            begin
                if new.id = '{deal.id}' and new.chat_status <> old.chat_status then
                    perform crm_test.pass_gate();
                end if;
                return new;
            end $$;
            create trigger gate_in_chat_write before update on crm.deals
                for each row execute function crm_test.gate_in_chat_write();
            """.encode()
        )
        patient = {"CRMCTL_DATABASE__LOCK_TIMEOUT": "60s", "CRMCTL_DATABASE__STATEMENT_TIMEOUT": "60s"}
        with chat.running("--until-caught-up", env=patient) as consumer:
            wait_until(lambda: waits_for_a_lock(chat.connection, "advisory"), "the consumer to come to the gate")
            yield gate.open, consumer


def test_an_expiry_of_the_deals_booking_and_an_edit_pass_beside_the_consumer_and_nothing_is_lost(chat: Chat) -> None:
    """With the foreign keys that a CRM has: the expiry's rows refer to the deal that the consumer holds."""
    for table in ("bookings", "deal_timeline_events"):
        chat.connection.execute(f"alter table crm.{table} add foreign key (deal_id) references crm.deals (id)".encode())
    deal = chat.deal()
    booking_id = insert_booking(chat.connection, deal=False, deal_id=deal.id, tenant_id=deal.tenant_id)
    chat.send(deal.event("Provisioning"))
    editor = chat.database.connect()
    with consumer_at_the_gate(chat, deal) as (open_gate, consumer), ThreadPoolExecutor() as pool:
        expiry = run_crmctl("bookings", "expire", "-o", "json", database=chat.database)
        assert (expiry.exit_code, expiry.json["reserve_expired_count"]) == (0, 1), expiry.stderr
        assert chat.status(deal) == "Pending"
        edit = "update crm.deals set status = 'Cancelled', version = version + 1 where id = %s"
        editing = pool.submit(editor.execute, edit, (deal.id,))
        open_gate()
        editing.result(30)
        result: CallResult = finish(consumer)
    assert result.exit_code == 0, result.stderr
    row = chat.deal_rows()[deal.id]
    assert (row["status"], row["version"], row["chat_status"]) == ("Cancelled", 2, "Provisioning")
    status = scalar(chat.connection, "select status from crm.bookings where id = %s", booking_id)
    assert status == "ReserveExpired"
    assert [json.loads(line)["message"] for line in result.stderr.splitlines()] == ["batch", "run finished"]


def test_two_runs_at_once_share_the_partitions_and_apply_each_event_once(chat: Chat) -> None:
    deals = [chat.deal() for _ in range(12)]
    chat.send(*(deal.event(status) for status in ("Provisioning", "Failed", "Ready", "Failed") for deal in deals))
    with ThreadPoolExecutor() as pool:
        results = [running.result() for running in [pool.submit(chat.consume, "--batch-size", "3") for _ in range(2)]]
    assert [result.exit_code for result in results] == [0, 0], [result.stderr for result in results]
    total: Counter[str] = Counter()
    for run in runs(chat.connection):
        total.update(run["counts"])
    assert (total["applied_count"], total["stale_count"]) == (36, 12)
    assert {chat.status(deal) for deal in deals} == {"Ready"}
    assert len(chat.marks()) == 48
