"""Messenger's side of the chat-status topic, for tests, the demo and benchmarks: events as it sends them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import orjson
from confluent_kafka import Producer

from crmctl.domain.topics import CHAT_STATUS_TOPIC


@dataclass(frozen=True, slots=True)
class ChatStatusChanged:
    """One event; what is not given is as messenger would fill it in."""

    deal_id: UUID
    tenant_id: UUID
    status: str
    message_id: UUID = field(default_factory=uuid4)
    chat_id: UUID = field(default_factory=uuid4)
    failure_reason: str | None = None
    changed_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    contract_version: int = 1

    def value(self) -> bytes:
        """The record's value: the envelope with its payload."""
        payload: dict[str, Any] = {
            "DealId": self.deal_id,
            "TenantId": self.tenant_id,
            "Status": self.status,
            "ChatId": self.chat_id,
            "ChangedAt": self.changed_at,
        }
        if self.failure_reason is not None:
            payload["FailureReason"] = self.failure_reason
        return orjson.dumps(
            {
                "MessageId": self.message_id,
                "ContractVersion": self.contract_version,
                "CreatedAt": self.changed_at,
                "AggregateId": self.deal_id,
                "AggregateType": "Deal",
                "Payload": payload,
            }
        )


def send(bootstrap_servers: str, events: Iterable[ChatStatusChanged], *, topic: str = CHAT_STATUS_TOPIC.name) -> int:
    """Produce events keyed by deal, as messenger does, and wait for all; return how many. Raises RuntimeError."""
    producer = Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            "enable.idempotence": True,
            "partitioner": "murmur2_random",
            "queue.buffering.max.messages": 1_000_000,
            "log_level": 0,
        }
    )
    failures: list[str] = []

    def note(error: Any, _message: Any) -> None:
        if error is not None:
            failures.append(str(error))

    count = 0
    for event in events:
        producer.produce(topic, value=event.value(), key=str(event.deal_id).encode(), on_delivery=note)
        producer.poll(0)
        count += 1
    if producer.flush(30) or failures:
        raise RuntimeError(f"events were not delivered: {failures[:1] or 'no answer in 30 s'}")
    return count
