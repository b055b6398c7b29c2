"""One batch of the deal-chat-status projection, as one transaction (source 003, steps 1 to 5).

What it changes, in this order: advisory locks of the partitions, so that a zombie owner and its successor cannot
interleave; the deals, locked in id order; then, in later statements that see what the last holder of those locks
committed, it reads positions, marks and deferred events, and decides by `domain.chat_status.plan`. It writes
`deals.chat_status` and `updated_at`, `deal_chat_positions`, `processed_messages` and `deferred_messages`.

A crash leaves all of it or nothing; the records are read again, and what is marked is a duplicate then. Dead letters
are not written here: a plan that has any raises DeadLettersFirst; the caller rolls back, writes them with no
transaction open, and runs the batch again with them condemned.
"""

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import psycopg
from psycopg.types.json import Jsonb

from crmctl.adapters.postgres import Transaction, array_literal, describe, is_data_error
from crmctl.adapters.records import RawRecord, portions
from crmctl.domain.chat_status import Deal, Decision, Deferred, ErrorCode, Event, Outcome, Plan, Position, plan
from crmctl.domain.chat_status_decoding import decode
from crmctl.sql import load

STATEMENTS: Final = load("consume_chat_status")
MARK_PREFIX: Final = "crm:deal-chat-status:"
_DEFERRED_BYTES: Final = 2 * 1024 * 1024
_MARKED: Final = frozenset({Outcome.APPLIED, Outcome.STALE, Outcome.SOFT_DELETED})


class DeadLettersFirst(Exception):  # noqa: N818  a signal to the caller, not an error
    """The batch has dead letters that are not written yet, here are some MB of them; write them, run it again."""

    def __init__(self, letters: Sequence[tuple[RawRecord, Decision]]) -> None:
        super().__init__(f"{len(letters)} dead letters")
        self.letters = letters


class WriteRefused(Exception):  # noqa: N818  a signal to the caller, not an error
    """PostgreSQL refuses to write what these events decide; undo it, and run the batch again without them."""

    def __init__(self, decisions: Sequence[Decision]) -> None:
        super().__init__(f"{len(decisions)} events cannot be written")
        self.decisions = decisions


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose work this is: the group, the topic as it is now, and the partitions that we own.

    A scope that is not `exclusive` only looks: it keeps no owner of a partition waiting.
    """

    group: str
    topic: str
    topic_id: str
    partition_count: int
    partitions: tuple[int, ...]
    exclusive: bool = True


@dataclass(frozen=True, slots=True)
class Batch:
    """Decoded new events in order of arrival, with their raw records."""

    events: tuple[Event, ...]
    raws: Mapping[Position, RawRecord]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The events that wait for some deals, and how many bytes each one's record has, which stays in the database."""

    deferred: dict[Position, Deferred]
    sizes: dict[Position, int]


def project(
    tx: Transaction,
    scope: Scope,
    batch: Batch,
    now: datetime,
    condemned: Mapping[Position, tuple[ErrorCode, str]],
    *,
    retry_limit: int,
) -> Plan:
    """Apply a batch and the deferred events that are due, and return what was decided of each.

    Raises DeadLettersFirst when the plan has dead letters that are not condemned yet, and what psycopg raises.
    """
    prepare(tx)
    if scope.exclusive:
        lock_partitions(tx, scope.group, scope.topic, scope.partitions)
    due = _due_deals(tx, scope, now, retry_limit)
    wanted = {event.deal_id for event in batch.events}.union(due)
    if not wanted:
        return Plan()
    deal_ids = array_literal(sorted(wanted))
    deals = _deals(tx, "lock_deals", deal_ids)
    waiting = _waiting(tx, deal_ids)
    seen = _marks(tx, batch.events, waiting=True)
    decided = plan(batch.events, waiting.deferred.values(), deals, seen, now, condemned)
    if new := [letter for letter in decided.dead_letters if letter.event.position not in condemned]:
        raise DeadLettersFirst(_letters(tx, new, batch.raws, waiting))
    try:
        _write_or_blame(tx, scope, decided, waiting, batch.raws)
    except WriteRefused as refused:
        raise DeadLettersFirst(_letters(tx, refused.decisions, batch.raws, waiting)) from None
    return decided


def project_again(
    tx: Transaction, events: Sequence[Event], condemned: Mapping[Position, tuple[ErrorCode, str]]
) -> Plan:
    """Apply the events of dead letters, by the same rule and with the same writes, and return what was decided of each.

    What still fails is a dead letter in the plan. The caller holds the locks that keep two replays apart. An event that
    the consumer has in line for its deal is no duplicate here: it may still end as another letter of the same record.
    Raises WriteRefused, and what psycopg raises.
    """
    nothing = _Waiting({}, {})
    deals = _deals(tx, "lock_deals", array_literal(sorted({event.deal_id for event in events})))
    decided = plan(events, (), deals, _marks(tx, events, waiting=False), tx.now, condemned, last_try=True)
    _write_or_blame(tx, None, decided, nothing, {})
    return decided


