"""The deal's chat status: ranks, the one rule, and the fold of a batch (source 003, INV-CHAT-1).

Pure: the consumer, its deferred retries and the replay of dead letters all decide through `plan`.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final, NamedTuple


class ChatStatus(StrEnum):
    """The values of `deals.chat_status`; messenger sends all but Pending."""

    PENDING = "Pending"
    PROVISIONING = "Provisioning"
    FAILED = "Failed"
    READY = "Ready"


RANKS: Final[Mapping[str, int]] = {
    ChatStatus.PENDING: 0,
    ChatStatus.PROVISIONING: 1,
    ChatStatus.FAILED: 1,
    ChatStatus.READY: 2,
}
# DateTimeOffset.MaxValue with any offset is no moment: nothing could ever be later. Microseconds since 1970.
_MAX_VALUE: Final = 253_402_300_799_999_999 - 14 * 3_600_000_000
# An event whose deal is missing is tried again after these pauses, and then it is a dead letter.
RETRY_PAUSES: Final = (
    timedelta(seconds=5),
    timedelta(seconds=10),
    timedelta(seconds=30),
    timedelta(minutes=1),
    timedelta(minutes=2),
)


class ErrorCode(StrEnum):
    """Why an event is a dead letter."""

    MALFORMED = "CRM_CHAT_STATUS_MALFORMED"
    UNKNOWN = "CRM_CHAT_STATUS_UNKNOWN"
    DEAL_NOT_FOUND = "CRM_DEAL_NOT_FOUND"
    TENANT_MISMATCH = "CRM_CHAT_STATUS_TENANT_MISMATCH"
    APPLY_FAILED = "CRM_CHAT_STATUS_APPLY_FAILED"


class Outcome(StrEnum):
    """What became of an event; the words of the source's logs."""

    APPLIED = "applied"
    STALE = "skipped-stale"
    DUPLICATE = "skipped-duplicate"
    SOFT_DELETED = "skipped-soft-deleted"
    DEFERRED = "deal-not-found"
    DEAD_LETTERED = "dead-lettered"


class Position(NamedTuple):
    """Where a record stands in its source: the topic's id (not its name: topics are re-created), partition, offset."""

    topic_id: str
    partition: int
    offset: int


class Event(NamedTuple):
    """A decoded event. Ids are canonical lower-case UUIDs; `changed_at` is microseconds since 1970, of any size.

    `status` None means that the sent value is none of ChatStatus; `sent_status` is what was sent. `contract_version` is
    1, or a text that shows what was sent instead.
    """

    message_id: str
    deal_id: str
    tenant_id: str
    chat_id: str
    status: ChatStatus | None
    sent_status: str
    failure_reason: str | None
    changed_at: int
    contract_version: int | str
    position: Position


class Deal(NamedTuple):
    """A deal as the fold sees it. `position` and `changed_at` are those of the latest event that its status is from."""

    tenant_id: str
    status: str
    deleted: bool = False
    position: Position | None = None
    changed_at: int | None = None


class Deferred(NamedTuple):
    """An event that waits for its deal. `attempts` are the retries that have failed."""

    event: Event
    attempts: int
    next_attempt_at: datetime


class Decision(NamedTuple):
    """What becomes of one event, and why; `attempts` are the retries of a deferred one."""

    event: Event
    outcome: Outcome
    from_status: str | None = None
    code: ErrorCode | None = None
    reason: str = ""
    attempts: int = 0
    next_attempt_at: datetime | None = None


@dataclass(slots=True)
class Plan:
    """Everything that one batch does: a decision for each event, and the deals that change."""

    decisions: list[Decision] = field(default_factory=list)
    deals: dict[str, Deal] = field(default_factory=dict)

    @property
    def dead_letters(self) -> list[Decision]:
        """The decisions that need a record in the dead-letter topic before anything is written."""
        return [decision for decision in self.decisions if decision.outcome is Outcome.DEAD_LETTERED]


def applies(deal: Deal, event: Event) -> bool:
    """The one rule: a higher rank, or another value of the same rank from a later source position.

    Positions of different partitions or topic ids cannot be compared; there ChangedAt decides.
    """
    if event.status is None:
        return False
    new, current = RANKS[event.status], RANKS.get(deal.status, 0)
    if new != current:
        return new > current
    return event.status != deal.status and _is_later(deal, event)


def _is_later(deal: Deal, event: Event) -> bool:
    if deal.position is None:
        return True
    if deal.position[:2] == event.position[:2]:
        return event.position.offset > deal.position.offset
    return deal.changed_at is None or deal.changed_at >= _MAX_VALUE or event.changed_at > deal.changed_at


