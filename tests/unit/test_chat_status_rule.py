"""The one rule of the deal-chat-status projection, the order of its cases, and that every history converges."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from crmctl.domain.chat_status import (
    RANKS,
    RETRY_PAUSES,
    ChatStatus,
    Deal,
    Decision,
    Deferred,
    ErrorCode,
    Event,
    Outcome,
    Plan,
    Position,
    applies,
    plan,
)

PENDING, PROVISIONING, FAILED, READY = ChatStatus
NOW: Final = datetime(2026, 11, 29, 12, tzinfo=UTC)
# DateTimeOffset's extremes, and a moment of today, as microseconds since 1970.
MIN_VALUE: Final = -62_135_596_800_000_000
MAX_VALUE: Final = 253_402_300_799_999_999
TODAY: Final = 1_795_953_600_000_000
_numbers = itertools.count()


def event(
    status: ChatStatus | None,
    offset: int = 0,
    *,
    partition: int = 0,
    topic_id: str = "topic",
    changed_at: int = TODAY,
    message_id: str | None = None,
    deal_id: str = "deal",
    tenant_id: str = "tenant",
) -> Event:
    return Event(
        message_id=message_id or f"message-{next(_numbers)}",
        deal_id=deal_id,
        tenant_id=tenant_id,
        chat_id="chat",
        status=status,
        sent_status=status or '"Closed"',
        failure_reason=None,
        changed_at=changed_at,
        contract_version=1,
        position=Position(topic_id, partition, offset),
    )


def deal(status: str = PENDING, *, at: int | None = None, changed_at: int = TODAY, deleted: bool = False) -> Deal:
    position = None if at is None else Position("topic", 0, at)
    return Deal("tenant", status, deleted, position, None if at is None else changed_at)


def waiting(waits: Event, *, attempts: int = 0, due: datetime = NOW) -> Deferred:
    return Deferred(waits, attempts, due)


def decide(
    *events: Event,
    deals: Mapping[str, Deal] | None = None,
    deferred: Iterable[Deferred] = (),
    seen: Iterable[str] = (),
    now: datetime = NOW,
    condemned: Mapping[Position, tuple[ErrorCode, str]] | None = None,
) -> Plan:
    """Plan a batch for one deal that exists, unless `deals` says otherwise."""
    return plan(events, deferred, {"deal": deal()} if deals is None else deals, set(seen), now, condemned or {})


def outcomes(decided: Plan) -> dict[int, Outcome]:
    return {decision.event.position.offset: decision.outcome for decision in decided.decisions}


def one(decided: Plan) -> Decision:
    (decision,) = decided.decisions
    return decision


# --- the rule ---------------------------------------------------------------------------------------------------------

ADVANCES: Final = {
    (PENDING, PROVISIONING),
    (PENDING, FAILED),
    (PENDING, READY),
    (PROVISIONING, FAILED),
    (FAILED, PROVISIONING),
    (PROVISIONING, READY),
    (FAILED, READY),
}


@pytest.mark.parametrize("new", ChatStatus)
@pytest.mark.parametrize("current", ChatStatus)
def test_a_later_event_applies_if_it_advances_the_rank_or_differs_within_it(
    current: ChatStatus, new: ChatStatus
) -> None:
    assert applies(deal(current, at=1), event(new, 2)) == ((current, new) in ADVANCES)


@pytest.mark.parametrize("new", ChatStatus)
@pytest.mark.parametrize("current", ChatStatus)
def test_an_event_that_is_not_later_applies_only_if_it_advances_the_rank(current: ChatStatus, new: ChatStatus) -> None:
    for offset in (1, 2):
        assert applies(deal(current, at=2), event(new, offset)) == (RANKS[new] > RANKS[current])


def test_a_deal_that_no_event_has_reached_takes_another_value_of_its_rank_whenever_it_was_changed() -> None:
    assert applies(deal(PROVISIONING), event(FAILED, changed_at=MIN_VALUE))
    assert not applies(deal(PROVISIONING), event(PROVISIONING))


@pytest.mark.parametrize("place", [Position("topic", 1, 0), Position("re-created", 0, 0)])
def test_across_partitions_and_topic_ids_changed_at_decides(place: Position) -> None:
    current = deal(PROVISIONING, at=50, changed_at=TODAY)

    def from_there(status: ChatStatus, changed_at: int) -> Event:
        return event(status, changed_at=changed_at)._replace(position=place)

    assert applies(current, from_there(FAILED, TODAY + 1))
    assert not applies(current, from_there(FAILED, TODAY))
    assert not applies(current, from_there(FAILED, TODAY - 1))
    assert applies(current, from_there(READY, MIN_VALUE))
    assert not applies(current, from_there(PENDING, MAX_VALUE))


def test_changed_at_decides_nothing_within_a_partition() -> None:
    assert applies(deal(PROVISIONING, at=1, changed_at=MAX_VALUE), event(FAILED, 2, changed_at=MIN_VALUE))
    assert not applies(deal(PROVISIONING, at=2, changed_at=MIN_VALUE), event(FAILED, 1, changed_at=MAX_VALUE))


@pytest.mark.parametrize("extreme", [MAX_VALUE, MAX_VALUE + 12 * 3_600_000_000])
def test_a_changed_at_of_max_value_does_not_freeze_the_deal_when_the_topic_is_re_created(extreme: int) -> None:
    current = deal(PROVISIONING, at=7, changed_at=extreme)
    for offset, status in enumerate((FAILED, PROVISIONING, FAILED)):
        decided = decide(event(status, offset, topic_id="re-created"), deals={"deal": current})
        current = decided.deals.get("deal", current)
    assert current.status == FAILED


def test_a_status_that_we_do_not_know_on_the_deal_is_the_lowest_rank() -> None:
    assert applies(deal("Archived", at=5), event(PROVISIONING, 1))


# --- the order of the cases -------------------------------------------------------------------------------------------


def test_a_message_that_is_marked_waiting_or_twice_in_the_batch_is_a_duplicate() -> None:
    waits = event(PROVISIONING, 1, deal_id="missing", message_id="waits")
    decided = decide(
        event(PROVISIONING, 2, message_id="marked"),
        event(READY, 3, message_id="waits"),
        event(PROVISIONING, 4, message_id="twice"),
        event(FAILED, 5, message_id="twice"),
        seen={"marked"},
        deferred=[waiting(waits, due=NOW + timedelta(seconds=1))],
    )
    assert outcomes(decided).items() >= {
        (2, Outcome.DUPLICATE),
        (3, Outcome.DUPLICATE),
        (4, Outcome.APPLIED),
        (5, Outcome.DUPLICATE),
    }


def test_a_duplicate_is_a_duplicate_whatever_else_is_wrong_with_it() -> None:
    decided = decide(event(None, message_id="m"), deals={"deal": deal()._replace(tenant_id="other")}, seen={"m"})
    assert one(decided).outcome is Outcome.DUPLICATE


@pytest.mark.parametrize("deals", [{}, {"deal": deal(deleted=True)}, {"deal": deal()._replace(tenant_id="other")}])
def test_an_unknown_status_is_a_dead_letter_whatever_its_deal_is_like(deals: Mapping[str, Deal]) -> None:
    decision = one(decide(event(None), deals=deals))
    assert (decision.outcome, decision.code) == (Outcome.DEAD_LETTERED, ErrorCode.UNKNOWN)
    assert decision.reason == 'Status "Closed" is not known'


def test_an_event_of_a_soft_deleted_deal_is_skipped_whoever_its_tenant_is() -> None:
    decided = decide(event(READY, tenant_id="other"), deals={"deal": deal(deleted=True)})
    assert one(decided).outcome is Outcome.SOFT_DELETED
    assert decided.deals == {}


def test_a_foreign_tenant_is_a_dead_letter_even_where_the_event_would_be_stale() -> None:
    decided = decide(event(PROVISIONING, tenant_id="other"), deals={"deal": deal(READY)})
    assert one(decided).code is ErrorCode.TENANT_MISMATCH
    assert decided.deals == {}


def test_a_dead_letter_is_not_seen_so_a_later_event_with_its_message_id_is_decided_on_its_own() -> None:
    decided = decide(event(READY, 1, message_id="m", tenant_id="other"), event(READY, 2, message_id="m"))
    assert outcomes(decided) == {1: Outcome.DEAD_LETTERED, 2: Outcome.APPLIED}


def test_what_is_condemned_stays_a_dead_letter_and_the_others_are_folded_without_it() -> None:
    refused = event(READY, 1)
    verdict = ErrorCode.APPLY_FAILED, "23514: no"
    decided = decide(refused, event(PROVISIONING, 2), condemned={refused.position: verdict})
    assert outcomes(decided) == {1: Outcome.DEAD_LETTERED, 2: Outcome.APPLIED}
    assert (decided.dead_letters[0].code, decided.dead_letters[0].reason) == verdict
    assert decided.deals["deal"].status == PROVISIONING


def test_provisioning_and_failed_alternate_in_the_order_of_the_partition_until_ready() -> None:
    statuses = (PROVISIONING, FAILED, FAILED, PROVISIONING, PENDING, FAILED, READY, FAILED, PROVISIONING, READY)
    decided = decide(*(event(status, offset) for offset, status in enumerate(statuses)))
    assert outcomes(decided) == {
        0: Outcome.APPLIED,
        1: Outcome.APPLIED,
        2: Outcome.STALE,
        3: Outcome.APPLIED,
        4: Outcome.STALE,
        5: Outcome.APPLIED,
        6: Outcome.APPLIED,
        7: Outcome.STALE,
        8: Outcome.STALE,
        9: Outcome.STALE,
    }
    from_statuses = [d.from_status for d in decided.decisions if d.outcome is Outcome.APPLIED]
    assert from_statuses == [PENDING, PROVISIONING, FAILED, PROVISIONING, FAILED]
    assert decided.deals["deal"].status == READY


def test_the_events_of_a_batch_fold_in_partition_order_however_they_arrive() -> None:
    decided = decide(event(FAILED, 2), event(PROVISIONING, 1))
    assert decided.deals["deal"] == deal(FAILED, at=2)


# --- events whose deal is missing -------------------------------------------------------------------------------------


def test_an_event_without_a_deal_is_retried_five_times_and_then_it_is_a_dead_letter() -> None:
    waits, now, pauses = event(PROVISIONING), NOW, []
    decision = one(decide(waits, deals={}, now=now))
    while decision.outcome is Outcome.DEFERRED:
        assert decision.next_attempt_at is not None
        pauses.append(decision.next_attempt_at - now)
        assert decision.attempts == len(pauses) - 1
        now = decision.next_attempt_at
        item = waiting(waits, attempts=decision.attempts, due=now)
        for too_early in decide(deals={}, deferred=[item], now=now - timedelta(microseconds=1)).decisions:
            assert (too_early.outcome, too_early.attempts) == (Outcome.DEFERRED, decision.attempts)
            assert too_early.next_attempt_at == now
        decision = one(decide(deals={}, deferred=[item], now=now))
    assert [pause.total_seconds() for pause in pauses] == [5, 10, 30, 60, 120]
    assert (decision.code, decision.attempts) == (ErrorCode.DEAL_NOT_FOUND, 5)
    assert decision.reason == "the deal was still missing after 5 retries"


def test_each_event_of_a_missing_deal_has_retries_of_its_own_and_is_dead_lettered_alone() -> None:
    last = waiting(event(PROVISIONING, 1), attempts=len(RETRY_PAUSES) - 1)
    second = waiting(event(FAILED, 2), attempts=1)
    later = waiting(event(READY, 3), due=NOW + timedelta(seconds=3))
    decided = decide(event(FAILED, 4), deals={}, deferred=[later, second, last])
    assert outcomes(decided).items() >= {
        (1, Outcome.DEAD_LETTERED),
        (2, Outcome.DEFERRED),
        (4, Outcome.DEFERRED),
    }
    attempts = {d.event.position.offset: (d.attempts, d.next_attempt_at) for d in decided.decisions}
    assert attempts[2] == (2, NOW + timedelta(seconds=30))
    assert attempts.get(3, (0, later.next_attempt_at)) == (0, later.next_attempt_at)
    assert attempts[4] == (0, NOW + timedelta(seconds=5))


def test_once_the_deal_is_there_its_whole_queue_and_the_new_events_fold_in_order_also_before_they_are_due() -> None:
    early, late = waiting(event(PROVISIONING, 1)), waiting(event(FAILED, 2), due=NOW + timedelta(hours=1))
    decided = decide(event(PROVISIONING, 3), deferred=[late, early])
    assert [(d.event.position.offset, d.outcome) for d in decided.decisions] == [
        (1, Outcome.APPLIED),
        (2, Outcome.APPLIED),
        (3, Outcome.APPLIED),
    ]
    assert decided.deals["deal"] == deal(PROVISIONING, at=3)


def test_a_deal_that_appears_deleted_or_with_another_tenant_settles_what_waited_for_it() -> None:
    item = waiting(event(READY, 1), attempts=2)
    deleted = one(decide(deals={"deal": deal(deleted=True)}, deferred=[item]))
    assert (deleted.outcome, deleted.attempts) == (Outcome.SOFT_DELETED, 2)
    foreign = one(decide(deals={"deal": deal()._replace(tenant_id="other")}, deferred=[item]))
    assert (foreign.code, foreign.attempts) == (ErrorCode.TENANT_MISMATCH, 2)


def test_a_record_that_waits_already_is_a_duplicate_when_it_is_read_again() -> None:
    waits = event(PROVISIONING, 1)
    decided = decide(waits, deals={}, deferred=[waiting(waits, due=NOW + timedelta(seconds=1))])
    assert [d.outcome for d in decided.decisions if d.outcome is not Outcome.DEFERRED] == [Outcome.DUPLICATE]


def test_of_an_event_whose_time_has_not_come_nothing_is_decided() -> None:
    """Else it is counted, logged and recorded again with every batch in which its deal has another event."""
    item = waiting(event(PROVISIONING, 1), due=NOW + timedelta(seconds=1))
    assert outcomes(decide(event(FAILED, 2), deals={}, deferred=[item])) == {2: Outcome.DEFERRED}


# --- every history converges ------------------------------------------------------------------------------------------


def sequential(events: Iterable[Event]) -> str:
    """The oracle: the source's rank guard over the events in the order in which messenger sent them, once each."""
    status, done = str(PENDING), set()
    for sent in events:
        if sent.status is None or sent.message_id in done:
            continue
        done.add(sent.message_id)
        higher = RANKS[sent.status] > RANKS[status]
        if higher or (RANKS[sent.status] == RANKS[status] and sent.status != status):
            status = sent.status
    return status


