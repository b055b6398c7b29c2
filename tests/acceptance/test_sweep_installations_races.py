"""The sweep against an OnAppInstall, an Install and other sweeps at whatever moment: no pair is ever broken."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from crmctl.adapters.postgres import Database as Connected
from crmctl.dev import bitrix24_tables
from crmctl.dev.bitrix24_portal import Bitrix24StandIn, Request, app_info, error
from crmctl.domain.installations import Action, Policy
from crmctl.domain.portal_answers import Answer
from crmctl.jobs import sweep_installations
from crmctl.jobs.job import Job, Run
from crmctl.jobs.sweep_claims import Claims
from crmctl.settings import Bitrix24Settings, DatabaseSettings
from tests.acceptance.conftest import ChaosTable
from tests.expire_support import Connection, rows, scaled
from tests.installations_support import (
    APPLICATION,
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


class KnowingPortals:
    """Portals that take some milliseconds to say that the application is installed, or that it is not."""

    def __init__(self, dice: random.Random) -> None:
        self._replies = [Answer(200, error("NOT_INSTALLED").body), Answer(200, app_info(installed=True).body)]
        self.reply, self.delay = self._replies[0], 0.0
        self._dice = dice

    def throw(self) -> None:
        """Decide what is answered next, and when."""
        self.reply, self.delay = self._dice.choice(self._replies), self._dice.uniform(0, 0.01)

    def host(self, domain_url: str) -> str | None:
        """Every domain is one."""
        return domain_url

    def app_info(self, _host: str, _access_token: str, turn: Callable[[], None]) -> Answer:
        """The answer after its time."""
        turn()
        time.sleep(self.delay)
        return self.reply

    def renew(self, _refresh_token: str) -> Answer:
        """No token here has to be renewed."""
        raise AssertionError


class Sweeper:
    """The job in this process: hundreds of interleavings would take minutes with the binary."""

    def __init__(self, database: Database, action: Action, portals: KnowingPortals | None) -> None:
        self._url = database.url
        self._database = self._connect()
        self._options = sweep_installations.Options(policy=Policy(action))
        self._portals = portals

    def __call__(self, run: Run, pause: float) -> None:
        """Claim and ask where there are portals, and apply; `pause` is made before the commit."""
        settings = Bitrix24Settings()
        if self._portals is None:
            self._sweep(sweep_installations.job(settings), run, pause)
            return
        self._portals.throw()
        with closing(Claims(settings, self._portals, self._connect, timedelta(minutes=1))) as claims:
            self._sweep(sweep_installations.job(settings, claims), run, pause)

    def _sweep(self, job: Job[Any, Any], run: Run, pause: float) -> None:
        progress = job.start(self._options)
        if job.prepare is not None:
            progress = job.prepare(run, self._options, progress)
        job.batch(self._database.begin(), run, self._options, progress)
        time.sleep(pause)
        self._database.commit()

    def _connect(self) -> Connected:
        return Connected(self._url, DatabaseSettings(), application_name=APPLICATION)

    def close(self) -> None:
        self._database.close()


def note_moves(connection: Connection) -> None:
    """Let the database note which statuses the sweep changes, and in which transaction."""
    connection.execute(
        f"""
        create table public.moves (
            transaction xid8 not null default pg_current_xact_id(), kind text, id uuid, "from" text, "to" text
        );
        create function public.note_move() returns trigger language plpgsql as $$
        begin
            insert into public.moves (kind, id, "from", "to") values (tg_argv[0], new.id, old.status, new.status);
            return null;
        end $$;
        create trigger note_move after update on b24lib_application_installations for each row
            when (current_setting('application_name') = '{APPLICATION}')
            execute function public.note_move('installation');
        create trigger note_move after update on b24lib_bitrix24_accounts for each row
            when (current_setting('application_name') = '{APPLICATION}')
            execute function public.note_move('account')
        """.encode()
    )


def assert_moved_whole(connection: Connection, pair: PairIds) -> str | None:
    """The sweep moved both rows of the pair in one transaction, from `new` to the same status, or neither, or no other.

    Whoever else changes rows at the same time, this is what the sweep answers for. Returns the status.
    """
    moves = rows(connection, "select * from public.moves order by kind desc")
    published = rows(connection, "select payload from crm.outbox_messages")
    connection.execute("truncate public.moves, crm.outbox_messages")
    if not moves:
        assert published == []
        return None
    assert [(move["kind"], move["id"]) for move in moves] == [
        ("installation", pair.installation_id),
        ("account", pair.account_id),
    ]
    assert len({move["transaction"] for move in moves}) == 1
    assert {move["from"] for move in moves} == {"new"}
    (status,) = {move["to"] for move in moves}
    assert [event["payload"]["InstallationToStatus"] for event in published] == [status]
    return str(status)


@pytest.mark.chaos
def test_random_interleavings_leave_no_broken_pair(
    database: Database, connection: Connection, chaos_table: ChaosTable
) -> None:
    count, dice = scaled(500, least=50), random.Random(20_261_129)
    outcomes: Counter[str] = Counter()
    libraries = [Library(database.connect()) for _ in range(2)]
    portals = KnowingPortals(dice)
    unverified = [Sweeper(database, action, None) for action in (Action.BLOCK, Action.DELETE)]
    verified = Sweeper(database, Action.BLOCK, portals)
    note_moves(connection)
    with chaos_table.row("sweep against OnAppInstall and Install") as row:
        for number in range(count):
            pair = insert_pair(connection)
            actors = [
                lambda d: finish_slowly(libraries[0], pair, d),  # noqa: B023
                lambda d: reinstall_slowly(libraries[1], pair, d),  # noqa: B023
            ]
            chosen = dice.sample(actors, dice.choice([1, 1, 1, 2]))
            sweeper = verified if number % 2 else dice.choice(unverified)
            deadlocks = outcomes["deadlock"]
            run = Run(uuid4(), "00-" + "1" * 32 + "-" + "1" * 16 + "-00")
            delays = [dice.uniform(0, dice.choice([0.005, 0.02, 0.08])) for _ in range(8)]
            if sweeper is verified:
                # It connects and asks before it applies: the others begin at any moment of that.
                delays[0], delays[3] = (delays[n] + dice.uniform(0, 0.1) for n in (0, 3))
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
            moved = assert_moved_whole(connection, pair)
            if len(chosen) == 1:
                # Two handlers of the library at once may break a pair or wait for each other by themselves.
                assert outcomes["deadlock"] == deadlocks
                assert broken_pairs(connection) == []
            asked = "asked and " if sweeper is verified and moved else ""
            how = f"{asked}swept to {moved}" if moved else "not swept"
            outcomes[f"{how}, {statuses(connection, pair)[0]} at the end"] += 1
            outcomes["asserted"] += 1
            connection.execute("truncate b24lib_application_installations, b24lib_bitrix24_accounts")
        for each in (*unverified, verified):
            each.close()
        assert (outcomes["error"], outcomes.pop("asserted")) == (0, count)
        assert {how.partition("swept to")[0] for how in outcomes if "swept to" in how} == {"", "asked and "}
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
