"""`crmctl bookings extend` on a real server: UC-BKG-003 A1, AC4, AC6, every answer and what it leaves behind."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, LiteralString
from urllib.parse import urlsplit
from uuid import UUID

import psycopg
import pytest

from crmctl.domain.bookings import BOOKING
from crmctl.jobs import expire_bookings
from tests.expire_support import (
    Connection,
    bookings,
    closed_gate,
    events,
    expire,
    finish,
    insert_due,
    log_lines,
    rows,
    runs,
    scalar,
    timeline,
    wait_until,
)
from tests.relay_support import PERMISSION, error_of, extend, insert_booked, rsa_signer, start_extend, tenant_of, work
from tests.support import Database, insert_booking

APPLICATION: Final = "crmctl extend-booking"
DOCUMENT: Final = {
    "job": str,
    "run_id": str,
    "dry_run": bool,
    "request_id": str,
    "repeated": bool,
    "booking_id": str,
    "old_booking_expires_at": str,
    "new_booking_expires_at": str,
    "extensions_count": int,
    "version": int,
    "new_deadline_is_past": bool,
    "duration_ms": int,
}


@pytest.fixture
def connection(database: Database) -> psycopg.Connection[Any]:
    return database.connect()


def token_for(connection: Connection, booking_id: UUID, *, permissions: Sequence[str] = (PERMISSION,)) -> str:
    """A good token of a manager of the booking's tenant."""
    return rsa_signer().token(tenant_of(connection, booking_id), permissions=list(permissions))


def notifications(connection: Connection) -> list[dict[str, Any]]:
    return rows(connection, "select * from crm.deal_notifications order by created_at")


def requests(connection: Connection) -> list[dict[str, Any]]:
    return rows(connection, "select * from crm.extension_requests order by created_at")


def wait_for_lock(connection: Connection) -> None:
    """Wait until an extension waits for somebody else's lock."""
    waiting = "select 1 from pg_stat_activity where application_name = %s and wait_event_type = 'Lock'"
    wait_until(lambda: rows(connection, waiting, APPLICATION), "an extension that waits for a lock")


def trigger(table: LiteralString, moment: LiteralString, body: LiteralString) -> list[LiteralString]:
    """The statements of a row trigger of the CRM's."""
    return [*_rule(body), f"create trigger rule {moment} on crm.{table} for each row execute function public.rule()"]


def deferred_trigger(table: LiteralString, moment: LiteralString, body: LiteralString) -> list[LiteralString]:
    """The statements of one that waits for the commit."""
    return [
        *_rule(body),
        f"create constraint trigger rule {moment} on crm.{table} deferrable initially deferred"
        " for each row execute function public.rule()",
    ]


def _rule(body: LiteralString) -> list[LiteralString]:
    return [f"create function public.rule() returns trigger language plpgsql as $$ begin {body}; return new; end $$"]


def answer(document: dict[str, Any]) -> dict[str, Any]:
    """What a document says of the extension, without what belongs to the run that printed it."""
    return {name: value for name, value in document.items() if name not in {"run_id", "duration_ms", "repeated"}}


