"""The memory of `chat-status consume` is bounded in bytes, whatever the size of the records in a batch."""

import json
import os
import subprocess
import sys
from typing import Any, Final

import pytest

from tests.chat_status_support import Chat, outgoing
from tests.expire_support import rows, scalar
from tests.kafka_fixtures import Kafka, MakeTopic, Outgoing
from tests.support import Database

pytestmark = pytest.mark.real_kafka

# What the issue allows, and the Deployment's limit is twice that.
LIMIT: Final = 192 * 1024 * 1024
LARGE: Final = 950_000
COUNT: Final = 200

# In a process of its own, because the peak of a child includes that of the process which forked it.
_MEASURE: Final = """
import json, resource, subprocess, sys
done = subprocess.run([sys.executable, "-m", "crmctl", *sys.argv[1:]], capture_output=True, text=True)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps({"exit_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr[-2000:], "peak": peak}))
"""


@pytest.fixture
def chat(kafka: Kafka, database: Database, make_topic: MakeTopic) -> Chat:
    return Chat.make(kafka, database, make_topic, dlq_config={"max.message.bytes": "2000000"})


def consumed_within_limit(chat: Chat) -> dict[str, Any]:
    """Consume to the end; return the result document, when the peak of the resident memory was within its limit."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, "chat-status", "consume", "--until-caught-up", "-o", "json"],
        env=os.environ | chat.env | {"CRMCTL_DATABASE_URL": chat.database.url},
        cwd="/",
        capture_output=True,
        encoding="utf-8",
        timeout=180,
        check=True,
    )
    measured = json.loads(done.stdout)
    assert measured["exit_code"] == 0, measured["stderr"]
    assert measured["peak"] <= LIMIT, f"{measured['peak'] >> 20} MiB"
    document: dict[str, Any] = json.loads(measured["stdout"])
    assert document["caught_up"] is True
    return document


def test_of_malformed_records(chat: Chat) -> None:
    for number in range(COUNT):
        chat.send(Outgoing(b"\xff" * LARGE, str(number), partition=number % 4))
    document = consumed_within_limit(chat)
    assert document["dead_lettered_count"] == COUNT
    assert sum(chat.committed().values()) == COUNT
    assert len({letter.source for letter in chat.letters()}) == len(chat.letters()) == COUNT


def test_of_events_that_wait_for_one_deal_and_are_tried_again_and_given_up(chat: Chat) -> None:
    deal = chat.missing_deal()
    for _ in range(COUNT):
        chat.send(outgoing(deal.event("Failed", failure_reason="x" * LARGE), partition=0))
    waiting = "select count(*) from crm.deferred_messages where length(value) > %s and attempts >= %s"
    for attempts in (0, 1):
        chat.let_pauses_pass()
        consumed_within_limit(chat)
        assert scalar(chat.connection, waiting, LARGE, attempts) == COUNT

    rows(chat.connection, "update crm.deferred_messages set attempts = 4, next_attempt_at = now()")
    assert consumed_within_limit(chat)["dead_lettered_count"] == COUNT
    letters = chat.letters()
    assert [letter.source for letter in letters] == [(0, number) for number in range(COUNT)]
    assert min(len(letter.record.value or b"") for letter in letters) > LARGE
