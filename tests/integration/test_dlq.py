"""`crmctl dlq list|show|replay|discard` against a real PostgreSQL and Kafka."""

import getpass
import os
import socket
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import NewTopic

from crmctl.adapters import kafka as adapter
from crmctl.adapters import postgres
from crmctl.adapters.topic_reader import TopicReader
from crmctl.dev.kafka_mock import PARTITIONS
from crmctl.jobs.dead_letters import STATEMENTS
from crmctl.jobs.serve_metrics import OpenLetters
from crmctl.settings import DatabaseSettings, KafkaSettings
from crmctl.telemetry import logs
from tests.chat_status_support import Chat, Deal, edited, outgoing
from tests.dlq_support import (
    APPLY_FAILED,
    MALFORMED,
    MISMATCH,
    NOT_FOUND,
    SOURCE_ID,
    UNKNOWN,
    counts,
    dlq,
    error_of,
    ledger,
    letter,
    listed,
    open_letters,
    place,
    replayed,
    resolutions,
    send_letters,
    start_replay,
)
from tests.expire_support import fingerprints, finish, rows, scalar
from tests.kafka_fixtures import Kafka, MakeTopic, Outgoing, Record
from tests.support import Database, insert_deal

MAX_VALUE = "9999-12-31T23:59:59.9999999+00:00"


@pytest.fixture
def chat(kafka: Kafka, database: Database, make_topic: MakeTopic) -> Chat:
    """A dead-letter topic, a group and a database of the test's own."""
    return Chat.make(kafka, database, make_topic)


def refuse_status(chat: Chat, status: str) -> None:
    """From now on PostgreSQL refuses this chat status."""
    rows(
        chat.connection, f"alter table crm.deals add constraint no_{status} check (chat_status <> '{status}') not valid"
    )


def allow_status(chat: Chat, status: str) -> None:
    """PostgreSQL takes it again."""
    rows(chat.connection, f"alter table crm.deals drop constraint no_{status}")


class TestAHundredLettersOfAllCodes:
    """Through the consumer itself, then the causes are fixed, but for those that nobody can fix."""

    def test_what_can_be_applied_is_and_the_rest_is_reported_once(self, chat: Chat) -> None:
        tenant = uuid.uuid4()
        missing = [Deal(uuid.uuid4(), tenant) for _ in range(40)]
        refused = [chat.deal() for _ in range(9)]
        known_now = [chat.deal() for _ in range(10)]
        theirs = [chat.deal() for _ in range(20)]
        refuse_status(chat, "Ready")
        chat.send(
            *(deal.event("Provisioning") for deal in missing),
            *(deal.event("Ready") for deal in refused),
            *(Deal(deal.id, uuid.uuid4()).event("Ready") for deal in theirs),
            *(Outgoing(f"no event {number}", str(number)) for number in range(20)),
        )
        for _ in range(6):
            chat.consumed()
            chat.let_pauses_pass()
        assert Counter(found.code for found in chat.letters()) == {
            NOT_FOUND: 40,
            APPLY_FAILED: 9,
            MISMATCH: 20,
            MALFORMED: 20,
        }
        # What an older crmctl did not know, and one letter that is not ours.
        send_letters(
            chat,
            *(letter(deal.event("Provisioning"), UNKNOWN) for deal in known_now),
            Outgoing(known_now[0].event("Failed").value(), "foreign"),
        )
        assert listed(chat)["open_count"] == 100

        for deal in missing:
            insert_deal(chat.connection, id=deal.id, tenant_id=deal.tenant_id)
        allow_status(chat, "Ready")
        before = fingerprints(chat.connection)
        foreseen = replayed(chat, "--dry-run")
        assert fingerprints(chat.connection) == before
        first, second = replayed(chat), replayed(chat)

        assert foreseen["dry_run"] is True
        same = {"run_id", "dry_run", "duration_ms"}
        assert {k: v for k, v in foreseen.items() if k not in same} == {k: v for k, v in first.items() if k not in same}
        assert counts(first) == {"applied": 60, "failed": 40}
        assert first["failed"] == first["open"] == {MISMATCH: 20, MALFORMED: 20}
        assert first["open_count"] == listed(chat)["open_count"] == 40
        assert counts(second) == {}
        assert second["batches"] == 0
        assert second["open"] == first["open"]
        assert resolutions(chat) == {"applied": 60, "failed": 40}
        statuses = Counter(row["chat_status"] for row in chat.deal_rows().values())
        assert statuses == {"Provisioning": 49, "Failed": 1, "Ready": 9, "Pending": 20}

    def test_two_replays_at_once_have_one_effect(self, chat: Chat) -> None:
        deals = [chat.deal() for _ in range(200)]
        send_letters(chat, *(letter(deal.event("Ready")) for deal in deals))
        rows(
            chat.connection,
            """
            create table crm.seen_changes (deal_id uuid);
            create function crm.see_change() returns trigger language plpgsql as $$
            begin insert into crm.seen_changes values (new.id); return null; end $$;
            create trigger see_change after update on crm.deals for each row execute function crm.see_change()
            """,
        )
        with ExitStack() as stack:
            running = [stack.enter_context(start_replay(chat, "--batch-size", "7")) for _ in range(2)]
            results = [finish(process) for process in running]
        assert [result.exit_code for result in results] == [0, 0]
        assert sum(result.json["applied_count"] for result in results) == 200
        assert scalar(chat.connection, "select count(*) from crm.seen_changes") == 200
        assert resolutions(chat) == {"applied": 200}