class TestABookedBooking:
    def test_moves_its_deadline_by_the_programs_duration(self, database: Database, connection: Connection) -> None:
        booking_id = insert_booked(connection, booking_duration_hours=72, extensions_count=1, version=5)
        before = bookings(connection)[booking_id]
        result = extend(database, booking_id, token=token_for(connection, booking_id))
        assert result.exit_code == 0
        after = bookings(connection)[booking_id]
        old = datetime.fromisoformat(before["booking_expires_at"])
        new = datetime.fromisoformat(after["booking_expires_at"])
        assert new - old == timedelta(hours=72)
        assert after["updated_at"] > before["updated_at"]
        assert after == before | {
            "booking_expires_at": after["booking_expires_at"],
            "extensions_count": 2,
            "version": 6,
            "updated_at": after["updated_at"],
        }
        assert result.json["extensions_count"] == 2
        assert result.json["version"] == 6
        assert datetime.fromisoformat(result.json["old_booking_expires_at"]) == old
        assert datetime.fromisoformat(result.json["new_booking_expires_at"]) == new

    def test_is_answered_with_one_document_of_stable_fields(self, database: Database, connection: Connection) -> None:
        booking_id = insert_booked(connection)
        document = extend(database, booking_id, token=token_for(connection, booking_id)).json
        assert {name: type(value) for name, value in document.items()} == DOCUMENT
        assert document["job"] == "extend-booking"
        assert document["booking_id"] == str(booking_id)
        assert document["repeated"] is False
        assert document["new_deadline_is_past"] is False
        assert datetime.fromisoformat(document["new_booking_expires_at"]).utcoffset() == timedelta(0)

    def test_leaves_timeline_notification_answer_and_run_record_in_its_transaction(
        self, database: Database, connection: Connection
    ) -> None:
        booking_id, request_id = insert_booked(connection), uuid.uuid4()
        result = extend(database, booking_id, "--request-id", str(request_id), token=token_for(connection, booking_id))
        booking = bookings(connection)[booking_id]
        body = {"BookingId": str(booking_id), "NewBookingExpiresAt": booking["booking_expires_at"]}
        (entry,) = timeline(connection)
        assert (entry["type"], entry["payload"]) == ("BookingExtended", body)
        assert (str(entry["tenant_id"]), str(entry["deal_id"])) == (booking["tenant_id"], booking["deal_id"])
        (notification,) = notifications(connection)
        assert (notification["type"], notification["payload"]) == ("BookingExtended", body)
        assert (str(notification["tenant_id"]), str(notification["deal_id"])) == (
            booking["tenant_id"],
            booking["deal_id"],
        )
        assert notification["delivered_at"] is None
        (request,) = requests(connection)
        assert (request["request_id"], request["booking_id"]) == (request_id, booking_id)
        assert (str(request["tenant_id"]), request["actor_subject"]) == (booking["tenant_id"], "manager-17")
        assert request["result"].items() <= result.json.items()
        (run,) = runs(connection)
        assert (run["job"], run["actor"], run["counts"]) == ("extend-booking", "manager-17", {"extended_count": 1})
        tables = ("bookings", "deal_timeline_events", "deal_notifications", "extension_requests", "job_runs")
        assert len({scalar(connection, f"select xmin::text from crm.{table}") for table in tables}) == 1

    def test_writes_no_event_however_often_it_is_extended(self, database: Database, connection: Connection) -> None:
        booking_id = insert_booked(connection)
        for expected in (1, 2, 3):
            result = extend(database, booking_id, token=token_for(connection, booking_id))
            assert result.json["extensions_count"] == expected
        assert events(connection) == []
        assert len(timeline(connection)) == len(notifications(connection)) == len(requests(connection)) == 3

    def test_is_extended_from_its_old_deadline_to_the_microsecond(
        self, database: Database, connection: Connection
    ) -> None:
        old = datetime(2027, 3, 28, 1, 59, 59, 123_457, tzinfo=UTC)
        booking_id = insert_booked(connection, booking_duration_hours=25, booking_expires_at=old)
        result = extend(database, booking_id, token=token_for(connection, booking_id))
        assert datetime.fromisoformat(result.json["new_booking_expires_at"]) == old + timedelta(hours=25)

    def test_takes_its_duration_from_its_own_snapshot_of_the_terms(
        self, database: Database, connection: Connection
    ) -> None:
        hours = {insert_booked(connection, booking_duration_hours=h): h for h in (1, 24, 24 * 365)}
        for booking_id, duration in hours.items():
            document = extend(database, booking_id, token=token_for(connection, booking_id)).json
            old, new = document["old_booking_expires_at"], document["new_booking_expires_at"]
            moved = datetime.fromisoformat(new) - datetime.fromisoformat(old)
            assert moved == timedelta(hours=duration)

    def test_is_not_expired_by_the_next_run(self, database: Database, connection: Connection) -> None:
        """AC4."""
        extended, other = insert_due(connection, BOOKING), insert_due(connection, BOOKING)
        assert extend(database, extended, token=token_for(connection, extended)).exit_code == 0
        assert expire(database, "--drain").json["booking_expired_count"] == 1
        found = bookings(connection)
        assert (found[extended]["status"], found[other]["status"]) == ("Booked", "BookingExpired")
        assert [event["aggregate_id"] for event in events(connection)] == [str(other)]


