"""`crmctl dlq show`: one dead letter whole, its deal as it is now, and what a replay would do; changes nothing."""

import base64
from typing import Any, Final

import orjson

from crmctl.adapters.postgres import Transaction
from crmctl.adapters.records import RawRecord
from crmctl.adapters.topic_reader import TopicReader
from crmctl.domain.chat_status import Decision, ErrorCode, Outcome
from crmctl.domain.dead_letters import Letter
from crmctl.domain.errors import LetterNotFoundError
from crmctl.jobs.dead_letters import STATEMENTS, Found, describe, letters_of, look
from crmctl.jobs.project_chat_status import foresee
from crmctl.jobs.replay_dead_letters import verdict

_LONGEST_VALUE: Final = 10_000


def query(tx: Transaction, reader: TopicReader, partition: int, offset: int) -> dict[str, Any]:
    """Return {letter, state, …, headers, envelope | value, resolution, deal, replay: {outcome, code, reason}}.

    Raises LetterNotFoundError where the topic holds no such record.
    """
    record = _read(reader, partition, offset)
    [letter] = letters_of([record])
    [found] = look(tx, [letter])
    return {
        **describe(found),
        "topic": reader.topic.name,
        "source_topic": letter.source_topic,
        "headers": [[name, None if value is None else _text(value)] for name, value in record.headers],
        **_value(record.value),
        "resolution": _resolution(found),
        "deal": _deal(tx, letter),
        "replay": _replay(tx, found),
    }


def _read(reader: TopicReader, partition: int, offset: int) -> RawRecord:
    if reader.first.get(partition, 0) <= offset < reader.ends.get(partition, 0):
        records, _ = reader.read({**reader.ends, partition: offset}, 1)
        if records and records[0].position.offset == offset:
            return records[0]
    held = ", ".join(f"{n}:{first}-{reader.ends[n] - 1}" for n, first in reader.first.items() if first < reader.ends[n])
    raise LetterNotFoundError(
        f"{reader.topic.name} holds no letter {partition}:{offset}",
        hint=f"it holds {held or 'nothing'}; see crmctl dlq list",
        letter=f"{partition}:{offset}",
    )


def _text(value: bytes) -> str | dict[str, str]:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def _value(value: bytes | None) -> dict[str, Any]:
    """The decoded envelope where the value is JSON, else the value itself, cut where it is long."""
    if value is None:
        return {"envelope": None, "value": None}
    try:
        return {"envelope": orjson.loads(value.removeprefix(b"\xef\xbb\xbf"))}
    except (orjson.JSONDecodeError, RecursionError):
        cut = value[:_LONGEST_VALUE]
        return {"envelope": None, "value": _text(cut), "value_bytes": len(value)}


def _resolution(found: Found) -> dict[str, Any] | None:
    row = found.other if found.other is not None and found.closed_by_another else found.own
    if row is None:
        return None
    return {name: row[name] for name in ("resolution", "reason", "resolved_by", "run_id", "resolved_at")}


def _deal(tx: Transaction, letter: Letter) -> dict[str, Any] | None:
    if letter.event is None:
        return None
    row = tx.first(STATEMENTS["deal"], {"deal_id": letter.event.deal_id})
    if row is None:
        return None
    position = None if row["topic_id"] is None else f"{row['partition']}:{row['offset']}"
    names = ("id", "tenant_id", "status", "chat_status", "deleted_at", "updated_at")
    return {**{name: row[name] for name in names}, "position": position}


def _replay(tx: Transaction, found: Found) -> dict[str, Any]:
    """What a replay would do with it now, and why."""
    if found.closed:
        by = "" if found.other is None or not found.closed_by_another else ", by another letter of its source record"
        return {"outcome": "none", "code": None, "reason": f"it is {found.state}{by}"}
    if found.letter.event is None:
        return {"outcome": "failed", "code": ErrorCode.MALFORMED.value, "reason": found.letter.malformed}
    decision = foresee(tx, found.letter.event)
    resolution, code, reason = verdict(decision)
    return {"outcome": resolution, "code": code, "reason": reason or _why(decision)}


def _why(decision: Decision) -> str:
    sent, now = decision.event.sent_status, decision.from_status
    if decision.outcome is Outcome.APPLIED:
        return f"the deal is {now}, and becomes {sent}"
    if decision.outcome is Outcome.DUPLICATE:
        return "its MessageId has been processed"
    return f"the deal is {now}, which {sent} from this source position does not change"
