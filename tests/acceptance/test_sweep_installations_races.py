"""The sweep against an OnAppInstall, an Install and other sweeps at whatever moment: no pair is ever broken."""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from crmctl.dev import bitrix24_tables
from crmctl.dev.bitrix24_portal import Bitrix24StandIn, Request, error
from crmctl.domain.installations import Action, Policy
from crmctl.jobs import sweep_installations
from crmctl.jobs.job import Run
from tests.acceptance.conftest import ChaosTable
from tests.expire_support import Connection, rows, scaled
from tests.installations_support import (
    Library,
    NotFoundError,
    PairIds,
    broken_pairs,
    insert_pair,
    start_sweep,
    statuses,
    sweep,
    verify,
)
from tests.support import Database

TOKEN = "application-token"


@pytest.fixture
def connection(database: Database) -> psycopg.Connection[Any]:
    connection = database.connect()
    bitrix24_tables.create(connection)
    return connection


@pytest.fixture
def portal() -> Iterator[Bitrix24StandIn]:
    with Bitrix24StandIn() as stand_in:
        yield stand_in


def test_a_finish_step_that_commits_between_verification_and_apply_is_left_alone(
    database: Database, connection: Connection, portal: Bitrix24StandIn
) -> None:
    pair = insert_pair(connection)
    portal.portals[pair.domain] = error("NOT_INSTALLED")
    library = Library(database.connect())
    portal.before_answer = lambda _request: library.on_app_install(pair.member_id, TOKEN)
    result = verify(database, portal)
    assert (result.json["finished_count"], result.json["deleted_count"]) == (1, 0)
    assert statuses(connection, pair) == ("active", "active")


@pytest.mark.parametrize("first", ["installation", "account"])
def test_a_finish_step_that_holds_a_row_is_left_alone(
    database: Database, connection: Connection, portal: Bitrix24StandIn, first: str
) -> None:
    pair = insert_pair(connection)
    portal.portals[pair.domain] = error("NOT_INSTALLED")
    library = Library(database.connect())
    unit = library.read_for_finish(pair.member_id, TOKEN)
    with psycopg.connect(database.url) as holder:

        def hold(_request: Request) -> None:
            table = "b24lib_application_installations" if first == "installation" else "b24lib_bitrix24_accounts"
            row_id = pair.installation_id if first == "installation" else pair.account_id
            holder.execute(f"select from {table} where id = %s for update".encode(), (row_id,))

        portal.before_answer = hold
        result = verify(database, portal)
        assert (result.json["skipped_locked_count"], result.json["deleted_count"]) == (1, 0)
        assert statuses(connection, pair) == ("new", "new")
        Library(holder).write(unit)
        holder.commit()
    assert statuses(connection, pair) == ("active", "active")
    assert sweep(database).json["checked_count"] == 0


class Sweeper:
    """The apply transaction in this process: hundreds of interleavings would take minutes with the binary."""

    def __init__(self, database: Database, action: Action) -> None:
        from crmctl.adapters.postgres import Database as Connected
        from crmctl.settings import Bitrix24Settings, DatabaseSettings

        self._database = Connected(database.url, DatabaseSettings(), application_name="crmctl sweep-installations")
        self._job = sweep_installations.job(Bitrix24Settings())
        self._options = sweep_installations.Options(policy=Policy(action))

    def __call__(self, run: Run, pause: float) -> None:
        transaction = self._database.begin()
        self._job.batch(transaction, run, self._options, self._job.start(self._options))
        time.sleep(pause)
        self._database.commit()

    def close(self) -> None:
        self._database.close()