class TestTheWarningOfADeadlineThatIsPast:
    def test_is_given_where_the_new_deadline_is_past_as_well(self, database: Database, connection: Connection) -> None:
        booking_id = insert_due(connection, BOOKING, overdue=timedelta(days=30), booking_duration_hours=24)
        token = token_for(connection, booking_id)
        assert extend(database, booking_id, token=token).json["new_deadline_is_past"] is True
        assert "Warning: the new deadline is past" in extend(database, booking_id, token=token, form="table").stdout
        assert expire(database).json["booking_expired_count"] == 1

    def test_is_not_given_otherwise(self, database: Database, connection: Connection) -> None:
        booking_id = insert_due(connection, BOOKING)
        result = extend(database, booking_id, token=token_for(connection, booking_id), form="table")
        assert result.exit_code == 0
        assert "Warning" not in result.stdout
        assert re.search(rf"^Extended +{booking_id}$", result.stdout, re.MULTILINE)
        assert re.search(r"^Extensions +1$", result.stdout, re.MULTILINE)


class TestABookingThatIsNotBooked:
    @pytest.mark.parametrize(
        "status", ["Reserved", "AwaitingPayment", "ReserveExpired", "BookingExpired", "SoldOnTheMoon"]
    )
    def test_is_an_invalid_state_whatever_its_status(
        self, database: Database, connection: Connection, status: str
    ) -> None:
        """AC6."""
        booking_id = insert_booking(connection, status=status)
        before = work(connection)
        result = extend(database, booking_id, token=token_for(connection, booking_id))
        assert result.exit_code == 12
        error = error_of(result)
        assert error["code"] == "CRM_BOOKING_INVALID_STATE"
        assert error["http_status"] == 409
        assert error["exit_code"] == 12
        assert error["booking_id"] == str(booking_id)
        assert error["status"] == status
        assert str(booking_id) in error["message"]
        assert status in error["message"]
        assert work(connection) == before

    @pytest.mark.parametrize("deadline", ["infinity", "-infinity", None])
    def test_is_one_where_its_deadline_is_no_point_in_time(
        self, database: Database, connection: Connection, deadline: str | None
    ) -> None:
        booking_id = insert_booked(connection, booking_expires_at=deadline)
        before = work(connection)
        result = extend(database, booking_id, token=token_for(connection, booking_id))
        assert result.exit_code == 12
        assert error_of(result)["code"] == "CRM_BOOKING_INVALID_STATE"
        assert error_of(result)["status"] == "Booked"
        assert work(connection) == before

    def test_is_one_where_the_new_deadline_would_be_beyond_the_calendar(
        self, database: Database, connection: Connection
    ) -> None:
        booking_id = insert_booked(connection, booking_expires_at="294000-01-01 00:00:00+00")
        connection.execute("update crm.bookings set booking_duration_hours = 2000000000")
        before = work(connection)
        result = extend(database, booking_id, token=token_for(connection, booking_id))
        assert result.exit_code == 12
        assert work(connection) == before


class TestARefusalByTheDatabaseOfTheCrm:
    """Its constraints and triggers are not ours, and what they refuse is no bug of ours."""

    @pytest.mark.parametrize(
        ("rules", "why"),
        [
            (
                ["alter table crm.bookings add constraint once check (extensions_count < 1)"],
                '23514: new row for relation "bookings" violates check constraint "once"',
            ),
            (trigger("bookings", "before update", "raise exception 'frozen' using detail = 'secret'"), "P0001: frozen"),
            (trigger("deal_timeline_events", "before insert", "raise exception 'closed'"), "P0001: closed"),
            (
                trigger("deal_notifications", "before insert", "raise exception 'mute' using errcode = '44000'"),
                "44000: mute",
            ),
            (
                deferred_trigger("bookings", "after update", "raise exception 'late' using errcode = '23000'"),
                "23000: late",
            ),
            (trigger("bookings", "before update", "return null"), "the update was suppressed by a trigger"),
        ],
        ids=["constraint", "trigger", "timeline", "notification", "deferred", "suppressed"],
    )
    @pytest.mark.parametrize("mode", [(), ("--dry-run",)], ids=["run", "dry-run"])
    def test_is_an_invalid_state_and_nothing_is_written(
        self, database: Database, connection: Connection, rules: list[LiteralString], why: str, mode: tuple[str, ...]
    ) -> None:
        booking_id = insert_booked(connection)
        for rule in rules:
            connection.execute(rule)
        before = work(connection)
        result = extend(database, booking_id, *mode, token=token_for(connection, booking_id))
        assert result.exit_code == 12
        error = error_of(result)
        assert error["code"] == "CRM_BOOKING_INVALID_STATE"
        assert error["status"] == "Booked"
        assert error["booking_id"] == str(booking_id)
        assert error["message"] == f"booking {booking_id} cannot be extended: {why}"
        assert "secret" not in result.stdout + result.stderr
        assert requests(connection) == []
        assert work(connection) == before

    def test_leaves_the_request_id_for_when_the_rule_is_gone(self, database: Database, connection: Connection) -> None:
        booking_id, request_id = insert_booked(connection), str(uuid.uuid4())
        token = token_for(connection, booking_id)
        connection.execute("alter table crm.bookings add constraint once check (extensions_count < 1)")
        assert extend(database, booking_id, "--request-id", request_id, token=token).exit_code == 12
        connection.execute("alter table crm.bookings drop constraint once")
        again = extend(database, booking_id, "--request-id", request_id, token=token)
        assert again.exit_code == 0
        assert again.json["repeated"] is False


