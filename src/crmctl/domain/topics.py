"""The topics that crmctl writes to or reads from, and what their contracts ask of them (docs/contracts.md)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from crmctl.domain.events import BOOKING_EXPIRED, INSTALLATION_MARKED_STALE


@dataclass(frozen=True, slots=True)
class Topic:
    """What a topic must be: at least so many partitions, and these settings."""

    name: str
    partitions: int
    config: Mapping[str, str] = field(default_factory=dict)


# Seven days: a consumer that was away for a week still finds every event.
BOOKING_EXPIRED_TOPIC: Final = Topic(
    name=BOOKING_EXPIRED.topic,
    partitions=6,
    config={"cleanup.policy": "delete", "retention.ms": str(7 * 24 * 3600 * 1000)},
)
INSTALLATION_MARKED_STALE_TOPIC: Final = Topic(
    name=INSTALLATION_MARKED_STALE.topic,
    partitions=3,
    config={"cleanup.policy": "delete", "retention.ms": str(7 * 24 * 3600 * 1000)},
)
# Dead letters are kept until somebody resolves them. Larger than any source record with our headers on top.
CHAT_STATUS_DLQ_TOPIC: Final = Topic(
    name="pin.crm.deal-chat-status-dlq.v1",
    partitions=3,
    config={"cleanup.policy": "delete", "retention.ms": "-1", "max.message.bytes": str(10 * 1024 * 1024)},
)
TOPICS: Final = (BOOKING_EXPIRED_TOPIC, INSTALLATION_MARKED_STALE_TOPIC, CHAT_STATUS_DLQ_TOPIC)
# Messenger's: crmctl reads it and never creates it, except in the embedded environment.
CHAT_STATUS_TOPIC: Final = Topic(
    name="pin.messenger.deal-chat-status-changed.v1",
    partitions=6,
    config={"cleanup.policy": "delete"},
)


def ours(dlq_topic: str) -> tuple[Topic, ...]:
    """The topics that crmctl writes to, with the name that the dead letters' is configured to have."""
    return tuple(replace(topic, name=dlq_topic) if topic is CHAT_STATUS_DLQ_TOPIC else topic for topic in TOPICS)


def faults(topic: Topic, partitions: int | None, config: Mapping[str, str]) -> list[str]:
    """Say where a topic falls short of its contract; `partitions` None means that it does not exist."""
    if partitions is None:
        return ["it does not exist"]
    found = []
    if partitions < topic.partitions:
        found.append(f"{partitions} partitions, {topic.partitions} are asked for")
    for name, wanted in topic.config.items():
        has = config.get(name)
        enough = has == wanted if name == "cleanup.policy" else _limit(has) >= _limit(wanted)
        if not enough:
            found.append(f"{name} is {has}, {wanted} is asked for")
    return found


def _limit(value: str | None) -> float:
    if value is None:
        return 0
    return float("inf") if value == "-1" else int(value)
