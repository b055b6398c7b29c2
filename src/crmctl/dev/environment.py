"""The development environment of a project: `dev up` starts it in the background, `dev down` stops it."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psycopg
from psycopg import sql

from crmctl.dev.postgres import PostgresServer, state_directory, write_private

DATABASE: Final = "crmctl"
CONFIG_FILE: Final = Path(".crmctl", "dev.toml")

_SERVER: Final = "postgres"


@dataclass(frozen=True, slots=True)
class Environment:
    """What `up` left running, and what it had to do for it."""

    database_url: str = field(repr=False)
    config_file: Path
    server_directory: Path
    pid: int | None
    server_started: bool
    database_created: bool


def up(directory: Path) -> Environment:
    """Start the project's server unless it runs, migrate its database, write `.crmctl/dev.toml` (mode 0600).

    `directory` is the project, that is, the working directory. The server survives the command and loses
    nothing in a power cut (fsync is on). A second `up`, also one at the same moment, changes nothing.
    """
    from crmctl.adapters.migrations import upgrade

    with _only_one(directory):
        server = PostgresServer(state_directory(_SERVER, directory))
        already_running = server.running
        server.start(fsync=True, dies_with_parent=False)
        created = _create_database(server)
        url = server.url(DATABASE)
        upgrade(url)
        config_file = directory.resolve() / CONFIG_FILE
        _write_config(config_file, url)
        return Environment(
            database_url=url,
            config_file=config_file,
            server_directory=server.directory,
            pid=server.pid,
            server_started=not already_running,
            database_created=created,
        )


def down(directory: Path, *, purge: bool = False) -> bool:
    """Stop the project's server and remove `dev.toml`; whether there was anything to stop.

    The data stays for the next `up`, unless `purge` says otherwise.
    """
    config_file = directory.resolve() / CONFIG_FILE
    server = PostgresServer(state_directory(_SERVER, directory))
    if not server.directory.exists() and not config_file.exists():
        return False
    with _only_one(directory):
        was_running = server.running
        server.stop()
        config_file.unlink(missing_ok=True)
        if purge:
            shutil.rmtree(server.directory, ignore_errors=True)
    return was_running


@contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    path = state_directory("environment.lock", directory)
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _create_database(server: PostgresServer) -> bool:
    with psycopg.connect(server.url(), autocommit=True) as connection:
        if connection.execute("select from pg_database where datname = %s", (DATABASE,)).fetchone() is not None:
            return False
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(DATABASE)))
        return True


def _write_config(path: Path, url: str) -> None:
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    write_private(unfinished, f'# Written by `crmctl dev up`, removed by `crmctl dev down`.\ndatabase_url = "{url}"\n')
    unfinished.replace(path)