class TestWhoseBookingItIs:
    def test_a_foreign_one_looks_exactly_like_one_that_does_not_exist(
        self, database: Database, connection: Connection
    ) -> None:
        foreign, missing = insert_booked(connection), uuid.uuid4()
        before = work(connection)
        token = rsa_signer().token(uuid.uuid4())
        request = ("--request-id", str(uuid.uuid4()))
        answers = {each: extend(database, each, *request, token=token) for each in (foreign, missing)}
        assert [result.exit_code for result in answers.values()] == [10, 10]
        assert len({result.stdout.replace(str(booking_id), "ID") for booking_id, result in answers.items()}) == 1
        error = error_of(answers[foreign])
        assert (error["code"], error["http_status"]) == ("CRM_BOOKING_NOT_FOUND", 404)
        assert error["booking_id"] == str(foreign)
        shown = [log_lines(result, "run failed")[0] for result in answers.values()]
        assert {line["reason"].replace(str(foreign), "ID").replace(str(missing), "ID") for line in shown} == {
            "no such booking: ID"
        }
        assert work(connection) == before

    @pytest.mark.parametrize("exists", [True, False], ids=["existing", "missing"])
    def test_a_foreign_tenant_by_name_is_forbidden_even_to_ask_about(
        self, database: Database, connection: Connection, exists: bool
    ) -> None:
        booking_id = insert_booked(connection) if exists else uuid.uuid4()
        foreign = tenant_of(connection, booking_id) if exists else uuid.uuid4()
        before = work(connection)
        result = extend(database, booking_id, "--tenant", str(foreign), token=rsa_signer().token(uuid.uuid4()))
        assert result.exit_code == 11
        assert (error_of(result)["code"], error_of(result)["http_status"]) == ("CRM_BOOKING_FORBIDDEN", 403)
        assert work(connection) == before

    def test_the_actors_own_tenant_may_be_named(self, database: Database, connection: Connection) -> None:
        booking_id = insert_booked(connection)
        tenant_id = tenant_of(connection, booking_id)
        result = extend(database, booking_id, "--tenant", str(tenant_id), token=token_for(connection, booking_id))
        assert result.exit_code == 0

    @pytest.mark.parametrize("permissions", [[], ["crm.bookings.view"], ["crm.bookings.decide.not"], ["*"]])
    def test_without_the_permission_nothing_is_extended(
        self, database: Database, connection: Connection, permissions: list[str]
    ) -> None:
        booking_id = insert_booked(connection)
        before = work(connection)
        result = extend(database, booking_id, token=token_for(connection, booking_id, permissions=permissions))
        assert result.exit_code == 11
        assert error_of(result)["code"] == "CRM_BOOKING_FORBIDDEN"
        assert "crm.bookings.decide" in error_of(result)["message"]
        assert work(connection) == before


