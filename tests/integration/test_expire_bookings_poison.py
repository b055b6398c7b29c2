"""Poison rows never fail a batch (UC-BKG-003 step 6): rows that break a rule, rows that refuse the write."""

import random
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from crmctl.domain.bookings import BOOKING, RESERVE, Defect, Phase
from tests.expire_support import (
    Connection,
    assert_expired_once,
    bookings,
    column,
    expire,
    expired,
    fingerprints,
    insert_due,
    insert_queue,
    locked,
    log_lines,
    runs,
    unchanged_apart_from,
    wait_until,
)
from tests.support import CallResult, Database

N = 10
PHASES = pytest.mark.parametrize("phase", [RESERVE, BOOKING], ids=lambda phase: phase.name)
MARK = 666  # an extensions_count that the triggers and constraints of these tests take offence at


def poison(result: CallResult) -> dict[str, str]:
    """Reason by id; each id is listed once."""
    listed = result.json["poison"]
    assert max(Counter(row["booking_id"] for row in listed).values(), default=1) == 1
    return {row["booking_id"]: row["reason"] for row in listed}


def total(result: CallResult) -> int:
    number = result.json["reserve_expired_count"] + result.json["booking_expired_count"]
    assert isinstance(number, int)
    return number


@pytest.fixture
def connection(database: Database) -> psycopg.Connection[Any]:
    return database.connect()


def without_not_null(connection: Connection, *columns: str) -> None:
    """As in a CRM that owns its schema and lets these columns be empty."""
    for name in columns:
        connection.execute(f"alter table crm.bookings alter column {name} drop not null".encode())


def raise_for_marked(connection: Connection, errcode: str, *, sleep: float = 0) -> None:
    """A trigger of the CRM's that refuses to expire the marked bookings, with an SQLSTATE."""
    connection.execute(
        f"""
        create function public.refuse() returns trigger language plpgsql as $$
        begin
            if new.extensions_count = {MARK} and new.status in ('ReserveExpired', 'BookingExpired') then
                perform pg_sleep({sleep});
                raise exception 'marked booking' using errcode = '{errcode}', detail = 'secret detail';
            end if;
            return new;
        end $$
        """.encode()
    )
    connection.execute("create trigger refuse before update on crm.bookings for each row execute function refuse()")


def refuse_with_trigger(connection: Connection) -> str:
    raise_for_marked(connection, "P0001")
    return "P0001"


def refuse_with_check(connection: Connection) -> str:
    connection.execute(
        f"""
        alter table crm.bookings add constraint no_expired_marked
            check (extensions_count <> {MARK} or status not in ('ReserveExpired', 'BookingExpired'))
        """.encode()
    )
    return "23514"


def refuse_with_numeric_overflow(connection: Connection) -> str:
    """The booking's version cannot be raised any further."""
    connection.execute(f"update crm.bookings set version = 2147483647 where extensions_count = {MARK}".encode())
    return "22003"


def refuse_with_date_overflow(connection: Connection) -> str:
    connection.execute(
        """
        create function public.archive_date() returns trigger language plpgsql as $$
        begin
            new.updated_at := new.updated_at + interval '999999 years';
            return new;
        end $$
        """
    )
    connection.execute(
        "create trigger archive_date before update on crm.bookings for each row "
        f"when (new.extensions_count = {MARK}) execute function archive_date()".encode()
    )
    return "22008"


def refuse_in_the_timeline(connection: Connection) -> str:
    connection.execute(
        f"""
        create function public.refuse_entry() returns trigger language plpgsql as $$
        begin
            if exists (select from crm.bookings b where b.deal_id = new.deal_id and b.extensions_count = {MARK}) then
                raise exception 'no entry for this deal';
            end if;
            return new;
        end $$
        """.encode()
    )
    connection.execute(
        "create trigger refuse_entry before insert on crm.deal_timeline_events "
        "for each row execute function refuse_entry()"
    )
    return "P0001"


