"""`crmctl chat-status lag`: how far the group is behind, and what waits. Reads only, joins no group."""

import time
from typing import Any, Final

from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient

from crmctl.adapters import groups
from crmctl.adapters.postgres import Transaction
from crmctl.domain.errors import ConfigurationError
from crmctl.sql import load

STATEMENTS: Final = load("chat_status_lag")


def query(tx: Transaction, client: AdminClient, reader: Consumer, group: str, topic: str) -> dict[str, Any]:
    """Return lag per partition (messages, and seconds since the oldest unread record), and the deferred events.

    A partition without a committed offset is behind by all that it holds. Raises ConfigurationError where there is
    no such topic.
    """
    numbers = groups.partitions(client, topic)
    if not numbers:
        raise ConfigurationError(f"topic {topic} does not exist", hint="check CRMCTL_CHAT_STATUS__TOPIC")
    first = groups.offsets(client, topic, numbers, "earliest")
    ends = groups.offsets(client, topic, numbers, "latest")
    committed = groups.committed(reader, topic, numbers)
    at = {number: max(committed.get(number, 0), first[number]) for number in numbers}
    unread = groups.timestamps(reader, topic, {n: at[n] for n in numbers if at[n] < ends[n]})
    now_ms = time.time() * 1000
    return {
        "group": group,
        "topic": topic,
        "partitions": [
            {
                "partition": number,
                "committed_offset": committed.get(number),
                "end_offset": ends[number],
                "lag_messages": ends[number] - at[number],
                "lag_seconds": round(max(0.0, now_ms - unread[number]) / 1000, 3) if number in unread else 0.0,
            }
            for number in numbers
        ],
        **tx.one(STATEMENTS["deferred"]),
    }