class TestTheRequestId:
    def test_repeated_returns_the_first_answer_and_changes_nothing(
        self, database: Database, connection: Connection
    ) -> None:
        booking_id, request = insert_booked(connection), ("--request-id", str(uuid.uuid4()))
        token = token_for(connection, booking_id)
        first = extend(database, booking_id, *request, token=token)
        after_first = work(connection)
        second = extend(database, booking_id, *request, token=token)
        assert (first.exit_code, second.exit_code) == (0, 0)
        assert (first.json["repeated"], second.json["repeated"]) == (False, True)
        assert answer(second.json) == answer(first.json)
        assert work(connection) == after_first
        table = extend(database, booking_id, *request, token=token, form="table").stdout
        assert re.search(rf"^Extended before +{booking_id}$", table, re.MULTILINE)

    def test_repeated_returns_the_first_answer_also_when_the_booking_has_moved_on(
        self, database: Database, connection: Connection
    ) -> None:
        booking_id, request = insert_booked(connection), ("--request-id", str(uuid.uuid4()))
        token = token_for(connection, booking_id)
        first = extend(database, booking_id, *request, token=token)
        assert extend(database, booking_id, token=token).json["extensions_count"] == 2
        connection.execute(
            "update crm.bookings set status = 'BookingExpired', booking_expires_at = now(), expired_at = now()"
        )
        assert answer(extend(database, booking_id, *request, token=token).json) == answer(first.json)

    def test_of_another_booking_is_an_invalid_state(self, database: Database, connection: Connection) -> None:
        tenant_id, request = uuid.uuid4(), ("--request-id", str(uuid.uuid4()))
        one, other = (insert_booked(connection, tenant_id=tenant_id) for _ in range(2))
        token = rsa_signer().token(tenant_id)
        assert extend(database, one, *request, token=token).exit_code == 0
        after_first = work(connection)
        for booking_id in (other, uuid.uuid4()):
            result = extend(database, booking_id, *request, token=token)
            assert result.exit_code == 12
            error = error_of(result)
            assert (error["code"], error["http_status"]) == ("CRM_BOOKING_INVALID_STATE", 409)
            assert error["booking_id"] == str(booking_id)
            assert request[1] in error["message"]
        assert work(connection) == after_first

    def test_of_another_tenant_is_another_request(self, database: Database, connection: Connection) -> None:
        request = ("--request-id", str(uuid.uuid4()))
        for booking_id in (insert_booked(connection), insert_booked(connection)):
            result = extend(database, booking_id, *request, token=token_for(connection, booking_id))
            assert (result.exit_code, result.json["repeated"]) == (0, False)
        assert len(requests(connection)) == 2

    def test_of_a_refused_extension_is_not_used_up(self, database: Database, connection: Connection) -> None:
        booking_id, request = insert_booking(connection), ("--request-id", str(uuid.uuid4()))
        token = token_for(connection, booking_id)
        assert extend(database, booking_id, *request, token=token).exit_code == 12
        connection.execute("update crm.bookings set status = 'Booked', booking_expires_at = now() + interval '1 day'")
        result = extend(database, booking_id, *request, token=token)
        assert (result.exit_code, result.json["repeated"]) == (0, False)

    def test_is_made_and_named_on_stderr_before_anything_is_written(
        self, database: Database, connection: Connection
    ) -> None:
        booking_id = insert_booked(connection)
        token = token_for(connection, booking_id)
        with row_lock(database, booking_id) as holder, start_extend(database, booking_id, token=token) as process:
            assert process.stderr is not None
            named = json.loads(process.stderr.readline())["request_id"]
            assert UUID(named)
            wait_for_lock(connection)
            assert requests(connection) == []
            holder.rollback()
            result = finish(process)
        assert result.exit_code == 0
        assert result.json["request_id"] == named
        repeated = extend(database, booking_id, "--request-id", named, token=token)
        assert answer(repeated.json) == answer(result.json)
        assert bookings(connection)[booking_id]["extensions_count"] == 1

    def test_is_named_on_stderr_however_quiet_the_log_is(self, database: Database, connection: Connection) -> None:
        booking_id = insert_booked(connection)
        quiet = {"CRMCTL_LOG_LEVEL": "error"}
        result = extend(database, booking_id, token=token_for(connection, booking_id), env=quiet)
        assert result.json["request_id"] in result.stderr

    def test_of_two_processes_at_once_extends_once_and_answers_both(
        self, database: Database, connection: Connection
    ) -> None:
        booking_id, request_id = insert_booked(connection), uuid.uuid4()
        token = token_for(connection, booking_id)
        request = ("--request-id", str(request_id))
        with contextlib.ExitStack() as stack:
            holder = stack.enter_context(request_claimed(database, tenant_of(connection, booking_id), request_id))
            both = [stack.enter_context(start_extend(database, booking_id, *request, token=token)) for _ in range(2)]
            waiting = "select pid from pg_stat_activity where application_name = %s and wait_event_type = 'Lock'"
            wait_until(lambda: len(rows(connection, waiting, APPLICATION)) == 2, "two extensions that wait")
            holder.rollback()
            results = [finish(process) for process in both]
        assert [result.exit_code for result in results] == [0, 0]
        assert sorted(result.json["repeated"] for result in results) == [False, True]
        assert answer(results[0].json) == answer(results[1].json)
        assert bookings(connection)[booking_id]["extensions_count"] == 1
        assert len(timeline(connection)) == len(notifications(connection)) == 1

    def test_after_a_kill_between_commit_and_output_returns_the_first_answer(
        self, database: Database, connection: Connection
    ) -> None:
        booking_id, request = insert_booked(connection), ("--request-id", str(uuid.uuid4()))
        token = token_for(connection, booking_id)
        with extension_with_a_full_pipe(database, booking_id, *request, token=token) as process:
            wait_until(lambda: requests(connection), "the commit of the extension")
            assert process.poll() is None
            process.kill()
            process.wait()
        committed = bookings(connection)[booking_id]
        before = work(connection)
        result = extend(database, booking_id, *request, token=token)
        assert (result.exit_code, result.json["repeated"], result.json["extensions_count"]) == (0, True, 1)
        assert result.json["new_booking_expires_at"] == committed["booking_expires_at"]
        assert committed["extensions_count"] == 1
        assert work(connection) == before

    def test_is_what_a_retry_needs_when_the_connection_is_lost_during_the_commit(
        self, database: Database, connection: Connection
    ) -> None:
        """Nobody can know whether it was kept. Run again without the id, it would extend a second time."""
        booking_id = insert_booked(connection)
        token = token_for(connection, booking_id)
        with connection_lost_in_the_commit(database) as url:
            lost = extend(url, booking_id, token=token)
        assert lost.exit_code == 69
        assert bookings(connection)[booking_id]["extensions_count"] == 1
        named = log_lines(lost, "new request id; name it with --request-id to try again")[0]["request_id"]
        error = error_of(lost)
        assert "may or may not" in error["message"]
        assert named in json.dumps(error), f"the document says: {error['hint']}"
        retried = extend(database, booking_id, "--request-id", named, token=token)
        assert (retried.exit_code, retried.json["repeated"], retried.json["extensions_count"]) == (0, True, 1)


