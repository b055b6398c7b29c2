"""`crmctl metrics serve`: every metric after a scripted incident, and what is served while a source is away."""

import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final

import psycopg
import pytest

from crmctl.dev import bitrix24_tables
from crmctl.domain.grants import Kind
from crmctl.domain.jobs import NAMES
from tests.chat_status_support import Chat, hour_ago_ms, metric
from tests.dlq_support import dlq, letter, listed, place, send_letters
from tests.expire_support import expire, finish, insert_due, rows, wait_until
from tests.installations_support import insert_pair
from tests.integration.test_chat_status_metrics import free_port, get
from tests.kafka_fixtures import Kafka, MakeTopic, Outgoing
from tests.prefork import run_crmctl
from tests.relay_support import insert_events
from tests.roles_support import Roles
from tests.support import Database, insert_booking, start_crmctl

NAMES_OF_METRICS: Final = {
    "crm_bookings_due",
    "crm_bookings_oldest_due_seconds",
    "crm_bookings_poison",
    "crm_bookings_never_expire",
    "crm_outbox_pending",
    "crm_outbox_held",
    "crm_outbox_oldest_unpublished_seconds",
    "crm_job_last_success_timestamp_seconds",
    "crm_job_last_failure_timestamp_seconds",
    "crm_job_paused",
    "crm_prunable_oldest_seconds",
    "crm_chat_status_deferred",
    "crm_chat_status_oldest_deferred_seconds",
    "crm_chat_status_group_lag_messages",
    "crm_chat_status_group_lag_seconds",
    "crm_chat_status_retention_headroom_messages",
    "crm_chat_status_dlq_open",
    "crm_installations_stale",
    "crm_installations_unclear",
    "crm_installations_anomalies",
    "crm_scrape_up",
}


@contextmanager
def serving(
    database: Database | str, env: Mapping[str, str], *args: str
) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    port = free_port()
    arguments = ("metrics", "serve", "--host", "127.0.0.1", "--port", str(port), *args)
    with start_crmctl(*arguments, database=database, env=env) as process:
        try:
            wait_until(lambda: get(port, "/healthz")[0] == 200, "the server", seconds=30)
            yield process, port
        finally:
            process.kill()


def scrape(port: int) -> str:
    status, text = get(port, "/metrics")
    assert status == 200
    return text


def outbox(text: str, what: str, database: str = "main") -> float | None:
    return metric(text, f"crm_outbox_{what}", database=database)


def names(text: str) -> set[str]:
    return set(re.findall(r"^# TYPE (\S+) gauge$", text, re.MULTILINE))


@pytest.mark.real_kafka
def test_every_metric_is_there_after_an_incident(database: Database, kafka: Kafka, make_topic: MakeTopic) -> None:
    connection = database.connect()
    chat = Chat.make(kafka, database, make_topic)
    # The sweep: one install that nobody finished, one that it must leave alone.
    bitrix24_tables.create(connection)
    insert_pair(connection, age=timedelta(hours=2))
    insert_pair(connection, age=timedelta(hours=2), without_account=True)
    assert run_crmctl("installations", "sweep", "--action", "alert", database=database).exit_code == 0
    roles = Roles.make(database)
    # Dead letters: two are open, one was discarded.
    letters = send_letters(chat, *(letter(chat.missing_deal().event("Ready")) for _ in range(3)))
    assert dlq(chat, "discard", place(letters[0]), "--reason", "a test", "--yes").exit_code == 0
    # The consumer commits, an event waits for its deal, one more is unread.
    chat.send(chat.missing_deal().event("Ready"), partition=0)
    chat.consumed()
    chat.send(Outgoing(value=b"{}", partition=0, timestamp_ms=hour_ago_ms()))
    # The expiry: one booking expired with its message pending, one is poison, one failed run; some are due again.
    insert_due(connection)
    insert_booking(connection, deal=False)
    assert expire(database).json["poison_count"] == 1
    assert expire(database, "--id", "00000000-0000-4000-8000-000000000001").exit_code == 10
    insert_due(connection, overdue=timedelta(minutes=10))
    insert_booking(connection, reserve_expires_at="infinity")
    # The relay: a held message.
    insert_events(connection, "any")
    rows(connection, "update crm.outbox_messages set next_attempt_at = now() + interval '1 hour' where topic = 'any'")
    rows(connection, "update crm.outbox_messages set created_at = now() - interval '5 minutes'")
    assert run_crmctl("jobs", "pause", "prune", "--reason", "a test", database=database).exit_code == 0

    with serving(roles.login(Kind.READONLY), chat.env) as (process, port):
        text = scrape(port)
        assert names(text) == NAMES_OF_METRICS
        assert metric(text, "crm_scrape_up", source="database") == 1
        assert metric(text, "crm_scrape_up", source="kafka") == 1
        assert metric(text, "crm_chat_status_dlq_open") == listed(chat)["open_count"] == 2
        assert metric(text, "crm_installations_stale") == 2
        assert metric(text, "crm_installations_unclear") == 0
        assert metric(text, "crm_installations_anomalies") == 1
        assert metric(text, "crm_bookings_due", phase="Reserve") == 1
        assert metric(text, "crm_bookings_due", phase="Booking") == 0
        assert 600 <= (metric(text, "crm_bookings_oldest_due_seconds", phase="Reserve") or 0) < 700
        assert metric(text, "crm_bookings_oldest_due_seconds", phase="Booking") == 0
        assert metric(text, "crm_bookings_poison") == 1
        assert metric(text, "crm_bookings_never_expire") == 1
        assert (outbox(text, "pending"), outbox(text, "held")) == (1, 1)
        assert 300 <= (outbox(text, "oldest_unpublished_seconds") or 0) < 400
        success = metric(text, "crm_job_last_success_timestamp_seconds", job="expire-bookings", database="main")
        failure = metric(text, "crm_job_last_failure_timestamp_seconds", job="expire-bookings", database="main")
        assert success is not None
        assert failure is not None
        assert 0 < failure - success < 60
        assert metric(text, "crm_job_last_success_timestamp_seconds", job="relay-outbox", database="main") is None
        assert {job: metric(text, "crm_job_paused", job=job, database="main") for job in NAMES} == {
            job: float(job == "prune") for job in NAMES
        }
        assert metric(text, "crm_chat_status_deferred") == 1
        assert (metric(text, "crm_chat_status_oldest_deferred_seconds") or -1) >= 0
        assert metric(text, "crm_chat_status_group_lag_messages", partition="0") == 1
        assert 3600 <= (metric(text, "crm_chat_status_group_lag_seconds") or 0) < 3700
        assert metric(text, "crm_chat_status_retention_headroom_messages", partition="0") == 1
        process.send_signal(signal.SIGTERM)
        assert finish(process).exit_code == 0


