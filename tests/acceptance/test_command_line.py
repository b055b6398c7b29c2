"""The binary as its users meet it: help, exit codes, streams, configuration, hostile surroundings."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest
import typer
from typer.core import TyperGroup

from crmctl.cli.app import app
from crmctl.dev.postgres import PostgresServer, temporary_server
from crmctl.migrations import REVISIONS, heads
from tests.support import CallResult, Database, insert_booking, run_process, start_crmctl

FAKE_CLOCK = Path(__file__).parents[1] / "fakeclock"


def shell(script: str, database: Database) -> CallResult:
    """Run a shell pipeline with `crmctl` in it; its exit code is crmctl's own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CRMCTL_")}
    environment |= {"CRMCTL_DATABASE_URL": database.url, "CRMCTL": f"{sys.executable} -m crmctl"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, encoding="utf-8", timeout=60, check=False, cwd="/"
    )
    return CallResult(done.returncode, done.stdout, done.stderr)


def command_paths() -> list[tuple[str, ...]]:
    def walk(command: object, path: tuple[str, ...]) -> list[tuple[str, ...]]:
        found = [path]
        if isinstance(command, TyperGroup):
            for name, child in command.commands.items():
                found += walk(child, (*path, name))
        return found

    return walk(typer.main.get_command(app), ())


@pytest.mark.parametrize("path", command_paths(), ids=lambda path: " ".join(path) or "crmctl")
def test_every_command_has_help_and_every_leaf_an_example(path: tuple[str, ...]) -> None:
    result = run_process(*path, "--help")
    assert result.exit_code == 0
    assert result.stderr == ""
    leaf = path in command_paths() and not any(
        other[: len(path)] == path and other != path for other in command_paths()
    )
    if leaf:
        assert "Example" in result.stdout
        assert f"crmctl {' '.join(path)}" in result.stdout


def test_command_modules_import_nothing_heavy() -> None:
    code = "import sys, crmctl.cli.app; print([m for m in %r if m in sys.modules])"
    heavy = [
        "psycopg",
        "sqlalchemy",
        "alembic",
        "pydantic",
        "pydantic_settings",
        "structlog",
        "tenacity",
        "confluent_kafka",
        "rich",
    ]
    done = subprocess.run([sys.executable, "-c", code % heavy], capture_output=True, encoding="utf-8", check=True)
    assert ast.literal_eval(done.stdout) == []


def test_no_configured_database_is_78_and_names_dev_up(tmp_path: Path) -> None:
    result = run_process("bookings", "expire", "-o", "json", cwd=tmp_path)
    assert result.exit_code == 78
    assert "crmctl dev up" in result.json["error"]["hint"]
    assert "crmctl dev up" in result.stderr


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("postgresql://crmctl:hunter2@127.0.0.1:1/crmctl", 69),
        ("postgresql://crmctl:hun@ter2@127.0.0.1:1/crmctl", 78),
        ("postgresql://crmctl:hun/ter2@127.0.0.1:1/crmctl", 78),
        ("postgresql://crmctl:hunter2%zz@127.0.0.1:1/crmctl", 78),
        ("postgresql://crmctl:hun:ter2@127.0.0.1:1/crmctl", 69),
        ("postgresql://crmctl:hun?ter2@127.0.0.1:1/crmctl", 69),
        ("postgresql://crmctl:hun#ter2@127.0.0.1:1/crmctl", 69),
        ("postgresql://crmctl:hun ter2@127.0.0.1:1/crmctl", 78),
        ("postgresql://crmctl:hun[ter2@127.0.0.1:1/crmctl", 69),
        ("host=127.0.0.1 port=1 user=u password=hun'ter2", 69),
        ("host=127.0.0.1 port=1 password=hunter2 user=u", 69),
        ("hunter2", 78),
        ("postgresql://crmctl:hunter2\udcff@127.0.0.1:1/crmctl", 78),
        ("postgresql://crmctl@127.0.0.1:1/crmctl?sslmode=require;password=hunter2", 78),
    ],
)
@pytest.mark.parametrize("command", [("bookings", "expire"), ("db", "upgrade"), ("bookings", "list")], ids=" ".join)
def test_no_part_of_a_dsn_password_is_ever_printed(url: str, code: int, command: tuple[str, ...]) -> None:
    result = run_process(*command, "-o", "json", database=url)
    assert result.exit_code == code
    assert "hun" not in result.stdout + result.stderr
    assert "ter2" not in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("place", "option"),
    [
        ("127.0.0.1:1/crmctl?sslmode=bogus", "sslmode"),
        ("127.0.0.1:1/crmctl?target_session_attrs=bogus", "target_session_attrs"),
        ("127.0.0.1:1/crmctl?keepalives=bogus", "keepalives"),
        ("127.0.0.1:1/crmctl?connect_timeout=bogus", "connect_timeout"),
        ("127.0.0.1:99999/crmctl", "port"),
        ("127.0.0.1:1,127.0.0.1:1/crmctl?port=1,2,3", "port"),
    ],
)
def test_an_option_that_no_server_could_mend_is_78_and_named(place: str, option: str) -> None:
    result = run_process("bookings", "expire", "-o", "json", database=f"postgresql://crmctl:hunter2@{place}")
    assert result.exit_code == 78
    assert result.json["error"]["message"].endswith(f"look at its {option}")
    assert "bogus" not in result.stdout + result.stderr
    assert "hunter2" not in result.stdout + result.stderr


