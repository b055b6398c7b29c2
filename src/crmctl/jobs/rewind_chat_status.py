"""`crmctl chat-status rewind`: move the consumer group's offsets for a full or partial replay.

Changes nothing but the group's offsets, in one call. A replay is safe: marks make duplicates of what was applied,
and where they are pruned the one rule converges to the same state (source 003, AC-8).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient

from crmctl.adapters import groups
from crmctl.domain.errors import ConfigurationError, UsageError


@dataclass(frozen=True, slots=True)
class Move:
    """Where one partition's offset goes; `old` None: nothing was committed."""

    partition: int
    old: int | None
    new: int


def plan(
    client: AdminClient, reader: Consumer, group: str, topic: str, to: str | int | datetime, only: Sequence[int]
) -> list[Move]:
    """Find the new offsets for `earliest`, `latest`, an offset or a moment, within what each partition holds.

    Raises GroupActiveError while the group has members, UsageError for a partition or offset that is not there.
    """
    groups.check_empty(client, group)
    there = groups.partitions(client, topic)
    if not there:
        raise ConfigurationError(f"topic {topic} does not exist", hint="check CRMCTL_CHAT_STATUS__TOPIC")
    if missing := sorted(set(only) - set(there)):
        raise UsageError(f"partition {missing[0]} does not exist", hint=f"{topic} has 0 to {there[-1]}")
    numbers = sorted(only) or there
    first = groups.offsets(client, topic, numbers, "earliest")
    ends = groups.offsets(client, topic, numbers, "latest")
    if isinstance(to, int):
        for number in numbers:
            if not first[number] <= to <= ends[number]:
                raise UsageError(
                    f"offset {to} is outside partition {number}, which holds {first[number]} to {ends[number]}",
                    hint="name one partition with --partition, or use earliest, latest or a time",
                )
        target = dict.fromkeys(numbers, to)
    elif isinstance(to, datetime):
        found = groups.offsets(client, topic, numbers, to)
        target = {number: found[number] if found[number] >= 0 else ends[number] for number in numbers}
    else:
        target = first if to == "earliest" else ends
    committed = groups.committed(reader, topic, numbers)
    return [Move(number, committed.get(number), target[number]) for number in numbers]


def apply(client: AdminClient, group: str, topic: str, moves: Sequence[Move]) -> None:
    """Move the group. Raises GroupActiveError where a member has joined meanwhile."""
    groups.move(client, group, topic, {move.partition: move.new for move in moves})
