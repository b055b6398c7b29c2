"""Extension against expiry, against itself and against `kill -9`: always exactly one outcome (AC5, A2)."""

import random
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from uuid import UUID

import psycopg
import pytest

from crmctl.domain.bookings import BOOKING
from tests.acceptance.conftest import ChaosTable
from tests.expire_support import (
    Connection,
    bookings,
    events,
    expire,
    finish,
    insert_due,
    rows,
    scalar,
    scaled,
    timeline,
    wait_until,
)
from tests.prefork import Prefork
from tests.relay_support import error_of, extend, insert_booked, rsa_signer, start_extend, tenant_of
from tests.support import CallResult, Database

pytestmark = pytest.mark.chaos

EXPIRY: Final = "crmctl expire-bookings"
EXTENSION: Final = "crmctl extend-booking"


@pytest.fixture
def sides() -> Iterator[tuple[Prefork, Prefork]]:
    """Two processes from which the commands of the two sides are forked."""
    with Prefork() as one, Prefork() as other:
        yield one, other


@dataclass(frozen=True, slots=True)
class Gates:
    """What holds both commands up until the test lets them go, one after the other."""

    expiry: Connection
    extension: Connection

    def open(self, pause: float) -> None:
        """Let the extension go first for a negative pause in seconds, else the expiry."""
        order = (self.expiry, self.extension) if pause >= 0 else (self.extension, self.expiry)
        order[0].rollback()
        spin(abs(pause))
        order[1].rollback()


@contextmanager
def closed_gates(database: Database, tenant_id: UUID, request_id: UUID) -> Iterator[Gates]:
    """The expiry waits for the table of bookings, the extension for somebody who claims its request id."""
    with psycopg.connect(database.url) as table, psycopg.connect(database.url) as claim:
        claim.execute(
            "insert into crm.extension_requests (tenant_id, request_id, booking_id, actor_subject) "
            "values (%s, %s, %s, 'gate')",
            (tenant_id, request_id, uuid.uuid4()),
        )
        table.execute("lock table crm.bookings in access exclusive mode")
        yield Gates(table, claim)
        claim.rollback()
        table.rollback()


