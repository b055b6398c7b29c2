"""What the consumer reads of a record: everything that .NET sends, and of all else only that it is malformed.

CASES is the table of docs/contracts.md; the same cases go through the binary in tests/integration.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crmctl.dev.messenger import ChatStatusChanged
from crmctl.domain.chat_status import ChatStatus, ErrorCode, Event, Position
from crmctl.domain.chat_status_decoding import MalformedError, decode
from crmctl.domain.topics import CHAT_STATUS_TOPIC
from tests.chat_status_support import edited

HERE: Final = Position("topic", 3, 17)
MESSAGE_ID: Final = UUID("6f9619ff-8b86-d011-b42d-00c04fc964ff")
SENT: Final = ChatStatusChanged(
    deal_id=UUID("0a1b2c3d-0004-0005-0006-0708090a0b0c"),
    tenant_id=UUID("11111111-2222-3333-4444-555555555555"),
    status="Ready",
    message_id=MESSAGE_ID,
    chat_id=UUID("99999999-8888-7777-6666-555555555555"),
    changed_at=datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC),
)
CONTRACTS: Final = Path(__file__).parents[2] / "docs" / "contracts.md"

Change = Callable[[ChatStatusChanged], bytes | None]


@dataclass(frozen=True, slots=True)
class Case:
    """What is done to a good event's value, and what the consumer then makes of it; without a code it applies."""

    change: Change
    code: ErrorCode | None = None


def envelope(**fields: Any) -> Change:
    return lambda event: edited(event, **fields)


def payload(**fields: Any) -> Change:
    return lambda event: edited(event, payload=fields)


def constant(value: bytes | None) -> Change:
    return lambda _: value


def as_text(change: Callable[[str], bytes]) -> Change:
    return lambda event: change(event.value().decode())


def spelled(spell: Callable[[UUID], str]) -> Change:
    """All four ids of the event, spelled in another way."""

    def change(event: ChatStatusChanged) -> bytes:
        ids = {"DealId": event.deal_id, "TenantId": event.tenant_id, "ChatId": event.chat_id}
        return edited(
            event, MessageId=spell(event.message_id), payload={name: spell(value) for name, value in ids.items()}
        )

    return change


def format_x(value: UUID) -> str:
    tail = ",".join(f"0x{byte:02x}" for byte in value.bytes[8:])
    return f"{{0x{value.time_low:08x},0x{value.time_mid:04x},0x{value.time_hi_version:04x},{{{tail}}}}}"


def loose_format_x(value: UUID) -> str:
    tail = ", ".join(f"0x{byte:X}" for byte in value.bytes[8:])
    return f" {{ 0x{value.time_low:x}, 0x{value.time_mid:x}, 0x{value.time_hi_version:x}, {{ {tail} }} }} "


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def with_text(old: bytes, new: bytes) -> Change:
    def change(event: ChatStatusChanged) -> bytes:
        value = event.value()
        assert value.count(old) == 1
        return value.replace(old, new)

    return change


SPELLINGS: Final[dict[str, Callable[[UUID], str]]] = {
    "as D": str,
    "as N": lambda value: value.hex,
    "as B": lambda value: f"{{{value}}}",
    "as P": lambda value: f"({value})",
    "as X": format_x,
    "as X with blanks and without leading zeros": loose_format_x,
    "in upper case": lambda value: str(value).upper(),
    "as N in upper case": lambda value: value.hex.upper(),
    "with blanks around it": lambda value: f" \t{value}\r\n",
}
BAD_IDS: Final[dict[str, Any]] = {
    "missing": ...,
    "null": None,
    "a number": 7,
    "an object": {},
    "empty": "",
    "blank": "  ",
    "one digit short": str(MESSAGE_ID)[:-1],
    "one digit long": f"{MESSAGE_ID}0",
    "not hexadecimal": str(MESSAGE_ID).replace("6", "g"),
    "of fullwidth digits": str(MESSAGE_ID).replace("6", "６"),
    "in mismatched brackets": f"{{{MESSAGE_ID})",
    "in the brackets of N": f"{{{MESSAGE_ID.hex}}}",
    "with its dashes elsewhere": f"{MESSAGE_ID.hex[:9]}-{MESSAGE_ID.hex[9:]}",
    "followed by NUL": f"{MESSAGE_ID}\0",
    "Guid.Empty": str(UUID(int=0)),
}
MALFORMED: Final = ErrorCode.MALFORMED
UNKNOWN: Final = ErrorCode.UNKNOWN

