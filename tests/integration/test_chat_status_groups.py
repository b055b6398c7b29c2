"""`chat-status lag`, `chat-status rewind`, and AC-8: a full replay ends in the same state, with or without marks."""

import os
import pty
import random
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.chat_status_support import Chat, Deal, hour_ago_ms, outgoing
from tests.expire_support import finish, rows, scalar, wait_until
from tests.kafka_fixtures import Kafka, MakeTopic, Outgoing
from tests.support import CallResult, Database

pytestmark = pytest.mark.real_kafka

STATUSES: Final = ("Provisioning", "Failed", "Provisioning", "Failed", "Ready", "Pending")


@pytest.fixture
def chat(kafka: Kafka, database: Database, make_topic: MakeTopic) -> Chat:
    return Chat.make(kafka, database, make_topic)


def moves(result: CallResult) -> dict[int, tuple[int | None, int]]:
    """Of each partition: from where to where the group was moved."""
    assert result.exit_code == 0, result.stderr
    return {move["partition"]: (move["old"], move["new"]) for move in result.json["moves"]}


def rewind(chat: Chat, to: str, *args: str) -> CallResult:
    return chat.run("rewind", "--to", to, "--yes", *args)


def lag(chat: Chat) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """The lines of `chat-status lag` by partition, and the rest of its document."""
    result = chat.run("lag")
    assert result.exit_code == 0, result.stderr
    document = result.json
    return {line["partition"]: line for line in document.pop("partitions")}, document


def fill(chat: Chat, per_partition: int, *, partitions: int = 2) -> float:
    """Records one second apart in the first partitions; returns when the first ones were made, an hour ago."""
    first = hour_ago_ms()
    for partition in range(partitions):
        deal = chat.deal()
        chat.kafka.produce(
            chat.topic,
            [
                outgoing(deal.event("Provisioning"), partition=partition, timestamp_ms=first + number * 1000)
                for number in range(per_partition)
            ],
        )
    return first / 1000


# --- the replay -------------------------------------------------------------------------------------------------------


def a_history(dice: random.Random) -> tuple[list[Deal], list[tuple[Deal, str]]]:
    deals = [Deal(uuid.uuid4(), uuid.uuid4()) for _ in range(20)]
    history = [(deal, dice.choice(STATUSES)) for _ in range(10) for deal in dice.sample(deals, 12)]
    return deals, history


def sequential(history: list[tuple[Deal, str]], deal: Deal) -> str:
    """The source's rank guard over the deal's events in their order."""
    ranks = {"Pending": 0, "Provisioning": 1, "Failed": 1, "Ready": 2}
    status = "Pending"
    for other, new in history:
        if other == deal and new != status and ranks[new] >= ranks[status] and ranks[status] < 2:
            status = new
    return status


@pytest.mark.parametrize(
    "prune",
    ["", "delete from crm.processed_messages", "delete from crm.processed_messages where hashtext(key) % 2 = 0"],
    ids=["marks kept", "marks pruned", "half the marks pruned"],
)
def test_ac_8_a_full_replay_from_offset_0_ends_in_the_same_state_and_changes_no_deal(chat: Chat, prune: str) -> None:
    deals, history = a_history(random.Random(20261129))
    for deal in deals:
        chat.deal(id=deal.id, tenant_id=deal.tenant_id)
    chat.send(*(deal.event(status) for deal, status in history), linger_ms=5)
    assert chat.consumed("--batch-size", "7")["batches"] > 10
    before = chat.deal_rows()
    marks = chat.marks()
    assert {deal: chat.status(deal) for deal in deals} == {deal: sequential(history, deal) for deal in deals}
    assert Counter(row["chat_status"] for row in before.values())["Ready"] not in {0, 20}

    if prune:
        rows(chat.connection, prune)
    kept = len(chat.marks())
    old = chat.committed()
    assert moves(rewind(chat, "earliest")) == {number: (old.get(number), 0) for number in range(4)}
    document = chat.consumed("--batch-size", "11")
    assert (document["applied_count"], document["duplicate_count"]) == (0, kept)
    assert document["stale_count"] == len(history) - kept
    assert chat.deal_rows() == before
    assert chat.marks() == marks
    assert chat.committed() == old | {number: 0 for number in range(4) if number not in old}
    assert chat.letters() == []


