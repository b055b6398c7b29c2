"""Durations and instants as people write them."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crmctl.domain.times import format_duration, parse_duration, parse_instant


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500ms", timedelta(milliseconds=500)),
        ("50s", timedelta(seconds=50)),
        ("1h30m", timedelta(minutes=90)),
        ("30d", timedelta(days=30)),
        ("0s", timedelta(0)),
    ],
)
def test_a_duration_is_read_by_its_units(text: str, expected: timedelta) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize(
    "text", ["", "50", "s", "-1s", "1.5h", "1h 30m", "5 s", "1y", "٥s", "9999999d", "1" * 5000 + "d"]
)
def test_a_duration_without_unit_or_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"duration|longer|digits"):
        parse_duration(text)


@given(st.integers(min_value=0, max_value=10**12).map(lambda ms: timedelta(milliseconds=ms)))
def test_a_written_duration_reads_back(value: timedelta) -> None:
    assert parse_duration(format_duration(value)) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-29T10:00:00Z", datetime(2026, 11, 29, 10, tzinfo=UTC)),
        ("2026-11-29t10:00:00z", datetime(2026, 11, 29, 10, tzinfo=UTC)),
        ("2026-11-29 13:00:00+03:00", datetime(2026, 11, 29, 10, tzinfo=UTC)),
        ("2026-11-29T10:00:00.1234567Z", datetime(2026, 11, 29, 10, 0, 0, 123456, tzinfo=UTC)),
    ],
)
def test_an_instant_needs_an_offset_and_keeps_microseconds(text: str, expected: datetime) -> None:
    assert parse_instant(text) == expected


@pytest.mark.parametrize("text", ["2026-11-29T10:00:00", "2026-11-29", "now", "", "2026-13-01T00:00:00Z", "1764410400"])
def test_what_names_no_instant_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  the message differs with the fault
        parse_instant(text)
