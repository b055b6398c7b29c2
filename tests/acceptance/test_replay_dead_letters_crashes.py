"""`crmctl dlq replay` is killed at random moments, with another replay beside it: the end is that of one run."""

import random
import time
import uuid
from collections import Counter

import pytest

from tests.acceptance.conftest import ChaosTable
from tests.chat_status_support import Chat, Deal
from tests.dlq_support import (
    MALFORMED,
    MISMATCH,
    NOT_FOUND,
    counts,
    ledger,
    letter,
    replayed,
    send_letters,
    start_replay,
)
from tests.expire_support import column, finish, rows, scaled
from tests.kafka_fixtures import Kafka, MakeTopic, Outgoing
from tests.support import Database

pytestmark = [pytest.mark.chaos]


@pytest.fixture
def chat(kafka: Kafka, database: Database, make_topic: MakeTopic) -> Chat:
    return Chat.make(kafka, database, make_topic)


def test_killed_at_random_moments(chat: Chat, chaos_table: ChaosTable) -> None:
    kills, dice = scaled(30), random.Random(7)
    tenant = uuid.uuid4()
    deals = [Deal(uuid.uuid4(), tenant) for _ in range(kills * 120)]
    with chat.connection.cursor() as cursor:
        cursor.executemany(
            b"insert into crm.deals (id, tenant_id, status, created_at, updated_at)"
            b" values (%s, %s, 'Active', now(), now())",
            [(deal.id, tenant) for deal in deals],
        )
    rows(
        chat.connection,
        """
        create table crm.seen_changes (deal_id uuid, chat_status text);
        create function crm.see_change() returns trigger language plpgsql as $$
        begin insert into crm.seen_changes values (new.id, new.chat_status); return null; end $$;
        create trigger see_change after update on crm.deals for each row execute function crm.see_change()
        """,
    )
    good = [letter(deal.event("Ready"), source=(0, number)) for number, deal in enumerate(deals)]
    twins = [Outgoing(one.value, one.key, one.headers) for one in dice.sample(good, kills * 3)]
    bad = {
        NOT_FOUND: [letter(chat.missing_deal().event("Ready")) for _ in range(kills)],
        MISMATCH: [letter(Deal(deal.id, uuid.uuid4()).event("Ready")) for deal in deals[:kills]],
        MALFORMED: [letter(None, MALFORMED, value=b"x" * (n + 1), key=str(n)) for n in range(kills)],
    }
    sent = [*good, *twins, *(one for group in bad.values() for one in group)]
    dice.shuffle(sent)
    send_letters(chat, *sent)

    with chaos_table.row("dlq replay: kill -9, another replay beside it") as row:
        row.due = len(sent)
        killed = 0
        while killed < kills:
            with start_replay(chat, "--batch-size", "5", "--rate", "150") as victim:
                time.sleep(dice.uniform(0.5, 1.1))
                beside = dice.random() < 0.3
                if beside:
                    with start_replay(chat, "--batch-size", "3", "--rate", "100") as other:
                        time.sleep(dice.uniform(0.5, 0.9))
                        other.kill()
                if victim.poll() is None:
                    victim.kill()
                    killed += 1
                finish(victim)
        last = replayed(chat)
        assert counts(replayed(chat)) == {}
        row.interruptions = f"{killed} kills"
        row.outcome = f"each applied once; {last['applied_count']:,} were left for the last run"

    changes = Counter(column(chat.connection, "select deal_id from crm.seen_changes"))
    assert changes == Counter(deal.id for deal in deals)
    found = Counter((entry["resolution"], entry["code"]) for entry in ledger(chat).values())
    expected: Counter[tuple[str, str | None]] = Counter({("failed", code): kills for code in bad})
    expected[("applied", None)], expected[("duplicate", None)] = len(good), len(twins)
    assert found == expected
    assert {entry["attempts"] for entry in ledger(chat).values() if entry["resolution"] == "failed"} == {1}
    assert len(chat.marks()) == len(good)