@pytest.mark.parametrize("host", ["a..b", "a" * 70])
def test_a_host_that_is_no_host_name_is_78(host: str) -> None:
    result = run_process("bookings", "list", database=f"host={host} port=1 dbname=crmctl")
    assert result.exit_code == 78
    assert "CRMCTL_DATABASE_URL" in result.stderr


def test_a_wrong_password_is_refused_without_printing_it(database: Database) -> None:
    parts = psycopg.conninfo.conninfo_to_dict(database.url)
    url = f"postgresql://{parts['user']}:hunter2@{parts['host']}:{parts['port']}/{parts['dbname']}"
    result = run_process("bookings", "expire", database=url)
    assert result.exit_code == 78
    assert "password authentication failed" in result.stderr
    assert "hunter2" not in result.stdout + result.stderr


def test_several_hosts_in_a_dsn_find_the_one_that_runs(database: Database) -> None:
    parts = psycopg.conninfo.conninfo_to_dict(database.url)
    url = (
        f"postgresql://{parts['user']}:{parts['password']}@127.0.0.1:1,127.0.0.1:{parts['port']}"
        f"/{parts['dbname']}?target_session_attrs=read-write"
    )
    assert run_process("bookings", "expire", database=url).exit_code == 0


def test_a_database_without_our_schema_is_78_and_names_the_fix(postgres_server: PostgresServer) -> None:
    result = run_process("bookings", "expire", "-o", "json", database=postgres_server.url())
    assert result.exit_code == 78
    assert result.json["error"]["code"] == "CRMCTL_SCHEMA"
    assert "crmctl db upgrade" in result.json["error"]["hint"]


def test_a_schema_that_is_behind_is_78(database: Database) -> None:
    database.connect().execute("delete from crm.crmctl_schema_version where version_num like 'bookkeeping%'")
    for command in (("bookings", "expire"), ("db", "check")):
        result = run_process(*command, database=database)
        assert result.exit_code == 78
        assert "behind" in result.stderr


def test_a_schema_that_is_ahead_runs_with_a_warning(database: Database) -> None:
    booking_id = insert_booking(database.connect())
    database.connect().execute(
        "update crm.crmctl_schema_version set version_num = 'bookkeeping_9999' where version_num = %s",
        (heads()["bookkeeping"],),
    )
    result = run_process("bookings", "expire", "--id", str(booking_id), "-o", "json", database=database)
    assert (result.exit_code, result.json["reserve_expired_count"]) == (0, 1)
    assert "schema ahead" in result.stderr
    checked = run_process("db", "check", "-o", "json", database=database)
    assert [part["state"] for part in checked.json["parts"]] == ["current", "ahead"]


