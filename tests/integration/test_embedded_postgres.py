"""The embedded server comes up, survives what happens on a laptop, and leaves nothing running."""

import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from crmctl.dev import environment
from crmctl.dev.postgres import PostgresServer, find_binaries, state_directory, temporary_server
from crmctl.domain.errors import ConfigurationError, UnavailableError

_START_AND_WAIT = """
import time
from crmctl.dev.postgres import temporary_server
with temporary_server() as server:
    print(server.port, server.directory, flush=True)
    time.sleep(600)
"""

_START_AND_LEAVE = """
import sys
from pathlib import Path
from crmctl.dev.postgres import PostgresServer
PostgresServer(Path(sys.argv[1])).start(fsync=False, dies_with_parent=False)
"""

_CHECK_AS_ORDINARY_USER = """
import os, psycopg
from pathlib import Path
from crmctl.dev.postgres import PostgresServer, state_directory
assert os.geteuid() != 0
directory = state_directory("postgres")
assert directory == Path.cwd() / ".crmctl" / "postgres"
server = PostgresServer(directory)
server.start(fsync=False, dies_with_parent=True)
server.restart()
with psycopg.connect(server.url()) as connection:
    print(connection.execute("select 'answered'").fetchone()[0])
server.stop()
assert not list(directory.glob("binaries*"))
"""


@contextmanager
def open_directory() -> Iterator[Path]:
    """A directory that a server of root's can live in; pytest's tmp_path is closed to its account."""
    made = Path(tempfile.mkdtemp(prefix="crmctl-test-"))
    made.chmod(0o711)
    yield made
    PostgresServer(made).stop()
    shutil.rmtree(made)


@pytest.fixture
def directory() -> Iterator[Path]:
    with open_directory() as made:
        yield made


@pytest.fixture(scope="module")
def shared_directory() -> Iterator[Path]:
    with open_directory() as made:
        PostgresServer(made).start(fsync=True, dies_with_parent=True)
        yield made


@pytest.fixture
def server(shared_directory: Path) -> Iterator[PostgresServer]:
    """A running server with one row in it; it was initialised once for all tests."""
    server = PostgresServer(shared_directory)
    server.start(fsync=True, dies_with_parent=True)
    with psycopg.connect(server.url()) as connection:
        connection.execute("create table kept as select 42 as n")
    yield server
    server.start(fsync=True, dies_with_parent=True)
    with psycopg.connect(server.url()) as connection:
        connection.execute("drop table kept")


