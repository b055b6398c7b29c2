"""A PgBouncer in transaction mode before a test's database: the one on the PATH, or Debian's unpacked into a folder."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

_PACKAGES = ("pgbouncer", "libc-ares2", "libevent-2.1-7")
_SECONDS = 60.0


class NotHereError(Exception):
    """There is no PgBouncer, and none can be had; the message says why."""


@dataclass(frozen=True, slots=True)
class Binary:
    """The program, and the folder of the libraries that came with it."""

    path: Path
    libraries: Path | None = None


def find(folder: Path) -> Binary:
    """The binary that CRMCTL_TEST_PGBOUNCER names, the system's, or Debian's. Raises NotHereError."""
    named = os.environ.get("CRMCTL_TEST_PGBOUNCER") or shutil.which("pgbouncer", path=f"{os.defpath}:/usr/sbin")
    if named:
        return Binary(Path(named))
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise NotHereError("pgbouncer is not installed, and this is no Debian to fetch it from")
    try:
        _run(["apt-get", "download", *_PACKAGES], folder)
        for package in folder.glob("*.deb"):
            _run(["dpkg-deb", "--extract", str(package), str(folder)], folder)
    except (subprocess.SubprocessError, OSError) as error:
        raise NotHereError(f"pgbouncer is not installed, and apt-get download failed: {error}") from None
    libraries = [path.parent for path in folder.glob("usr/lib/*/libcares.so.2")]
    return Binary(folder / "usr" / "sbin" / "pgbouncer", libraries[0] if libraries else None)


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=_SECONDS)


@contextmanager
def pooled(binary: Binary, database_url: str, *, connections: int = 2) -> Iterator[str]:
    """Run it before a database with so many server connections; yields the DSN of the pool."""
    parts = psycopg.conninfo.conninfo_to_dict(database_url)
    port = _free_port()
    # Not under pytest's own folders: as root it runs as nobody, who may not look into them.
    with tempfile.TemporaryDirectory(prefix="crmctl-pgbouncer-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        config = folder / "pgbouncer.ini"
        config.write_text(
            "[databases]\n"
            f"pool = host={parts['host']} port={parts['port']} dbname={parts['dbname']}"
            f" user={parts['user']} password={parts['password']}\n"
            "[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
            f"pool_mode = transaction\ndefault_pool_size = {connections}\n"
        )
        config.chmod(0o644)
        is_root = os.geteuid() == 0
        environment = {} if binary.libraries is None else {"LD_LIBRARY_PATH": str(binary.libraries)}
        with subprocess.Popen(
            [str(binary.path), "-q", str(config)],
            env=environment,
            cwd="/",
            stderr=subprocess.PIPE,
            encoding="utf-8",
            user="nobody" if is_root else None,
            group=pwd.getpwnam("nobody").pw_gid if is_root else None,
            extra_groups=[] if is_root else None,
        ) as process:
            try:
                _wait_until_it_listens(port, process)
                yield f"postgresql://anybody@127.0.0.1:{port}/pool"
            finally:
                process.kill()


def _wait_until_it_listens(port: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if process.poll() is not None:
                assert process.stderr is not None
                raise AssertionError(f"pgbouncer ended: {process.stderr.read()}") from None
            assert time.monotonic() < deadline, "pgbouncer does not listen"
            time.sleep(0.05)
        else:
            return


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert isinstance(port, int)
    return port