def test_a_replay_with_dead_letters_and_missing_deals_makes_the_same_letters_again_and_nothing_else(chat: Chat) -> None:
    deal, missing = chat.deal(), chat.missing_deal()
    chat.send(deal.event("Failed"), deal.event("Nonsense"), missing.event("Ready"), deal.event("Provisioning"))
    chat.consumed()
    before, waiting = chat.deal_rows(), chat.deferred()
    moves(rewind(chat, "earliest"))
    document = chat.consumed()
    assert (document["applied_count"], document["duplicate_count"]) == (0, 3)
    assert chat.deal_rows() == before
    assert chat.deferred() == waiting
    first, second = chat.letters()
    assert first.source == second.source


# --- rewind -----------------------------------------------------------------------------------------------------------


def test_rewind_moves_all_partitions_or_one_to_where_it_is_told(chat: Chat) -> None:
    first = fill(chat, 5)
    chat.consumed()
    assert moves(rewind(chat, "earliest")) == {0: (5, 0), 1: (5, 0), 2: (0, 0), 3: (0, 0)}
    assert moves(rewind(chat, "latest")) == {0: (0, 5), 1: (0, 5), 2: (0, 0), 3: (0, 0)}
    assert moves(rewind(chat, "3", "--partition", "1")) == {1: (5, 3)}
    assert chat.committed() == {0: 5, 1: 3, 2: 0, 3: 0}
    moment = datetime.fromtimestamp(first + 2, UTC).isoformat()
    assert moves(rewind(chat, moment, "--partition", "0", "--partition", "1")) == {0: (5, 2), 1: (3, 2)}
    beyond = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    assert moves(rewind(chat, beyond, "--partition", "0")) == {0: (2, 5)}
    assert chat.consumed()["duplicate_count"] == 3


def test_rewind_works_on_a_group_that_has_never_consumed(chat: Chat) -> None:
    fill(chat, 3, partitions=1)
    assert moves(rewind(chat, "2", "--partition", "0")) == {0: (None, 2)}
    assert chat.consumed()["applied_count"] == 1
    assert scalar(chat.connection, 'select "offset" from crm.deal_chat_positions') == 2


REFUSED: Final = {
    ("--to", "6", "--partition", "0"): "offset 6 is outside partition 0, which holds 0 to 5",
    ("--to", "1"): "offset 1 is outside partition 1, which holds 0 to 0",
    ("--to", "earliest", "--partition", "4"): "partition 4 does not exist",
    ("--to", "yesterday"): "yesterday",
    ("--to", "2026-11-29T12:00:00"): "2026-11-29T12:00:00",
    ("--to", "-1"): "-1",
    (): "--to",
}


def test_rewind_refuses_what_is_not_there(chat: Chat) -> None:
    fill(chat, 5, partitions=1)
    for args, message in REFUSED.items():
        result = chat.run("rewind", *args, "--yes")
        assert result.exit_code == 2, args
        assert message in result.stdout + result.stderr
    assert chat.committed() == {}


def test_rewind_asks_first_and_without_a_terminal_it_does_nothing(chat: Chat) -> None:
    fill(chat, 5, partitions=1)
    chat.consumed()
    result = chat.run("rewind", "--to", "earliest")
    assert (result.exit_code, result.json["error"]["code"]) == (2, "CRMCTL_USAGE")
    assert "--yes" in result.json["error"]["hint"]
    assert chat.committed()[0] == 5

    declined, question = on_a_terminal(chat, "n\n")
    assert declined == 2
    assert f"Move group {chat.group} on {chat.topic} (0: 5 to 0)?" in question
    assert chat.committed()[0] == 5
    accepted, _ = on_a_terminal(chat, "y\n")
    assert accepted == 0
    assert chat.committed()[0] == 0