def refuse_in_the_outbox(connection: Connection) -> str:
    """Somebody sent these events by hand, and a unique index of theirs forbids a second."""
    connection.execute("create unique index one_event_each on crm.outbox_messages (aggregate_id, topic)")
    connection.execute(
        f"""
        insert into crm.outbox_messages
            (topic, key, aggregate_type, aggregate_id, contract_version, payload, published_at)
        select 'pin.crm.booking-expired.v1', b.id::text, 'Booking', b.id::text, 1, '{{"By": "hand"}}', now()
        from crm.bookings b
        where b.extensions_count = {MARK}
        """.encode()
    )
    return "23505"


def refuse_deferred(connection: Connection) -> str:
    """A constraint trigger that would wait for the commit."""
    connection.execute(
        f"""
        create function public.refuse_late() returns trigger language plpgsql as $$
        begin
            if new.extensions_count = {MARK} then
                raise exception 'refused at the commit' using errcode = '23000';
            end if;
            return null;
        end $$
        """.encode()
    )
    connection.execute(
        "create constraint trigger refuse_late after update on crm.bookings deferrable initially deferred "
        "for each row execute function refuse_late()"
    )
    return "23000"


def refuse_deferred_unique(connection: Connection) -> str:
    """A deferred uniqueness that a second expiry at the same moment breaks: only the marked ones share a slot."""
    connection.execute(
        "create table public.slots (slot text, constraint one unique (slot) deferrable initially deferred)"
    )
    connection.execute("insert into slots values ('taken')")
    connection.execute(
        f"""
        create function public.take_slot() returns trigger language plpgsql as $$
        begin
            insert into public.slots values (case new.extensions_count when {MARK} then 'taken' else new.id::text end);
            return null;
        end $$
        """.encode()
    )
    connection.execute(
        "create trigger take_slot after update on crm.bookings for each row execute function take_slot()"
    )
    return "23505"


REFUSALS = pytest.mark.parametrize(
    "refuse",
    [
        refuse_with_trigger,
        refuse_with_check,
        refuse_with_numeric_overflow,
        refuse_with_date_overflow,
        refuse_in_the_timeline,
        refuse_in_the_outbox,
        refuse_deferred,
        refuse_deferred_unique,
    ],
)


def defects(phase: Phase) -> Sequence[tuple[Defect, dict[str, Any]]]:
    """Every defect of the domain with what brings it about."""
    return (
        (Defect.DEADLINE_INFINITE, {phase.deadline: "-infinity"}),
        (Defect.TENANT_MISSING, {"tenant_id": None}),
        (Defect.PROPERTY_OBJECT_MISSING, {"property_object_id": None}),
        (Defect.BASE_MISSING, {phase.base: None}),
        (Defect.BASE_MISSING, {phase.base: "-infinity"}),
        (Defect.BASE_MISSING, {phase.base: "infinity"}),
        (Defect.DURATION_MISSING, {phase.duration: None}),
        (Defect.DEADLINE_BEFORE_BASE, {phase.base: "2099-01-01T00:00:00Z"}),
        (Defect.DEAL_MISSING, {"deal_id": None}),
        (Defect.DEAL_MISSING, {"deal": False}),
    )


def insert_defective(
    connection: Connection, phase: Phase, defect: dict[str, Any], *, overdue: timedelta = timedelta(minutes=1)
) -> UUID:
    """Insert a due booking, then break it; every column that a CRM's own schema may leave empty can be."""
    columns = dict(defect)
    booking_id = insert_due(connection, phase, overdue=overdue, deal=columns.pop("deal", True))
    for name, value in columns.items():
        connection.execute(f"update crm.bookings set {name} = %s where id = %s".encode(), (value, booking_id))
    return booking_id