@pytest.fixture
def project(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty project whose server's files, also root's, are gone after the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield tmp_path
    environment.down(tmp_path, purge=True)


def accepts_connections(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def read_the_row(server: PostgresServer) -> tuple[int] | None:
    with psycopg.connect(server.url()) as connection:
        return connection.execute("select n from kept").fetchone()


def test_a_temporary_server_answers_and_is_gone_afterwards() -> None:
    with temporary_server(settings={"work_mem": "5MB"}) as server:
        with psycopg.connect(server.url()) as connection:
            assert connection.execute("show work_mem").fetchone() == ("5MB",)
            assert connection.execute("show fsync").fetchone() == ("off",)
        port = server.port
        assert accepts_connections(port)
    assert not server.running
    assert not accepts_connections(port)
    assert not server.directory.exists()


def test_two_servers_run_at_once(server: PostgresServer) -> None:
    with temporary_server() as other:
        assert other.port != server.port
        with psycopg.connect(other.url()) as connection:
            assert connection.execute("select to_regclass('kept')").fetchone() == (None,)
    assert read_the_row(server) == (42,)


def test_only_tcp_on_loopback_with_the_password(server: PostgresServer) -> None:
    with psycopg.connect(server.url()) as connection:
        assert connection.execute("show listen_addresses").fetchone() == ("127.0.0.1",)
        assert connection.execute("show unix_socket_directories").fetchone() == ("",)
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(f"postgresql://crmctl:guessed@127.0.0.1:{server.port}/postgres")
    assert mode(server.directory / "password") == 0o600
    assert mode(server.log) == 0o600
    assert not list(server.directory.glob("*.initdb"))


def test_stop_and_start_keep_the_data(server: PostgresServer) -> None:
    server.stop()
    server.stop()
    assert not server.running
    server.start(fsync=True, dies_with_parent=True)
    assert read_the_row(server) == (42,)


def test_starting_a_running_server_leaves_it_alone(server: PostgresServer) -> None:
    pid = server.pid
    server.start(fsync=False, dies_with_parent=True)
    PostgresServer(server.directory).start(fsync=False, dies_with_parent=True)
    assert server.pid == pid


def test_a_restart_keeps_the_port_and_what_was_committed(server: PostgresServer) -> None:
    port = server.port
    server.restart("immediate")
    assert "not properly shut down" in server.log.read_text()
    assert (server.port, read_the_row(server)) == (port, (42,))
    server.restart("fast")
    assert (server.port, read_the_row(server)) == (port, (42,))


def test_a_killed_server_is_reopened(server: PostgresServer) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    assert eventually(lambda: not server.running)
    assert (server.data / "postmaster.pid").exists()
    again = PostgresServer(server.directory)
    again.start(fsync=True, dies_with_parent=True)
    assert read_the_row(again) == (42,)


def test_a_pid_that_another_program_has_by_now_is_no_obstacle(server: PostgresServer) -> None:
    left_behind = (server.data / "postmaster.pid").read_text().splitlines()
    server.stop()
    (server.data / "postmaster.pid").write_text("\n".join([str(os.getpid()), *left_behind[1:]]))
    assert not server.running
    server.stop()
    server.start(fsync=True, dies_with_parent=True)
    assert read_the_row(server) == (42,)


def test_a_server_that_cannot_start_says_why_and_is_not_left_running(server: PostgresServer) -> None:
    server.stop()
    broken = PostgresServer(server.directory, settings={"no_such_parameter": "1"})
    with pytest.raises(UnavailableError, match="unrecognized configuration parameter"):
        broken.start(fsync=True, dies_with_parent=True)
    assert not broken.running


def test_data_without_its_password_is_explained(server: PostgresServer) -> None:
    server.stop()
    password = server.directory / "password"
    elsewhere = password.rename(server.directory / "elsewhere")
    with pytest.raises(ConfigurationError, match="password file"):
        server.start(fsync=True, dies_with_parent=True)
    elsewhere.rename(password)


def test_an_initialisation_that_was_killed_is_done_again(directory: Path) -> None:
    (directory / "data.unfinished" / "base").mkdir(parents=True)
    server = PostgresServer(directory)
    server.start(fsync=False, dies_with_parent=True)
    assert server.running
    assert not (directory / "data.unfinished").exists()


def test_the_server_dies_with_a_killed_parent_and_its_directory_goes_with_the_next_one() -> None:
    with subprocess.Popen([sys.executable, "-c", _START_AND_WAIT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        port, directory = parent.stdout.readline().split()
        assert accepts_connections(int(port))
        parent.kill()
    assert eventually(lambda: not accepts_connections(int(port)))
    assert eventually(lambda: not PostgresServer(Path(directory)).running)
    with temporary_server() as server:
        assert server.running
        assert not Path(directory).exists()


def test_a_background_server_survives_its_process_and_is_stopped_by_another(server: PostgresServer) -> None:
    server.stop()
    subprocess.run([sys.executable, "-c", _START_AND_LEAVE, str(server.directory)], check=True)
    again = PostgresServer(server.directory)
    port = again.port
    assert read_the_row(again) == (42,)
    again.stop()
    assert not again.running
    assert not accepts_connections(port)


def test_missing_binaries_are_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CRMCTL_PG_BIN", str(tmp_path))
    with pytest.raises(ConfigurationError, match="CRMCTL_PG_BIN"):
        find_binaries()


def test_configured_binaries_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for program in ("postgres", "initdb"):
        (tmp_path / program).touch(mode=0o755)
    monkeypatch.setenv("CRMCTL_PG_BIN", str(tmp_path))
    assert find_binaries().directory == tmp_path
    assert find_binaries().psql is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's state is outside the project")
def test_a_state_directory_that_someone_else_made_is_refused(project: Path) -> None:
    state = state_directory("postgres", project)
    os.chown(state.parent, pwd.getpwnam("nobody").pw_uid, -1)
    try:
        with pytest.raises(ConfigurationError, match="only root can write"):
            state_directory("postgres", project)
    finally:
        os.chown(state.parent, 0, -1)


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests ran as an ordinary user already")
def test_an_ordinary_user_runs_it_in_place(directory: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    home = directory / "project"
    home.mkdir()
    os.chown(home, nobody.pw_uid, nobody.pw_gid)
    python_path = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

    def run(interpreter: str, code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [interpreter, "-c", code],
            cwd=home,
            env=python_path,
            user=nobody.pw_uid,
            group=nobody.pw_gid,
            extra_groups=[],
            capture_output=True,
            text=True,
            check=False,
        )

    # The interpreter of a root user may be in a home that is closed to others.
    interpreters = [sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"]
    for interpreter in interpreters:
        try:
            usable = run(interpreter, "import crmctl.dev.postgres").returncode == 0
        except PermissionError:
            usable = False
        if usable:
            break
    else:
        pytest.skip("nobody can run no Python with this project's dependencies here")
    done = run(interpreter, _CHECK_AS_ORDINARY_USER)
    assert (done.returncode, done.stdout) == (0, "answered\n"), done.stderr


def test_up_again_or_at_the_same_moment_is_up_once(project: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        environments = list(pool.map(environment.up, [project] * 3))
    environments.append(environment.up(project))
    assert len({(found.database_url, found.pid) for found in environments}) == 1
    assert sorted(found.server_started for found in environments) == [False, False, False, True]
    assert sorted(found.database_created for found in environments) == [False, False, False, True]


def test_up_leaves_a_migrated_database_and_its_address(project: Path) -> None:
    found = environment.up(project)
    assert found.config_file == project.resolve() / ".crmctl" / "dev.toml"
    assert mode(found.config_file) == 0o600
    assert tomllib.loads(found.config_file.read_text())["database_url"] == found.database_url
    assert found.database_url not in repr(found)
    with psycopg.connect(found.database_url) as connection:
        assert connection.execute("select count(*) from crm.bookings").fetchone() == (0,)
        assert connection.execute("show fsync").fetchone() == ("on",)


def test_down_keeps_the_data_unless_told_to_purge(project: Path) -> None:
    assert not environment.down(project)
    found = environment.up(project)
    with psycopg.connect(found.database_url) as connection:
        connection.execute("create table kept ()")
    assert environment.down(project)
    assert not found.config_file.exists()
    assert not environment.down(project)
    with psycopg.connect(environment.up(project).database_url) as connection:
        assert connection.execute("select to_regclass('kept') is not null").fetchone() == (True,)
    assert environment.down(project, purge=True)
    assert not found.server_directory.exists()
