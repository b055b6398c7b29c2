"""`crmctl dlq discard`: close dead letters that nobody will ever apply, with a reason and who decided it (DESIGN 8).

Changes `dlq_resolutions` and nothing else, one transaction per batch, by the walk that the replay takes; the record
stays in its topic. A crash leaves a batch whole or not at all, and a rerun closes the rest.
"""

from collections.abc import Callable
from typing import Final

from crmctl.adapters.postgres import Transaction
from crmctl.adapters.topic_reader import TopicReader
from crmctl.domain.dead_letters import Resolution
from crmctl.jobs import dead_letter_walk
from crmctl.jobs.dead_letter_walk import Choice, Options, Progress
from crmctl.jobs.dead_letters import Entry
from crmctl.jobs.job import Job

JOB_NAME: Final = "discard-dead-letters"


def job(reader: TopicReader, actor: str, reason: str, committed: Callable[[Progress], None]) -> Job[Options, Progress]:
    """The job, on behalf of `actor`, who gives `reason`; `committed` is told of each committed batch."""

    def handle(_: Transaction, choice: Choice) -> list[Entry]:
        return [Entry(item.letter, Resolution.DISCARDED, item.code, reason, item.tries) for item in choice.tried]

    return dead_letter_walk.job(JOB_NAME, (Resolution.DISCARDED,), handle, reader, actor, committed)