class TestRowsThatBreakARule:
    @pytest.fixture(autouse=True)
    def _a_schema_of_the_crms(self, connection: Connection) -> None:
        without_not_null(
            connection,
            "tenant_id",
            "deal_id",
            "property_object_id",
            "created_at",
            "reserve_duration_minutes",
            "booking_duration_hours",
        )

    def test_every_defect_of_the_domain_is_tried_in_both_phases(self) -> None:
        for phase in (RESERVE, BOOKING):
            assert {defect for defect, _ in defects(phase)} == set(Defect)

    @PHASES
    def test_each_is_left_out_and_named_with_its_reason(
        self, database: Database, connection: Connection, phase: Phase
    ) -> None:
        healthy, bad = set(), {}
        for defect, columns in defects(phase):
            healthy.add(insert_due(connection, phase))
            bad[insert_defective(connection, phase, columns)] = defect.value
        healthy.add(insert_due(connection, phase))
        before = bookings(connection)

        result = expire(database)

        assert result.exit_code == 0, result.stderr
        assert poison(result) == {str(booking_id): defect for booking_id, defect in bad.items()}
        assert result.json["poison_count"] == len(bad)
        lines = log_lines(result, "poison booking")
        assert {line["level"] for line in lines} == {"error"}
        assert {line["booking_id"]: line["reason"] for line in lines} == poison(result)
        after = bookings(connection)
        assert [after[booking_id] for booking_id in bad] == [before[booking_id] for booking_id in bad]
        assert_expired_once(connection, healthy)

    @PHASES
    def test_3n_of_them_at_the_head_do_not_hold_up_the_rest(
        self, database: Database, connection: Connection, phase: Phase
    ) -> None:
        kinds = defects(phase)
        bad = [
            insert_defective(connection, phase, kinds[n % len(kinds)][1], overdue=timedelta(hours=3, seconds=-n))
            for n in range(3 * N)
        ]
        healthy = insert_queue(connection, N + 5, phase)

        result = expire(database, "--batch-size", str(N))

        assert (total(result), result.json["has_more"]) == (N, True)
        assert result.json["poison_count"] == 3 * N
        assert poison(result).keys() == {str(booking_id) for booking_id in bad}
        assert_expired_once(connection, healthy[:N])

        again = expire(database, "--batch-size", str(N))

        assert (total(again), again.json["has_more"]) == (5, False)
        assert again.json["poison_count"] == 3 * N
        assert_expired_once(connection, healthy)

    def test_a_mended_row_expires_in_the_next_run(self, database: Database, connection: Connection) -> None:
        bad = insert_due(connection, deal=False)
        assert poison(expire(database)) == {str(bad): "DEAL_MISSING"}

        connection.execute(
            """
            insert into crm.deals (id, tenant_id, status, created_at, updated_at)
            select b.deal_id, b.tenant_id, 'InProgress', now(), now()
            from crm.bookings b
            """
        )

        result = expire(database)
        assert (total(result), result.json["poison_count"]) == (1, 0)
        assert_expired_once(connection, {bad})

    @PHASES
    @pytest.mark.parametrize("healthy", [0, N, 2 * N])
    def test_a_drain_reports_those_behind_the_last_healthy_row_too(
        self, database: Database, connection: Connection, phase: Phase, healthy: int
    ) -> None:
        ids = insert_queue(connection, healthy, phase)
        bad = insert_queue(connection, 3, phase, oldest=timedelta(minutes=5), deal=False)

        result = expire(database, "--drain", "--batch-size", str(N), "--strict")

        assert_expired_once(connection, ids)
        assert poison(result).keys() == {str(booking_id) for booking_id in bad}
        assert (result.json["poison_count"], result.exit_code) == (3, 3)