STATUSES: Final = st.sampled_from([PROVISIONING, FAILED, PROVISIONING, FAILED, READY, PENDING])


@settings(max_examples=200, deadline=None)
@given(statuses=st.lists(STATUSES, min_size=1, max_size=7), data=st.data())
def test_without_any_marks_a_deals_events_in_any_order_and_number_end_as_in_sequence(
    statuses: list[ChatStatus], data: st.DataObject
) -> None:
    sent = [event(status, offset) for offset, status in enumerate(statuses)]
    assert fold_one_by_one(arrivals(sent, data)) == sequential(sent)


def test_an_event_of_the_same_value_moves_the_position_on_so_an_older_one_cannot_come_back() -> None:
    """Provisioning at 1 and 3, and Failed at 2, which was a dead letter and is replayed when both are done."""
    first, refused, last = event(PROVISIONING, 1), event(FAILED, 2), event(PROVISIONING, 3)
    assert fold_one_by_one([first, last, refused]) == PROVISIONING


@settings(max_examples=200, deadline=None)
@given(
    history=st.lists(
        st.tuples(STATUSES, st.sampled_from([("old", 0), ("old", 1), ("new", 0), ("new", 1)])), min_size=1, max_size=7
    ),
    data=st.data(),
)
def test_where_changed_at_tells_the_truth_partitions_and_topic_ids_may_change_under_a_deal(
    history: list[tuple[ChatStatus, tuple[str, int]]], data: st.DataObject
) -> None:
    sent = [
        event(status, number, topic_id=topic_id, partition=partition, changed_at=TODAY + number)
        for number, (status, (topic_id, partition)) in enumerate(history)
    ]
    assert fold_one_by_one(arrivals(sent, data)) == sequential(sent)