def plan(
    events: Iterable[Event],
    deferred: Iterable[Deferred],
    deals: Mapping[str, Deal],
    seen: Collection[str],
    now: datetime,
    condemned: Mapping[Position, tuple[ErrorCode, str]],
    *,
    last_try: bool = False,
) -> Plan:
    """Decide a batch: `events` in order of arrival, `deferred` all that wait for the deals of this batch.

    `deals` holds the deals that exist, `seen` the message ids that are marked. `condemned` are positions that are
    dead letters already, whatever the rule would say of them now. A dead letter is never seen, so a later
    event with its message id is decided on its own. With `last_try` an event without a deal does not wait: it is a dead
    letter, or rather stays one.
    """
    result = Plan()
    waiting = {item.event.position: item for item in deferred}
    known = set(seen) | {item.event.message_id for item in waiting.values()}
    queues: dict[str, list[Event]] = {}
    for item in waiting.values():
        queues.setdefault(item.event.deal_id, []).append(item.event)
    for event in events:
        if event.position in waiting or event.message_id in known:
            result.decisions.append(Decision(event, Outcome.DUPLICATE))
        elif (verdict := _condemn(event, deals.get(event.deal_id), condemned)) is not None:
            result.decisions.append(verdict)
        else:
            known.add(event.message_id)
            queues.setdefault(event.deal_id, []).append(event)
    for deal_id, queue in queues.items():
        deal = deals.get(deal_id)
        queue.sort(key=lambda event: event.position)
        if deal is None:
            waits = (_wait(event, waiting.get(event.position), now, condemned, last_try=last_try) for event in queue)
            result.decisions += [decision for decision in waits if decision is not None]
        else:
            _fold(deal_id, deal, queue, waiting, condemned, result)
    return result


def _condemn(
    event: Event, deal: Deal | None, condemned: Mapping[Position, tuple[ErrorCode, str]], attempts: int = 0
) -> Decision | None:
    """The dead letters that no later event can change."""
    verdict = condemned.get(event.position)
    if verdict is None and event.status is None:
        verdict = ErrorCode.UNKNOWN, f"Status {event.sent_status} is not known"
    elif verdict is None and deal is not None and not deal.deleted and deal.tenant_id != event.tenant_id:
        verdict = ErrorCode.TENANT_MISMATCH, "TenantId is not the tenant of the deal"
    if verdict is None:
        return None
    code, reason = verdict
    return Decision(event, Outcome.DEAD_LETTERED, code=code, reason=reason, attempts=attempts)


def _wait(
    event: Event,
    item: Deferred | None,
    now: datetime,
    condemned: Mapping[Position, tuple[ErrorCode, str]],
    *,
    last_try: bool,
) -> Decision | None:
    """What becomes of an event without a deal; None while its next retry is not due."""
    if (verdict := _condemn(event, None, condemned, item.attempts if item else 0)) is not None:
        return verdict
    if item is None and last_try:
        reason = "the deal is missing"
        return Decision(event, Outcome.DEAD_LETTERED, code=ErrorCode.DEAL_NOT_FOUND, reason=reason)
    if item is None:
        return Decision(event, Outcome.DEFERRED, next_attempt_at=now + RETRY_PAUSES[0])
    if item.next_attempt_at > now:
        return None
    attempts = item.attempts + 1
    if attempts >= len(RETRY_PAUSES):
        reason = f"the deal was still missing after {attempts} retries"
        return Decision(event, Outcome.DEAD_LETTERED, code=ErrorCode.DEAL_NOT_FOUND, reason=reason, attempts=attempts)
    return Decision(event, Outcome.DEFERRED, attempts=attempts, next_attempt_at=now + RETRY_PAUSES[attempts])


def _fold(
    deal_id: str,
    deal: Deal,
    queue: Iterable[Event],
    waiting: Mapping[Position, Deferred],
    condemned: Mapping[Position, tuple[ErrorCode, str]],
    result: Plan,
) -> None:
    for event in queue:
        attempts = waiting[event.position].attempts if event.position in waiting else 0
        if (verdict := _condemn(event, deal, condemned, attempts)) is not None:
            result.decisions.append(verdict)
        elif deal.deleted:
            result.decisions.append(Decision(event, Outcome.SOFT_DELETED, deal.status, attempts=attempts))
        elif applies(deal, event) and event.status is not None:
            result.decisions.append(Decision(event, Outcome.APPLIED, deal.status, attempts=attempts))
            deal = Deal(deal.tenant_id, event.status, deal.deleted, event.position, event.changed_at)
            result.deals[deal_id] = deal
        else:
            result.decisions.append(Decision(event, Outcome.STALE, deal.status, attempts=attempts))
            if event.status == deal.status != ChatStatus.READY and _is_later(deal, event):
                # It confirms the status: an older event of the same rank that comes later must not undo it.
                deal = Deal(deal.tenant_id, deal.status, deal.deleted, event.position, event.changed_at)
                result.deals[deal_id] = deal