class TestRowsOnWhichTheWriteFails:
    @REFUSALS
    def test_3n_of_them_at_the_head_do_not_hold_up_the_rest(
        self, database: Database, connection: Connection, refuse: Any
    ) -> None:
        bad = insert_queue(connection, 3 * N, oldest=timedelta(hours=3), extensions_count=MARK)
        healthy = insert_queue(connection, N + 5)
        state = refuse(connection)
        before = bookings(connection)
        sent = column(connection, "select id from crm.outbox_messages")

        result = expire(database, "--batch-size", str(N))

        assert result.exit_code == 0, result.stderr
        assert (total(result), result.json["has_more"]) == (N, True)
        assert (result.json["poison_count"], result.json["undetermined_count"]) == (3 * N, 0)
        found = poison(result)
        assert found.keys() == {str(booking_id) for booking_id in bad}
        assert {reason[:6] for reason in found.values()} == {f"{state}:"}
        assert {line["booking_id"] for line in log_lines(result, "poison booking")} == found.keys()
        after = bookings(connection)
        assert [after[booking_id] for booking_id in bad] == [before[booking_id] for booking_id in bad]
        connection.execute("delete from crm.outbox_messages where id = any(%s)", (sent,))
        assert_expired_once(connection, healthy[:N])

    def test_every_sqlstate_that_blames_the_row_is_isolated(self, database: Database, connection: Connection) -> None:
        states = ["22012", "23000", "27000", "44000", "P0001", "P0002", "P0004"]
        ids = insert_queue(connection, 3 * len(states))
        bad = dict(zip(ids[::3], states, strict=True))
        for number, booking_id in enumerate(bad):
            mark = (MARK + number, booking_id)
            connection.execute("update crm.bookings set extensions_count = %s where id = %s", mark)
        connection.execute(
            f"""
            create function public.refuse() returns trigger language plpgsql as $$
            declare
                state text = ('{{{",".join(states)}}}'::text[])[1 + new.extensions_count - {MARK}];
            begin
                if state is not null then
                    raise exception 'marked booking' using errcode = state, detail = 'secret detail';
                end if;
                return new;
            end $$
            """.encode()
        )
        connection.execute("create trigger refuse before update on crm.bookings for each row execute function refuse()")

        result = expire(database)

        assert result.exit_code == 0, result.stderr
        assert poison(result) == {str(booking_id): f"{state}: marked booking" for booking_id, state in bad.items()}
        assert "secret detail" not in result.stdout + result.stderr
        assert_expired_once(connection, set(ids) - bad.keys())

    def test_both_phases_isolate_their_own(self, database: Database, connection: Connection) -> None:
        healthy = insert_queue(connection, 5) + insert_queue(connection, 5, BOOKING)
        bad = [insert_due(connection, phase, extensions_count=MARK) for phase in (RESERVE, BOOKING)]
        raise_for_marked(connection, "P0001")

        result = expire(database, "--batch-size", "3", "--drain")

        assert poison(result).keys() == {str(booking_id) for booking_id in bad}
        assert result.json["poison_count"] == 2
        assert_expired_once(connection, healthy)

    def test_the_next_run_tries_them_again(self, database: Database, connection: Connection) -> None:
        bad = insert_due(connection, extensions_count=MARK)
        raise_for_marked(connection, "P0001")
        for _ in range(2):
            assert poison(expire(database)).keys() == {str(bad)}
        connection.execute("drop trigger refuse on crm.bookings")
        assert total(expire(database)) == 1
        assert_expired_once(connection, {bad})

    def test_a_batch_of_poison_alone_succeeds_and_reports_all(self, database: Database, connection: Connection) -> None:
        bad = insert_queue(connection, N, extensions_count=MARK)
        raise_for_marked(connection, "P0001")

        result = expire(database, "--batch-size", "4", "--drain")

        assert (result.exit_code, total(result), result.json["has_more"]) == (0, 0, False)
        assert poison(result).keys() == {str(booking_id) for booking_id in bad}
        assert expired(connection) == set()

    def test_rows_locked_by_others_are_still_skipped_and_counted_once(
        self, database: Database, connection: Connection
    ) -> None:
        ids = insert_queue(connection, 24)
        bad, held = set(ids[2::6]), set(ids[4::6])
        connection.execute("update crm.bookings set extensions_count = %s where id = any(%s)", (MARK, list(bad)))
        raise_for_marked(connection, "P0001")

        with locked(database, held):
            result = expire(database, "--batch-size", "5", "--drain")

        assert result.json["skipped_locked_count"] == len(held)
        assert poison(result).keys() == {str(booking_id) for booking_id in bad}
        assert_expired_once(connection, set(ids) - bad - held)

    def test_a_named_poison_booking_is_told_its_reason(self, database: Database, connection: Connection) -> None:
        good, bad = insert_due(connection), insert_due(connection, extensions_count=MARK)
        raise_for_marked(connection, "P0001")

        result = expire(database, "--id", str(good), "--id", str(bad))

        assert result.json["not_expired"] == [{"booking_id": str(bad), "reason": "P0001: marked booking"}]
        assert_expired_once(connection, {good})

    def test_an_update_that_a_trigger_swallows_is_not_called_locked(
        self, database: Database, connection: Connection
    ) -> None:
        healthy = insert_queue(connection, 3)
        swallowed = insert_due(connection, extensions_count=MARK)
        connection.execute(
            f"""
            create function public.swallow() returns trigger language plpgsql as $$
            begin
                return case when new.extensions_count <> {MARK} then new end;
            end $$
            """.encode()
        )
        connection.execute(
            "create trigger swallow before update on crm.bookings for each row execute function swallow()"
        )

        result = expire(database, "--drain")

        assert_expired_once(connection, healthy)
        assert result.json["skipped_locked_count"] == 0
        assert poison(result).keys() == {str(swallowed)}