def arrivals(sent: Sequence[Event], data: st.DataObject) -> list[Event]:
    """Each event at least once, in any order."""
    again = data.draw(st.lists(st.sampled_from(sent), max_size=4))
    return data.draw(st.permutations([*sent, *again]))


def fold_one_by_one(events: Iterable[Event]) -> str:
    current = deal()
    for arrived in events:
        current = decide(arrived, deals={"deal": current}).deals.get("deal", current)
    return current.status


DEALS: Final = 3
PARTITIONS: Final = 2


@dataclass(slots=True)
class World:
    """Messenger's partitions, and all that the consumer remembers between two batches."""

    partitions: list[list[Event]]
    deals: dict[str, Deal] = field(default_factory=dict)
    marks: set[str] = field(default_factory=set)
    waiting: dict[Position, Deferred] = field(default_factory=dict)
    letters: dict[Position, Event] = field(default_factory=dict)
    committed: list[int] = field(default_factory=lambda: [0] * PARTITIONS)
    now: datetime = NOW

    def read(self, partition: int, count: int, fate: str) -> None:
        """Poll, handle and commit a batch; or die before the transaction's commit, or before the offset's."""
        start = self.committed[partition]
        batch = self.partitions[partition][start : start + count]
        if fate != "dies in the transaction":
            self.handle(batch, refused={e.deal_id for e in batch[:1]} if fate == "a deal is refused" else set())
        if fate not in {"dies in the transaction", "dies before the offsets"}:
            self.committed[partition] = start + len(batch)

    def handle(self, events: Sequence[Event], refused: set[str] | None = None) -> None:
        """One batch with what is due, as jobs/project_chat_status.py runs it; the writes of some deals are refused."""
        condemned: dict[Position, tuple[ErrorCode, str]] = {}
        while True:
            due = {item.event.deal_id for item in self.waiting.values() if item.next_attempt_at <= self.now}
            ids = {e.deal_id for e in events} | due
            queue = [item for item in self.waiting.values() if item.event.deal_id in ids]
            deals = {deal_id: self.deals[deal_id] for deal_id in ids & self.deals.keys()}
            seen = self.marks | {item.event.message_id for item in self.waiting.values()}
            decided = plan(events, queue, deals, seen, self.now, condemned)
            new = {d.event.position: d.event for d in decided.dead_letters if d.event.position not in condemned}
            fatal = {
                d.event.position: d.event
                for d in decided.decisions
                if d.event.deal_id in (refused or ()) and d.outcome not in {Outcome.DUPLICATE, Outcome.DEAD_LETTERED}
            }
            if not new and not fatal:
                self.commit(decided)
                return
            self.letters |= new or fatal
            condemned |= dict.fromkeys(new or fatal, (ErrorCode.APPLY_FAILED, ""))

    def commit(self, decided: Plan) -> None:
        self.deals |= decided.deals
        for decision in decided.decisions:
            waits = decision.event
            if decision.outcome in {Outcome.APPLIED, Outcome.STALE, Outcome.SOFT_DELETED}:
                self.marks.add(waits.message_id)
            if decision.outcome is Outcome.DEFERRED:
                assert decision.next_attempt_at is not None
                self.waiting[waits.position] = Deferred(waits, decision.attempts, decision.next_attempt_at)
            elif decision.outcome is not Outcome.DUPLICATE:
                self.waiting.pop(waits.position, None)

    def appear(self, number: int) -> None:
        self.deals.setdefault(f"deal-{number}", deal())

    def replay(self, choose: Callable[[int], bool]) -> None:
        """Apply some dead letters through the same code, one batch each."""
        for number, (position, letter) in enumerate(sorted(self.letters.items())):
            if choose(number) and letter.deal_id in self.deals:
                del self.letters[position]
                self.handle([letter])

    def finish(self) -> None:
        """Every deal appears, everything is read, retried and replayed."""
        for number in range(DEALS):
            self.appear(number)
        for partition in range(PARTITIONS):
            self.read(partition, 1_000, "")
        self.now += timedelta(hours=1)
        self.handle([])
        self.replay(lambda _: True)
        assert self.waiting == {}
        assert all(letter.status is None or letter.tenant_id != "tenant" for letter in self.letters.values())

    def assert_sequential(self) -> None:
        for number in range(DEALS):
            sent = [
                e
                for partition in self.partitions
                for e in partition
                if e.deal_id == f"deal-{number}" and e.tenant_id == "tenant"
            ]
            assert self.deals[f"deal-{number}"].status == sequential(sent), [str(e.status) for e in sent]


