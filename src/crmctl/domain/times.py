"""Durations and instants as people write them: `50s`, `1h30m`, `2026-11-29T10:00:00+03:00`."""

import re
from datetime import datetime, timedelta

_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_PART = re.compile(r"(\d+)(ms|[smhd])", re.ASCII)
_RFC3339 = re.compile(r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}:\d{2}(?:\.\d+)?(?P<offset>[Zz]|[+-]\d{2}:\d{2})?", re.ASCII)
_LONGEST_MS = timedelta(days=36_500) // timedelta(milliseconds=1)


def parse_duration(text: str) -> timedelta:
    """Read a duration such as `500ms`, `50s`, `1h30m` or `30d`; a bare number has no unit and is refused.

    Raises ValueError with a message that shows the accepted form.
    """
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r} is not a duration; write it like 500ms, 50s, 5m, 1h30m or 30d")
    milliseconds = sum(int(number) * _UNITS[unit] for number, unit in parts)
    if milliseconds > _LONGEST_MS:
        raise ValueError(f"{text!r} is longer than 36500d")
    return timedelta(milliseconds=milliseconds)


def parse_instant(text: str) -> datetime:
    """Read an RFC 3339 timestamp with an offset; one without an offset names no instant and is refused.

    Digits beyond the microsecond, PostgreSQL's resolution, are cut. Raises ValueError.
    """
    match = _RFC3339.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an RFC 3339 timestamp; write it like 2026-11-29T10:00:00Z")
    if match["offset"] is None:
        raise ValueError(f"{text!r} has no offset from UTC; add Z or one like +03:00")
    return datetime.fromisoformat(text.upper())


def format_duration(value: timedelta) -> str:
    """Write a duration in its largest whole unit, as `parse_duration` reads it."""
    milliseconds = value // timedelta(milliseconds=1)
    for unit, size in reversed(_UNITS.items()):
        if milliseconds >= size and milliseconds % size == 0:
            return f"{milliseconds // size}{unit}"
    return f"{milliseconds}ms"