class TestTheRule:
    """A replay decides as the consumer does, by the positions that the headers give."""

    def test_an_earlier_provisioning_does_not_undo_a_later_failed(self, chat: Chat) -> None:
        deal = chat.deal()
        send_letters(chat, letter(deal.event("Failed"), source=(3, 20)))
        assert counts(replayed(chat)) == {"applied": 1}
        send_letters(chat, letter(deal.event("Provisioning"), source=(3, 10)))
        assert counts(replayed(chat)) == {"stale": 1}
        assert chat.status(deal) == "Failed"

    def test_a_later_provisioning_follows_a_failed(self, chat: Chat) -> None:
        deal = chat.deal()
        send_letters(
            chat,
            letter(deal.event("Provisioning"), source=(3, 20)),
            letter(deal.event("Failed"), source=(3, 10)),
        )
        assert counts(replayed(chat)) == {"applied": 2}
        assert chat.status(deal) == "Provisioning"

    def test_a_ready_applies_although_later_events_of_lower_rank_did(self, chat: Chat) -> None:
        deal = chat.deal()
        ready = deal.event("Ready")
        [first] = chat.send(ready, partition=0)
        chat.send(deal.event("Provisioning"), deal.event("Failed"), partition=0)
        rows(chat.connection, "update crm.deals set chat_status = 'Failed'")
        send_letters(chat, letter(ready, source=(0, first.offset)))
        assert counts(replayed(chat)) == {"applied": 1}
        assert chat.status(deal) == "Ready"

    @pytest.mark.parametrize("status", ["Provisioning", "Failed", "Ready"])
    def test_nothing_moves_a_ready_deal(self, chat: Chat, status: str) -> None:
        deal = chat.deal(chat_status="Ready")
        send_letters(chat, letter(deal.event(status)))
        assert counts(replayed(chat)) == {"stale": 1}
        assert chat.status(deal) == "Ready"

    def test_the_latest_moment_of_net_poisons_nothing(self, chat: Chat) -> None:
        deal = chat.deal()
        made = letter(deal.event("Provisioning"), source=(0, 1))
        latest = edited(deal.event("Provisioning"), payload={"ChangedAt": MAX_VALUE})
        send_letters(chat, Outgoing(latest, made.key, made.headers))
        assert counts(replayed(chat)) == {"applied": 1}
        # From another partition, where only ChangedAt could say which is later.
        send_letters(chat, letter(deal.event("Failed"), source=(1, 1)))
        assert counts(replayed(chat)) == {"applied": 1}
        assert chat.status(deal) == "Failed"

    def test_a_message_that_has_been_processed_is_a_duplicate(self, chat: Chat) -> None:
        deal = chat.deal()
        event = deal.event("Provisioning")
        chat.send(event)
        assert chat.consumed()["applied_count"] == 1
        send_letters(chat, letter(event))
        assert counts(replayed(chat)) == {"duplicate": 1}

    def test_a_message_that_waits_for_its_deal_is_no_duplicate(self, chat: Chat) -> None:
        """It may still end as another letter of its source record, which this one's resolution would close."""
        deal = chat.missing_deal()
        event = deal.event("Provisioning")
        [record] = chat.send(event)
        assert chat.consumed()["deferred_count"] == 1
        send_letters(chat, letter(event, source=(record.partition, record.offset)))
        assert replayed(chat)["failed"] == {NOT_FOUND: 1}
        insert_deal(chat.connection, id=deal.id, tenant_id=deal.tenant_id)
        assert counts(replayed(chat)) == {"applied": 1}
        chat.let_pauses_pass()
        assert chat.consumed()["dead_lettered_count"] == 0
        assert chat.deferred() == []
        assert chat.status(deal) == "Provisioning"

    def test_an_event_of_a_deleted_deal_is_stale(self, chat: Chat) -> None:
        deal = chat.deal(deleted_at=datetime.now(UTC))
        [record] = send_letters(chat, letter(deal.event("Ready")))
        assert counts(replayed(chat)) == {"stale": 1}
        assert ledger(chat)[place(record)]["reason"] == "the deal is deleted"
        assert chat.status(deal) == "Pending"

    def test_of_deals_only_the_status_and_the_time_change(self, chat: Chat) -> None:
        deal = chat.deal()
        before = chat.deal_rows()[deal.id]
        send_letters(chat, letter(deal.event("Ready")))
        replayed(chat)
        after = chat.deal_rows()[deal.id]
        assert {name for name in after if after[name] != before[name]} == {"chat_status", "updated_at"}


class TestLettersThatAreNotWhole:
    def test_without_any_header_of_ours(self, chat: Chat) -> None:
        deal = chat.deal()
        [record] = send_letters(chat, Outgoing(deal.event("Ready").value(), str(deal.id)))
        [row] = listed(chat)["letters"]
        assert (row["letter"], row["code"], row["source"], row["state"]) == (place(record), "none", None, "open")
        assert counts(replayed(chat)) == {"applied": 1}
        assert chat.status(deal) == "Ready"

    def test_from_an_older_header_set_the_source_is_not_known(self, chat: Chat) -> None:
        deal = chat.deal()
        older = letter(deal.event("Ready"), without=("x-source-topic-id", "x-original-partition", "x-dlq-attempts"))
        send_letters(chat, older)
        [row] = listed(chat)["letters"]
        assert (row["code"], row["source"], row["attempts"]) == (NOT_FOUND, None, 0)
        assert counts(replayed(chat)) == {"applied": 1}

    @pytest.mark.parametrize(
        "headers",
        [
            {"x-original-offset": b"-1"},
            {"x-original-offset": b"9" * 30},
            {"x-original-partition": b"3000000000"},
            {"x-source-topic-id": b""},
            {"x-source-topic-id": b"a\0b" * 100},
            {"x-dlq-error-code": b"A\0\xff", "x-dlq-reason": b"\0\xfe" * 5_000, "x-dlq-attempts": b"many"},
            {"x-dlq-failed-at": b"yesterday"},
            {"x-dlq-failed-at": b"0001-01-01T00:00:00+14:00"},
        ],
    )
    def test_with_headers_that_make_no_sense(self, chat: Chat, headers: dict[str, bytes]) -> None:
        deal = chat.deal()
        made = letter(deal.event("Ready"))
        twisted = tuple((name, headers.get(name, value)) for name, value in made.headers)
        [record] = send_letters(chat, Outgoing(made.value, made.key, twisted))
        assert open_letters(chat) == {place(record)}
        assert dlq(chat, "show", place(record)).exit_code == 0
        assert counts(replayed(chat)) == {"applied": 1}

    def test_tombstones_and_garbage_do_not_block_the_others(self, chat: Chat) -> None:
        deal = chat.deal()
        send_letters(
            chat,
            Outgoing(None, str(deal.id)),
            letter(None, MALFORMED, value=b"\xff\0" * 1000, key=str(deal.id)),
            letter(deal.event("Archived"), UNKNOWN),
            letter(deal.event("Ready")),
        )
        result = replayed(chat)
        assert counts(result) == {"applied": 1, "failed": 3}
        assert result["failed"] == {MALFORMED: 2, UNKNOWN: 1}
        assert chat.status(deal) == "Ready"