def test_a_schema_that_asks_for_a_newer_crmctl_is_78(database: Database) -> None:
    database.connect().execute("update crm.crmctl_compatibility set minimum_version = '99.0.0'")
    result = run_process("bookings", "expire", database=database)
    assert result.exit_code == 78
    assert "99.0.0" in result.stderr


def test_a_server_that_is_read_only_by_configuration_is_78(database: Database) -> None:
    name = psycopg.conninfo.conninfo_to_dict(database.url)["dbname"]
    database.connect().execute(f"alter database {name} set default_transaction_read_only = on")
    result = run_process("bookings", "expire", database=database)
    assert result.exit_code == 78
    assert "read-only" in result.stderr
    assert run_process("bookings", "list", database=database).exit_code == 0


def test_a_standby_is_75_for_a_job_and_fine_for_a_list() -> None:
    with temporary_server() as server:
        run_process("db", "upgrade", database=server.url())
        server.stop()
        (server.data / "standby.signal").touch()
        os.chown(server.data / "standby.signal", server.data.stat().st_uid, server.data.stat().st_gid)
        server.start(fsync=False, dies_with_parent=True)
        result = run_process("bookings", "expire", database=server.url())
        assert result.exit_code == 75
        assert "standby" in result.stderr
        assert run_process("bookings", "list", database=server.url()).exit_code == 0


@pytest.mark.parametrize(("offset", "code"), [("300", 0), ("-300", 0), ("7200", 78), ("-7200", 78)])
def test_a_host_clock_far_off_stops_a_job_and_a_small_difference_changes_nothing(
    offset: str, code: int, database: Database
) -> None:
    connection = database.connect()
    due = insert_booking(connection)
    insert_booking(connection, created_at=connection.execute("select now() - interval '58 minutes'").fetchone()[0])  # type: ignore[index]
    environment = {"PYTHONPATH": str(FAKE_CLOCK), "FAKE_CLOCK_OFFSET_SECONDS": offset}
    result = run_process("bookings", "expire", "-o", "json", database=database, env=environment)
    assert result.exit_code == code
    expired = connection.execute("select id from crm.bookings where status = 'ReserveExpired'").fetchall()
    assert expired == ([(due,)] if code == 0 else [])
    if code:
        assert "120 minutes" in result.stderr


def test_a_reader_that_goes_away_is_no_failure(database: Database) -> None:
    connection = database.connect()
    for _ in range(50):
        insert_booking(connection)
    script = "$CRMCTL bookings list --due -o json --limit 50 | head -1; exit ${PIPESTATUS[0]}"
    result = shell(script, database)
    assert (result.exit_code, result.stderr) == (0, "")
    # A reader that is gone before the first byte: the run is committed all the same.
    result = shell("{ $CRMCTL bookings expire; echo $? >&3; } 3>&2 | true", database)
    assert "0" in result.stderr.splitlines()
    assert "Traceback" not in result.stderr
    assert connection.execute("select count(*) from crm.outbox_messages").fetchone() == (50,)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_at_any_moment_leaves_a_result_or_none_and_no_traceback(database: Database, signum: int) -> None:
    for delay in range(0, 600, 40):
        with start_crmctl("bookings", "list", "-o", "json", database=database) as process:
            time.sleep(delay / 1000)
            process.send_signal(signum)
            stdout, stderr = process.communicate(timeout=30)
        # Python itself may be hit before it has read a line of ours.
        assert "Traceback" not in stderr or "crmctl" not in stderr
        if process.returncode == 0:
            assert json.loads(stdout) == {"bookings": []}
        else:
            assert process.returncode in (-signum, 128 + signum)
            assert stdout == "" or json.loads(stdout)["error"]["code"] == "CRMCTL_INTERRUPTED"


