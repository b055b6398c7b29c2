"""`crmctl bookings expire` on a real server: UC-BKG-003 steps 1-7, AC1, AC2, AC3, AC7, AC8, and every flag."""

import json
import re
import uuid
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from crmctl.domain.bookings import BOOKING, RESERVE
from tests.expire_support import (
    TOPIC,
    Connection,
    assert_expired_once,
    bookings,
    events,
    expire,
    expired,
    fingerprints,
    insert_due,
    insert_queue,
    locked,
    log_lines,
    rows,
    runs,
    scalar,
    timeline,
    unchanged_apart_from,
)
from tests.prefork import run_crmctl
from tests.support import CallResult, Database, insert_booking

PHASES = pytest.mark.parametrize("phase", [RESERVE, BOOKING], ids=lambda phase: phase.name)
TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
DOCUMENT = {
    "job": str,
    "run_id": str,
    "dry_run": bool,
    "as_of": str,
    "reserve_expired_count": int,
    "booking_expired_count": int,
    "skipped_locked_count": int,
    "poison_count": int,
    "undetermined_count": int,
    "poison": list,
    "not_expired": list,
    "batches": int,
    "has_more": bool,
    "duration_ms": int,
}


def instant(text: str) -> datetime:
    return datetime.fromisoformat(text)


def error(result: CallResult) -> Any:
    return result.json["error"]


def expired_total(result: CallResult) -> int:
    total = result.json["reserve_expired_count"] + result.json["booking_expired_count"]
    assert isinstance(total, int)
    return total


def reasons(result: CallResult) -> dict[str, str]:
    return {row["booking_id"]: row["reason"] for row in result.json["not_expired"]}


def next_minute(connection: Connection) -> datetime:
    now = scalar(connection, "select clock_timestamp()")
    assert isinstance(now, datetime)
    return now + timedelta(minutes=1)


@pytest.fixture
def connection(database: Database) -> psycopg.Connection[Any]:
    return database.connect()


class TestAcceptanceCriteria:
    @pytest.mark.parametrize(
        ("status", "target", "timeline_type", "phase"),
        [
            ("Reserved", "ReserveExpired", "BookingReserveExpired", "Reserve"),
            ("AwaitingPayment", "ReserveExpired", "BookingReserveExpired", "Reserve"),
            ("Booked", "BookingExpired", "BookingExpired", "Booking"),
        ],
    )
    def test_ac1_ac2_an_overdue_booking_expires_with_its_timeline_row_and_its_event(
        self, database: Database, connection: Connection, status: str, target: str, timeline_type: str, phase: str
    ) -> None:
        booking_id = insert_booking(connection, status=status, version=7)
        before = bookings(connection)[booking_id]

        result = expire(database)

        assert result.exit_code == 0, result.stderr
        as_of = instant(result.json["as_of"])
        after = bookings(connection)[booking_id]
        assert (after["status"], after["version"]) == (target, 8)
        assert instant(after["expired_at"]) == instant(after["updated_at"]) == as_of
        changed = {name for name in before if before[name] != after[name]}
        assert changed == {"status", "version", "expired_at", "updated_at"}

        (entry,) = timeline(connection)
        assert entry["type"] == timeline_type
        assert entry["payload"] == {"BookingId": str(booking_id)}
        assert (str(entry["deal_id"]), str(entry["tenant_id"])) == (before["deal_id"], before["tenant_id"])
        assert entry["occurred_at"] == as_of

        (event,) = events(connection)
        assert event["payload"]["Phase"] == phase
        counts = (result.json["reserve_expired_count"], result.json["booking_expired_count"])
        assert counts == ((1, 0) if phase == "Reserve" else (0, 1))

    @PHASES
    def test_ac3_a_second_run_changes_nothing(self, database: Database, connection: Connection, phase: Any) -> None:
        booking_id = insert_due(connection, phase)
        assert expired_total(expire(database)) == 1
        once = fingerprints(connection)

        again = expire(database)

        assert again.exit_code == 0
        assert expired_total(again) == 0
        assert fingerprints(connection) == once
        assert bookings(connection)[booking_id]["version"] == 2
        assert_expired_once(connection, {booking_id})

    @PHASES
    def test_ac7_after_the_expiry_the_same_object_and_deal_take_a_new_booking(
        self, database: Database, connection: Connection, phase: Any
    ) -> None:
        old_id = insert_due(connection, phase)
        old = bookings(connection)[old_id]
        same = {name: old[name] for name in ("deal_id", "property_object_id", "tenant_id")}
        for held in ("deal_id", "property_object_id"):
            with pytest.raises(psycopg.errors.UniqueViolation):
                insert_booking(connection, deal=False, **{held: old[held]})
        assert expired_total(expire(database)) == 1
        terminal = bookings(connection)[old_id]

        new_id = insert_due(connection, phase, deal=False, deadline=next_minute(connection), **same)
        result = expire(database)

        assert expired_total(result) == 0
        assert bookings(connection)[old_id] == terminal
        assert bookings(connection)[new_id]["status"] == phase.statuses[0]
        assert_expired_once(connection, {old_id})

    @PHASES
    def test_ac8_the_payload_carries_six_fields_and_nothing_else(
        self, database: Database, connection: Connection, phase: Any
    ) -> None:
        booking_id = insert_due(connection, phase)

        as_of = expire(database).json["as_of"]

        booking = bookings(connection)[booking_id]
        (event,) = events(connection)
        expired_at = event["payload"].pop("ExpiredAt")
        assert expired_at.endswith("+00:00")
        assert datetime.fromisoformat(expired_at) == datetime.fromisoformat(as_of)  # PostgreSQL drops trailing zeros
        assert event["payload"] == {
            "BookingId": str(booking_id),
            "TenantId": booking["tenant_id"],
            "DealId": booking["deal_id"],
            "PropertyObjectId": booking["property_object_id"],
            "Phase": phase.name,
        }