class TestOneResolutionClosesAllOfItsSource:
    def test_crash_duplicates(self, chat: Chat) -> None:
        deal = chat.deal()
        twins = [letter(deal.event("Ready"), source=(1, 7)) for _ in range(3)]
        twins = [Outgoing(twins[0].value, one.key, one.headers) for one in twins]
        send_letters(chat, *twins)
        assert counts(replayed(chat)) == {"applied": 1, "duplicate": 2}
        assert open_letters(chat) == set()

    def test_letters_that_a_full_replay_of_the_source_made_again(self, chat: Chat) -> None:
        deal = chat.missing_deal()
        [record] = send_letters(chat, letter(deal.event("Ready"), source=(1, 7), partition=0))
        assert dlq(chat, "discard", place(record), "--reason", "gone", "--yes").exit_code == 0
        [again] = send_letters(chat, letter(deal.event("Ready"), source=(1, 7), partition=1))
        assert open_letters(chat) == set()
        [row] = [row for row in listed(chat, "--all")["letters"] if row["letter"] == place(again)]
        assert row["state"] == "discarded"
        result = replayed(chat)
        assert counts(result) == {"duplicate": 1}  # the letter gets its own row
        assert counts(replayed(chat)) == {}

    def test_a_letter_of_the_same_place_in_another_source_topic_is_another(self, chat: Chat) -> None:
        one, two = chat.deal(), chat.deal()
        send_letters(chat, letter(one.event("Ready"), source=(1, 7)))
        replayed(chat)
        send_letters(chat, letter(two.event("Ready"), source=(1, 7), source_id="another-topic-id"))
        assert counts(replayed(chat)) == {"applied": 1}

    @pytest.mark.real_kafka
    def test_a_dead_letter_topic_that_was_created_again_starts_afresh(self, chat: Chat) -> None:
        """Its offsets begin at 0 again; what its predecessor's letters came to says nothing of them."""
        send_letters(chat, *(letter(chat.deal().event("Ready"), partition=0) for _ in range(3)))
        assert counts(replayed(chat)) == {"applied": 3}
        send_letters(chat, letter(chat.missing_deal().event("Ready"), partition=0))
        assert counts(replayed(chat)) == {"failed": 1}
        admin = chat.kafka.admin()
        admin.delete_topics([chat.dlq_topic])[chat.dlq_topic].result()
        admin.create_topics([NewTopic(chat.dlq_topic, PARTITIONS, 1)])[chat.dlq_topic].result()
        fresh = [chat.deal() for _ in range(5)]
        send_letters(chat, *(letter(deal.event("Ready"), partition=0) for deal in fresh))
        before = listed(chat)
        assert (before["open_count"], before["lost_count"]) == (5, 1)
        result = replayed(chat)
        assert counts(result) == {"applied": 5}
        assert result["lost_count"] == 1
        assert {chat.status(deal) for deal in fresh} == {"Ready"}


