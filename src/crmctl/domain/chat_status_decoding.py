"""Reads the bytes of `pin.messenger.deal-chat-status-changed.v1`: fast, and never surprised.

What .NET producers really send is read: a byte order mark, every spelling of a GUID, seven-digit fractions,
DateTimeOffset.MinValue and MaxValue with any offset. What cannot be read is Malformed with a reason.
"""

import re
from datetime import datetime
from typing import Any, Final

import orjson

from crmctl.domain.chat_status import ChatStatus, Event, Position

_BOM: Final = b"\xef\xbb\xbf"
_EPOCH: Final = datetime(1970, 1, 1)
_CANONICAL: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.ASCII)
# The four ids of an event in the usual spelling, one to a line: one look instead of four.
_FOUR: Final = re.compile(r"\n".join([r"(?!0{8}-)" + _CANONICAL.pattern] * 4), re.ASCII)
_HEX: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_STRUCT: Final = re.compile(
    r"\{0x([0-9a-f]{1,8}),0x([0-9a-f]{1,4}),0x([0-9a-f]{1,4}),\{"
    + ",".join(r"0x([0-9a-f]{1,2})" for _ in range(8))
    + r"\}\}",
    re.ASCII,
)
_INSTANT: Final = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d)(?::(\d\d)(?:\.(\d{1,9}))?)?(?:([Zz])|([+-])(\d\d):?(\d\d))", re.ASCII
)
_STATUSES: Final = {status.value: status for status in ChatStatus}
_LONGEST_SHOWN: Final = 100
_LONGEST_REASON: Final = 1_000
_EMPTY: Final = "00000000-0000-0000-0000-000000000000"


class MalformedError(Exception):
    """The record cannot be an event; the text says what is wrong with it, without quoting it."""


def decode(value: bytes | None, position: Position) -> Event:
    """Decode a record's value. Raises MalformedError, and nothing else."""
    if value is None:
        raise MalformedError("it is a tombstone")
    try:
        document = orjson.loads(value.removeprefix(_BOM))
    except (orjson.JSONDecodeError, RecursionError) as error:
        raise MalformedError(f"it is not UTF-8 JSON: {_short(str(error))}") from None
    if not isinstance(document, dict):
        raise MalformedError("it is not a JSON object")
    payload = document.get("Payload")
    if not isinstance(payload, dict):
        raise MalformedError("Payload is missing or no object")
    status, failure_reason = payload.get("Status"), payload.get("FailureReason")
    version = document.get("ContractVersion")
    known = _STATUSES.get(status) if isinstance(status, str) else None
    message_id, deal_id, tenant_id, chat_id = _ids(document, payload)
    return Event(
        message_id=message_id,
        deal_id=deal_id,
        tenant_id=tenant_id,
        chat_id=chat_id,
        status=known,
        sent_status=known or _show(status),
        failure_reason=failure_reason[:_LONGEST_REASON] if isinstance(failure_reason, str) else None,
        changed_at=_instant(payload.get("ChangedAt")),
        contract_version=1 if type(version) is int and version == 1 else _show(version),
        position=position,
    )


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…"


def _show(status: object) -> str:
    if isinstance(status, str | int | float | bool | None):
        return _short(orjson.dumps(status).decode())
    return "an array" if isinstance(status, list) else "an object"


def _ids(document: dict[str, Any], payload: dict[str, Any]) -> tuple[str, str, str, str]:
    try:
        ids = (document["MessageId"], payload["DealId"], payload["TenantId"], payload["ChatId"])
        if _FOUR.fullmatch("\n".join(ids)):
            return ids
    except (KeyError, TypeError):  # one of them is missing or no text
        pass
    message_id = _guid(document, "MessageId")
    return message_id, _guid(payload, "DealId"), _guid(payload, "TenantId"), _guid(payload, "ChatId")


def _guid(source: dict[str, object], name: str) -> str:
    value = source.get(name)
    if not isinstance(value, str):
        raise MalformedError(f"{name} is missing or no text")
    guid = value if _CANONICAL.fullmatch(value) else _canonical(value, name)
    if guid == _EMPTY:
        raise MalformedError(f"{name} is the empty GUID")
    return guid


def _canonical(value: str, name: str) -> str:
    """Any other spelling: upper case, without dashes, in brackets, as a C struct."""
    text = value.strip().lower()
    if (struct := _STRUCT.fullmatch("".join(text.split()))) is not None:
        widths = (8, 4, 4, *(2,) * 8)
        digits = "".join(part.zfill(width) for part, width in zip(struct.groups(), widths, strict=True))
    elif _CANONICAL.fullmatch(bare := text[1:-1] if text[:1] + text[-1:] in {"{}", "()"} else text):
        digits = bare.replace("-", "")
    else:
        digits = text
    if not _HEX.fullmatch(digits):
        raise MalformedError(f"{name} is no GUID")
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _instant(value: object) -> int:
    """Microseconds since 1970 of a DateTimeOffset; those of .NET's extremes lie outside Python's datetime."""
    match = _INSTANT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise MalformedError("ChangedAt is missing or no timestamp with an offset")
    year, month, day, hour, minute, second, fraction, _, sign, hours, minutes = match.groups()
    try:
        local = datetime(int(year), int(month), int(day), int(hour), int(minute), int(second or 0))
    except ValueError:
        raise MalformedError("ChangedAt is no date") from None
    since = local - _EPOCH
    offset = (int(hours) * 60 + int(minutes)) * (1 if sign == "+" else -1) if sign else 0
    whole = since.days * 86_400 + since.seconds - offset * 60
    return whole * 1_000_000 + int((fraction or "")[:6].ljust(6, "0"))