def test_the_runbook_lists_every_metric_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "runbooks" / "serve-metrics.md").read_text()
    table = page.split("| metric |")[1].split("\n\n")[0]
    assert set(re.findall(r"`(crm_\w+)", table)) == NAMES_OF_METRICS


def test_an_empty_system_exports_zeros_and_not_nothing(database: Database, kafka: Kafka, make_topic: MakeTopic) -> None:
    chat = Chat.make(kafka, database, make_topic)
    with serving(database, chat.env) as (_, port):
        text = scrape(port)
    for name in ("crm_bookings_poison", "crm_bookings_never_expire", "crm_chat_status_group_lag_seconds"):
        assert metric(text, name) == 0, name
    assert (outbox(text, "pending"), outbox(text, "held")) == (0, 0)
    assert metric(text, "crm_prunable_oldest_seconds", database="main") == 0
    assert outbox(text, "oldest_unpublished_seconds") == 0
    assert metric(text, "crm_chat_status_oldest_deferred_seconds") == 0
    assert metric(text, "crm_bookings_oldest_due_seconds", phase="Reserve") == 0


def test_what_prune_has_to_delete_has_an_age_and_a_last_success_has_none(database: Database) -> None:
    connection = database.connect()
    for days in (40, 35):
        insert_due(connection)
        assert expire(database).json["reserve_expired_count"] == 1
        moved = "update crm.job_runs set finished_at = now() - make_interval(days => %s) where outcome = 'committed'"
        rows(connection, f"{moved} and finished_at > now() - interval '1 day'", days)
    with serving(database, {"CRMCTL_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1"}) as (_, port):
        age = metric(scrape(port), "crm_prunable_oldest_seconds", database="main")
        rows(connection, "delete from crm.job_runs where finished_at < now() - interval '39 days'")
        wait_until(
            lambda: metric(scrape(port), "crm_prunable_oldest_seconds", database="main") == 0, "prune", seconds=20
        )
    assert age is not None
    assert age // 86_400 == 40


def test_without_bitrix24_s_tables_the_source_is_up_and_has_no_series(database: Database) -> None:
    with serving(database, {"CRMCTL_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1"}) as (_, port):
        text = scrape(port)
        assert metric(text, "crm_scrape_up", source="installations") == 1
        assert "crm_installations_" not in text
        # One of the three is no schema of the library's: that is a fault.
        database.connect().execute("create table b24lib_journal (id uuid)")
        wait_until(lambda: metric(scrape(port), "crm_scrape_up", source="installations") == 0, "the fault", seconds=20)


def test_a_database_that_is_away_is_down_and_comes_back(
    database: Database, kafka: Kafka, make_topic: MakeTopic
) -> None:
    chat = Chat.make(kafka, database, make_topic)
    name = psycopg.conninfo.conninfo_to_dict(database.url)["dbname"]
    admin = psycopg.connect(psycopg.conninfo.make_conninfo(database.url, dbname="postgres"), autocommit=True)
    with admin, serving(database, chat.env) as (process, port):
        assert metric(scrape(port), "crm_scrape_up", source="database") == 1
        admin.execute(f"alter database {name} allow_connections false".encode())
        admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", (name,))
        wait_until(lambda: metric(scrape(port), "crm_scrape_up", source="database") == 0, "the outage", seconds=30)
        assert outbox(scrape(port), "pending") is None
        assert get(port, "/healthz")[0] == 200
        assert get(port, "/readyz")[0] == 200
        admin.execute(f"alter database {name} allow_connections true".encode())
        wait_until(lambda: metric(scrape(port), "crm_scrape_up", source="database") == 1, "its end", seconds=30)
        assert process.poll() is None


def test_a_broker_that_is_away_leaves_the_database_s_figures(database: Database) -> None:
    with serving(database, {"CRMCTL_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1"}) as (_, port):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        assert metric(text, "crm_scrape_up", source="kafka") == 0
        assert outbox(text, "pending") == 0
        assert get(port, "/nothing")[0] == 404


def test_a_port_that_is_taken_is_78(database: Database) -> None:
    env = {"CRMCTL_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1"}
    with serving(database, env) as (_, port):
        result = run_crmctl("metrics", "serve", "--host", "127.0.0.1", "--port", str(port), database=database, env=env)
    assert result.exit_code == 78
    assert "--port" in result.stderr


def test_without_a_database_or_a_broker_it_does_not_start(database: Database) -> None:
    result = run_crmctl("metrics", "serve", "--port", "0", database=database)
    assert result.exit_code == 78
    assert "CRMCTL_KAFKA__BOOTSTRAP_SERVERS" in result.stderr