class TestTheList:
    def test_100_are_listed_and_all_are_counted(self, database: Database, connection: Connection) -> None:
        broken = insert_queue(connection, 60, oldest=timedelta(hours=3), deal=False)
        refused = insert_queue(connection, 57, extensions_count=MARK)
        healthy = insert_queue(connection, 3, oldest=timedelta(minutes=5))
        raise_for_marked(connection, "P0001")

        result = expire(database)

        assert result.json["poison_count"] == 117
        found = poison(result)
        assert len(found) == 100
        assert found.keys() < {str(booking_id) for booking_id in broken + refused}
        assert_expired_once(connection, healthy)

    @pytest.mark.parametrize("flags", [(), ("--drain", "--batch-size", "10")], ids=" ".join)
    def test_the_log_names_every_one(self, database: Database, connection: Connection, flags: tuple[str, ...]) -> None:
        broken = insert_queue(connection, 110, oldest=timedelta(hours=3), deal=False)
        refused = insert_queue(connection, 57, extensions_count=MARK)
        raise_for_marked(connection, "P0001")

        result = expire(database, *flags)

        lines = log_lines(result, "poison booking")
        assert sorted(line["booking_id"] for line in lines) == sorted(map(str, broken + refused))
        assert {line["level"] for line in lines} == {"error"}

    @pytest.mark.parametrize("flags", [("--batch-size", "10"), ("--batch-size", "1000")], ids=" ".join)
    def test_a_drain_counts_each_once(self, database: Database, connection: Connection, flags: tuple[str, ...]) -> None:
        insert_queue(connection, 105, oldest=timedelta(hours=3), deal=False)
        healthy = insert_queue(connection, 25)
        insert_queue(connection, 7, oldest=timedelta(minutes=5), deal=False)
        healthy += insert_queue(connection, 1, oldest=timedelta(seconds=30))

        result = expire(database, "--drain", *flags)

        assert (result.json["poison_count"], len(poison(result))) == (112, 100)
        assert_expired_once(connection, healthy)

    def test_named_bookings_beyond_the_list_keep_their_reason(self, database: Database, connection: Connection) -> None:
        refused = insert_queue(connection, 103, extensions_count=MARK)
        raise_for_marked(connection, "P0001")

        result = expire(database, *(f"--id={booking_id}" for booking_id in refused))

        reasons = {row["booking_id"]: row["reason"] for row in result.json["not_expired"]}
        assert reasons.keys() == {str(booking_id) for booking_id in refused}
        assert set(reasons.values()) == {"P0001: marked booking"}

    def test_the_run_record_has_the_count(self, database: Database, connection: Connection) -> None:
        insert_due(connection, deal=False)
        insert_due(connection, extensions_count=MARK)
        raise_for_marked(connection, "P0001")
        expire(database)
        (run,) = runs(connection)
        assert (run["outcome"], run["counts"]["poison_count"]) == ("committed", 2)