@pytest.mark.real_kafka
class TestLostLetters:
    """The topic holds them no more, and nobody has closed them."""

    def take(self, chat: Chat, before: int) -> None:
        """Retention takes what stands before this offset of partition 0."""
        gone = TopicPartition(chat.dlq_topic, 0, before)
        admin = chat.kafka.admin()
        admin.delete_records([gone])[gone].result(30)

    def acknowledged(self, chat: Chat, *args: str) -> int:
        result = dlq(chat, "discard", "--lost", "--reason", "it was too short, INC-43", "--yes", *args)
        assert result.exit_code == 0, result.stderr
        count: int = result.json["acknowledged_count"]
        return count

    def test_are_reported_until_somebody_acknowledges_them(self, chat: Chat) -> None:
        send_letters(chat, letter(chat.deal().event("Ready"), partition=0))
        assert counts(replayed(chat)) == {"applied": 1}
        send_letters(chat, *(letter(chat.missing_deal().event("Ready"), partition=0) for _ in range(2)))
        assert counts(replayed(chat)) == {"failed": 2}
        send_letters(chat, *(letter(chat.missing_deal().event("Ready"), partition=0) for _ in range(4)))
        self.take(chat, 5)
        found = listed(chat)
        assert (found["open_count"], found["lost_count"]) == (2, 4)
        result = dlq(chat, "replay", "--strict")
        assert (result.exit_code, result.json["lost_count"]) == (3, 4)

        before = ledger(chat)
        assert self.acknowledged(chat, "--dry-run") == 4
        assert ledger(chat) == before
        assert self.acknowledged(chat) == 4
        assert self.acknowledged(chat) == 0
        after = ledger(chat)
        assert resolutions(chat) == {"applied": 1, "lost": 4, "failed": 2}
        assert (after["0:1"]["code"], after["0:1"]["attempts"]) == (NOT_FOUND, 1)
        for at in ("0:1", "0:4"):
            assert after[at]["reason"] == "it was too short, INC-43"
            assert after[at]["resolved_by"] == f"{getpass.getuser()}@{socket.gethostname()}"
        found = listed(chat)
        assert (found["open_count"], found["lost_count"]) == (2, 0)
        assert replayed(chat)["lost_count"] == 0

    def test_one_whose_source_another_letter_closed_is_none(self, chat: Chat) -> None:
        deal = chat.missing_deal()
        send_letters(chat, letter(deal.event("Ready"), source=(1, 7), partition=0))
        assert counts(replayed(chat)) == {"failed": 1}
        self.take(chat, 1)
        assert listed(chat)["lost_count"] == 1
        insert_deal(chat.connection, id=deal.id, tenant_id=deal.tenant_id)
        send_letters(chat, letter(deal.event("Ready"), source=(1, 7), partition=0))
        assert counts(replayed(chat)) == {"applied": 1}
        assert listed(chat)["lost_count"] == 0
        assert dlq(chat, "replay", "--strict").exit_code == 0
        assert self.acknowledged(chat) == 0

    def test_one_that_no_replay_has_met_can_be_acknowledged_too(self, chat: Chat) -> None:
        """Its source was closed, which nobody can know any more."""
        event = chat.missing_deal().event("Ready")
        [first] = send_letters(chat, letter(event, source=(1, 7), partition=0))
        assert dlq(chat, "discard", place(first), "--reason", "gone", "--yes").exit_code == 0
        send_letters(chat, letter(event, source=(1, 7), partition=0))
        self.take(chat, 2)
        assert dlq(chat, "replay", "--strict").exit_code == 3
        assert self.acknowledged(chat) == 1
        assert dlq(chat, "replay", "--strict").exit_code == 0

    def test_an_acknowledgement_closes_no_letter_that_is_still_there(self, chat: Chat) -> None:
        deal = chat.missing_deal()
        send_letters(chat, letter(deal.event("Ready"), source=(1, 7), partition=0))
        assert counts(replayed(chat)) == {"failed": 1}
        self.take(chat, 1)
        [again] = send_letters(chat, letter(deal.event("Ready"), source=(1, 7), partition=0))
        assert self.acknowledged(chat) == 1
        assert open_letters(chat) == {place(again)}
        insert_deal(chat.connection, id=deal.id, tenant_id=deal.tenant_id)
        assert counts(replayed(chat)) == {"applied": 1}

    def test_of_an_earlier_topic_can_be_acknowledged_without_a_source(self, chat: Chat) -> None:
        event = chat.missing_deal().event("Ready")
        send_letters(chat, letter(event, without=("x-source-topic-id",), partition=0))
        assert counts(replayed(chat)) == {"failed": 1}
        admin = chat.kafka.admin()
        admin.delete_topics([chat.dlq_topic])[chat.dlq_topic].result()
        admin.create_topics([NewTopic(chat.dlq_topic, PARTITIONS, 1)])[chat.dlq_topic].result()
        assert listed(chat)["lost_count"] == 1
        assert self.acknowledged(chat) == 1
        assert listed(chat)["lost_count"] == 0

    @pytest.mark.parametrize("arguments", [("--at", "0"), ("0:1",), ("--code", MALFORMED)])
    def test_are_acknowledged_all_together(self, chat: Chat, arguments: tuple[str, ...]) -> None:
        result = dlq(chat, "discard", "--lost", *arguments, "--reason", "mine", "--yes")
        assert result.exit_code == 2
        assert "--lost" in result.stderr


class TestALetterThatFailsAgain:
    def test_stays_open_with_one_attempt_more_and_its_latest_code(self, chat: Chat) -> None:
        deal = chat.missing_deal()
        [record] = send_letters(chat, letter(deal.event("Ready"), attempts=5))
        assert replayed(chat)["failed"] == {NOT_FOUND: 1}
        insert_deal(chat.connection, id=deal.id, tenant_id=uuid.uuid4())
        assert replayed(chat)["failed"] == {MISMATCH: 1}
        row = ledger(chat)[place(record)]
        assert (row["resolution"], row["attempts"], row["code"]) == ("failed", 2, MISMATCH)
        [shown] = listed(chat)["letters"]
        assert (shown["state"], shown["replays"], shown["attempts"], shown["code"]) == ("open", 2, 5, MISMATCH)

    def test_for_the_same_cause_is_left_as_it_is(self, chat: Chat) -> None:
        """A rerun changes nothing, also where nothing could be done."""
        send_letters(chat, letter(chat.missing_deal().event("Ready")), letter(None, MALFORMED, value=b"{"))
        assert counts(replayed(chat)) == {"failed": 2}
        before = ledger(chat)
        result = replayed(chat)
        assert counts(result) == {}
        assert result["open"] == {NOT_FOUND: 1, MALFORMED: 1}
        assert ledger(chat) == before

    def test_a_refusal_by_postgresql_is_tried_up_to_max_attempts(self, chat: Chat) -> None:
        deal, other = chat.deal(), chat.deal()
        refuse_status(chat, "Ready")
        [record, _] = send_letters(chat, letter(deal.event("Ready")), letter(other.event("Failed")))
        assert counts(replayed(chat, "--max-attempts", "2")) == {"applied": 1, "failed": 1}
        assert counts(replayed(chat, "--max-attempts", "2")) == {"failed": 1}
        result = dlq(chat, "replay", "--max-attempts", "2", "--strict")
        assert result.exit_code == 3
        assert counts(result.json) == {"refused": 1}
        row = ledger(chat)[place(record)]
        assert (row["attempts"], row["code"]) == (2, APPLY_FAILED)
        assert "23514" in row["reason"]
        allow_status(chat, "Ready")
        assert counts(replayed(chat)) == {"applied": 1}
        assert ledger(chat)[place(record)]["attempts"] == 2

    def test_is_told_with_its_place_and_why(self, chat: Chat) -> None:
        deal = chat.deal()
        [record] = send_letters(chat, letter(Deal(deal.id, uuid.uuid4()).event("Ready")))
        result = dlq(chat, "replay")
        assert f'"offset": {record.offset}' in result.stderr
        assert MISMATCH in result.stderr
        assert str(deal.id) in result.stderr

    def test_makes_exit_3_under_strict_and_0_without(self, chat: Chat) -> None:
        send_letters(chat, letter(chat.missing_deal().event("Ready")))
        assert dlq(chat, "replay").exit_code == 0
        assert dlq(chat, "replay", "--strict").exit_code == 3