def test_a_result_that_cannot_be_written_is_74_and_the_work_stays(database: Database) -> None:
    connection = database.connect()
    insert_booking(connection)
    for redirect in ("> /dev/full", ">&-"):
        result = shell(f"$CRMCTL bookings expire -o json {redirect}", database)
        assert result.exit_code == 74, redirect
        assert "could not be written" in result.stderr
        assert "Traceback" not in result.stderr
        assert "Exception ignored" not in result.stderr
    assert connection.execute("select count(*) from crm.outbox_messages").fetchone() == (1,)


def test_an_unwritable_stderr_stops_nothing(database: Database) -> None:
    for redirect in ("2> /dev/full", "2>&-"):
        result = shell(f"$CRMCTL bookings expire -o json {redirect}", database)
        assert result.exit_code == 0, redirect
        assert result.json["reserve_expired_count"] == 0


def test_markup_and_any_script_in_the_data_print_on_an_ascii_stdout(database: Database) -> None:
    connection = database.connect()
    booking_id = insert_booking(connection, status="[/b]Особый 🏠")
    ascii_only = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    for arguments in (("list", "--status", "[/b]Особый 🏠"), ("show", str(booking_id))):
        result = run_process("bookings", *arguments, database=database, env=ascii_only)
        assert (result.exit_code, result.stderr) == (0, "")
        assert "[/b]\\u041e\\u0441\\u043e\\u0431\\u044b\\u0439 \\U0001f3e0" in result.stdout
        result = run_process("bookings", *arguments, "-o", "json", database=database, env=ascii_only)
        assert "[/b]Особый 🏠" in json.dumps(result.json, ensure_ascii=False)
        result = run_process("bookings", *arguments, database=database)
        assert "[/b]Особый 🏠" in result.stdout


def test_lists_filter_by_what_they_are_asked_for(database: Database) -> None:
    connection = database.connect()
    now = connection.execute("select now()").fetchone()[0]  # type: ignore[index]
    due = insert_booking(connection)
    booked = insert_booking(connection, status="Booked")
    upcoming = insert_booking(connection, created_at=now)
    infinite = insert_booking(connection, reserve_expires_at="-infinity")
    done = insert_booking(connection, status="ReserveExpired")

    def listed(*arguments: str) -> set[str]:
        result = run_process("bookings", "list", *arguments, "-o", "json", database=database)
        assert result.exit_code == 0
        return {row["id"] for row in result.json["bookings"]}

    assert listed("--due") == {str(due), str(booked), str(infinite)}
    assert listed() == {str(due), str(booked), str(infinite), str(upcoming)}
    assert listed("--status", "ReserveExpired") == {str(done)}
    assert listed("--limit", "1") == {str(infinite)}
    tenant = connection.execute("select tenant_id from crm.bookings where id = %s", (due,)).fetchone()
    assert tenant is not None
    assert listed("--tenant", str(tenant[0])) == {str(due)}
    result = run_process("bookings", "list", "--due", "--status", "Booked", database=database)
    assert result.exit_code == 2


def test_showing_a_booking_that_does_not_exist_is_10(database: Database) -> None:
    missing = "00000000-0000-4000-8000-000000000001"
    result = run_process("bookings", "show", missing, "-o", "json", database=database)
    assert result.exit_code == 10
    assert (result.json["error"]["code"], missing in result.json["error"]["message"]) == ("CRM_BOOKING_NOT_FOUND", True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--batch-size", "0"),
        ("--batch-size", "many"),
        ("--id", "not-a-uuid"),
        ("--time-budget", "50"),
        ("--as-of", "2026-11-29T10:00:00"),
        ("-o", "yaml"),
        ("--no-such-option",),
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_2(arguments: tuple[str, ...]) -> None:
    result = run_process("bookings", "expire", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("outbox", "list", "--aggregate", "\udcff"),
        ("bookings", "list", "--status", "Booked\udcff"),
        ("jobs", "pause", "expire-bookings", "--reason", "\udcff"),
        ("dlq", "list", "--code", "\udcff"),
        ("dlq", "discard", "0:1", "--reason", "\udcff", "--yes"),
        ("bookings", "show", "\udcff"),
        ("\udcff",),
    ],
    ids=lambda arguments: " ".join(arguments).encode(errors="backslashreplace").decode(),
)
def test_an_argument_that_is_no_utf8_is_2(arguments: tuple[str, ...], database: Database) -> None:
    result = run_process(*arguments, database=database)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Error: " in result.stderr
    assert "Traceback" not in result.stderr


