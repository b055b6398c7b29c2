"""How PostgreSQL runs each statement of `bookings expire`: due rows come from the partial indexes, in their order.

The job itself runs here, batch after batch in one transaction that is rolled back, on 60,000 bookings of which
12,000 are due. Before each statement goes to the server, it is EXPLAINed with the parameters that the job bound and
the settings of its session. So a plan here is the plan of a run, wherever the job gets it from.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from crmctl.adapters import postgres
from crmctl.adapters.postgres import Params, Transaction
from crmctl.dev.postgres import PostgresServer
from crmctl.dev.seed import seed
from crmctl.domain.bookings import BOOKING, PHASES, RESERVE, Phase
from crmctl.jobs.expire_bookings import JOB, STATEMENTS, Options, Progress
from crmctl.jobs.job import Budget, Run
from crmctl.settings import DatabaseSettings
from tests.expire_support import column

BOOKINGS: Final = 60_000
FRAGMENTS: Final = {"defect", "queue", "behind_floor"}
# Whatever the statement is called, this is what it may touch apart from the due rows: single bookings by id.
PRIMARY_KEY: Final = "bookings_pkey"

Plan = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Seen:
    """One statement as the job sent it: its name, its phase, and its plan."""

    name: str
    phase: Phase
    plan: Plan

    def __str__(self) -> str:
        return f"{self.phase.name} {self.name}:\n{json.dumps(self.plan, indent=1)}"

    def nodes(self) -> Iterator[Plan]:
        """Every node of the plan, subplans and CTEs included."""
        yield from _nodes(self.plan)

    def indexes(self) -> set[str]:
        """The indexes by which bookings are found."""
        on_bookings = (node for node in self.nodes() if node.get("Index Name", "").find("bookings") >= 0)
        return {node["Index Name"] for node in on_bookings}


def _nodes(plan: Plan) -> Iterator[Plan]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)


@dataclass(frozen=True, slots=True)
class ExplainingTransaction(Transaction):
    """The job's transaction, which also notes down the plan of each statement before it runs."""

    seen: list[Seen] = field(default_factory=list)

    def one(self, statement: str, params: Params | None = None) -> dict[str, Any]:
        self._explain(statement, params)
        return Transaction.one(self, statement, params)

    def first(self, statement: str, params: Params | None = None) -> dict[str, Any] | None:
        self._explain(statement, params)
        return Transaction.first(self, statement, params)

    def all(self, statement: str, params: Params | None = None) -> list[dict[str, Any]]:
        self._explain(statement, params)
        return Transaction.all(self, statement, params)

    def execute(self, statement: str, params: Params | None = None) -> None:
        self._explain(statement, params)
        Transaction.execute(self, statement, params)

    def _explain(self, statement: str, params: Params | None) -> None:
        for phase in PHASES:
            for name, text in STATEMENTS[phase.name].items():
                if text == statement:
                    explained = self.connection.execute(f"explain (format json) {statement}".encode(), params)
                    row = explained.fetchone()
                    assert row is not None
                    self.seen.append(Seen(name, phase, row["QUERY PLAN"][0]["Plan"]))
                    return


@pytest.fixture(scope="module")
def populated(postgres_server: PostgresServer, template_database: str) -> Iterator[str]:
    """The address of a database with sample data, analysed; nobody commits to it."""
    name = "plans"
    with psycopg.connect(postgres_server.url(), autocommit=True) as admin:
        make = sql.SQL("create database {} template {}")
        admin.execute(make.format(sql.Identifier(name), sql.Identifier(template_database)))
        with psycopg.connect(postgres_server.url(name)) as connection:
            seeded = seed(connection, BOOKINGS)
            assert seeded.due_reserve + seeded.due_booking == BOOKINGS // 5
        with psycopg.connect(postgres_server.url(name), autocommit=True) as connection:
            connection.execute("vacuum analyze")
        yield postgres_server.url(name)
        admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def plans(
    url: str, options: Options, *, batches: int = 1, before: str | None = None, budget: timedelta | None = None
) -> list[Seen]:
    """Run some batches of the job as the wrapper would, roll them back, and return the plans of their statements."""
    database = postgres.Database(url, DatabaseSettings(), application_name="crmctl expire-bookings")
    try:
        begun = database.begin()
        if before:
            begun.execute(before)
        tx = ExplainingTransaction(begun.connection, begun.now)
        progress = Progress()
        for _ in range(batches):
            progress = JOB.batch(tx, Run(uuid4(), "00-0-0-00", Budget(budget)), options, progress)
        assert progress.result.expired_count > 0
        return tx.seen
    finally:
        database.rollback()
        database.close()


def due_ids(url: str, count: int) -> tuple[UUID, ...]:
    with psycopg.connect(url) as connection:
        return tuple(
            column(
                connection,
                """
                select id from crm.bookings
                where status in ('Reserved', 'AwaitingPayment') and reserve_expires_at < now()
                    or status = 'Booked' and booking_expires_at < now()
                order by id limit %s
                """,
                count,
            )
        )


def tenant(url: str) -> UUID:
    with psycopg.connect(url) as connection:
        (found,) = column(connection, "select tenant_id from crm.bookings group by 1 order by count(*) desc limit 1")
    assert isinstance(found, UUID)
    return found


def assert_due_rows_come_from_the_index(seen: Seen) -> None:
    """The phase's partial index, in its order: no sequential scan, no sort; single bookings by primary key."""
    kinds = {node["Node Type"] for node in seen.nodes()}
    scanned = {node["Relation Name"] for node in seen.nodes() if node["Node Type"] == "Seq Scan"}
    assert not scanned & {"bookings", "deals"}, seen
    assert not {"Sort", "Incremental Sort"} & kinds, seen
    assert seen.phase.index in seen.indexes(), seen
    assert seen.indexes() <= {seen.phase.index, PRIMARY_KEY}, seen