class TestFilters:
    @pytest.fixture
    def sent(self, chat: Chat) -> dict[str, Record]:
        """Letters that differ in one thing each."""
        tenant, other = uuid.UUID(int=1), uuid.UUID(int=2)
        deals = {name: chat.deal(id=UUID(int=number), tenant_id=tenant) for number, name in enumerate("abcd", 10)}
        foreign = chat.deal(tenant_id=other)
        hour_ago = datetime(2026, 1, 1, 11, tzinfo=UTC)
        noon = hour_ago + timedelta(hours=1)
        made = {
            "not found": letter(deals["a"].event("Ready"), partition=0, failed_at=noon),
            "refused": letter(deals["b"].event("Ready"), APPLY_FAILED, partition=0, failed_at=noon),
            "other tenant": letter(foreign.event("Ready"), partition=0, failed_at=noon),
            "earlier": letter(deals["c"].event("Ready"), partition=1, failed_at=hour_ago),
            "other key": letter(deals["d"].event("Ready"), partition=1, key="another", failed_at=noon),
            "garbage": letter(None, MALFORMED, value=b"x", key="z", partition=1, failed_at=noon),
        }
        return dict(zip(made, send_letters(chat, *made.values()), strict=True))

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (("--code", APPLY_FAILED), {"refused"}),
            (("--code", APPLY_FAILED, "--code", MALFORMED), {"refused", "garbage"}),
            (("--deal", str(UUID(int=10))), {"not found"}),
            (("--tenant", str(UUID(int=2))), {"other tenant"}),
            (("--key", "another"), {"other key"}),
            (("--until", "2026-01-01T12:00:00Z"), {"earlier"}),
            (("--since", "2026-01-01T15:00:00+03:00", "--tenant", str(UUID(int=2))), {"other tenant"}),
            (("--at", "1"), {"earlier", "other key", "garbage"}),
            (("--at", "0:1"), {"refused"}),
            (("--at", "0:1-"), {"refused", "other tenant"}),
            (("--at", "0:0-1", "--at", "1:2"), {"not found", "refused", "garbage"}),
            (("--at", "0", "--code", NOT_FOUND, "--tenant", str(UUID(int=1))), {"not found"}),
            (("--deal", str(UUID(int=99))), set()),
        ],
    )
    def test_select_exactly_what_they_say(
        self, chat: Chat, sent: dict[str, Record], arguments: tuple[str, ...], expected: set[str]
    ) -> None:
        names = {place(record): name for name, record in sent.items()}
        assert {names[at] for at in open_letters(chat, *arguments)} == expected
        before = replayed(chat, "--dry-run", *arguments)
        assert ledger(chat) == {}
        result = replayed(chat, *arguments)
        assert counts(before) == counts(result)
        assert {names[at] for at in ledger(chat)} == expected
        assert result["open_count"] == len(sent) - sum(row["resolution"] != "failed" for row in ledger(chat).values())

    def test_limit_tries_so_many_and_says_that_there_are_more(self, chat: Chat) -> None:
        deals = [chat.deal() for _ in range(12)]
        send_letters(chat, *(letter(deal.event("Ready"), partition=0) for deal in deals))
        first = replayed(chat, "--limit", "5", "--batch-size", "2")
        assert (counts(first), first["has_more"]) == ({"applied": 5}, True)
        second = replayed(chat, "--limit", "50")
        assert (counts(second), second["has_more"]) == ({"applied": 7}, False)

    def test_what_they_do_not_select_is_not_written_though_its_source_is_closed(self, chat: Chat) -> None:
        deal = chat.missing_deal()
        [first] = send_letters(chat, letter(deal.event("Ready"), source=(1, 7), partition=0))
        assert dlq(chat, "discard", place(first), "--reason", "gone", "--yes").exit_code == 0
        [again] = send_letters(chat, letter(deal.event("Ready"), source=(1, 7), partition=1))
        before = ledger(chat)
        for arguments in (("--at", "0"), ("--code", MALFORMED), ("--code", MALFORMED, "--limit", "1")):
            assert counts(replayed(chat, *arguments)) == {}
            assert ledger(chat) == before
        assert counts(replayed(chat, "--at", place(again))) == {"duplicate": 1}

    def test_a_letter_that_is_closed_with_another_of_its_source_is_not_left_open(self, chat: Chat) -> None:
        event = chat.deal().event("Ready")
        [first, _] = send_letters(chat, *(letter(event, source=(1, 7), partition=0) for _ in range(2)))
        result = replayed(chat, "--at", place(first))
        assert counts(result) == {"applied": 1}
        assert result["open_count"] == listed(chat)["open_count"] == 0

    def test_limit_reads_as_many_at_once_as_ever(self, chat: Chat) -> None:
        """One that is selected, behind many that are not: a transaction for each of those would take minutes."""
        send_letters(chat, *(letter(chat.missing_deal().event("Ready"), partition=0) for _ in range(300)))
        [last] = send_letters(chat, letter(None, MALFORMED, value=b"x", partition=0))
        result = replayed(chat, "--limit", "1", "--code", MALFORMED)
        assert counts(result) == {"failed": 1}
        assert set(ledger(chat)) == {place(last)}
        [run] = rows(chat.connection, "select batch from crm.job_runs where outcome = 'committed'")
        assert run["batch"] <= 3, "a batch is at most what one poll of the broker brings"

    def test_limit_leaves_what_follows_unread(self, chat: Chat) -> None:
        """What it has read beyond is neither tried nor counted."""
        records = send_letters(
            chat,
            letter(None, MALFORMED, value=b"x", partition=0),
            *(letter(chat.deal().event("Ready"), partition=0) for _ in range(5)),
        )
        result = replayed(chat, "--limit", "2", "--code", NOT_FOUND)
        assert counts(result) == {"applied": 2}
        assert (result["open"], result["has_more"]) == ({MALFORMED: 1}, True)
        assert set(ledger(chat)) == {place(records[1]), place(records[2])}

    def test_limit_takes_the_same_letters_as_its_preview(self, chat: Chat) -> None:
        """Whatever the order in which the broker answers for its partitions."""
        send_letters(
            chat,
            *(letter(None, MALFORMED, value=b"x%d" % number, partition=0) for number in range(3)),
            *(letter(chat.deal().event("Ready"), partition=1) for _ in range(3)),
            *(letter(chat.deal(chat_status="Ready").event("Failed"), partition=2) for _ in range(3)),
        )
        arguments = ("--limit", "4", "--batch-size", "2")
        foreseen, result, second = replayed(chat, "--dry-run", *arguments), replayed(chat, *arguments), replayed(chat)
        assert counts(foreseen) == counts(result) == {"failed": 3, "applied": 1}
        assert foreseen["open"] == result["open"] == {MALFORMED: 3}
        assert counts(second) == {"applied": 2, "stale": 3}

    def test_rate_spreads_letters_over_time(self, chat: Chat) -> None:
        send_letters(chat, *(letter(chat.deal().event("Ready")) for _ in range(6)))
        result = replayed(chat, "--rate", "2")
        assert counts(result) == {"applied": 6}
        assert result["duration_ms"] >= 2_900

    def test_rate_counts_letters_that_are_tried(self, chat: Chat) -> None:
        """Those that are not selected take no time of it."""
        send_letters(chat, *(letter(chat.deal().event("Ready"), partition=0) for _ in range(40)))
        send_letters(chat, *(letter(None, MALFORMED, value=b"x%d" % number, partition=0) for number in range(3)))
        result = replayed(chat, "--rate", "2", "--code", MALFORMED)
        assert counts(result) == {"failed": 3}
        assert 1_900 <= result["duration_ms"] < 10_000

    def test_a_key_may_be_any_bytes(self, chat: Chat) -> None:
        """As the shell's $'\\xff' gives them."""
        key = b"a\xff"
        [record] = chat.kafka.produce(chat.dlq_topic, [Outgoing(b"x", key, partition=0)])
        send_letters(chat, letter(None, MALFORMED, value=b"x", key="a", partition=0))
        assert open_letters(chat, "--key", os.fsdecode(key)) == {place(record)}
        assert counts(replayed(chat, "--key", os.fsdecode(key))) == {"failed": 1}
        assert set(ledger(chat)) == {place(record)}

    @pytest.mark.parametrize("text", ["x", "1:", "1:2-1", "-1", "1:2:3", "1:99999999999999999999", "3000000000"])
    def test_a_place_that_is_none_is_a_usage_error(self, chat: Chat, text: str) -> None:
        result = dlq(chat, "list", "--at", text)
        assert result.exit_code == 2
        assert text in result.stderr