def spin(seconds: float) -> None:
    """Pass a time that is shorter than a sleep can measure."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def wait_at_gates(connection: Connection, *applications: str) -> None:
    waiting = (
        "select application_name from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
    )
    wait_until(
        lambda: sorted(row["application_name"] for row in rows(connection, waiting)) == sorted(applications),
        "the commands at their gates",
    )


class TestTheExpiryAndAnExtensionMeetAtTheDeadline:
    @pytest.mark.parametrize("kind", ["at the deadline", "already overdue"])
    def test_and_exactly_one_of_them_wins(
        self, database: Database, sides: tuple[Prefork, Prefork], chaos_table: ChaosTable, kind: str
    ) -> None:
        """At the deadline both start while it passes; if overdue, both are let go in the middle of their work."""
        connection, rounds, chance = database.connect(), scaled(500), random.Random(20_261_129)
        meet = self.at_the_deadline if kind == "at the deadline" else self.at_the_gates
        outcomes: Counter[str] = Counter()
        with chaos_table.row(f"extend against expire, {kind}") as row:
            for _ in range(rounds):
                booking_id, expiry, extension = meet(database, connection, sides, chance)
                outcomes[self.assert_one_outcome(connection, booking_id, expiry, extension)] += 1
            row.interruptions, row.due = f"{rounds} races", rounds
            row.outcome = ", ".join(f"{count} {who} won" for who, count in sorted(outcomes.items()))
            assert set(outcomes) == {"expiry", "extension"}
            assert expire(database, "--drain").json["booking_expired_count"] == 0
            assert len(events(connection)) == outcomes["expiry"]
            assert len(timeline(connection)) == rounds
            assert scalar(connection, "select count(*) from crm.deal_notifications") == outcomes["extension"]
            assert scalar(connection, "select count(*) from crm.extension_requests") == outcomes["extension"]

    @staticmethod
    def at_the_deadline(
        database: Database, connection: Connection, sides: tuple[Prefork, Prefork], chance: random.Random
    ) -> tuple[UUID, CallResult, CallResult]:
        """Start both within a few milliseconds; the deadline passes while they connect."""
        soon = scalar(connection, "select clock_timestamp()") + timedelta(milliseconds=chance.uniform(0, 40))
        booking_id = insert_due(connection, BOOKING, deadline=soon)
        command = extension_command(connection, booking_id, uuid.uuid4())
        head_start = chance.uniform(-0.03, 0.03)
        if head_start < 0:
            sides[1].start(*command.args, database=database, env=command.env)
        else:
            sides[0].start("bookings", "expire", "-o", "json", database=database, env={})
        spin(abs(head_start))
        if head_start < 0:
            sides[0].start("bookings", "expire", "-o", "json", database=database, env={})
        else:
            sides[1].start(*command.args, database=database, env=command.env)
        return booking_id, sides[0].finish(), sides[1].finish()

    @staticmethod
    def at_the_gates(
        database: Database, connection: Connection, sides: tuple[Prefork, Prefork], chance: random.Random
    ) -> tuple[UUID, CallResult, CallResult]:
        """Both are in their transactions when they are let go, up to some milliseconds apart."""
        booking_id, request_id = insert_due(connection, BOOKING, overdue=timedelta(0)), uuid.uuid4()
        command = extension_command(connection, booking_id, request_id)
        with closed_gates(database, tenant_of(connection, booking_id), request_id) as gates:
            sides[0].start("bookings", "expire", "-o", "json", database=database, env={})
            sides[1].start(*command.args, database=database, env=command.env)
            wait_at_gates(connection, EXPIRY, EXTENSION)
            gates.open(chance.uniform(-0.002, 0.01))
            return booking_id, sides[0].finish(), sides[1].finish()

    @staticmethod
    def assert_one_outcome(connection: Connection, booking_id: UUID, expiry: CallResult, extension: CallResult) -> str:
        """Check every trace of the round; returns who won."""
        assert expiry.exit_code == 0, expiry.stderr
        booking = bookings(connection)[booking_id]
        entries = [entry["type"] for entry in timeline(connection) if str(entry["deal_id"]) == booking["deal_id"]]
        own_events = [event for event in events(connection) if event["aggregate_id"] == str(booking_id)]
        assert booking["version"] == 2
        if extension.exit_code == 0:
            assert (booking["status"], booking["extensions_count"], booking["expired_at"]) == ("Booked", 1, None)
            assert extension.json["version"] == 2
            assert expiry.json["booking_expired_count"] == 0
            assert (entries, own_events) == (["BookingExtended"], [])
            return "extension"
        assert extension.exit_code == 12, extension.stderr
        error = error_of(extension)
        assert (error["code"], error["status"]) == ("CRM_BOOKING_INVALID_STATE", "BookingExpired")
        assert (booking["status"], booking["extensions_count"]) == ("BookingExpired", 0)
        assert expiry.json["booking_expired_count"] == 1
        assert (entries, len(own_events)) == (["BookingExpired"], 1)
        return "expiry"


@dataclass(frozen=True, slots=True)
class Command:
    """What `Prefork` is to run."""

    args: tuple[str, ...]
    env: dict[str, str]


def extension_command(connection: Connection, booking_id: UUID, request_id: UUID) -> Command:
    token = rsa_signer().token(tenant_of(connection, booking_id))
    return Command(
        ("bookings", "extend", str(booking_id), "--request-id", str(request_id), "-o", "json"),
        rsa_signer().settings | {"CRMCTL_ACTOR_TOKEN": token},
    )


class TestTwoExtensionsAtOnce:
    def test_with_one_request_id_extend_once_and_give_one_answer(
        self, database: Database, sides: tuple[Prefork, Prefork], chaos_table: ChaosTable
    ) -> None:
        connection, rounds = database.connect(), scaled(200)
        with chaos_table.row("the same extension from two processes") as row:
            for _ in range(rounds):
                booking_id = insert_booked(connection)
                command = extension_command(connection, booking_id, uuid.uuid4())
                for side in sides:
                    side.start(*command.args, database=database, env=command.env)
                answers = [side.finish() for side in sides]
                assert [answer.exit_code for answer in answers] == [0, 0]
                assert sorted(answer.json["repeated"] for answer in answers) == [False, True]
                assert len({answer.json["new_booking_expires_at"] for answer in answers}) == 1
                assert bookings(connection)[booking_id]["extensions_count"] == 1
            row.interruptions, row.due, row.outcome = f"{rounds} races", rounds, "one extension, one answer each"
            assert len(timeline(connection)) == rounds

    def test_with_two_request_ids_extend_twice(
        self, database: Database, sides: tuple[Prefork, Prefork], chaos_table: ChaosTable
    ) -> None:
        connection, rounds = database.connect(), scaled(100)
        with chaos_table.row("two extensions of one booking from two processes") as row:
            for _ in range(rounds):
                booking_id = insert_booked(connection, booking_duration_hours=24)
                old = scalar(connection, "select booking_expires_at from crm.bookings where id = %s", booking_id)
                for side in sides:
                    command = extension_command(connection, booking_id, uuid.uuid4())
                    side.start(*command.args, database=database, env=command.env)
                answers = [side.finish() for side in sides]
                assert sorted(answer.json["extensions_count"] for answer in answers) == [1, 2]
                new = scalar(connection, "select booking_expires_at from crm.bookings where id = %s", booking_id)
                assert new == old + timedelta(hours=48)
            row.interruptions, row.due, row.outcome = f"{rounds} races", rounds, "two extensions each"

    def test_of_many_bookings_get_in_nobodys_way(self, database: Database) -> None:
        connection = database.connect()
        ids = [insert_booked(connection) for _ in range(6)]
        tokens = {booking_id: rsa_signer().token(tenant_of(connection, booking_id)) for booking_id in ids}
        with ExitStack() as stack:
            started = [stack.enter_context(start_extend(database, each, token=tokens[each])) for each in ids]
            assert [finish(process).exit_code for process in started] == [0] * len(ids)
        assert {booking["extensions_count"] for booking in bookings(connection).values()} == {1}


class TestAnExtensionIsKilled:
    def test_at_any_moment_and_run_again_it_has_extended_once(
        self, database: Database, chaos_table: ChaosTable
    ) -> None:
        """kill -9 at any moment of its session; then the same request id once more."""
        connection, kills, chance = database.connect(), scaled(50, least=6), random.Random(20_261_129)
        slow_down(connection)
        outcomes: Counter[str] = Counter()
        with chaos_table.row("extend killed with SIGKILL") as row:
            for _ in range(kills):
                booking_id, request = insert_booked(connection), ("--request-id", str(uuid.uuid4()))
                token = rsa_signer().token(tenant_of(connection, booking_id))
                with start_extend(database, booking_id, *request, token=token) as process:
                    wait_until(lambda: session(connection) or process.poll() is not None, "the session")
                    time.sleep(chance.uniform(0, 0.12))
                    process.kill()
                wait_until(lambda: not session(connection), "the end of its session")
                committed = bookings(connection)[booking_id]["extensions_count"]
                outcomes["committed" if committed else "rolled back"] += 1
                result = extend(database, booking_id, *request, token=token)
                assert (result.exit_code, result.json["extensions_count"]) == (0, 1)
                assert result.json["repeated"] == bool(committed)
                booking = bookings(connection)[booking_id]
                assert (booking["extensions_count"], booking["version"]) == (1, 2)
            row.interruptions, row.due = f"{kills} kills", kills
            row.outcome = ", ".join(f"{count} {how}" for how, count in sorted(outcomes.items()))
            assert len(timeline(connection)) == kills
            assert scalar(connection, "select count(*) from crm.deal_notifications") == kills
            assert events(connection) == []


def slow_down(connection: Connection) -> None:
    """Spread the writes of an extension over some tens of milliseconds, so that kills fall between them."""
    connection.execute(
        """
        create function public.slow_down() returns trigger language plpgsql as $$
        begin
            perform pg_sleep(0.02);
            return new;
        end $$;
        create trigger slow_down before insert on crm.extension_requests
            for each row execute function public.slow_down();
        create trigger slow_down before insert on crm.deal_notifications
            for each row execute function public.slow_down();
        create trigger slow_down before insert on crm.job_runs
            for each row execute function public.slow_down()
        """
    )


def session(connection: Connection) -> bool:
    found = "select 1 from pg_stat_activity where application_name = %s and datname = current_database()"
    return bool(rows(connection, found, EXTENSION))