def test_upgrade_and_check_can_be_repeated_and_raced(postgres_server: PostgresServer) -> None:
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute("drop database if exists upgrades with (force)")
        connection.execute("create database upgrades")
    url = postgres_server.url("upgrades")
    environment = os.environ | {"CRMCTL_DATABASE_URL": url}
    racing = [
        subprocess.Popen(
            [sys.executable, "-m", "crmctl", "db", "upgrade", "-o", "json"],
            env=environment,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        for _ in range(3)
    ]
    applied = [json.loads(process.communicate(timeout=60)[0])["applied"] for process in racing]
    assert [process.returncode for process in racing] == [0, 0, 0]
    assert sorted(revision for one in applied for revision in one) == sorted(
        revision for revisions in REVISIONS.values() for revision in revisions
    )
    assert run_process("db", "upgrade", database=url).stdout == "nothing to do\n"
    checked = run_process("db", "check", "-o", "json", database=url)
    assert [(part["part"], part["state"]) for part in checked.json["parts"]] == [
        ("core", "current"),
        ("bookkeeping", "current"),
    ]


def test_bookkeeping_alone_serves_a_crm_that_owns_its_core(database: Database, postgres_server: PostgresServer) -> None:
    connection = database.connect()
    connection.execute("delete from crm.crmctl_schema_version")
    ours = connection.execute(
        "select string_agg('crm.' || tablename, ', ') from pg_tables where schemaname = 'crm' and tablename not in "
        "('bookings', 'deals', 'deal_timeline_events', 'outbox_messages', 'crmctl_schema_version')"
    ).fetchone()
    assert ours is not None
    connection.execute(f"drop table {ours[0]}")
    result = run_process("db", "upgrade", "--only", "bookkeeping", "-o", "json", database=database)
    assert result.json == {"applied": list(REVISIONS["bookkeeping"])}
    booking_id = insert_booking(connection)
    assert run_process("bookings", "expire", database=database).exit_code == 0
    row = connection.execute("select status from crm.bookings where id = %s", (booking_id,)).fetchone()
    assert row == ("ReserveExpired",)
    checked = run_process("db", "check", "-o", "json", database=database)
    assert [part["state"] for part in checked.json["parts"]] == ["owned-by-crm", "current"]


def test_the_session_is_named_and_guarded_within_its_transaction_only(database: Database) -> None:
    connection = database.connect()
    insert_booking(connection)
    connection.execute(
        "create table seen (application_name text, statement_timeout text, lock_timeout text, idle text, zone text)"
    )
    connection.execute("""
        create function note_session() returns trigger language plpgsql as $$
        begin
            insert into seen values (
                current_setting('application_name'), current_setting('statement_timeout'),
                current_setting('lock_timeout'), current_setting('idle_in_transaction_session_timeout'),
                current_setting('TimeZone'));
            return new;
        end $$""")
    connection.execute("create trigger note before update on crm.bookings for each row execute function note_session()")
    environment = {"CRMCTL_DATABASE__STATEMENT_TIMEOUT": "45s"}
    assert run_process("bookings", "expire", database=database, env=environment).exit_code == 0
    assert connection.execute("select * from seen").fetchone() == (
        "crmctl expire-bookings",
        "45s",
        "5s",
        "30s",
        "UTC",
    )