class TestTheGroupsOffsets:
    @pytest.mark.real_kafka
    def test_mirror_the_prefix_where_all_is_closed(self, chat: Chat) -> None:
        missing = chat.missing_deal()
        send_letters(
            chat,
            *(letter(chat.deal().event("Ready"), partition=0) for _ in range(3)),
            letter(missing.event("Ready"), partition=0),
            letter(chat.deal().event("Ready"), partition=0),
            letter(chat.deal().event("Ready"), partition=1),
        )
        replayed(chat, "--batch-size", "2")
        assert {number: offset for number, offset in chat.committed(replay=True).items() if offset} == {0: 3, 1: 1}
        insert_deal(chat.connection, id=missing.id, tenant_id=missing.tenant_id)
        assert counts(replayed(chat)) == {"applied": 1}
        assert {number: offset for number, offset in chat.committed(replay=True).items() if offset} == {0: 5, 1: 1}

    @pytest.mark.real_kafka
    def test_stay_before_what_a_limit_has_left(self, chat: Chat) -> None:
        send_letters(chat, *(letter(chat.deal().event("Ready"), partition=0) for _ in range(5)))
        replayed(chat, "--limit", "2")
        assert {number: offset for number, offset in chat.committed(replay=True).items() if offset} == {0: 2}

    @pytest.mark.real_kafka
    def test_say_nothing_that_a_replay_believes(self, chat: Chat) -> None:
        """A database that was restored from before a replay tries its letters again."""
        deal = chat.deal()
        send_letters(chat, letter(deal.event("Ready")))
        replayed(chat)
        rows(chat.connection, "delete from crm.dlq_resolutions")
        rows(chat.connection, "delete from crm.processed_messages")
        rows(chat.connection, "update crm.deals set chat_status = 'Pending'")
        assert counts(replayed(chat)) == {"applied": 1}
        assert chat.status(deal) == "Ready"