CASES: Final[dict[str, Case]] = {
    "a byte order mark in front": Case(lambda event: b"\xef\xbb\xbf" + event.value()),
    "white space around the document": Case(lambda event: b" \r\n\t" + event.value() + b"\n"),
    **{f"ids spelled {name}": Case(spelled(spell)) for name, spell in SPELLINGS.items() if name != "as D"},
    "seven digits after the second": Case(payload(ChangedAt="2026-11-29T12:00:00.1234567+03:00")),
    "DateTimeOffset.MinValue at +14:00": Case(payload(ChangedAt="0001-01-01T00:00:00.0000000+14:00")),
    "DateTimeOffset.MaxValue at -12:00": Case(payload(ChangedAt="9999-12-31T23:59:59.9999999-12:00")),
    "duplicate keys, of which the last one counts": Case(
        with_text(b'"Payload":{', b'"Payload":{"Status":"Closed","DealId":"",')
    ),
    "NUL in a text": Case(payload(FailureReason="a\0b")),
    "characters beyond the BMP, as escapes": Case(payload(FailureReason="\U0001f3e0")),
    "unknown fields, 1 MB of them": Case(envelope(Extra={"Deep": nested(900), "Long": "x" * 1_000_000})),
    "FailureReason that is no text": Case(payload(FailureReason={"Code": 7})),
    "FailureReason of 1 MB": Case(payload(FailureReason="x" * 1_000_000)),
    "no ContractVersion, CreatedAt, AggregateId, AggregateType": Case(
        envelope(ContractVersion=..., CreatedAt=..., AggregateId=..., AggregateType=...)
    ),
    "ContractVersion that is no number": Case(envelope(ContractVersion="1.0")),
    "ContractVersion of 1,000 nested arrays": Case(
        lambda event: event.value().replace(b':1,"Cr', b":" + b"[" * 1000 + b"]" * 1000 + b',"Cr')
    ),
    "a tombstone (null value)": Case(constant(None), MALFORMED),
    "an empty value": Case(constant(b""), MALFORMED),
    "white space only": Case(constant(b"  \n"), MALFORMED),
    "1 MB of garbage": Case(constant(bytes(range(256)) * 4000), MALFORMED),
    "1 MB of zeros": Case(constant(bytes(1_000_000)), MALFORMED),
    "UTF-16 with a byte order mark": Case(as_text(lambda text: text.encode("utf-16")), MALFORMED),
    "UTF-16 without a byte order mark": Case(as_text(lambda text: text.encode("utf-16-le")), MALFORMED),
    "two byte order marks": Case(lambda event: b"\xef\xbb\xbf" * 2 + event.value(), MALFORMED),
    "bytes that are not UTF-8 in a text": Case(with_text(b"AggregateType", b"Aggregate\xff"), MALFORMED),
    "a lone surrogate as an escape": Case(with_text(b'"Deal"', b'"\\ud800"'), MALFORMED),
    "a lone surrogate as bytes": Case(with_text(b'"Deal"', b'"\xed\xa0\x80"'), MALFORMED),
    "a control character in a text": Case(with_text(b'"Deal"', b'"De\nal"'), MALFORMED),
    "100,000 nested brackets": Case(constant(b"[" * 100_000 + b"]" * 100_000), MALFORMED),
    "100,000 nested brackets in an unknown field": Case(
        with_text(b'"Deal"', b"[" * 100_000 + b"]" * 100_000), MALFORMED
    ),
    "100,000 nested objects": Case(constant(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), MALFORMED),
    "a number beyond every double": Case(with_text(b'"Deal"', b"1e999"), MALFORMED),
    "NaN": Case(with_text(b'"Deal"', b"NaN"), MALFORMED),
    "a document that breaks off": Case(lambda event: event.value()[:-1], MALFORMED),
    "something behind the document": Case(lambda event: event.value() + b"{}", MALFORMED),
    "double-encoded JSON": Case(as_text(lambda text: json.dumps(text).encode()), MALFORMED),
    "an array": Case(lambda event: b"[" + event.value() + b"]", MALFORMED),
    "a text": Case(constant(b'"Ready"'), MALFORMED),
    "a number": Case(constant(b"1"), MALFORMED),
    "null": Case(constant(b"null"), MALFORMED),
    "Payload missing": Case(envelope(Payload=...), MALFORMED),
    "Payload that is a text (double-encoded)": Case(
        lambda event: edited(event, Payload=json.dumps(json.loads(event.value())["Payload"])), MALFORMED
    ),
    "ChangedAt missing": Case(payload(ChangedAt=...), MALFORMED),
    "ChangedAt that is a number": Case(payload(ChangedAt=1_795_953_600), MALFORMED),
    "ChangedAt without an offset": Case(payload(ChangedAt="2026-11-29T12:00:00"), MALFORMED),
    "ChangedAt on a day that does not exist": Case(payload(ChangedAt="2026-02-30T12:00:00Z"), MALFORMED),
    **{f"MessageId {name}": Case(envelope(MessageId=value), MALFORMED) for name, value in BAD_IDS.items()},
    **{
        f"{field} {name}": Case(payload(**{field: BAD_IDS[name]}), MALFORMED)
        for field in ("DealId", "TenantId", "ChatId")
        for name in ("missing", "null", "one digit short", "Guid.Empty")
    },
    "Status missing": Case(payload(Status=...), UNKNOWN),
    "Status null": Case(payload(Status=None), UNKNOWN),
    "Status that is a number": Case(payload(Status=3), UNKNOWN),
    "Status in lower case": Case(payload(Status="ready"), UNKNOWN),
    "Status with NUL behind it": Case(payload(Status="Ready\0"), UNKNOWN),
    "Status that no enum has": Case(payload(Status="Closed"), UNKNOWN),
    "Status of 1 MB": Case(payload(Status="Ready" * 200_000), UNKNOWN),
    "Status that is an array": Case(payload(Status=["Ready"]), UNKNOWN),
    "Status of 1,000 nested arrays": Case(with_text(b'"Ready"', b"[" * 1000 + b"]" * 1000), UNKNOWN),
}