class TestARowThatSomebodyHolds:
    def test_by_the_expiry_is_waited_for_and_then_read_again(self, database: Database, connection: Connection) -> None:
        """A2: the expiry's own statement holds the row; once it has committed, its terminal status is the answer."""
        booking_id = insert_due(connection, BOOKING)
        token = token_for(connection, booking_id)
        with psycopg.connect(database.url) as expiry:
            expire_in(expiry)
            with start_extend(database, booking_id, token=token) as process:
                wait_for_lock(connection)
                expiry.commit()
                result = finish(process)
        assert result.exit_code == 12
        assert error_of(result)["code"] == "CRM_BOOKING_INVALID_STATE"
        assert error_of(result)["status"] == "BookingExpired"
        assert bookings(connection)[booking_id]["version"] == 2
        assert len(events(connection)) == len(timeline(connection)) == 1
        assert requests(connection) == notifications(connection) == []

    def test_by_an_expiry_that_rolls_back_is_extended(self, database: Database, connection: Connection) -> None:
        booking_id = insert_due(connection, BOOKING)
        token = token_for(connection, booking_id)
        with psycopg.connect(database.url) as expiry:
            expire_in(expiry)
            with start_extend(database, booking_id, token=token) as process:
                wait_for_lock(connection)
                expiry.rollback()
                result = finish(process)
        assert (result.exit_code, result.json["extensions_count"]) == (0, 1)
        assert events(connection) == []

    def test_by_another_extension_is_extended_from_the_deadline_that_it_left(
        self, database: Database, connection: Connection
    ) -> None:
        booking_id = insert_booked(connection, booking_duration_hours=24)
        old = datetime.fromisoformat(bookings(connection)[booking_id]["booking_expires_at"])
        token = token_for(connection, booking_id)
        with row_lock(database, booking_id) as holder, contextlib.ExitStack() as stack:
            both = [stack.enter_context(start_extend(database, booking_id, token=token)) for _ in range(2)]
            waiting = "select pid from pg_stat_activity where application_name = %s and wait_event_type = 'Lock'"
            wait_until(lambda: len(rows(connection, waiting, APPLICATION)) == 2, "two extensions that wait")
            holder.rollback()
            results = [finish(process) for process in both]
        assert [result.exit_code for result in results] == [0, 0]
        assert sorted(result.json["extensions_count"] for result in results) == [1, 2]
        new = datetime.fromisoformat(bookings(connection)[booking_id]["booking_expires_at"])
        assert new == old + timedelta(hours=48)

    def test_for_too_long_is_to_be_tried_again_later(self, database: Database, connection: Connection) -> None:
        booking_id = insert_booked(connection)
        before = work(connection)
        with row_lock(database, booking_id):
            result = extend(
                database,
                booking_id,
                token=token_for(connection, booking_id),
                env={"CRMCTL_DATABASE__LOCK_TIMEOUT": "200ms"},
            )
        assert result.exit_code == 75
        assert error_of(result)["code"] == "CRMCTL_TRY_AGAIN"
        assert work(connection) == before


