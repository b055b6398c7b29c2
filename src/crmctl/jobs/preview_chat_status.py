"""`crmctl chat-status consume --dry-run`: what a run to today's end of the topic would do; changes nothing.

Reads from the group's committed offsets without joining it, and runs the consumer's own batches in one transaction
that the wrapper rolls back. The deals that it changed stay locked until then; the partitions are not, so that a
running consumer goes on. Dead letters are counted and not written.
"""

from collections.abc import Mapping
from typing import Any

from crmctl.adapters.postgres import Transaction
from crmctl.adapters.records import RawRecord
from crmctl.adapters.topic_reader import TopicReader
from crmctl.domain.chat_status import ErrorCode, Plan, Position
from crmctl.domain.chat_status_decoding import MalformedError, decode
from crmctl.jobs.consume_chat_status import Totals, counts_of
from crmctl.jobs.project_chat_status import Batch, DeadLettersFirst, Scope, project


def query(tx: Transaction, reader: TopicReader, group: str, committed: Mapping[int, int], size: int) -> dict[str, Any]:
    """Return the counts that a run would report. `committed` are the group's offsets; what is missing is unread."""
    numbers = tuple(sorted(reader.first))
    scope = Scope(group, reader.topic.name, reader.topic.id, len(numbers), numbers, exclusive=False)
    at: Mapping[int, int] = {number: max(committed.get(number, 0), first) for number, first in reader.first.items()}
    totals = Totals()
    while True:
        records, at = reader.read(at, size)
        batch, malformed = _decode(records)
        decided = _project(tx, scope, batch, size)
        totals.counts.update(counts_of(decided))
        totals.counts["dead_lettered_count"] += malformed
        totals.batches += bool(decided.decisions or malformed)
        if not records and not decided.decisions:
            totals.caught_up = True
            return totals.document()


def _decode(records: list[RawRecord]) -> tuple[Batch, int]:
    events, malformed = [], 0
    for record in records:
        try:
            events.append(decode(record.value, record.position))
        except MalformedError:
            malformed += 1
    return Batch(tuple(events), {record.position: record for record in records}), malformed


def _project(tx: Transaction, scope: Scope, batch: Batch, size: int) -> Plan:
    condemned: dict[Position, tuple[ErrorCode, str]] = {}
    while True:
        try:
            with tx.savepoint():
                return project(tx, scope, batch, tx.now, condemned, retry_limit=size)
        except DeadLettersFirst as first:
            condemned |= {raw.position: (d.code or ErrorCode.APPLY_FAILED, d.reason) for raw, d in first.letters}