Sent = tuple[int, ChatStatus | None, str]
Step = tuple[str, int, int, str]

SENT: Final = st.lists(
    st.tuples(
        st.integers(0, DEALS - 1),
        st.one_of(STATUSES, STATUSES, STATUSES, st.none()),
        st.sampled_from(["tenant"] * 9 + ["other"]),
    ),
    max_size=14,
)
BITS: Final = st.integers(0, 2**14 - 1)
READ: Final = st.tuples(
    st.just("read"),
    st.integers(0, PARTITIONS - 1),
    st.integers(1, 5),
    st.sampled_from(["", "", "dies in the transaction", "dies before the offsets", "a deal is refused"]),
)
REWIND: Final = st.tuples(st.just("rewind"), st.integers(0, PARTITIONS - 1), st.integers(0, 14), st.just(""))
FORGET: Final = st.tuples(st.just("forget"), BITS, st.just(0), st.just(""))
APPEAR: Final = st.tuples(st.just("appear"), st.integers(0, DEALS - 1), st.just(0), st.just(""))
WAIT: Final = st.tuples(st.just("wait"), st.sampled_from([5, 30, 120]), st.just(0), st.just(""))
REPLAY: Final = st.tuples(st.just("replay"), BITS, st.just(0), st.just(""))


def sent_by_messenger(sent: Iterable[Sent]) -> list[list[Event]]:
    """A deal's events are in one partition."""
    partitions: list[list[Event]] = [[] for _ in range(PARTITIONS)]
    for number, (deal_number, status, tenant_id) in enumerate(sent):
        partition = partitions[deal_number % PARTITIONS]
        partition.append(
            event(
                status,
                len(partition),
                partition=deal_number % PARTITIONS,
                message_id=f"m{number}",
                deal_id=f"deal-{deal_number}",
                tenant_id=tenant_id,
            )
        )
    return partitions