class TestEnvelope:
    def test_the_outbox_row_is_a_version_1_message_of_the_booking_aggregate(
        self, database: Database, connection: Connection
    ) -> None:
        ids = [*insert_queue(connection, 3), *insert_queue(connection, 2, BOOKING)]
        before = scalar(connection, "select clock_timestamp()")

        result = expire(database)

        found = events(connection)
        assert len({event["id"] for event in found}) == len({event["position"] for event in found}) == len(ids)
        for event in found:
            assert event["topic"] == TOPIC
            assert event["key"] == event["aggregate_id"] == event["payload"]["BookingId"]
            assert (event["aggregate_type"], event["contract_version"]) == ("Booking", 1)
            assert before <= event["created_at"] == instant(result.json["as_of"])
            assert event["headers"].keys() == {"traceparent"}
            assert TRACEPARENT.fullmatch(event["headers"]["traceparent"])
            assert (event["published_at"], event["last_error"], event["next_attempt_at"]) == (None, None, None)
            assert event["attempts"] == 0
        assert Counter(event["key"] for event in found) == Counter(str(booking_id) for booking_id in ids)

    def test_ids_are_in_the_order_of_time_where_postgresql_can_make_them(
        self, database: Database, connection: Connection
    ) -> None:
        insert_queue(connection, 3)
        expire(database, "--drain", "--batch-size", "1")
        expected = 7 if connection.info.server_version >= 180_000 else 4
        rows = [*events(connection), *timeline(connection)]
        assert [row["id"].version for row in rows] == [expected] * 6

    def test_the_callers_trace_goes_on_in_the_event(self, database: Database, connection: Connection) -> None:
        insert_due(connection)
        trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"

        expire(database, env={"TRACEPARENT": f"00-{trace}-{parent}-01"})

        (event,) = events(connection)
        version, trace_id, span_id, flags = event["headers"]["traceparent"].split("-")
        assert (version, trace_id, flags) == ("00", trace, "01")
        assert span_id != parent

    @pytest.mark.parametrize(
        "inherited",
        [
            "rubbish",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-zz",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        ],
    )
    def test_a_malformed_trace_of_the_caller_is_replaced(
        self, database: Database, connection: Connection, inherited: str
    ) -> None:
        insert_due(connection)

        assert expire(database, env={"TRACEPARENT": inherited}).exit_code == 0

        (event,) = events(connection)
        assert TRACEPARENT.fullmatch(event["headers"]["traceparent"]), event["headers"]
        assert "-00000000000000000000000000000000-" not in event["headers"]["traceparent"]


class TestWhatIsDue:
    def test_the_deadline_itself_is_not_yet_due(self, database: Database, connection: Connection) -> None:
        deadline = scalar(connection, "select clock_timestamp()") - timedelta(minutes=5)
        ids = {insert_due(connection, phase, deadline=deadline) for phase in (RESERVE, BOOKING)}

        assert expired_total(expire(database, "--as-of", deadline.isoformat())) == 0
        assert expired(connection) == set()

        assert expired_total(expire(database, "--as-of", (deadline + timedelta(microseconds=1)).isoformat())) == 2
        assert_expired_once(connection, ids)

    def test_only_the_deadline_of_the_own_phase_counts(self, database: Database, connection: Connection) -> None:
        tomorrow = next_minute(connection) + timedelta(days=1)
        untouched = {
            "Booked, its reserve ran out long ago": insert_due(connection, BOOKING, deadline=tomorrow),
            "Booked, without a deadline": insert_due(connection, BOOKING, booking_expires_at=None),
            "Reserved, not yet due": insert_due(connection, RESERVE, deadline=tomorrow),
            "Reserved, without a deadline": insert_due(connection, RESERVE, reserve_expires_at=None),
            "Reserved, with a stray booking deadline": insert_due(
                connection, RESERVE, deadline=tomorrow, booking_expires_at=tomorrow - timedelta(days=9)
            ),
            "Reserved for ever": insert_due(connection, RESERVE, reserve_expires_at="infinity"),
        }
        before = fingerprints(connection)

        result = expire(database)

        assert (expired_total(result), result.json["poison_count"], result.json["has_more"]) == (0, 0, False)
        assert fingerprints(connection) == before, untouched

    def test_statuses_that_are_not_ours_are_untouched(self, database: Database, connection: Connection) -> None:
        long_ago: dict[str, Any] = {"reserve_expires_at": "2020-01-01Z", "booking_expires_at": "2020-01-01Z"}
        for status in ("Cancelled", "Draft", "Sold", "reserved", "BOOKED", "Reserved ", "", "ReserveExpired"):
            insert_booking(connection, status=status, **long_ago)
        ours = insert_due(connection)
        before = bookings(connection)

        result = expire(database, "--drain")

        assert expired_total(result) == 1
        after = bookings(connection)
        assert {booking_id for booking_id in before if before[booking_id] != after[booking_id]} == {ours}
        assert len(events(connection)) == len(timeline(connection)) == 1

    def test_a_row_that_a_foreign_key_check_holds_still_expires(
        self, database: Database, connection: Connection
    ) -> None:
        ids = insert_queue(connection, 3)
        with locked(database, ids[:2], "for key share"):
            result = expire(database)
        assert (expired_total(result), result.json["skipped_locked_count"]) == (3, 0)


class TestBatches:
    def test_one_moment_holds_for_the_whole_batch(self, database: Database, connection: Connection) -> None:
        insert_queue(connection, 4)
        insert_queue(connection, 3, BOOKING)

        result = expire(database)

        as_of = instant(result.json["as_of"])
        assert {instant(booking["expired_at"]) for booking in bookings(connection).values()} == {as_of}
        assert {instant(event["payload"]["ExpiredAt"]) for event in events(connection)} == {as_of}
        assert {entry["occurred_at"] for entry in timeline(connection)} == {as_of}
        assert {booking["version"] for booking in bookings(connection).values()} == {2}

    def test_a_run_expires_the_earliest_n_of_each_phase(self, database: Database, connection: Connection) -> None:
        reserves, booked = insert_queue(connection, 5), insert_queue(connection, 4, BOOKING)

        result = expire(database, "--batch-size", "3")

        assert (result.json["reserve_expired_count"], result.json["booking_expired_count"]) == (3, 3)
        assert (result.json["batches"], result.json["has_more"]) == (1, True)
        assert_expired_once(connection, reserves[:3] + booked[:3])

    def test_a_batch_that_takes_the_last_row_has_no_more(self, database: Database, connection: Connection) -> None:
        insert_queue(connection, 3)
        result = expire(database, "--batch-size", "3")
        assert (expired_total(result), result.json["has_more"]) == (3, False)

    @pytest.mark.parametrize(("batch_size", "batches"), [(1, 7), (3, 3), (7, 1)])
    def test_drain_goes_on_until_nothing_is_due(
        self, database: Database, connection: Connection, batch_size: int, batches: int
    ) -> None:
        ids = insert_queue(connection, 7) + insert_queue(connection, 2, BOOKING)

        result = expire(database, "--drain", "--batch-size", str(batch_size))

        assert (result.json["reserve_expired_count"], result.json["booking_expired_count"]) == (7, 2)
        assert (result.json["batches"], result.json["has_more"]) == (batches, False)
        assert_expired_once(connection, ids)

    def test_drain_passes_through_equal_deadlines(self, database: Database, connection: Connection) -> None:
        ids = insert_queue(connection, 10, apart=timedelta(0))
        result = expire(database, "--drain", "--batch-size", "3")
        assert (expired_total(result), result.json["skipped_locked_count"], result.json["batches"]) == (10, 0, 4)
        assert_expired_once(connection, ids)

    def test_each_batch_of_a_drain_has_the_moment_of_its_own_transaction(
        self, database: Database, connection: Connection
    ) -> None:
        insert_queue(connection, 6)

        result = expire(database, "--drain", "--batch-size", "2")

        moments = [run["as_of"] for run in runs(connection)]
        assert moments == [run["started_at"] for run in runs(connection)]
        assert moments == sorted(set(moments))
        assert instant(result.json["as_of"]) == moments[-1]
        assert Counter(instant(booking["expired_at"]) for booking in bookings(connection).values()) == Counter(
            dict.fromkeys(moments, 2)
        )

    @pytest.mark.parametrize("size", ["0", "100001", "many"])
    def test_a_senseless_batch_size_is_a_usage_error(self, database: Database, size: str) -> None:
        result = expire(database, "--batch-size", size)
        assert (result.exit_code, result.stdout) == (2, "")

    def test_max_expire_caps_the_whole_run(self, database: Database, connection: Connection) -> None:
        reserves, booked = insert_queue(connection, 8), insert_queue(connection, 8, BOOKING)

        first = expire(database, "--drain", "--batch-size", "3", "--max-expire", "7")
        assert (expired_total(first), first.json["has_more"]) == (7, True)

        second = expire(database, "--max-expire", "7")
        assert (expired_total(second), second.json["has_more"]) == (7, True)

        third = expire(database, "--drain", "--max-expire", "7")
        assert (expired_total(third), third.json["has_more"]) == (2, False)
        assert_expired_once(connection, reserves + booked)

    def test_max_expire_that_is_just_enough_has_no_more(self, database: Database, connection: Connection) -> None:
        insert_queue(connection, 4)
        result = expire(database, "--drain", "--batch-size", "2", "--max-expire", "4")
        assert (expired_total(result), result.json["has_more"]) == (4, False)

    def test_the_time_budget_ends_a_drain_between_two_batches(self, database: Database, connection: Connection) -> None:
        ids = insert_queue(connection, 40)
        connection.execute(
            """
            create function public.slow() returns trigger language plpgsql as $$
            begin
                perform pg_sleep(0.02);
                return new;
            end $$
            """
        )
        connection.execute("create trigger slow before update on crm.bookings for each row execute function slow()")

        result = expire(database, "--drain", "--batch-size", "5", "--time-budget", "250ms")

        assert result.exit_code == 0
        done = expired_total(result)
        assert 5 <= done < 40
        assert (done % 5, result.json["batches"], result.json["has_more"]) == (0, done // 5, True)
        assert_expired_once(connection, ids[:done])

    def test_a_spent_time_budget_still_allows_one_batch(self, database: Database, connection: Connection) -> None:
        insert_queue(connection, 3)
        result = expire(database, "--drain", "--batch-size", "2", "--time-budget", "0s")
        assert (expired_total(result), result.json["batches"], result.json["has_more"]) == (2, 1, True)

    @pytest.mark.parametrize("budget", ["50", "soon", "-1s"])
    def test_a_time_budget_without_a_unit_is_a_usage_error(self, database: Database, budget: str) -> None:
        result = expire(database, "--time-budget", budget)
        assert (result.exit_code, result.stdout) == (2, "")


class TestScope:
    def test_only_the_named_tenant_expires(self, database: Database, connection: Connection) -> None:
        ours, theirs = uuid.uuid4(), uuid.uuid4()
        ids = insert_queue(connection, 3, tenant_id=ours) + insert_queue(connection, 2, BOOKING, tenant_id=ours)
        insert_queue(connection, 3, oldest=timedelta(hours=3), tenant_id=theirs)

        result = expire(database, "--tenant", str(ours), "--drain", "--batch-size", "2")

        assert (result.json["reserve_expired_count"], result.json["booking_expired_count"]) == (3, 2)
        assert result.json["has_more"] is False
        assert_expired_once(connection, ids)

    def test_only_the_named_bookings_expire_even_beyond_the_batch_size(
        self, database: Database, connection: Connection
    ) -> None:
        reserves, booked = insert_queue(connection, 6), insert_queue(connection, 4, BOOKING)
        named = [reserves[5], reserves[1], reserves[3], booked[2], reserves[1]]

        result = expire(database, "--batch-size", "1", *(f"--id={booking_id}" for booking_id in named))

        assert result.exit_code == 0
        assert (result.json["reserve_expired_count"], result.json["booking_expired_count"]) == (3, 1)
        assert (result.json["not_expired"], result.json["has_more"]) == ([], False)
        assert_expired_once(connection, set(named))

    def test_a_named_booking_that_does_not_expire_is_told_why(self, database: Database, connection: Connection) -> None:
        tomorrow = next_minute(connection) + timedelta(days=1)
        orphan = insert_due(connection, deal=False)
        held = insert_due(connection)
        expected = {
            insert_due(connection, deadline=tomorrow): "NOT_DUE",
            insert_due(connection, BOOKING, deadline=tomorrow): "NOT_DUE",
            insert_due(connection, reserve_expires_at=None): "NOT_DUE",
            insert_booking(connection, status="ReserveExpired"): "ALREADY_EXPIRED",
            insert_booking(connection, status="BookingExpired"): "ALREADY_EXPIRED",
            insert_booking(connection, status="Cancelled"): "STATUS_NOT_OURS",
            orphan: "DEAL_MISSING",
            held: "LOCKED",
        }
        due = insert_due(connection)
        before = bookings(connection)

        with locked(database, [held]):
            result = expire(database, *(f"--id={booking_id}" for booking_id in (*expected, due)))

        assert result.exit_code == 0
        assert reasons(result) == {str(booking_id): reason for booking_id, reason in expected.items()}
        assert (expired_total(result), result.json["skipped_locked_count"], result.json["poison_count"]) == (1, 1, 1)
        after = bookings(connection)
        assert {booking_id for booking_id in before if before[booking_id] != after[booking_id]} == {due}
        assert [event["aggregate_id"] for event in events(connection)] == [str(due)]

    def test_naming_an_expired_booking_again_is_no_error(self, database: Database, connection: Connection) -> None:
        booking_id = insert_due(connection)
        assert reasons(expire(database, "--id", str(booking_id))) == {}
        once = fingerprints(connection)

        again = expire(database, "--id", str(booking_id))

        assert (again.exit_code, reasons(again)) == (0, {str(booking_id): "ALREADY_EXPIRED"})
        assert fingerprints(connection) == once

    def test_a_named_booking_beyond_max_expire_is_not_called_locked(
        self, database: Database, connection: Connection
    ) -> None:
        first, second = insert_queue(connection, 2)

        result = expire(database, "--id", str(first), "--id", str(second), "--max-expire", "1")

        assert (expired_total(result), result.json["skipped_locked_count"], result.json["has_more"]) == (1, 0, True)
        assert reasons(result).keys() == {str(second)}
        assert reasons(result)[str(second)] != "LOCKED"

    def test_an_unknown_id_is_exit_10_and_nothing_is_written(self, database: Database, connection: Connection) -> None:
        due = insert_due(connection)
        unknown = uuid.uuid4()
        before = fingerprints(connection)

        result = expire(database, "--id", str(due), "--id", str(unknown))

        assert result.exit_code == 10
        assert error(result)["code"] == "CRM_BOOKING_NOT_FOUND"
        assert str(unknown) in error(result)["message"]
        assert str(due) not in error(result)["message"]
        after = fingerprints(connection)
        assert {table for table in before if before[table] != after[table]} <= {"crm.job_runs"}

    def test_another_tenants_booking_is_as_good_as_unknown(self, database: Database, connection: Connection) -> None:
        due = insert_due(connection)
        result = expire(database, "--id", str(due), "--tenant", str(uuid.uuid4()))
        assert (result.exit_code, error(result)["code"]) == (10, "CRM_BOOKING_NOT_FOUND")
        assert expired(connection) == set()

    @pytest.mark.parametrize("flag", ["--id", "--tenant"])
    def test_an_id_that_is_no_uuid_is_a_usage_error(self, database: Database, flag: str) -> None:
        result = expire(database, flag, "42")
        assert (result.exit_code, result.stdout) == (2, "")


class TestAsOf:
    def test_a_past_moment_decides_and_is_recorded(self, database: Database, connection: Connection) -> None:
        before_it = insert_due(connection, overdue=timedelta(minutes=30))
        insert_due(connection, overdue=timedelta(minutes=10))
        moment = scalar(connection, "select clock_timestamp()") - timedelta(minutes=20)
        moscow = moment.astimezone(UTC).isoformat().replace("+00:00", "Z")

        result = expire(database, "--as-of", moscow)

        assert result.exit_code == 0
        assert instant(result.json["as_of"]) == moment
        assert_expired_once(connection, {before_it})
        booking = bookings(connection)[before_it]
        assert instant(booking["expired_at"]) == moment < instant(booking["updated_at"])
        (run,) = runs(connection)
        assert run["as_of"] == moment < run["started_at"]

    def test_an_offset_is_respected(self, database: Database, connection: Connection) -> None:
        deadline = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
        booking_id = insert_due(connection, deadline=deadline)

        assert expired_total(expire(database, "--as-of", "2026-03-01T14:59:59+03:00")) == 0
        assert expired_total(expire(database, "--as-of", "2026-03-01T15:00:01+03:00")) == 1

        (event,) = events(connection)
        assert event["payload"]["ExpiredAt"] == "2026-03-01T12:00:01+00:00"
        assert_expired_once(connection, {booking_id})

    @pytest.mark.parametrize("moment", ["2026-03-01T12:00:00", "2026-03-01", ""])
    def test_a_moment_without_an_offset_is_a_usage_error(
        self, database: Database, connection: Connection, moment: str
    ) -> None:
        insert_due(connection)
        before = fingerprints(connection)
        result = expire(database, "--as-of", moment)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "--as-of" in result.stderr
        assert fingerprints(connection) == before

    def test_a_future_moment_is_refused(self, database: Database, connection: Connection) -> None:
        insert_due(connection)
        insert_due(connection, deadline=next_minute(connection))
        future = next_minute(connection) + timedelta(hours=1)

        result = expire(database, "--as-of", future.isoformat())

        assert result.exit_code == 2
        assert "future" in error(result)["message"]
        assert expired(connection) == set()
        assert events(connection) == timeline(connection) == []

    def test_a_dry_run_may_look_into_the_future(self, database: Database, connection: Connection) -> None:
        insert_due(connection)
        insert_due(connection, deadline=next_minute(connection))
        before = fingerprints(connection)
        future = next_minute(connection) + timedelta(hours=1)

        result = expire(database, "--as-of", future.isoformat(), "--dry-run")

        assert result.exit_code == 0
        assert (expired_total(result), instant(result.json["as_of"])) == (2, future)
        assert fingerprints(connection) == before


class TestDryRun:
    @pytest.fixture
    def crowd(self, connection: Connection) -> list[UUID]:
        """Both phases, two tenants, orphans at the head, and a row that refuses every update; returns the healthy."""
        tenant = UUID(int=1)
        insert_queue(connection, 4, oldest=timedelta(hours=9), deal=False)
        healthy = insert_queue(connection, 9, tenant_id=tenant) + insert_queue(connection, 8)
        healthy += insert_queue(connection, 7, BOOKING, tenant_id=tenant)
        insert_due(connection, overdue=timedelta(minutes=90), version=2**31 - 1, tenant_id=tenant)
        return healthy

    @pytest.mark.parametrize(
        "flags",
        [
            (),
            ("--batch-size", "4", "--drain"),
            ("--batch-size", "3", "--drain", "--max-expire", "10"),
            ("--batch-size", "2", "--drain", "--tenant", str(UUID(int=1))),
        ],
        ids=" ".join,
    )
    def test_it_reports_what_the_run_then_does_and_changes_nothing(
        self, database: Database, connection: Connection, crowd: list[UUID], flags: tuple[str, ...]
    ) -> None:
        flags = (*flags, "--as-of", scalar(connection, "select clock_timestamp()").isoformat())
        before = fingerprints(connection)
        with locked(database, crowd[2:4]):
            preview = expire(database, *flags, "--dry-run")
            assert fingerprints(connection) == before
            run = expire(database, *flags)

        assert (preview.exit_code, run.exit_code) == (0, 0), preview.stderr
        assert (preview.json["dry_run"], run.json["dry_run"]) == (True, False)
        assert unchanged_apart_from(preview.json, "dry_run") == unchanged_apart_from(run.json, "dry_run")
        assert expired_total(run) == len(events(connection)) > 0

    def test_it_says_what_would_become_of_named_bookings(self, database: Database, connection: Connection) -> None:
        due, later = insert_due(connection), insert_due(connection, deadline=next_minute(connection))
        before = fingerprints(connection)
        flags = ("--id", str(due), "--id", str(later))

        preview = expire(database, *flags, "--dry-run")

        assert fingerprints(connection) == before
        assert reasons(preview) == reasons(expire(database, *flags)) == {str(later): "NOT_DUE"}

    def test_its_table_says_would_expire(self, database: Database, connection: Connection) -> None:
        insert_queue(connection, 3)
        preview = run_crmctl("bookings", "expire", "--dry-run", database=database)
        assert re.search(r"^Would expire +3$", preview.stdout, re.MULTILINE)
        run = run_crmctl("bookings", "expire", database=database)
        assert re.search(r"^Expired +3$", run.stdout, re.MULTILINE)

    def test_it_leaves_no_locks_behind(self, database: Database, connection: Connection) -> None:
        ids = insert_queue(connection, 3)
        expire(database, "--dry-run")
        with locked(database, ids, "for update nowait"):
            pass


class TestRunRecords:
    def test_each_batch_that_did_something_leaves_one(self, database: Database, connection: Connection) -> None:
        insert_queue(connection, 5)
        insert_queue(connection, 3, BOOKING)
        insert_due(connection, deal=False, overdue=timedelta(hours=3))

        result = expire(database, "--drain", "--batch-size", "2")

        found = runs(connection)
        assert [run["batch"] for run in found] == [1, 2, 3]
        assert {(str(run["run_id"]), run["job"], run["actor"], run["outcome"]) for run in found} == {
            (result.json["run_id"], "expire-bookings", "system", "committed")
        }
        assert [run["counts"]["reserve_expired_count"] for run in found] == [2, 2, 1]
        assert [run["counts"]["booking_expired_count"] for run in found] == [2, 1, 0]
        assert [run["counts"]["poison_count"] for run in found] == [1, 0, 0]
        for run in found:
            assert run["started_at"] <= run["finished_at"]
            assert run["version"]
            assert run["host"]
            assert (run["error_code"], run["error"]) == (None, None)

    @pytest.mark.parametrize("flags", [(), ("--drain",), ("--dry-run",), ("--drain", "--dry-run")], ids=" ".join)
    def test_a_run_without_work_leaves_none(
        self, database: Database, connection: Connection, flags: tuple[str, ...]
    ) -> None:
        insert_due(connection, deadline=next_minute(connection))
        assert expire(database, *flags).exit_code == 0
        assert runs(connection) == []

    def test_a_dry_run_leaves_none(self, database: Database, connection: Connection) -> None:
        insert_queue(connection, 3)
        expire(database, "--dry-run")
        assert runs(connection) == []

    def test_a_run_that_rolled_back_leaves_its_failure(self, database: Database, connection: Connection) -> None:
        insert_due(connection)
        connection.execute(
            """
            create function public.fail() returns trigger language plpgsql as $$
            begin
                raise exception 'out of order' using errcode = '53100';
            end $$
            """
        )
        connection.execute("create trigger fail before insert on crm.outbox_messages execute function fail()")

        result = expire(database)

        assert result.exit_code == 75
        assert expired(connection) == set()
        (run,) = runs(connection)
        assert (run["outcome"], run["error_code"], run["counts"]) == ("failed", "CRMCTL_TRY_AGAIN", {})
        assert "53100" in run["error"]
        assert (run["job"], run["batch"]) == ("expire-bookings", 1)

    def test_a_drain_that_fails_later_keeps_and_tells_what_it_committed(
        self, database: Database, connection: Connection
    ) -> None:
        ids = insert_queue(connection, 5)
        connection.execute(
            f"""
            create function public.fail() returns trigger language plpgsql as $$
            begin
                if new.id = '{ids[3]}' then
                    raise exception 'out of order' using errcode = '53100';
                end if;
                return new;
            end $$
            """.encode()
        )
        connection.execute("create trigger fail before update on crm.bookings for each row execute function fail()")

        result = expire(database, "--drain", "--batch-size", "2")

        assert result.exit_code == 75
        assert result.json["committed"]["batches"] == 1
        assert result.json["committed"]["reserve_expired_count"] == 2
        assert_expired_once(connection, ids[:2])
        assert [(run["batch"], run["outcome"]) for run in runs(connection)] == [(1, "committed"), (2, "failed")]


class TestLockedRows:
    @pytest.mark.parametrize("apart", [timedelta(seconds=1), timedelta(0)], ids=["distinct", "equal deadlines"])
    @pytest.mark.parametrize("flags", [(), ("--batch-size", "7", "--drain")], ids=" ".join)
    def test_the_50_earliest_are_locked_and_the_rest_expire(
        self, database: Database, connection: Connection, apart: timedelta, flags: tuple[str, ...]
    ) -> None:
        ids = insert_queue(connection, 80, apart=apart)
        with locked(database, ids[:50]):
            result = expire(database, *flags)
            assert result.exit_code == 0
            assert_expired_once(connection, ids[50:])
        assert (expired_total(result), result.json["skipped_locked_count"]) == (30, 50)
        assert result.json["has_more"] is False

        rest = expire(database, "--drain")
        assert (expired_total(rest), rest.json["skipped_locked_count"]) == (50, 0)
        assert_expired_once(connection, ids)

    @pytest.mark.parametrize("apart", [timedelta(seconds=1), timedelta(0)], ids=["distinct", "equal deadlines"])
    def test_locked_rows_at_the_head_do_not_use_up_a_small_batch(
        self, database: Database, connection: Connection, apart: timedelta
    ) -> None:
        ids = insert_queue(connection, 80, apart=apart)
        with locked(database, ids[:50]):
            result = expire(database, "--batch-size", "10")
        assert (expired_total(result), result.json["skipped_locked_count"]) == (10, 50)
        assert result.json["has_more"] is True
        assert_expired_once(connection, ids[50:60])

    @pytest.mark.parametrize("apart", [timedelta(seconds=1), timedelta(0)], ids=["distinct", "equal deadlines"])
    def test_locked_rows_are_counted_once_wherever_they_stand(
        self, database: Database, connection: Connection, apart: timedelta
    ) -> None:
        reserves = insert_queue(connection, 21, apart=apart)
        booked = insert_queue(connection, 9, BOOKING, apart=apart)
        held = {*reserves[::4], reserves[1], reserves[-1], *booked[2:5], booked[-1]}
        with locked(database, held):
            result = expire(database, "--drain", "--batch-size", "3")
        assert result.json["skipped_locked_count"] == len(held)
        assert_expired_once(connection, {*reserves, *booked} - held)

    def test_with_everything_locked_the_run_does_nothing_and_succeeds(
        self, database: Database, connection: Connection
    ) -> None:
        ids = insert_queue(connection, 5)
        with locked(database, ids):
            result = expire(database, "--drain", "--batch-size", "2", "--strict")
        assert (result.exit_code, expired_total(result), result.json["skipped_locked_count"]) == (0, 0, 5)
        assert expired(connection) == set()


class TestDatabaseDefaults:
    @pytest.mark.parametrize(
        "setting",
        [
            "timezone = 'Asia/Tokyo'",
            "datestyle = 'German'",
            "default_transaction_isolation = 'serializable'",
            "search_path = ''",
        ],
    )
    def test_the_rows_and_payload_bytes_do_not_depend_on_them(
        self, database: Database, connection: Connection, setting: str
    ) -> None:
        base = datetime(2026, 3, 1, 22, 30, tzinfo=UTC)
        fixed: list[dict[str, Any]] = [
            {"id": UUID(int=n), "deal_id": UUID(int=n + 100), "property_object_id": UUID(int=n + 200)}
            | {"tenant_id": UUID(int=n % 2), "phase": RESERVE if n % 3 else BOOKING}
            | {"deadline": base + timedelta(minutes=7 * n, microseconds=n)}
            for n in range(12)
        ]
        as_of = base + timedelta(minutes=60)
        seen = []
        for each in ("timezone = 'UTC'", setting):
            connection.execute("truncate crm.bookings, crm.deals, crm.outbox_messages, crm.deal_timeline_events")
            for row in fixed:
                insert_due(connection, **row)
            name = scalar(connection, "select quote_ident(current_database())")
            connection.execute(f"alter database {name} set {each}".encode())
            result = expire(database, "--drain", "--batch-size", "2", "--as-of", as_of.isoformat())
            assert result.exit_code == 0, result.stderr
            seen.append(
                (
                    rows(connection, "select id, status, expired_at, version from crm.bookings order by id"),
                    rows(connection, "select key, payload::text::bytea from crm.outbox_messages order by key"),
                    rows(connection, "select payload::text, occurred_at from crm.deal_timeline_events order by 1"),
                    unchanged_apart_from(result.json),
                )
            )

        assert seen[0] == seen[1]
        payload = json.loads(bytes(seen[0][1][0]["payload"]))
        assert payload["ExpiredAt"] == "2026-03-01T23:30:00+00:00"

    def test_the_run_after_midnight_in_tokyo_is_the_run_before_midnight_in_utc(
        self, database: Database, connection: Connection
    ) -> None:
        name = scalar(connection, "select quote_ident(current_database())")
        connection.execute(f"alter database {name} set timezone = 'Asia/Tokyo'".encode())
        booking_id = insert_due(connection)

        result = expire(database)

        assert result.json["as_of"].endswith("+00:00")
        (event,) = events(connection)
        assert event["payload"]["ExpiredAt"] == result.json["as_of"]
        assert_expired_once(connection, {booking_id})


class TestOutput:
    @pytest.mark.parametrize(("flags", "due"), [((), 0), ((), 3), (("--drain",), 0), (("--dry-run", "--strict"), 3)])
    def test_json_is_one_document_with_stable_names(
        self, database: Database, connection: Connection, flags: tuple[str, ...], due: int
    ) -> None:
        insert_queue(connection, due)

        result = expire(database, *flags)

        document, end = json.JSONDecoder().raw_decode(result.stdout)
        assert result.stdout[end:] == "\n"
        assert {name: type(value) for name, value in document.items()} == DOCUMENT
        assert list(document) == list(DOCUMENT)
        assert document["job"] == "expire-bookings"
        assert instant(document["as_of"]).utcoffset() == timedelta(0)
        assert UUID(document["run_id"]).version == 4
        assert document["duration_ms"] >= 0

    def test_a_failure_is_one_document_too(self, database: Database) -> None:
        result = expire(database, "--id", str(uuid.uuid4()))
        document, end = json.JSONDecoder().raw_decode(result.stdout)
        assert result.stdout[end:] == "\n"
        assert document["error"].keys() >= {"code", "message", "hint", "exit_code"}
        assert document["error"]["exit_code"] == result.exit_code == 10

    def test_one_summary_line_is_logged_with_the_figures(self, database: Database, connection: Connection) -> None:
        insert_queue(connection, 2)
        result = expire(database)
        (summary,) = log_lines(result, "run finished")
        for name in ("run_id", "job", "reserve_expired_count", "booking_expired_count", "skipped_locked_count"):
            assert summary[name] == result.json[name]
        assert "duration_ms" in summary

    def test_the_table_has_the_same_figures(self, database: Database, connection: Connection) -> None:
        insert_queue(connection, 2)
        insert_due(connection, BOOKING)
        orphan = insert_due(connection, deal=False)
        result = run_crmctl("bookings", "expire", database=database)
        assert result.exit_code == 0
        for line in (r"Expired +3", r"  reserves +2", r"  bookings +1", r"Poison +1", rf"{orphan} +DEAL_MISSING"):
            assert re.search(rf"^{line}$", result.stdout, re.MULTILINE), line


class TestStrict:
    def test_poison_is_exit_3_and_the_work_is_done(self, database: Database, connection: Connection) -> None:
        healthy = insert_due(connection)
        insert_due(connection, deal=False)
        result = expire(database, "--strict")
        assert (result.exit_code, result.json["poison_count"]) == (3, 1)
        assert_expired_once(connection, {healthy})

    def test_without_it_poison_is_exit_0(self, database: Database, connection: Connection) -> None:
        insert_due(connection, deal=False)
        result = expire(database)
        assert (result.exit_code, result.json["poison_count"]) == (0, 1)

    def test_nothing_wrong_is_exit_0(self, database: Database, connection: Connection) -> None:
        insert_due(connection)
        assert expire(database, "--strict").exit_code == 0

    def test_a_dry_run_foretells_it(self, database: Database, connection: Connection) -> None:
        insert_due(connection, deal=False)
        assert expire(database, "--strict", "--dry-run").exit_code == 3
