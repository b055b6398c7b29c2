"""`crmctl dlq discard --lost`: acknowledge open letters that their topic holds no more, so that they count no longer.

Nothing can be done about such a letter: its record is gone, by retention, by hand, or with its topic. Changes
`dlq_resolutions` and nothing else; one batch is one transaction:

1. takes the advisory locks of all partitions, so that a replay that still holds such a letter is waited for;
2. makes `lost` of up to N rows of lost letters that had failed a replay;
3. inserts such a row for each letter without one in a run of up to N offsets before the first that the topic holds.

Its row closes that letter only: another letter of the same source record, which the topic may still hold, stays open.
A crash leaves a batch whole or not at all, and a rerun acknowledges the rest; another one finds nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from crmctl.adapters.postgres import Transaction
from crmctl.adapters.topic_reader import TopicReader
from crmctl.jobs.dead_letters import STATEMENTS
from crmctl.jobs.discard_dead_letters import JOB_NAME
from crmctl.jobs.job import Job, Run
from crmctl.jobs.project_chat_status import lock_partitions

_BATCH_SIZE: Final = 10_000


@dataclass(frozen=True, slots=True)
class Options:
    """Whose locks to take: those of the replay's consumer group. And how much one transaction takes."""

    group: str
    batch_size: int = _BATCH_SIZE


@dataclass(frozen=True, slots=True)
class Progress:
    """Letters of the whole run; `at`: up to which offset each partition is done, none before the first batch."""

    acknowledged_count: int = 0
    at: Mapping[int, int] | None = None
    batches: int = 0
    more: bool = True
    needs_person: bool = False
    failure: None = None

    def counts(self) -> dict[str, int]:
        """What was written, in letters."""
        return {"acknowledged_count": self.acknowledged_count}

    def document(self) -> dict[str, object]:
        """The result as it is printed."""
        return {**self.counts(), "batches": self.batches, "has_more": self.more}


def job(reader: TopicReader, actor: str, reason: str) -> Job[Options, Progress]:
    """The job, on behalf of `actor`, who gives `reason`; what is gone is what `reader` missed when it was opened."""

    def batch(tx: Transaction, run: Run, options: Options, before: Progress) -> Progress:
        numbers = sorted(reader.first)
        at = before.at if before.at is not None else dict.fromkeys(numbers, 0)
        lock_partitions(tx, options.group, reader.topic.name, numbers)
        said = {"topic_id": reader.topic.id, "reason": reason, "resolved_by": actor, "run_id": run.id}
        first = [reader.first[number] for number in numbers]
        failed = _count(
            tx, "acknowledge_failed", {**said, "partitions": numbers, "first": first, "limit": options.batch_size}
        )
        unseen = 0
        number = next((number for number in numbers if at[number] < reader.first[number]), None)
        if number is not None:
            end = min(at[number] + options.batch_size, reader.first[number])
            unseen = _count(tx, "acknowledge_unseen", {**said, "partition": number, "from": at[number], "to": end})
            at = {**at, number: end}
        return replace(
            before,
            acknowledged_count=before.acknowledged_count + failed + unseen,
            at=at,
            batches=before.batches + bool(failed + unseen),
            more=failed == options.batch_size or any(at[n] < reader.first[n] for n in numbers),
        )

    return Job(JOB_NAME, actor, lambda _: Progress(), batch)


def _count(tx: Transaction, statement: str, params: Mapping[str, object]) -> int:
    return int(tx.one(STATEMENTS[statement], params)["acknowledged_count"])