SCOPES: Final[Mapping[str, Any]] = {"all": lambda _: {}, "--tenant": lambda url: {"tenant_id": tenant(url)}}


def test_the_statements_are_those_that_these_tests_explain() -> None:
    for phase in PHASES:
        assert STATEMENTS[phase.name].keys() - FRAGMENTS == {
            "expire",
            "pick_one",
            "left_behind",
            "count_due",
            "not_expired",
        }


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("batch_size", [1000, 5000, 100_000])
def test_a_batch_walks_the_partial_indexes(populated: str, batch_size: int, scope: str) -> None:
    seen = plans(populated, Options(batch_size=batch_size, **SCOPES[scope](populated)))
    assert {(each.name, each.phase) for each in seen} == {
        (name, phase) for name in ("expire", "left_behind") for phase in PHASES
    }
    for each in seen:
        assert_due_rows_come_from_the_index(each)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("batch_size", [1000, 2500])
def test_the_next_batch_starts_where_the_last_one_stopped(populated: str, batch_size: int, scope: str) -> None:
    seen = plans(populated, Options(batch_size=batch_size, **SCOPES[scope](populated)), batches=2)
    for each in seen:
        assert_due_rows_come_from_the_index(each)
    for each in seen:
        if each.name == "expire":
            bounds = [node["Index Cond"] for node in each.nodes() if node.get("Index Name") == each.phase.index]
            assert all("ROW(" in bound for bound in bounds), each


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("batch_size", [1000, 5000, 100_000])
def test_what_lies_beyond_max_expire_is_counted_by_the_index(populated: str, batch_size: int, scope: str) -> None:
    options = Options(batch_size=batch_size, max_expire=1, **SCOPES[scope](populated))
    seen = [each for each in plans(populated, options) if each.name == "count_due"]
    assert {each.phase for each in seen} == {BOOKING}
    for each in seen:
        assert_due_rows_come_from_the_index(each)


# Some of the earliest refuse the write, in both phases: the walk is halved down to single rows.
REFUSE: Final = """
    update crm.bookings set version = 2147483647
    where id in (
        select id from crm.bookings
        where status in ('Reserved', 'AwaitingPayment') and reserve_expires_at < now() - interval '5 hours'
            or status = 'Booked' and booking_expires_at < now() - interval '5 hours'
    ) and get_byte(uuid_send(id), 0) < 8
"""


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("batch_size", [1000, 5000])
def test_isolating_poison_rows_walks_the_partial_indexes(populated: str, batch_size: int, scope: str) -> None:
    seen = plans(populated, Options(batch_size=batch_size, **SCOPES[scope](populated)), before=REFUSE)
    assert {each.phase for each in seen if each.name == "pick_one"} == {RESERVE, BOOKING}
    for each in seen:
        # A row that was picked already is expired alone, by its id.
        if each.name != "expire" or PRIMARY_KEY not in picked_by(each):
            assert_due_rows_come_from_the_index(each)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("batch_size", [1000, 5000, 100_000])
def test_what_stays_undetermined_is_counted_by_the_index(populated: str, batch_size: int, scope: str) -> None:
    options = Options(batch_size=batch_size, **SCOPES[scope](populated))
    everything = "update crm.bookings set version = 2147483647 where status in ('Reserved', 'AwaitingPayment')"
    seen = plans(populated, options, before=everything, budget=timedelta(0))
    counted = [each for each in seen if each.name == "count_due"]
    assert {each.phase for each in counted} == {RESERVE}
    for each in seen:
        assert_due_rows_come_from_the_index(each)


def picked_by(seen: Seen) -> set[str]:
    """The indexes by which the rows to lock are found."""
    lock = next(node for node in seen.nodes() if node["Node Type"] == "LockRows")
    return {node["Index Name"] for node in _nodes(lock) if node.get("Index Name", "").find("bookings") >= 0}


@pytest.mark.parametrize("named", [1, 3, 200])
def test_named_bookings_are_found_without_reading_the_table(populated: str, named: int) -> None:
    """With --id the rows may come from the primary key, and a sort of those few is fine."""
    options = Options(booking_ids=due_ids(populated, named))
    seen = plans(populated, options)
    assert {each.name for each in seen} == {"expire", "left_behind", "not_expired"}
    for each in seen:
        scanned = {node.get("Relation Name") for node in each.nodes() if node["Node Type"] == "Seq Scan"}
        assert not scanned & {"bookings", "deals"}, each
        assert each.indexes() <= {each.phase.index, PRIMARY_KEY}, each
        for node in each.nodes():
            if node["Node Type"] == "Sort":
                assert node["Plan Rows"] <= named, each


def test_a_backlog_after_a_long_outage_is_walked_the_same_way(populated: str) -> None:
    """Nearly all active bookings are due, and the statistics know it."""
    age = """
        update crm.bookings
        set reserve_expires_at = reserve_expires_at - interval '30 days', created_at = created_at - interval '30 days',
            booked_at = booked_at - interval '30 days', booking_expires_at = booking_expires_at - interval '30 days'
        where status in ('Reserved', 'AwaitingPayment', 'Booked')
    """
    database = postgres.Database(
        populated, DatabaseSettings(statement_timeout=timedelta(minutes=1)), application_name="x"
    )
    try:
        begun = database.begin()
        begun.execute(age)
        begun.execute("analyze crm.bookings")
        tx = ExplainingTransaction(begun.connection, begun.now)
        JOB.batch(tx, Run(uuid4(), "00-0-0-00"), Options(batch_size=5000), Progress())
    finally:
        database.rollback()
        database.close()
    for each in tx.seen:
        assert_due_rows_come_from_the_index(each)