class TestTheGauge:
    """`crm_chat_status_dlq_open` counts anew what may have changed, and nothing else."""

    @pytest.fixture
    def gauge(self, chat: Chat) -> Iterator[Callable[[], float]]:
        kafka, log = KafkaSettings(bootstrap_servers=chat.kafka.bootstrap_servers), logs.configure()
        admin = adapter.admin(kafka, log)

        def open_reader() -> TopicReader:
            consumer = adapter.consumer(kafka, log, group=f"{chat.group}-gauge", enable_partition_eof=True)
            return TopicReader.open(consumer, admin, chat.dlq_topic, log)

        database = postgres.Database(chat.database.url, DatabaseSettings(), application_name="gauge")
        letters = OpenLetters(database, open_reader)
        yield lambda: letters.read()[0].samples[0].value
        database.close()

    def test_sees_a_transaction_that_began_first_and_commits_last(self, chat: Chat, gauge: Callable[[], float]) -> None:
        """Two replays at once; the ledger's times are those of the transactions' beginnings."""
        records = send_letters(chat, *(letter(chat.missing_deal().event("Ready"), partition=0) for _ in range(3)))
        assert counts(replayed(chat)) == {"failed": 3}
        assert gauge() == 3
        close = """update crm.dlq_resolutions set resolution = 'applied', resolved_at = now() where "offset" = %s"""
        with chat.database.connect(autocommit=False) as slow, chat.database.connect(autocommit=False) as quick:
            slow.execute("select now()")
            quick.execute(close, (records[0].offset,))
            quick.commit()
            assert gauge() == 2
            slow.execute(close, (records[1].offset,))
            assert gauge() == 2
            slow.commit()
        assert gauge() == listed(chat)["open_count"] == 1

    def test_sees_what_closes_the_source_of_another_letter(self, chat: Chat, gauge: Callable[[], float]) -> None:
        event = chat.missing_deal().event("Ready")
        [_, again] = send_letters(chat, *(letter(event, source=(1, 7), partition=number) for number in (0, 1)))
        assert gauge() == 2
        assert dlq(chat, "discard", place(again), "--reason", "gone", "--yes").exit_code == 0
        assert gauge() == listed(chat)["open_count"] == 0
        send_letters(chat, letter(chat.missing_deal().event("Ready"), partition=0))
        assert gauge() == 1


class TestList:
    def test_summary_groups_by_code_and_reason(self, chat: Chat) -> None:
        send_letters(
            chat,
            *(letter(chat.missing_deal().event("Ready"), reason="gone") for _ in range(3)),
            letter(None, MALFORMED, value=b"x", reason="it is not UTF-8 JSON"),
        )
        document = listed(chat, "--summary")
        assert [(g["count"], g["code"], g["reason"]) for g in document["groups"]] == [
            (3, NOT_FOUND, "gone"),
            (1, MALFORMED, "it is not UTF-8 JSON"),
        ]
        assert document["open_count"] == 4

    def test_all_shows_what_became_of_the_closed(self, chat: Chat) -> None:
        deal = chat.deal()
        send_letters(chat, letter(deal.event("Ready"), source=(0, 1)), letter(deal.event("Failed"), source=(0, 2)))
        replayed(chat)
        assert listed(chat)["letters"] == []
        assert Counter(row["state"] for row in listed(chat, "--all")["letters"]) == {"applied": 1, "stale": 1}

    def test_limit_shows_so_many_and_counts_all(self, chat: Chat) -> None:
        send_letters(chat, *(letter(chat.missing_deal().event("Ready")) for _ in range(5)))
        document = listed(chat, "--limit", "2")
        assert (document["listed_count"], document["open_count"], document["has_more"]) == (2, 5, True)
        assert len(document["letters"]) == 2

    def test_nothing_is_one_document_too(self, chat: Chat) -> None:
        assert listed(chat)["letters"] == []
        assert dlq(chat, "list", form="table").stdout == "No letters.\n"
        assert dlq(chat, "list", "--summary", form="table").stdout == "No dead letters.\n"

    def test_markup_and_an_ascii_terminal_harm_nothing(self, chat: Chat) -> None:
        send_letters(chat, letter(chat.missing_deal().event("Ready"), reason="[/b] причина [red]"))
        result = dlq(chat, "list", form="table", env={"PYTHONIOENCODING": "ascii"})
        assert result.exit_code == 0
        assert "[/b] \\u043f" in result.stdout
        shown = dlq(chat, "list", env={"PYTHONIOENCODING": "ascii"})
        assert shown.json["letters"][0]["reason"] == "[/b] причина [red]"

    def test_a_topic_that_does_not_exist_is_named(self, chat: Chat) -> None:
        result = dlq(chat, "list", env={"CRMCTL_CHAT_STATUS__DLQ_TOPIC": "no.such.topic"})
        if not chat.kafka.is_real:
            pytest.skip("the mock cluster creates every topic that is asked for")
        assert result.exit_code == 78
        assert "no.such.topic" in error_of(result)["message"]

    def test_a_broker_that_is_away_is_69(self, chat: Chat) -> None:
        result = dlq(chat, "list", env={"CRMCTL_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1"})
        assert result.exit_code == 69


class TestShow:
    def test_tells_all_of_a_letter_and_what_a_replay_would_do(self, chat: Chat) -> None:
        deal = chat.deal()
        event = deal.event("Ready")
        [record] = send_letters(chat, letter(event, source=(4, 9), attempts=5))
        document = dlq(chat, "show", place(record)).json
        assert document["letter"] == place(record)
        assert document["source"] == "4:9"
        assert ["x-source-topic-id", SOURCE_ID] in document["headers"]
        assert document["envelope"]["Payload"]["DealId"] == str(deal.id)
        assert document["deal"]["chat_status"] == "Pending"
        assert document["replay"] == {
            "outcome": "applied",
            "code": None,
            "reason": "the deal is Pending, and becomes Ready",
        }
        assert document["resolution"] is None
        assert ledger(chat) == {}
        table = dlq(chat, "show", place(record), form="table").stdout
        assert "the deal is Pending, and becomes Ready" in table

    def test_says_why_a_replay_would_not_apply_it(self, chat: Chat) -> None:
        deal = chat.deal(chat_status="Ready")
        missing = chat.missing_deal()
        records = send_letters(
            chat,
            letter(deal.event("Failed")),
            letter(missing.event("Ready")),
            letter(Deal(deal.id, uuid.uuid4()).event("Ready")),
            letter(None, MALFORMED, value=b"\xff\xfe"),
        )
        outcomes = [dlq(chat, "show", place(record)).json["replay"] for record in records]
        assert [(found["outcome"], found["code"]) for found in outcomes] == [
            ("stale", None),
            ("failed", NOT_FOUND),
            ("failed", MISMATCH),
            ("failed", MALFORMED),
        ]
        assert "Ready" in outcomes[0]["reason"]
        assert outcomes[1]["reason"] == "the deal is missing"

    def test_of_a_closed_one_tells_the_resolution(self, chat: Chat) -> None:
        [record] = send_letters(chat, letter(chat.deal().event("Ready")))
        run_id = replayed(chat)["run_id"]
        document = dlq(chat, "show", place(record)).json
        assert (document["state"], document["replay"]["outcome"]) == ("applied", "none")
        assert document["resolution"]["run_id"] == run_id
        assert document["resolution"]["resolved_by"] == f"{getpass.getuser()}@{socket.gethostname()}"

    @pytest.mark.parametrize("text", ["0:5", "99:0"])
    def test_a_letter_that_is_not_there_is_10(self, chat: Chat, text: str) -> None:
        result = dlq(chat, "show", text)
        assert result.exit_code == 10
        assert error_of(result)["code"] == "CRM_DLQ_LETTER_NOT_FOUND"
        assert error_of(result)["letter"] == text