@pytest.mark.chaos
def test_random_interleavings_leave_no_broken_pair(
    database: Database, connection: Connection, chaos_table: ChaosTable
) -> None:
    from uuid import uuid4

    count, dice = scaled(500, least=50), random.Random(20_261_129)
    outcomes: Counter[str] = Counter()
    libraries = [Library(database.connect()) for _ in range(2)]
    sweepers = [Sweeper(database, action) for action in (Action.BLOCK, Action.DELETE)]
    with chaos_table.row("sweep against OnAppInstall and Install") as row:
        for _ in range(count):
            pair = insert_pair(connection)
            actors = [
                lambda d: finish_slowly(libraries[0], pair, d),  # noqa: B023
                lambda d: reinstall_slowly(libraries[1], pair, d),  # noqa: B023
            ]
            chosen = dice.sample(actors, dice.choice([1, 1, 2]) if dice.random() < 0.5 else 1)
            sweeper = dice.choice(sweepers)
            deadlocks = outcomes["deadlock"]
            run = Run(uuid4(), "00-" + "1" * 32 + "-" + "1" * 16 + "-00")
            delays = [dice.uniform(0, dice.choice([0.005, 0.02])) for _ in range(8)]
            threads = [
                threading.Thread(target=guarded, args=(actor, delays[n * 3 : n * 3 + 3], outcomes))
                for n, actor in enumerate(chosen)
            ]
            for thread in threads:
                thread.start()
            time.sleep(delays[6])
            sweeper(run, delays[7] / 2)
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive()
            # Two handlers of the library at once may break a pair by themselves: that is not the sweep's doing.
            if len(chosen) == 1:
                assert outcomes["deadlock"] == deadlocks
                assert broken_pairs(connection) == []
                swept = rows(
                    connection,
                    "select outcome from crm.installation_checks where installation_id = %s",
                    pair.installation_id,
                )
                status = statuses(connection, pair)[0]
                outcomes[f"{status} after {swept[0]['outcome']}" if swept else f"{status}, not swept"] += 1
            connection.execute("truncate b24lib_application_installations, b24lib_bitrix24_accounts")
        for sweeper in sweepers:
            sweeper.close()
        assert outcomes["error"] == 0
        row.interruptions, row.due = f"{count} interleavings", count
        row.outcome = ", ".join(f"{n} {how}" for how, n in sorted(outcomes.items()) if n)
    assert rows(connection, "select 1 from crm.installation_checks where claimed_by is not null") == []


def guarded(actor: Any, delays: list[float], outcomes: Counter[str]) -> None:
    try:
        actor(delays)
    except NotFoundError:
        outcomes["not found"] += 1
    except psycopg.errors.DeadlockDetected:
        # Two handlers of the library that take the two rows in different orders; the sweep never waits for a lock.
        outcomes["deadlock"] += 1
    except BaseException:
        outcomes["error"] += 1
        raise


def finish_slowly(library: Library, pair: PairIds, delays: list[float]) -> None:
    """OnAppInstall with a pause after its reading and after each update; in either order of the rows."""
    time.sleep(delays[0])
    unit = library.read_for_finish(pair.member_id, TOKEN)
    time.sleep(delays[1])
    library.flush(unit, pause=delays[2] / 2, account_first=delays[2] > 0.006)


def reinstall_slowly(library: Library, pair: PairIds, delays: list[float]) -> None:
    """Install of the same member."""
    time.sleep(delays[0])
    library.install(pair.member_id, pair.domain)


def test_two_unverified_sweeps_at_once_share_the_work(database: Database, connection: Connection) -> None:
    pairs = [insert_pair(connection) for _ in range(60)]
    args = ("--drain", "--batch-size", "7")
    processes = [start_sweep(database, *args) for _ in range(3)]
    try:
        for process in processes:
            process.communicate(timeout=60)
            assert process.returncode == 0
    finally:
        for process in processes:
            process.kill()
    assert sweep(database, "--drain").exit_code == 0
    assert {statuses(connection, pair) for pair in pairs} == {("blocked", "blocked")}
    assert rows(connection, "select count(*) as n from crm.outbox_messages") == [{"n": 60}]
    assert rows(connection, "select aggregate_id from crm.outbox_messages group by 1 having count(*) > 1") == []


def test_age_is_looked_at_again_under_the_lock(
    database: Database, connection: Connection, portal: Bitrix24StandIn
) -> None:
    pair = insert_pair(connection)
    portal.portals[pair.domain] = error("NOT_INSTALLED")
    other = database.connect()

    def rejuvenate(_request: Request) -> None:
        other.execute(
            "update b24lib_application_installations set created_at_utc = created_at_utc + %s", (timedelta(hours=2),)
        )

    portal.before_answer = rejuvenate
    assert verify(database, portal).json["finished_count"] == 1
    assert statuses(connection, pair) == ("new", "new")
