"""`crmctl dlq replay`: apply dead letters through the consumer's own rule (DESIGN 8).

Letters are read from the first that may be open, in the order of their partitions, up to the ends that were seen at the
start. One batch is one transaction, in this order:

1. reads up to N letters from Kafka; nothing is locked yet;
2. takes an advisory lock for each of their partitions, so that two replays cannot try one letter at the same time;
3. looks the letters up in the ledger: what is closed is passed over, what the filters do not select stays as it is,
   and what --limit or --rate leaves no room for is read again by the next batch or the next run;
4. applies the rest by `project_chat_status.project_again`, under a savepoint: the deals are locked in id order, then
   `deals.chat_status`, `deal_chat_positions` and `processed_messages` are written as the consumer writes them; what
   PostgreSQL refuses is found by bisecting, and the savepoint runs again without it;
5. writes the ledger: applied, stale, duplicate, or failed (attempts + 1, its latest code);
6. `job_runs`, by the wrapper; commit.

The group's committed offsets, which only show how far all is closed, follow the commit. A crash anywhere leaves a
batch whole or not at all; a rerun begins at the first letter that is not closed. A letter that fails for the same
cause as at its last replay is left as it is, so that a rerun changes nothing; only what PostgreSQL itself refused is
tried again each time, up to --max-attempts.
"""

from collections.abc import Callable, Sequence
from typing import Final

from crmctl.adapters.postgres import Transaction
from crmctl.adapters.topic_reader import TopicReader
from crmctl.domain.chat_status import Decision, ErrorCode, Event, Outcome, Position
from crmctl.domain.dead_letters import Letter, Resolution
from crmctl.jobs import dead_letter_walk
from crmctl.jobs.dead_letter_walk import Choice, Options, Progress
from crmctl.jobs.dead_letters import Entry, Found
from crmctl.jobs.job import Job
from crmctl.jobs.project_chat_status import WriteRefused, project_again

JOB_NAME: Final = "replay-dead-letters"
_RESOLUTIONS: Final = {
    Outcome.APPLIED: Resolution.APPLIED,
    Outcome.STALE: Resolution.STALE,
    Outcome.SOFT_DELETED: Resolution.STALE,
    Outcome.DUPLICATE: Resolution.DUPLICATE,
    Outcome.DEAD_LETTERED: Resolution.FAILED,
}
_SAME_SOURCE: Final = "another letter of the same source record was resolved"
_COUNTED: Final = (Resolution.APPLIED, Resolution.STALE, Resolution.DUPLICATE, Resolution.FAILED)


def job(reader: TopicReader, actor: str, committed: Callable[[Progress], None]) -> Job[Options, Progress]:
    """The job, on behalf of `actor`; `committed` is told of each committed batch."""
    return dead_letter_walk.job(JOB_NAME, _COUNTED, _handle, reader, actor, committed)


def _handle(tx: Transaction, choice: Choice) -> list[Entry]:
    entries = [_closed_elsewhere(item) for item in choice.elsewhere]
    tried = zip(choice.tried, _try(tx, [item.letter for item in choice.tried]), strict=True)
    return entries + [_entry(item, *verdict) for item, verdict in tried if not _as_before(item, *verdict[:2])]


Verdict = tuple[Resolution, str | None, str | None]


def _try(tx: Transaction, letters: Sequence[Letter]) -> list[Verdict]:
    """Apply letters; return resolution, code and reason of each. Of letters of one source record the first is tried."""
    events: dict[Position, Event] = {}
    for letter in letters:
        if letter.event is not None:
            events.setdefault(letter.event.position, letter.event)
    decided = {d.event.position: d for d in _apply(tx, list(events.values()))} if events else {}
    done: set[Position] = set()
    verdicts: list[Verdict] = []
    for letter in letters:
        if letter.event is None:
            verdicts.append((Resolution.FAILED, ErrorCode.MALFORMED.value, letter.malformed))
            continue
        found = verdict(decided[letter.event.position])
        again = letter.event.position in done and found[0] is not Resolution.FAILED
        verdicts.append((Resolution.DUPLICATE, None, _SAME_SOURCE) if again else found)
        done.add(letter.event.position)
    return verdicts


def verdict(decision: Decision) -> Verdict:
    """What a decision means for a letter."""
    code = decision.code.value if decision.code is not None else None
    reason = "the deal is deleted" if decision.outcome is Outcome.SOFT_DELETED else decision.reason or None
    return _RESOLUTIONS[decision.outcome], code, reason


def _apply(tx: Transaction, events: Sequence[Event]) -> list[Decision]:
    condemned: dict[Position, tuple[ErrorCode, str]] = {}
    while True:
        try:
            with tx.savepoint():
                return project_again(tx, events, condemned).decisions
        except WriteRefused as refused:
            condemned |= {d.event.position: (d.code or ErrorCode.APPLY_FAILED, d.reason) for d in refused.decisions}


def _as_before(item: Found, resolution: Resolution, code: str | None) -> bool:
    """Whether a letter fails for the cause that its last replay found; PostgreSQL's refusals may come and go."""
    return (
        resolution is Resolution.FAILED
        and item.own is not None
        and item.own["code"] == code
        and code != ErrorCode.APPLY_FAILED.value
    )


def _entry(item: Found, resolution: Resolution, code: str | None, reason: str | None) -> Entry:
    attempts = item.tries + (resolution is Resolution.FAILED)
    return Entry(item.letter, resolution, code, reason, attempts)


def _closed_elsewhere(item: Found) -> Entry:
    return Entry(item.letter, Resolution.DUPLICATE, None, _SAME_SOURCE, item.tries)