class TestARowThatTheExtensionHolds:
    def test_is_skipped_by_the_expiry_and_then_out_of_its_reach(
        self, database: Database, connection: Connection
    ) -> None:
        """A1 step 5, A2: the worker passes by the row that a manager's command has locked."""
        booking_id = insert_due(connection, BOOKING)
        token = token_for(connection, booking_id)
        with closed_gate(database) as gate:
            rows(
                connection,
                """
                create function crm_test.wait() returns trigger language plpgsql as $$
                begin
                    perform crm_test.pass_gate();
                    return new;
                end $$;
                create trigger wait before insert on crm.deal_notifications
                    for each row execute function crm_test.wait()
                """,
            )
            patient = {"CRMCTL_DATABASE__LOCK_TIMEOUT": "60s", "CRMCTL_DATABASE__STATEMENT_TIMEOUT": "60s"}
            with start_extend(database, booking_id, token=token, env=patient) as process:
                wait_for_lock(connection)
                passed = expire(database).json
                gate.open()
                result = finish(process)
        assert (passed["booking_expired_count"], passed["skipped_locked_count"]) == (0, 1)
        assert (result.exit_code, result.json["extensions_count"]) == (0, 1)
        after = expire(database).json
        assert (after["booking_expired_count"], after["skipped_locked_count"]) == (0, 0)
        assert events(connection) == []

    @pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
    def test_is_free_again_after_a_signal_and_nothing_is_written(
        self, database: Database, connection: Connection, signum: int, exit_code: int
    ) -> None:
        booking_id = insert_booked(connection)
        before = work(connection)
        token = token_for(connection, booking_id)
        with row_lock(database, booking_id), start_extend(database, booking_id, token=token) as process:
            wait_for_lock(connection)
            process.send_signal(signum)
            result = finish(process)
        assert result.exit_code == exit_code
        assert work(connection) == before
        assert extend(database, booking_id, token=token).exit_code == 0


class TestTheErrorDocument:
    """Issue 3: code, http_status, message, booking_id."""

    @pytest.mark.parametrize(
        ("claims", "exit_code", "http_status"),
        [
            ({"permissions": []}, 11, 403),
            ({"developer_company_id": str(uuid.uuid4())}, 10, 404),
            ({}, 12, 409),
        ],
        ids=["forbidden", "not found", "invalid state"],
    )
    def test_names_the_booking_whatever_the_refusal(
        self,
        database: Database,
        connection: Connection,
        claims: dict[str, Any],
        exit_code: int,
        http_status: int,
    ) -> None:
        booking_id = insert_booking(connection)
        token = rsa_signer().token(tenant_of(connection, booking_id), **claims)
        result = extend(database, booking_id, token=token)
        assert result.exit_code == exit_code
        assert error_of(result)["http_status"] == http_status
        assert error_of(result)["message"]
        assert error_of(result).get("booking_id") == str(booking_id)


class TestADryRun:
    def test_shows_the_extension_and_changes_nothing(self, database: Database, connection: Connection) -> None:
        booking_id, request = insert_booked(connection), ("--request-id", str(uuid.uuid4()))
        token = token_for(connection, booking_id)
        before = work(connection)
        preview = extend(database, booking_id, "--dry-run", *request, token=token)
        assert (preview.exit_code, preview.json["dry_run"]) == (0, True)
        assert work(connection) == before
        assert runs(connection) == []
        real = extend(database, booking_id, *request, token=token)
        assert answer(real.json) == answer(preview.json) | {"dry_run": False}

    def test_refuses_what_the_real_run_would_refuse(self, database: Database, connection: Connection) -> None:
        booking_id = insert_booking(connection)
        result = extend(database, booking_id, "--dry-run", token=token_for(connection, booking_id))
        assert result.exit_code == 12

    def test_says_so_in_the_table(self, database: Database, connection: Connection) -> None:
        booking_id = insert_booked(connection)
        result = extend(database, booking_id, "--dry-run", token=token_for(connection, booking_id), form="table")
        assert re.search(rf"^Would extend +{booking_id}$", result.stdout, re.MULTILINE)


