"""`crmctl prune`: it deletes what is old and done, in bounded batches, and nothing else."""

import re
import signal
from datetime import timedelta
from typing import Any, Final

import psycopg
import pytest

from crmctl.jobs import prune
from tests.expire_support import Connection, fingerprints, rows, runs, scalar, wait_until
from tests.prefork import run_crmctl
from tests.relay_support import count, insert_events
from tests.support import CallResult, Database, start_crmctl

DOCUMENT: Final = {
    "job": str,
    "run_id": str,
    "dry_run": bool,
    "skipped": type(None),
    "cutoff": str,
    "outbox_count": int,
    "marks_count": int,
    "runs_count": int,
    "batches": int,
    "has_more": bool,
    "duration_ms": int,
}


@pytest.fixture
def connection(database: Database) -> psycopg.Connection[Any]:
    return database.connect()


def pruned(database: Database, *args: str) -> dict[str, Any]:
    result = run_prune(database, *args)
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = result.json
    return document


def run_prune(database: Database, *args: str) -> CallResult:
    return run_crmctl("prune", "-o", "json", *args, database=database)


def insert_published(connection: Connection, number: int, *, days: float, prefix: str = "p") -> None:
    """Outbox rows that were published so many days ago."""
    insert_events(connection, "any", aggregates=number, prefix=prefix)
    connection.execute(
        "update crm.outbox_messages set created_at = now() - %s, published_at = now() - %s where aggregate_id like %s",
        (timedelta(days=days), timedelta(days=days), f"{prefix}-%"),
    )


def insert_marks(connection: Connection, number: int, *, days: float) -> None:
    rows(
        connection,
        "insert into crm.processed_messages (key, processed_at) "
        "select 'crm:deal-chat-status:' || gen_random_uuid(), now() - %s from generate_series(1, %s)",
        timedelta(days=days),
        number,
    )


def insert_run(connection: Connection, job: str, *, days: float, outcome: str = "committed", batches: int = 1) -> None:
    rows(
        connection,
        """
        insert into crm.job_runs (run_id, batch, job, actor, started_at, finished_at, outcome, version, host)
        select r.id, b, %s, 'system', now() - %s, now() - %s, %s, '0', 'here'
        from (select gen_random_uuid() as id) r cross join generate_series(1, %s) b
        """,
        job,
        timedelta(days=days),
        timedelta(days=days),
        outcome,
        batches,
    )


def test_old_and_done_rows_go_and_all_others_stay(database: Database, connection: Connection) -> None:
    insert_published(connection, 3, days=31, prefix="old")
    insert_published(connection, 2, days=29, prefix="young")
    insert_events(connection, "any", prefix="waiting")
    rows(
        connection,
        "update crm.outbox_messages set created_at = now() - interval '1 year' where aggregate_id = 'waiting-1'",
    )
    insert_marks(connection, 4, days=31)
    insert_marks(connection, 2, days=29)
    rows(
        connection,
        "insert into crm.extension_requests (tenant_id, request_id, booking_id, actor_subject, created_at) "
        "select gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), 'm', now() - interval '5 years'",
    )
    document = pruned(database)
    assert {name: type(value) for name, value in document.items()} == DOCUMENT
    assert (document["outbox_count"], document["marks_count"], document["has_more"]) == (3, 4, False)
    left = {row["aggregate_id"] for row in rows(connection, "select aggregate_id from crm.outbox_messages")}
    assert left == {"young-1", "young-2", "waiting-1"}
    assert scalar(connection, "select count(*) from crm.processed_messages") == 2
    assert scalar(connection, "select count(*) from crm.extension_requests") == 1
    (record,) = runs(connection)
    assert record["counts"] == {"outbox_count": 3, "marks_count": 4, "runs_count": 0}


def test_of_each_job_the_last_success_stays_however_old(database: Database, connection: Connection) -> None:
    insert_run(connection, "expire-bookings", days=400)
    insert_run(connection, "expire-bookings", days=300)
    insert_run(connection, "expire-bookings", days=200, outcome="failed")
    insert_run(connection, "relay-outbox", days=100)
    insert_run(connection, "relay-outbox", days=1)
    insert_run(connection, "consume-chat-status", days=90, outcome="failed")
    assert pruned(database)["runs_count"] == 4
    left = [
        (row["job"], row["outcome"], row["days"])
        for row in rows(
            connection,
            "select job, outcome, extract(day from now() - finished_at)::int as days from crm.job_runs "
            "where job <> 'prune' order by 1",
        )
    ]
    assert left == [("expire-bookings", "committed", 300), ("relay-outbox", "committed", 1)]