class TestDiscard:
    def test_closes_letters_with_a_reason_and_who_it_was(self, chat: Chat) -> None:
        records = send_letters(chat, *(letter(chat.missing_deal().event("Ready")) for _ in range(3)))
        result = dlq(chat, "discard", place(records[0]), place(records[1]), "--reason", "test data", "--yes")
        assert result.exit_code == 0
        assert result.json["discarded_count"] == 2
        row = ledger(chat)[place(records[0])]
        assert (row["resolution"], row["reason"]) == ("discarded", "test data")
        assert row["resolved_by"] == f"{getpass.getuser()}@{socket.gethostname()}"
        assert open_letters(chat) == {place(records[2])}
        assert counts(replayed(chat)) == {"failed": 1}
        runs = rows(chat.connection, "select job, actor from crm.job_runs order by started_at")
        assert [run["job"] for run in runs] == ["discard-dead-letters", "replay-dead-letters"]
        assert {run["actor"] for run in runs} == {row["resolved_by"]}

    def test_twice_changes_nothing_more(self, chat: Chat) -> None:
        send_letters(chat, letter(None, MALFORMED, value=b"x"))
        arguments = ("discard", "--code", MALFORMED, "--reason", "hand-made", "--yes")
        assert dlq(chat, *arguments).json["discarded_count"] == 1
        before = ledger(chat)
        assert dlq(chat, *arguments).json["discarded_count"] == 0
        assert ledger(chat) == before

    def test_dry_run_changes_nothing(self, chat: Chat) -> None:
        send_letters(chat, letter(None, MALFORMED, value=b"x"))
        result = dlq(chat, "discard", "--code", MALFORMED, "--reason", "hand-made", "--dry-run")
        assert (result.exit_code, result.json["discarded_count"]) == (0, 1)
        assert ledger(chat) == {}

    @pytest.mark.parametrize(
        "arguments",
        [
            pytest.param(("--at", "0"), id="no reason"),
            pytest.param(("--at", "0", "--reason", "  "), id="a blank reason"),
            pytest.param(("--at", "0", "--reason", os.fsdecode(b"\xff"), "--yes"), id="a reason that is no text"),
            pytest.param(("--reason", "all of it", "--yes"), id="no letters"),
            pytest.param(("--at", "0", "--reason", "nobody to ask"), id="no terminal and no --yes"),
        ],
    )
    def test_asks_for_what_it_needs(self, chat: Chat, arguments: tuple[str, ...]) -> None:
        send_letters(chat, letter(chat.missing_deal().event("Ready"), partition=0))
        result = dlq(chat, "discard", *arguments)
        assert result.exit_code == 2
        assert "Traceback" not in result.stderr
        assert ledger(chat) == {}


def test_every_statement_of_the_ledger_uses_an_index(chat: Chat) -> None:
    """On 20,000 letters; a scan of the ledger would cost more with each letter that was ever resolved."""
    rows(
        chat.connection,
        """
        insert into crm.dlq_resolutions
            (topic_id, partition, "offset", source_topic_id, source_partition, source_offset, resolution, resolved_by,
             run_id)
        select 'topic', n % 6, n / 6, 'source', n % 6, n, 'applied', 'test', gen_random_uuid()
        from generate_series(0, 19999) n
        """,
    )
    rows(chat.connection, "analyze crm.dlq_resolutions")
    params: dict[str, Any] = {
        "topic_id": "topic",
        "topic_ids": ["source", "source"],
        "partitions": [0, 1],
        "offsets": [5, 6],
        "first": [0, 0],
        "last": [9, 9],
        "floors": [3_300, 3_300],
    }
    for name in ("floors", "rows", "closed_sources", "closed_count"):
        plan = chat.connection.execute(("explain " + STATEMENTS[name]).encode(), params).fetchall()
        text = "\n".join(str(row) for row in plan)
        assert "Seq Scan" not in text, text
        assert "dlq_resolutions" in text


def test_a_rebalance_of_the_replay_group_ends_nothing(chat: Chat) -> None:
    """The reader is assigned its partitions; that another member of its group comes and goes does not touch it."""
    deals = [chat.deal() for _ in range(40)]
    send_letters(chat, *(letter(deal.event("Ready")) for deal in deals))
    other = Consumer({"bootstrap.servers": chat.kafka.bootstrap_servers, "group.id": f"{chat.group}-dlq"})
    other.subscribe([chat.dlq_topic])
    with start_replay(chat, "--rate", "10") as running:
        for _ in range(20):
            other.poll(0.1)
        other.close()
        result = finish(running)
    assert result.exit_code == 0
    assert counts(result.json) == {"applied": 40}


def test_messenger_records_are_what_the_letters_hold(chat: Chat) -> None:
    """The tests' letters and the consumer's are alike: the same headers, in the same order."""
    deal = chat.missing_deal()
    chat.send(outgoing(Deal(deal.id, deal.tenant_id).event("Archived")))
    chat.consumed()
    [written] = chat.letters()
    made = letter(deal.event("Archived"))
    assert [name for name, _ in written.record.headers if name.startswith("x-")] == [name for name, _ in made.headers]