class TestWhatIsNotPoison:
    """A timeout, a deadlock or a serialization failure is nobody's row: the transaction is retried whole, or fails."""

    def interfere(self, connection: Connection, booking_id: UUID, errcode: str, times: int) -> None:
        """A trigger that fails on one booking for the first `times` attempts; a sequence survives the rollbacks."""
        connection.execute("create sequence public.attempts")
        connection.execute(
            f"""
            create function public.interfere() returns trigger language plpgsql as $$
            begin
                if new.id = '{booking_id}' and nextval('public.attempts') <= {times} then
                    raise exception 'somebody got in the way' using errcode = '{errcode}';
                end if;
                return new;
            end $$
            """.encode()
        )
        connection.execute(
            "create trigger interfere before update on crm.bookings for each row execute function interfere()"
        )

    @pytest.mark.parametrize(("errcode", "times"), [("40001", 3), ("40P01", 1)])
    def test_a_conflict_is_retried_whole(
        self, database: Database, connection: Connection, errcode: str, times: int
    ) -> None:
        ids = insert_queue(connection, 8)
        self.interfere(connection, ids[5], errcode, times)

        result = expire(database)

        assert result.exit_code == 0, result.stderr
        assert (total(result), result.json["poison_count"], result.json["batches"]) == (8, 0, 1)
        assert len(log_lines(result, "retrying the transaction")) == times
        assert column(connection, "select last_value from public.attempts") == [times + 1]
        assert_expired_once(connection, ids)
        assert [(run["batch"], run["outcome"]) for run in runs(connection)] == [(1, "committed")]

    @pytest.mark.parametrize("errcode", ["40001", "40P01"])
    def test_a_conflict_that_never_ends_is_exit_75(
        self, database: Database, connection: Connection, errcode: str
    ) -> None:
        ids = insert_queue(connection, 8)
        self.interfere(connection, ids[5], errcode, 1000)

        result = expire(database, env={"CRMCTL_DATABASE__TRANSACTION_ATTEMPTS": "3"})

        assert result.exit_code == 75
        assert result.json["error"]["code"] == "CRMCTL_TRY_AGAIN"
        assert column(connection, "select last_value from public.attempts") == [3]
        assert log_lines(result, "poison booking") == []
        assert expired(connection) == set()
        assert [(run["outcome"], run["error_code"]) for run in runs(connection)] == [("failed", "CRMCTL_TRY_AGAIN")]

    def test_a_conflict_while_bisecting_starts_over(self, database: Database, connection: Connection) -> None:
        ids = insert_queue(connection, 12)
        bad = ids[3]
        connection.execute("update crm.bookings set extensions_count = %s where id = %s", (MARK, bad))
        raise_for_marked(connection, "P0001")
        self.interfere(connection, ids[9], "40001", 2)

        result = expire(database)

        assert (result.exit_code, result.json["poison_count"]) == (0, 1)
        assert poison(result).keys() == {str(bad)}
        assert_expired_once(connection, set(ids) - {bad})

    def test_a_real_deadlock_is_retried(self, database: Database, connection: Connection) -> None:
        ids = insert_queue(connection, 4)
        connection.execute("create table public.ledger (id int primary key)")
        connection.execute("insert into ledger values (1)")
        connection.execute(
            f"""
            create function public.book() returns trigger language plpgsql as $$
            begin
                if new.id = '{ids[3]}' then
                    perform from public.ledger for update;
                end if;
                return new;
            end $$
            """.encode()
        )
        connection.execute("create trigger book before update on crm.bookings for each row execute function book()")
        result: list[CallResult] = []
        with psycopg.connect(database.url) as manager:
            # The manager never is the one that finds the deadlock, so the worker is the one that gives way.
            manager.execute("set deadlock_timeout = '1min'")
            manager.execute("select from public.ledger for update")
            worker = threading.Thread(target=lambda: result.append(expire(database)))
            worker.start()
            waiting = (
                "select pid from pg_stat_activity where wait_event_type = 'Lock' and application_name like 'crmctl%%'"
            )
            wait_until(lambda: column(connection, waiting.replace("%%", "%")), "the worker to wait for the ledger")
            manager.execute("update crm.bookings set updated_at = now() where id = %s", (ids[0],))
            manager.commit()
        worker.join()

        assert result[0].exit_code == 0, result[0].stderr
        (line,) = log_lines(result[0], "retrying the transaction")
        assert line["reason"].startswith("40P01")
        assert_expired_once(connection, ids)

    def test_a_statement_timeout_is_exit_75(self, database: Database, connection: Connection) -> None:
        ids = insert_queue(connection, 4)
        connection.execute("update crm.bookings set extensions_count = %s where id = %s", (MARK, ids[2]))
        raise_for_marked(connection, "P0001", sleep=30)
        before = fingerprints(connection)

        result = expire(database, env={"CRMCTL_DATABASE__STATEMENT_TIMEOUT": "400ms"})

        assert result.exit_code == 75
        assert result.json["error"]["code"] == "CRMCTL_TRY_AGAIN"
        assert "57014" in result.json["error"]["message"]
        assert log_lines(result, "poison booking") == []
        assert fingerprints(connection) | {"crm.job_runs": ""} == before | {"crm.job_runs": ""}
        assert [run["outcome"] for run in runs(connection)] == ["failed"]

    def test_a_lock_timeout_is_exit_75(self, database: Database, connection: Connection) -> None:
        insert_queue(connection, 4)
        with psycopg.connect(database.url) as migration:
            migration.execute("lock table crm.deal_timeline_events in share mode")

            result = expire(database, env={"CRMCTL_DATABASE__LOCK_TIMEOUT": "300ms"})

        assert result.exit_code == 75
        assert "55P03" in result.json["error"]["message"]
        assert expired(connection) == set()

    @pytest.mark.parametrize("errcode", ["53100", "57014", "55P03", "XX000", "42501"])
    def test_an_sqlstate_that_does_not_blame_the_row_fails_the_run(
        self, database: Database, connection: Connection, errcode: str
    ) -> None:
        ids = insert_queue(connection, 4)
        connection.execute("update crm.bookings set extensions_count = %s where id = %s", (MARK, ids[2]))
        raise_for_marked(connection, errcode)

        result = expire(database)

        assert result.exit_code not in (0, 3)
        assert log_lines(result, "poison booking") == []
        assert expired(connection) == set()


