"""What the tests of `crmctl dlq` share: letters made by hand, the commands, and what the ledger says."""

import json
import subprocess
import uuid
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from crmctl.dev.messenger import ChatStatusChanged
from tests.chat_status_support import Chat
from tests.expire_support import rows
from tests.kafka_fixtures import Outgoing, Record
from tests.prefork import run_crmctl
from tests.support import CallResult, start_crmctl

NOT_FOUND = "CRM_DEAL_NOT_FOUND"
MISMATCH = "CRM_CHAT_STATUS_TENANT_MISMATCH"
MALFORMED = "CRM_CHAT_STATUS_MALFORMED"
UNKNOWN = "CRM_CHAT_STATUS_UNKNOWN"
APPLY_FAILED = "CRM_CHAT_STATUS_APPLY_FAILED"
# The id of a source topic that need not exist: a replay never reads it.
SOURCE_ID = "c291cmNlLXRvcGljLWlkLQ"


def letter(
    event: ChatStatusChanged | None,
    code: str | None = NOT_FOUND,
    *,
    source: tuple[int, int] | None = None,
    source_id: str = SOURCE_ID,
    value: bytes | None = None,
    key: str | None = None,
    reason: str = "the test says so",
    attempts: int = 0,
    failed_at: datetime | None = None,
    partition: int = -1,
    without: tuple[str, ...] = (),
) -> Outgoing:
    """A record of the dead-letter topic as the consumer writes it; `source` is its partition and offset there."""
    number, offset = source if source is not None else (0, uuid.uuid4().int % 2**40)
    headers = {
        "x-dlq-reason": reason,
        "x-dlq-error-code": code or "",
        "x-source-topic": "pin.messenger.deal-chat-status-changed.v1",
        "x-original-offset": str(offset),
        "x-source-topic-id": source_id,
        "x-original-partition": str(number),
        "x-original-timestamp": "0",
        "x-dlq-group": "test",
        "x-dlq-attempts": str(attempts),
        "x-dlq-failed-at": (failed_at or datetime.now(UTC)).isoformat(),
    }
    return Outgoing(
        value=event.value() if event is not None else value,
        key=key if key is not None or event is None else str(event.deal_id),
        headers=tuple((name, text) for name, text in headers.items() if name not in without),
        partition=partition,
    )


def send_letters(chat: Chat, *letters: Outgoing) -> list[Record]:
    """Produce to the dead-letter topic; returns the records in the order of the letters."""
    arrived = chat.kafka.produce(chat.dlq_topic, letters, partitioner="murmur2_random")
    arrived.sort(key=lambda record: (record.partition, record.offset))
    ordered = []
    for sent in letters:
        wanted = _bytes(sent.value), _bytes(sent.key)
        found = next(record for record in arrived if (record.value, record.key) == wanted)
        arrived.remove(found)
        ordered.append(found)
    return ordered


def _bytes(text: bytes | str | None) -> bytes | None:
    return text.encode() if isinstance(text, str) else text


def place(record: Record) -> str:
    """Where a letter stands, as `dlq list` prints it."""
    return f"{record.partition}:{record.offset}"


def dlq(chat: Chat, *args: str, env: Mapping[str, str] | None = None, form: str = "json") -> CallResult:
    """Run a `crmctl dlq …` to its end."""
    return run_crmctl("dlq", *args, "-o", form, database=chat.database, env=chat.env | dict(env or {}))


def replayed(chat: Chat, *args: str) -> dict[str, Any]:
    """Run `crmctl dlq replay` and return its document."""
    result = dlq(chat, "replay", *args)
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = result.json
    return document


def start_replay(chat: Chat, *args: str) -> subprocess.Popen[str]:
    """Start `crmctl dlq replay -o json`; use it as a context manager."""
    return start_crmctl("dlq", "replay", "-o", "json", *args, database=chat.database, env=chat.env)


def listed(chat: Chat, *args: str) -> dict[str, Any]:
    """Run `crmctl dlq list` and return its document."""
    result = dlq(chat, "list", *args)
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = result.json
    return document


def open_letters(chat: Chat, *args: str) -> set[str]:
    """Where the open letters stand."""
    return {row["letter"] for row in listed(chat, *args)["letters"]}


def counts(document: Mapping[str, Any]) -> dict[str, int]:
    """The figures of a replay that are not zero, without what is left open."""
    names = ("applied", "stale", "duplicate", "failed", "refused")
    return {name: document[f"{name}_count"] for name in names if document[f"{name}_count"]}


def ledger(chat: Chat) -> dict[str, dict[str, Any]]:
    """The ledger's rows by the places of their letters."""
    found = rows(chat.connection, "select *, partition || ':' || \"offset\" as place from crm.dlq_resolutions")
    return {row["place"]: row for row in found}


def resolutions(chat: Chat) -> Counter[str]:
    """How many letters ended how."""
    return Counter(row["resolution"] for row in ledger(chat).values())


def insert(chat: Chat, *deal_ids: UUID, tenant_id: UUID) -> None:
    """Insert deals of one tenant."""
    for deal_id in deal_ids:
        chat.deal(id=deal_id, tenant_id=tenant_id)


def error_of(result: CallResult) -> dict[str, Any]:
    """The JSON error document."""
    return dict(json.loads(result.stdout)["error"])