def row_of(name: str) -> str:
    """The row of the table in which a case is: what is wrong with an id is one row for all four."""
    return re.sub("^(MessageId|DealId|TenantId|ChatId) ", "an id: ", name)


def decoded(**changes: Any) -> Event:
    return decode(edited(SENT, **changes), HERE)


def test_an_event_as_messenger_sends_it_is_read_field_by_field() -> None:
    assert decode(SENT.value(), HERE) == Event(
        message_id="6f9619ff-8b86-d011-b42d-00c04fc964ff",
        deal_id="0a1b2c3d-0004-0005-0006-0708090a0b0c",
        tenant_id="11111111-2222-3333-4444-555555555555",
        chat_id="99999999-8888-7777-6666-555555555555",
        status=ChatStatus.READY,
        sent_status="Ready",
        failure_reason=None,
        changed_at=1_795_953_600_123_456,
        contract_version=1,
        position=HERE,
    )


@pytest.mark.parametrize("name", CASES)
def test_a_case_of_the_table_has_the_outcome_that_the_table_says(name: str) -> None:
    case = CASES[name]
    value = case.change(SENT)
    if case.code is MALFORMED:
        with pytest.raises(MalformedError) as caught:
            decode(value, HERE)
        assert 0 < len(str(caught.value)) <= 200
        return
    event = decode(value, HERE)
    assert event.status == (ChatStatus.READY if case.code is None else None)
    assert len(event.sent_status) <= 101
    expected = decode(SENT.value(), HERE)
    assert (event.message_id, event.deal_id, event.tenant_id, event.chat_id) == (
        expected.message_id,
        expected.deal_id,
        expected.tenant_id,
        expected.chat_id,
    )