class TestTheIsolationOfTheDatabase:
    @pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
    def test_may_be_stricter_than_the_default(self, database: Database, connection: Connection, isolation: str) -> None:
        """The row that the expiry changed under our snapshot is read again, and is not a failure to serialize."""
        booking_id = insert_due(connection, BOOKING)
        token = token_for(connection, booking_id)
        name = scalar(connection, "select current_database()")
        rows(connection, f"alter database {name} set default_transaction_isolation = '{isolation}'")
        with psycopg.connect(database.url) as expiry:
            expire_in(expiry)
            with start_extend(database, booking_id, token=token) as process:
                wait_for_lock(connection)
                expiry.commit()
                result = finish(process)
        assert result.exit_code == 12
        assert error_of(result)["status"] == "BookingExpired"


def expire_in(connection: psycopg.Connection[Any]) -> None:
    """Expire what is due with the job's own statement, in a transaction that stays open."""
    now = connection.execute("select now()").fetchone()
    assert now is not None
    done = connection.execute(
        expire_bookings.STATEMENTS[BOOKING.name]["expire"].encode(),
        {
            "as_of": now[0],
            "tenant_id": None,
            "booking_ids": None,
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "floor_deadline": expire_bookings.START.deadline,
            "floor_id": expire_bookings.START.id,
            "batch_size": 10,
        },
    ).fetchone()
    assert done is not None
    assert done[:2] == (1, 1)


@contextlib.contextmanager
def connection_lost_in_the_commit(database: Database) -> Iterator[str]:
    """A way to the database that breaks once a COMMIT has been carried out, and before its answer is through."""
    parts = urlsplit(database.url)
    assert parts.hostname is not None
    server = (parts.hostname, parts.port or 5432)

    def carry(client: socket.socket) -> None:
        with client, socket.create_connection(server) as behind:
            threading.Thread(target=answer, args=(client, behind), daemon=True).start()
            while data := client.recv(65_536):
                committing = b"COMMIT\0" in data
                if committing:
                    behind_answers.clear()
                behind.sendall(data)
                if committing:
                    behind_answers.wait(20)
                    return

    behind_answers = threading.Event()
    behind_answers.set()

    def answer(client: socket.socket, behind: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := behind.recv(65_536):
                if not behind_answers.is_set():
                    behind_answers.set()
                    return
                client.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=carry, args=(client,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        port = listener.getsockname()[1]
        yield parts._replace(netloc=f"{parts.username}:{parts.password}@127.0.0.1:{port}").geturl()
        listener.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def row_lock(database: Database, booking_id: UUID) -> Iterator[psycopg.Connection[Any]]:
    """Another session that holds the booking's row until it is rolled back."""
    with psycopg.connect(database.url) as holder:
        assert rows(holder, "select 1 from crm.bookings where id = %s for update", booking_id)
        yield holder
        holder.rollback()


@contextlib.contextmanager
def request_claimed(database: Database, tenant_id: UUID, request_id: UUID) -> Iterator[psycopg.Connection[Any]]:
    """Another session that has claimed the request id and not yet committed: whoever else claims it waits."""
    with psycopg.connect(database.url) as holder:
        holder.execute(
            "insert into crm.extension_requests (tenant_id, request_id, booking_id, actor_subject) "
            "values (%s, %s, %s, 'somebody')",
            (tenant_id, request_id, uuid.uuid4()),
        )
        yield holder
        holder.rollback()


@contextlib.contextmanager
def extension_with_a_full_pipe(
    database: Database, booking_id: UUID, *args: str, token: str
) -> Iterator[subprocess.Popen[bytes]]:
    """An extension whose stdout takes nothing: it commits, and then waits in its write for ever."""
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x")
        os.set_blocking(writer, True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("CRMCTL_", "PG"))}
        environment |= rsa_signer().settings
        environment |= {"CRMCTL_DATABASE_URL": database.url, "CRMCTL_ACTOR_TOKEN": token}
        with subprocess.Popen(
            [sys.executable, "-m", "crmctl", "bookings", "extend", str(booking_id), "-o", "json", *args],
            env=environment,
            cwd=Path("/"),
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=subprocess.DEVNULL,
        ) as process:
            yield process
            process.kill()
    finally:
        os.close(writer)
        os.close(reader)