def on_a_terminal(chat: Chat, answer: str) -> tuple[int, str]:
    """Run a rewind of partition 0 on a terminal; returns its exit code and what it said."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "crmctl", "chat-status", "rewind", "--to", "earliest", "--partition", "0"]
    with subprocess.Popen(
        command,
        stdin=theirs,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        cwd=Path("/"),
        env=dict(os.environ) | chat.env | {"CRMCTL_DATABASE_URL": chat.database.url},
    ) as process:
        os.close(theirs)
        os.write(ours, answer.encode())
        said = b""
        try:
            while chunk := os.read(ours, 4096):
                said += chunk
        except OSError:  # how Linux says that the other side has gone
            pass
        os.close(ours)
    return process.returncode, " ".join(said.decode().split())


def test_rewind_refuses_while_the_group_has_members(chat: Chat) -> None:
    deal = chat.deal()
    chat.send(deal.event("Ready"))
    with chat.running() as consumer:
        wait_until(lambda: chat.status(deal) == "Ready", "the consumer to be at work")
        result = rewind(chat, "earliest")
        consumer.terminate()
        assert finish(consumer).exit_code == 0
    assert (result.exit_code, result.json["error"]["code"]) == (12, "CRMCTL_GROUP_ACTIVE")
    assert f"group {chat.group} still has 1 members" in result.json["error"]["message"]
    assert moves(rewind(chat, "latest"))


def test_a_rewind_that_a_member_forestalls_is_refused_too(chat: Chat) -> None:
    """The member joins between the look and the move: Kafka itself refuses."""
    from crmctl.jobs import rewind_chat_status as job

    deal = chat.deal()
    chat.send(deal.event("Ready"), partition=0)
    client = AdminClient({"bootstrap.servers": chat.kafka.bootstrap_servers})
    reader = Consumer({"bootstrap.servers": chat.kafka.bootstrap_servers, "group.id": chat.group})
    planned = job.plan(client, reader, chat.group, chat.topic, "earliest", ())
    reader.close()
    with chat.running() as consumer:
        wait_until(lambda: chat.status(deal) == "Ready", "the consumer to be at work")
        with pytest.raises(Exception, match="still has") as caught:
            job.apply(client, chat.group, chat.topic, planned)
        consumer.terminate()
        finish(consumer)
    assert type(caught.value).__name__ == "GroupActiveError"
    assert chat.committed()[0] == 1


def test_a_group_instance_id_makes_the_consumer_a_static_member(chat: Chat) -> None:
    deal = chat.deal()
    chat.send(deal.event("Ready"))
    with chat.running(env={"CRMCTL_CHAT_STATUS__GROUP_INSTANCE_ID": "pod-0"}) as consumer:
        wait_until(lambda: chat.status(deal) == "Ready", "the consumer to be at work")
        admin = AdminClient({"bootstrap.servers": chat.kafka.bootstrap_servers})
        (member,) = admin.describe_consumer_groups([chat.group])[chat.group].result(30).members
        consumer.terminate()
        assert finish(consumer).exit_code == 0
    assert member.group_instance_id == "pod-0"


# --- lag --------------------------------------------------------------------------------------------------------------


def test_lag_shows_messages_and_seconds_by_partition_and_what_waits(chat: Chat) -> None:
    first = fill(chat, 5)
    missing = [chat.missing_deal() for _ in range(3)]
    chat.send(*(deal.event("Ready") for deal in missing), partition=3)
    lines, rest = lag(chat)
    assert {n: (x["committed_offset"], x["end_offset"], x["lag_messages"]) for n, x in lines.items()} == {
        0: (None, 5, 5),
        1: (None, 5, 5),
        2: (None, 0, 0),
        3: (None, 3, 3),
    }
    assert lines[0]["lag_seconds"] == pytest.approx(time.time() - first, abs=10)
    assert lines[2]["lag_seconds"] == 0
    assert 0 <= lines[3]["lag_seconds"] < 60
    assert rest == {
        "group": chat.group,
        "topic": chat.topic,
        "deferred_count": 0,
        "oldest_deferred_at": None,
        "next_attempt_at": None,
    }

    chat.consumed()
    moves(rewind(chat, "4", "--partition", "0"))
    lines, rest = lag(chat)
    assert {n: x["lag_messages"] for n, x in lines.items()} == {0: 1, 1: 0, 2: 0, 3: 0}
    assert lines[0]["lag_seconds"] == pytest.approx(time.time() - first - 4, abs=10)
    assert [lines[n]["lag_seconds"] for n in (1, 2, 3)] == [0, 0, 0]
    (deferred,) = rows(
        chat.connection, "select min(deferred_at), min(next_attempt_at) as next from crm.deferred_messages"
    )
    assert rest["deferred_count"] == 3
    assert datetime.fromisoformat(rest["oldest_deferred_at"]) == deferred["min"]
    assert datetime.fromisoformat(rest["next_attempt_at"]) == deferred["next"]


@contextmanager
def a_member(chat: Chat) -> Iterator[Callable[[], bool]]:
    """Whether the group still has the one member that it had at the start of the block."""
    deal = chat.deal()
    chat.send(deal.event("Ready"))
    with chat.running() as consumer:
        wait_until(lambda: chat.status(deal) == "Ready", "the consumer to be at work")
        admin = AdminClient({"bootstrap.servers": chat.kafka.bootstrap_servers})

        def members() -> set[str]:
            described = admin.describe_consumer_groups([chat.group])[chat.group].result(30)
            return {member.member_id for member in described.members}

        before = members()
        yield lambda: members() == before
        consumer.terminate()
        assert finish(consumer).exit_code == 0


def test_lag_joins_no_group_and_moves_nothing(chat: Chat) -> None:
    with a_member(chat) as undisturbed:
        lag(chat)
        assert undisturbed()
    committed = chat.committed()
    lag(chat)
    assert chat.committed() == committed


def test_lag_is_nothing_behind_aborted_records_at_the_end_of_a_partition(chat: Chat) -> None:
    deal = chat.deal()
    producer = Producer({"bootstrap.servers": chat.kafka.bootstrap_servers, "transactional.id": str(uuid.uuid4())})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(chat.topic, deal.event("Ready").value(), str(deal.id).encode(), 0)
    producer.flush(30)
    producer.abort_transaction(30)
    chat.consumed()
    lines, _ = lag(chat)
    assert (lines[0]["lag_messages"], lines[0]["lag_seconds"]) == (0, 0)


def test_lag_and_rewind_name_a_topic_that_does_not_exist(chat: Chat) -> None:
    absent = {"CRMCTL_CHAT_STATUS__TOPIC": "pin.messenger.absent"}
    for command in (("lag",), ("rewind", "--to", "earliest", "--yes")):
        result = chat.run(*command, env=absent)
        assert (result.exit_code, result.json["error"]["code"]) == (78, "CRMCTL_CONFIGURATION")
        assert "pin.messenger.absent does not exist" in result.json["error"]["message"]


def test_lag_counts_from_the_first_record_that_is_left_where_the_committed_one_is_gone(chat: Chat) -> None:
    fill(chat, 5, partitions=1)
    chat.consumed()
    moves(rewind(chat, "1", "--partition", "0"))
    admin = AdminClient({"bootstrap.servers": chat.kafka.bootstrap_servers})
    gone = TopicPartition(chat.topic, 0, 3)
    admin.delete_records([gone])[gone].result(30)
    lines, _ = lag(chat)
    assert (lines[0]["committed_offset"], lines[0]["lag_messages"]) == (1, 2)
    assert chat.consumed()["duplicate_count"] == 2


def test_records_that_no_consumer_can_decode_lag_like_any_other(chat: Chat) -> None:
    chat.kafka.produce(chat.topic, [Outgoing(None, None, partition=0, timestamp_ms=hour_ago_ms())])
    lines, _ = lag(chat)
    assert lines[0]["lag_messages"] == 1
    assert 3600 <= lines[0]["lag_seconds"] < 4000