def test_the_table_in_the_contracts_lists_exactly_these_cases() -> None:
    page = CONTRACTS.read_text(encoding="utf-8")
    section = page.split(f"## `{CHAT_STATUS_TOPIC.name}`")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| (applies|`CRM_\w+`) \|$", section, re.MULTILINE)
    told = {row_of(name): f"`{case.code}`" if case.code else "applies" for name, case in CASES.items()}
    assert dict(rows) == told
    assert len(rows) == len(told)


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_guid_is_one_message_id_however_it_is_spelled(name: str) -> None:
    assert decoded(MessageId=SPELLINGS[name](MESSAGE_ID)).message_id == str(MESSAGE_ID)


@settings(max_examples=200, deadline=None)
@given(value=st.uuids(), data=st.data())
def test_every_spelling_of_every_guid_is_one_id(value: UUID, data: st.DataObject) -> None:
    spell = data.draw(st.sampled_from(list(SPELLINGS.values())))
    text = spell(value)
    assert decoded(MessageId=data.draw(st.sampled_from([text, text.upper(), text.lower()]))).message_id == str(value)


@pytest.mark.parametrize(
    ("text", "microseconds"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01T00:00Z", 0),
        ("1970-01-01 00:00:00z", 0),
        ("1970-01-01T03:00:00+03:00", 0),
        ("1969-12-31T19:30:00-0430", 0),
        ("1970-01-01T00:00:00.1Z", 100_000),
        ("1970-01-01T00:00:00.1234567Z", 123_456),
        ("1970-01-01T00:00:00.123456789Z", 123_456),
        ("1969-12-31T23:59:59.9999999Z", -1),
        ("0001-01-01T00:00:00.0000000+00:00", -62_135_596_800_000_000),
        ("0001-01-01T00:00:00+14:00", -62_135_596_800_000_000 - 14 * 3_600_000_000),
        ("0001-01-01T00:00:00-12:00", -62_135_596_800_000_000 + 12 * 3_600_000_000),
        ("9999-12-31T23:59:59.9999999+00:00", 253_402_300_799_999_999),
        ("9999-12-31T23:59:59.9999999+14:00", 253_402_300_799_999_999 - 14 * 3_600_000_000),
        ("9999-12-31T23:59:59.9999999-12:00", 253_402_300_799_999_999 + 12 * 3_600_000_000),
    ],
)
def test_changed_at_is_the_moment_in_microseconds(text: str, microseconds: int) -> None:
    assert decoded(payload={"ChangedAt": text}).changed_at == microseconds


@settings(max_examples=200, deadline=None)
@given(moment=st.datetimes(timezones=st.timezones().map(lambda _: UTC)))
def test_every_moment_that_python_knows_is_read_as_python_reads_it(moment: datetime) -> None:
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    expected = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    assert decoded(payload={"ChangedAt": moment.isoformat()}).changed_at == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "2026-11-29",
        "2026-11-29T25:00:00Z",
        "2026-11-29T12:00:60Z",
        "0000-01-01T00:00:00Z",
        "12026-11-29T12:00:00Z",
        "2026-11-29T12:00:00.Z",
        "2026-11-29T12:00:00Z ",
        "٢٠٢٦-11-29T12:00:00Z",
    ],
)
def test_what_is_no_moment_is_malformed(text: str) -> None:
    with pytest.raises(MalformedError, match="ChangedAt"):
        decoded(payload={"ChangedAt": text})