class TestTheTimeBudget:
    def test_bisecting_stops_and_keeps_the_good_rows(self, database: Database, connection: Connection) -> None:
        first = insert_queue(connection, 8, oldest=timedelta(hours=3))
        bad = insert_queue(connection, 200, extensions_count=MARK)
        last = insert_queue(connection, 8, oldest=timedelta(minutes=5))
        raise_for_marked(connection, "P0001", sleep=0.05)

        result = expire(database, "--batch-size", "64", "--time-budget", "1500ms", "--strict")

        assert result.exit_code == 3
        assert_expired_once(connection, first)
        found, undetermined = result.json["poison_count"], result.json["undetermined_count"]
        assert 0 < found < len(bad)
        assert 0 < undetermined <= len(bad) + len(last) - found
        assert poison(result).keys() == {str(booking_id) for booking_id in bad[:found]}
        assert result.json["has_more"] is True
        (run,) = runs(connection)
        assert run["counts"]["undetermined_count"] == undetermined

        connection.execute(
            "create or replace function public.refuse() returns trigger language plpgsql as 'begin return new; end'"
        )
        rest = expire(database, "--drain")
        assert (total(rest), rest.json["undetermined_count"]) == (len(bad) + len(last), 0)
        assert_expired_once(connection, first + bad + last)

    def test_a_drain_ends_there_too(self, database: Database, connection: Connection) -> None:
        bad = insert_queue(connection, 100, extensions_count=MARK)
        raise_for_marked(connection, "P0001", sleep=0.05)

        result = expire(database, "--batch-size", "16", "--time-budget", "700ms", "--drain")

        assert result.exit_code == 0
        assert (total(result), result.json["has_more"]) == (0, True)
        assert 0 < result.json["poison_count"] + result.json["undetermined_count"] <= len(bad)