def foresee(tx: Transaction, event: Event) -> Decision:
    """Say what `project_again` would decide of one event now; reads only, locks nothing."""
    deals = _deals(tx, "read_deals", array_literal([event.deal_id]))
    decided = plan([event], (), deals, _marks(tx, [event], waiting=False), tx.now, {}, last_try=True)
    return decided.decisions[0]


def _write_or_blame(
    tx: Transaction, scope: Scope | None, decided: Plan, waiting: _Waiting, raws: Mapping[Position, RawRecord]
) -> None:
    try:
        with tx.savepoint():
            _write(tx, scope, decided, waiting, raws)
    except psycopg.Error as error:
        if not is_data_error(error):
            raise
        failing = _find_failing(tx, scope, decided, waiting, raws)
        if not failing:  # it fails as a whole and in no part: nobody to blame
            raise
        raise WriteRefused(failing) from None


def prepare(tx: Transaction) -> None:
    """Let deferred constraints fail where a deal can still be blamed, not at the commit."""
    tx.execute(STATEMENTS["prepare"])


def lock_partitions(tx: Transaction, group: str, topic: str, partitions: Iterable[int]) -> None:
    """Keep others of the group from the topic's partitions until the transaction ends."""
    keys = [
        int.from_bytes(hashlib.sha256(f"{group}/{topic}/{number}".encode()).digest()[:8], signed=True)
        for number in partitions
    ]
    tx.execute(STATEMENTS["lock_partitions"], {"keys": keys})


def _due_deals(tx: Transaction, scope: Scope, now: datetime, limit: int) -> list[str]:
    rows = tx.all(
        STATEMENTS["due_deals"],
        {
            "now": now,
            "topic_id": scope.topic_id,
            "partitions": list(scope.partitions),
            "partition_count": scope.partition_count,
            "orphans": 0 in scope.partitions,
            "limit": limit,
        },
    )
    return [row["deal_id"] for row in rows]


def _deals(tx: Transaction, statement: str, deal_ids: str) -> dict[str, Deal]:
    found = tx.all(STATEMENTS[statement], {"deal_ids": deal_ids})
    read = tx.all(STATEMENTS["positions"], {"deal_ids": deal_ids})
    positions = {
        row["deal_id"]: (Position(row["topic_id"], row["partition"], row["offset"]), row["changed_at"]) for row in read
    }
    return {
        row["id"]: Deal(row["tenant_id"], row["chat_status"], row["deleted"], *positions.get(row["id"], (None, None)))
        for row in found
    }


def _marks(tx: Transaction, events: Sequence[Event], *, waiting: bool) -> set[str]:
    rows = tx.all(
        STATEMENTS["marks"],
        {
            "prefix_length": len(MARK_PREFIX),
            "keys": array_literal([MARK_PREFIX + event.message_id for event in events]),
            "waiting": waiting,
            "message_ids": array_literal([event.message_id for event in events]),
        },
    )
    return {row["message_id"] for row in rows}


def _waiting(tx: Transaction, deal_ids: str) -> _Waiting:
    waiting = _Waiting({}, {})
    for row in tx.each(STATEMENTS["deferred"], {"deal_ids": deal_ids}):
        position = Position(row["topic_id"], row["partition"], row["offset"])
        event = decode(row["value"], position)
        waiting.deferred[position] = Deferred(event, row["attempts"], row["next_attempt_at"])
        waiting.sizes[position] = row["size"]
    return waiting


def _letters(
    tx: Transaction, decisions: Sequence[Decision], raws: Mapping[Position, RawRecord], waiting: _Waiting
) -> list[tuple[RawRecord, Decision]]:
    """The first of the dead letters, as many as make a portion, with their records."""

    def size(decision: Decision) -> int:
        position = decision.event.position
        return raws[position].size() if position in raws else waiting.sizes[position]

    first = next(portions(decisions, size))
    deferred = [d.event.position for d in first if d.event.position not in raws]
    found = {**raws, **_deferred_records(tx, deferred)}
    return [(found[d.event.position], d) for d in first]


def _deferred_records(tx: Transaction, positions: Sequence[Position]) -> dict[Position, RawRecord]:
    found: dict[Position, RawRecord] = {}
    for row in tx.all(STATEMENTS["deferred_records"], _position_arrays(positions)):
        position = Position(row["topic_id"], row["partition"], row["offset"])
        headers = tuple((name, None if text is None else base64.b64decode(text)) for name, text in row["headers"])
        found[position] = RawRecord(position, row["topic"], row["key"], row["value"], headers, row["timestamp_ms"])
    return found