def test_it_takes_as_many_batches_as_it_needs_and_a_second_run_changes_nothing(
    database: Database, connection: Connection
) -> None:
    insert_published(connection, 25, days=40)
    insert_marks(connection, 25, days=40)
    insert_run(connection, "relay-outbox", days=40, batches=25)
    document = pruned(database, "--batch-size", "10")
    assert (document["outbox_count"], document["marks_count"], document["runs_count"]) == (25, 25, 24)
    assert (document["batches"], document["has_more"]) == (3, False)
    assert [row["counts"]["outbox_count"] for row in runs(connection) if row["job"] == "prune"] == [10, 10, 5]
    before = fingerprints(connection)
    again = pruned(database, "--batch-size", "10")
    assert (again["outbox_count"], again["marks_count"], again["runs_count"], again["batches"]) == (0, 0, 0, 1)
    assert fingerprints(connection) == before


def test_old_rows_between_young_ones_are_found(database: Database, connection: Connection) -> None:
    insert_events(connection, "any", aggregates=300)
    rows(
        connection,
        "update crm.outbox_messages set published_at = now() - case when position %% 3 = 0 then interval '40 days' "
        "else interval '1 day' end where %s",
        True,
    )
    old = count(connection, "published_at < now() - interval '30 days'")
    assert old == 100
    assert pruned(database, "--batch-size", "7")["outbox_count"] == old
    assert count(connection) == 200


def test_a_dry_run_counts_and_deletes_nothing(database: Database, connection: Connection) -> None:
    insert_published(connection, 12, days=40)
    insert_marks(connection, 3, days=40)
    before = fingerprints(connection)
    document = pruned(database, "--dry-run", "--batch-size", "5")
    assert (document["dry_run"], document["outbox_count"], document["marks_count"]) == (True, 12, 3)
    assert fingerprints(connection) == before
    assert "Would delete" in run_crmctl("prune", "--dry-run", database=database).stdout


def test_the_age_is_what_was_asked_for(database: Database, connection: Connection) -> None:
    insert_published(connection, 1, days=10)
    assert pruned(database, "--older-than", "11d")["outbox_count"] == 0
    assert pruned(database, "--older-than", "9d")["outbox_count"] == 1


@pytest.mark.parametrize("age", ["1h", "23h59m", "30"])
def test_an_age_below_a_day_is_2(database: Database, connection: Connection, age: str) -> None:
    insert_published(connection, 1, days=10)
    assert run_prune(database, "--older-than", age).exit_code == 2
    assert count(connection) == 1


def test_a_second_one_leaves_at_once(database: Database, connection: Connection) -> None:
    insert_published(connection, 1, days=40)
    with psycopg.connect(database.url) as other:
        other.execute("select pg_advisory_xact_lock(%s)", (prune._LOCK,))
        result = run_prune(database)
        assert (result.exit_code, result.json["skipped"]) == (0, "locked")
        assert "another run of prune" in run_crmctl("prune", database=database).stdout
    assert count(connection) == 1
    assert pruned(database)["outbox_count"] == 1


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_kill_loses_a_batch_at_most_and_the_next_run_goes_on(
    database: Database, connection: Connection, kill: signal.Signals
) -> None:
    insert_published(connection, 3000, days=40)
    with start_crmctl("prune", "--batch-size", "10", database=database) as process:
        wait_until(lambda: count(connection) < 2990, "some batches")
        process.send_signal(kill)
        process.communicate(timeout=30)
    sessions = (
        "select count(*) from pg_stat_activity where application_name = 'crmctl prune' and datname = current_database()"
    )
    wait_until(lambda: scalar(connection, sessions) == 0, "the end of its session")
    left = count(connection)
    assert 0 < left < 3000
    assert left % 10 == 0
    recorded = sum(row["counts"]["outbox_count"] for row in runs(connection) if row["outcome"] == "committed")
    assert recorded == 3000 - left
    assert pruned(database)["outbox_count"] == left
    assert count(connection) == 0


@pytest.mark.parametrize(
    ("statement", "node"),
    [
        ("outbox", r"Tid Range Scan on outbox_messages"),
        ("marks", r"Index (Only )?Scan using ix_processed_messages_processed_at"),
        ("runs", r"Index (Only )?Scan.* using ix_job_runs_job_finished_at"),
    ],
)
def test_no_statement_reads_a_whole_table(
    database: Database, connection: Connection, statement: str, node: str
) -> None:
    insert_published(connection, 500, days=40)
    insert_marks(connection, 500, days=40)
    insert_run(connection, "relay-outbox", days=40, batches=500)
    connection.execute("analyze")
    with connection.transaction(force_rollback=True):
        connection.execute(prune.STATEMENTS["prepare"].encode())
        params = {
            "cutoff": scalar(connection, "select now() - interval '30 days'"),
            "batch_size": 10,
            "floor": "(0,0)",
        }
        lines = connection.execute(f"explain {prune.STATEMENTS[statement]}".encode(), params).fetchall()
    plan = "\n".join(line[0] for line in lines)
    assert re.search(node, plan), plan
    assert not re.search(r"Seq Scan on (outbox_messages|processed_messages|job_runs)", plan), plan