def test_what_was_sent_instead_of_a_status_is_shown_in_short() -> None:
    assert decoded(payload={"Status": 3}).sent_status == "3"
    assert decoded(payload={"Status": "Ready\0"}).sent_status == '"Ready\\u0000"'
    assert decoded(payload={"Status": None}).sent_status == "null"
    assert decoded(payload={"Status": ["Ready"]}).sent_status == "an array"
    assert decoded(payload={"Status": {}}).sent_status == "an object"
    assert len(decoded(payload={"Status": "x" * 1_000}).sent_status) == 101


def test_a_failure_reason_that_is_no_text_is_none() -> None:
    assert decoded(payload={"FailureReason": "no room"}).failure_reason == "no room"
    assert decoded(payload={"FailureReason": 7}).failure_reason is None


def test_a_malformed_record_is_not_quoted() -> None:
    for value in (b'{"Password":"hunter2"', edited(SENT, MessageId="hunter2"), b"hunter2"):
        with pytest.raises(MalformedError) as caught:
            decode(value, HERE)
        assert "hunter2" not in str(caught.value)


def survives(value: bytes | None) -> None:
    """Decode: an event or MalformedError, and the event can be logged and dead-lettered."""
    try:
        event = decode(value, HERE)
    except MalformedError as error:
        str(error).encode()
        return
    UUID(event.message_id), UUID(event.deal_id), UUID(event.tenant_id), UUID(event.chat_id)
    event.sent_status.encode()
    assert -(2**63) <= event.changed_at < 2**63


@settings(max_examples=500, deadline=None)
@given(value=st.one_of(st.none(), st.binary(max_size=200), st.text(max_size=100).map(lambda text: text.encode())))
def test_random_bytes_are_never_a_surprise(value: bytes | None) -> None:
    survives(value)


@settings(max_examples=300, deadline=None)
@given(cuts=st.lists(st.tuples(st.integers(0, 600), st.integers(0, 40), st.binary(max_size=6)), min_size=1, max_size=3))
def test_an_event_with_some_bytes_replaced_is_never_a_surprise(cuts: list[tuple[int, int, bytes]]) -> None:
    value = SENT.value()
    for start, length, new in cuts:
        value = value[:start] + new + value[start + length :]
    survives(value)


SCALARS: Final = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=20),
    st.uuids().map(str),
    st.sampled_from([*ChatStatus, "2026-11-29T12:00:00Z", "{}", "()", "0x", "\0", "\ud800"]),
)
VALUES: Final = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@settings(max_examples=200, deadline=None)
@given(
    outer=st.dictionaries(st.sampled_from(["MessageId", "ContractVersion", "Payload", "Extra"]), VALUES),
    inner=st.dictionaries(
        st.sampled_from(["DealId", "TenantId", "ChatId", "Status", "FailureReason", "ChangedAt", "Extra"]), VALUES
    ),
)
def test_an_event_with_random_json_in_its_fields_is_never_a_surprise(
    outer: dict[str, Any], inner: dict[str, Any]
) -> None:
    survives(edited(SENT, payload=inner, **outer))


@settings(max_examples=100, deadline=None)
@given(document=VALUES)
def test_random_json_is_never_a_surprise(document: Any) -> None:
    survives(json.dumps(document).encode())


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_can_be_logged_however_deep_or_long_it_was(name: str) -> None:
    """orjson takes 1,023 levels; Python's own json and repr end before that."""
    if CASES[name].code is MALFORMED:
        return
    event = decode(CASES[name].change(SENT), HERE)
    line = json.dumps({"payload.Version": event.contract_version, "FailureReason": event.failure_reason})
    assert len(line) < 16_000
    assert len(str(event.contract_version)) <= 101


@pytest.mark.parametrize("version", [True, "1", 1.5, 2, None, [1], {"Major": 1}])
def test_a_contract_version_that_is_not_1_does_not_equal_1(version: object) -> None:
    assert decoded(ContractVersion=version).contract_version != 1