def _write(
    tx: Transaction, scope: Scope | None, decided: Plan, waiting: _Waiting, raws: Mapping[Position, RawRecord]
) -> None:
    decisions = decided.decisions
    marks = sorted(MARK_PREFIX + d.event.message_id for d in decisions if d.outcome in _MARKED)
    done = [
        d.event.position
        for d in decisions
        if d.outcome not in (Outcome.DEFERRED, Outcome.DUPLICATE) and d.event.position in waiting.deferred
    ]
    if marks or done or decided.deals:
        dones = {f"done_{name}": values for name, values in _position_arrays(done).items()}
        arrays = {**_deal_arrays(decided), "mark_keys": marks, **dones}
        tx.execute(STATEMENTS["write"], {name: array_literal(values) for name, values in arrays.items()})
    if scope is None:
        return
    deferred = [d for d in decisions if d.outcome is Outcome.DEFERRED]
    if again := [d for d in deferred if d.event.position in waiting.deferred]:
        tx.execute(STATEMENTS["postpone"], _retry_arrays(again))
    new = [d for d in deferred if d.event.position not in waiting.deferred]
    # In the text of a statement, and in what is made of it, a record is many times as long as it is.
    for portion in portions(new, lambda d: raws[d.event.position].size(), _DEFERRED_BYTES):
        tx.execute(STATEMENTS["defer"], {"topic": scope.topic, **_deferred_arrays(portion, raws)})


def _deal_arrays(decided: Plan) -> dict[str, list[Any]]:
    changed = sorted(decided.deals.items())
    positions = [deal.position for _, deal in changed if deal.position is not None]
    return {
        "deal_ids": [deal_id for deal_id, _ in changed],
        "chat_statuses": [str(deal.status) for _, deal in changed],
        "topic_ids": [position.topic_id for position in positions],
        "partitions": [position.partition for position in positions],
        "offsets": [position.offset for position in positions],
        "changed_ats": [deal.changed_at for _, deal in changed],
    }


def _position_arrays(positions: Iterable[Position]) -> dict[str, list[Any]]:
    found = list(positions)
    return {
        "topic_ids": [position.topic_id for position in found],
        "partitions": [position.partition for position in found],
        "offsets": [position.offset for position in found],
    }


def _retry_arrays(decisions: Sequence[Decision]) -> dict[str, list[Any]]:
    return {
        **_position_arrays(d.event.position for d in decisions),
        "attempts": [d.attempts for d in decisions],
        "next_attempts_at": [d.next_attempt_at for d in decisions],
    }


def _deferred_arrays(decisions: Sequence[Decision], raws: Mapping[Position, RawRecord]) -> dict[str, list[Any]]:
    records = [raws[d.event.position] for d in decisions]
    return {
        **_retry_arrays(decisions),
        "message_ids": [d.event.message_id for d in decisions],
        "deal_ids": [d.event.deal_id for d in decisions],
        "keys": [record.key for record in records],
        "values": [record.value for record in records],
        "headers": [
            Jsonb([(name, None if v is None else base64.b64encode(v).decode()) for name, v in record.headers])
            for record in records
        ],
        "timestamps": [record.timestamp_ms for record in records],
    }


def _find_failing(
    tx: Transaction, scope: Scope | None, decided: Plan, waiting: _Waiting, raws: Mapping[Position, RawRecord]
) -> list[Decision]:
    """Halve the batch by deals, each half under a savepoint, down to the deals whose write PostgreSQL refuses.

    All events of such a deal that would have written something are dead letters, with PostgreSQL's reason.
    """
    failing: list[Decision] = []
    groups = [sorted({d.event.deal_id for d in decided.decisions})]
    while groups:
        deal_ids = groups.pop()
        members = set(deal_ids)
        part = Plan(
            [d for d in decided.decisions if d.event.deal_id in members],
            {deal_id: deal for deal_id, deal in decided.deals.items() if deal_id in members},
        )
        try:
            with tx.savepoint():
                _write(tx, scope, part, waiting, raws)
        except psycopg.Error as error:
            if not is_data_error(error):
                raise
            if len(deal_ids) > 1:
                middle = len(deal_ids) // 2
                groups += [deal_ids[:middle], deal_ids[middle:]]
                continue
            failing += [
                d._replace(outcome=Outcome.DEAD_LETTERED, code=ErrorCode.APPLY_FAILED, reason=describe(error))
                for d in part.decisions
                if d.outcome in _MARKED or d.outcome is Outcome.DEFERRED
            ]
    return failing