def live(world: World, steps: Iterable[Step]) -> None:
    for kind, first, second, fate in steps:
        if kind == "read":
            world.read(first, second, fate)
        elif kind == "rewind":
            world.committed[first] = min(second, world.committed[first])
        elif kind == "forget":
            world.marks = {mark for number, mark in enumerate(sorted(world.marks)) if not first >> number & 1}
        elif kind == "appear":
            world.appear(first)
        elif kind == "wait":
            world.now += timedelta(seconds=first)
            world.handle([])
        else:
            world.replay(lambda number: bool(first >> number & 1))  # noqa: B023


@settings(max_examples=250, deadline=None)
@given(sent=SENT, steps=st.lists(st.one_of(READ, READ, REWIND, FORGET, APPEAR, WAIT, REPLAY), max_size=25))
@example(
    sent=[(0, PROVISIONING, "tenant"), (0, FAILED, "tenant"), (0, PROVISIONING, "tenant")],
    steps=[("appear", 0, 0, ""), ("read", 0, 1, ""), ("read", 0, 1, "a deal is refused"), ("read", 0, 1, "")],
)
def test_crashes_rewinds_lost_marks_retries_and_replays_in_any_order_end_as_in_sequence(
    sent: list[Sent], steps: list[Step]
) -> None:
    world = World(sent_by_messenger(sent))
    live(world, steps)
    world.finish()
    world.assert_sequential()


@settings(max_examples=200, deadline=None)
@given(
    sent=SENT,
    steps=st.lists(st.one_of(READ.filter(lambda step: step[3] != "a deal is refused"), REWIND, APPEAR), max_size=25),
    data=st.data(),
)
def test_a_message_that_messenger_sends_again_later_changes_nothing_while_its_mark_is_kept(
    sent: list[Sent], steps: list[Step], data: st.DataObject
) -> None:
    world = World(sent_by_messenger([s for s in sent if s[2] == "tenant"]))
    for partition in world.partitions:
        for copied in data.draw(st.lists(st.sampled_from(partition), max_size=4)) if partition else []:
            position = copied.position._replace(offset=len(partition))
            partition.append(copied._replace(position=position))
    live(world, steps)
    world.finish()
    world.assert_sequential()


def test_ready_absorbs_whatever_comes_before_and_after() -> None:
    for before, after in itertools.product(itertools.product(ChatStatus, repeat=2), repeat=2):
        sent = [event(status, offset) for offset, status in enumerate((*before, READY, *after))]
        assert fold_one_by_one(sent) == READY
        assert decide(*sent).deals["deal"].status == READY