class TestAnyMixture:
    """Whatever rows are poisoned, and however: exactly the healthy ones expire, exactly the others are reported."""

    KINDS = ("healthy", "orphan", "before its base", "trigger", "check", "overflow", "timeline")

    def poisoned(self, kind: str) -> dict[str, Any]:
        columns: dict[str, dict[str, Any]] = {
            "orphan": {"deal": False},
            "before its base": {"reserve_expires_at": "2001-01-01Z", "booking_expires_at": "2001-01-01Z"},
            "trigger": {"extensions_count": MARK},
            "check": {"extensions_count": MARK + 1},
            "overflow": {"version": 2**31 - 1},
            "timeline": {"extensions_count": MARK + 2},
        }
        return columns.get(kind, {})

    def prepare(self, connection: Connection) -> None:
        raise_for_marked(connection, "P0001")
        connection.execute(
            f"""
            alter table crm.bookings add constraint no_expired
                check (extensions_count <> {MARK + 1} or status not in ('ReserveExpired', 'BookingExpired'));
            create function public.refuse_entry() returns trigger language plpgsql as $$
            begin
                if exists (
                    select from crm.bookings b where b.deal_id = new.deal_id and b.extensions_count = {MARK + 2}
                ) then
                    raise exception 'no entry for this deal';
                end if;
                return null;
            end $$;
            create constraint trigger refuse_entry after insert on crm.deal_timeline_events
                deferrable initially deferred for each row execute function refuse_entry()
            """.encode()
        )

    @pytest.mark.parametrize("seed", range(8))
    def test_exactly_the_healthy_ones_expire(self, database: Database, connection: Connection, seed: int) -> None:
        dice = random.Random(seed)
        share = dice.choice([0.05, 0.3, 0.6, 0.95])
        healthy: set[UUID] = set()
        bad: set[UUID] = set()
        with connection.transaction():
            for n in range(dice.randint(20, 60)):
                kind = dice.choice(self.KINDS[1:]) if dice.random() < share else "healthy"
                phase = dice.choice([RESERVE, RESERVE, BOOKING])
                overdue = timedelta(hours=2) - timedelta(seconds=dice.choice([n, n, 7]))
                booking_id = insert_due(connection, phase, overdue=overdue, **self.poisoned(kind))
                (healthy if kind == "healthy" else bad).add(booking_id)
        self.prepare(connection)
        batch_size = dice.choice([1, 2, 3, 7, 10, 1000])
        flags = ("--drain", "--batch-size", str(batch_size))
        before = fingerprints(connection)

        preview = expire(database, *flags, "--dry-run")
        assert fingerprints(connection) == before
        result = expire(database, *flags)

        assert_expired_once(connection, healthy)
        assert poison(result).keys() == {str(booking_id) for booking_id in bad}
        assert result.json["poison_count"] == len(bad)
        assert (result.json["skipped_locked_count"], result.json["undetermined_count"]) == (0, 0)
        assert result.json["has_more"] is False
        assert {line["booking_id"] for line in log_lines(result, "poison booking")} == poison(result).keys()
        assert unchanged_apart_from(preview.json, "dry_run", "as_of") == unchanged_apart_from(
            result.json, "dry_run", "as_of"
        )
