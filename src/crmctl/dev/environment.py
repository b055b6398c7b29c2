"""The development environment of a project: `dev up` starts it in the background, `dev down` stops it."""

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psycopg
from psycopg import sql

from crmctl.dev import bitrix24_tables, identity
from crmctl.dev.kafka import Broker, start_broker, stop_broker
from crmctl.dev.postgres import PostgresServer, state_directory, write_private
from crmctl.domain.topics import CHAT_STATUS_TOPIC, TOPICS

DATABASE: Final = "crmctl"
CONFIG_FILE: Final = Path(".crmctl", "dev.toml")
KEY_FILE: Final = Path(".crmctl", "dev-key.pem")

_POSTGRES: Final = "postgres"
_KAFKA: Final = "kafka"


@dataclass(frozen=True, slots=True)
class Environment:
    """What `up` left running, and what it had to do for it. `kafka` is apache-kafka or librdkafka-mock."""

    database_url: str = field(repr=False)
    kafka: str
    bootstrap_servers: str
    config_file: Path
    server_directory: Path
    pid: int | None
    server_started: bool
    database_created: bool


def up(directory: Path, announce: Callable[[str], None] | None = None) -> Environment:
    """Start the project's servers unless they run, migrate, create the topics, write `.crmctl/dev.toml` (0600).

    bitrix24-php-lib's tables, which are that library's in production, are created here as it does.
    `directory` is the project, that is, the working directory. The servers survive the command, and PostgreSQL
    loses nothing in a power cut (fsync is on). A second `up`, also one at the same moment, changes nothing.
    `announce` is told of what takes long.
    """
    from crmctl.adapters.migrations import upgrade

    with _only_one(directory):
        server = PostgresServer(state_directory(_POSTGRES, directory))
        already_running = server.running
        server.start(fsync=True, dies_with_parent=False)
        created = create_database(server)
        url = server.url(DATABASE)
        upgrade(url)
        with psycopg.connect(url) as connection:
            bitrix24_tables.create(connection)
        broker = start_broker(state_directory(_KAFKA, directory), dies_with_parent=False, announce=announce)
        create_topics(broker)
        config_file = directory.resolve() / CONFIG_FILE
        config_file.parent.mkdir(exist_ok=True)
        _write_config(config_file, url, broker, identity.ensure_key(directory.resolve() / KEY_FILE))
        return Environment(
            database_url=url,
            kafka=broker.kind,
            bootstrap_servers=broker.bootstrap_servers,
            config_file=config_file,
            server_directory=server.directory,
            pid=server.pid,
            server_started=not already_running,
            database_created=created,
        )


def down(directory: Path, *, purge: bool = False) -> bool:
    """Stop the project's servers and remove `dev.toml`; whether there was anything to stop.

    The data stays for the next `up`, unless `purge` says otherwise.
    """
    config_file = directory.resolve() / CONFIG_FILE
    server = PostgresServer(state_directory(_POSTGRES, directory))
    kafka_directory = state_directory(_KAFKA, directory)
    if not any(path.exists() for path in (server.directory, kafka_directory, config_file)):
        return False
    with _only_one(directory):
        was_running = server.running
        server.stop()
        was_running |= stop_broker(kafka_directory)
        config_file.unlink(missing_ok=True)
        if purge:
            shutil.rmtree(server.directory, ignore_errors=True)
            shutil.rmtree(kafka_directory, ignore_errors=True)
            (directory.resolve() / KEY_FILE).unlink(missing_ok=True)
    return was_running


def create_database(server: PostgresServer) -> bool:
    """Create the environment's database; whether it was missing."""
    with psycopg.connect(server.url(), autocommit=True) as connection:
        if connection.execute("select from pg_database where datname = %s", (DATABASE,)).fetchone() is not None:
            return False
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(DATABASE)))
        return True


def create_topics(broker: Broker) -> None:
    """Create the topics of the contracts; the mock makes a topic when it is asked about it by name."""
    from crmctl.adapters import kafka, topics
    from crmctl.settings import KafkaSettings
    from crmctl.telemetry import logs

    client = kafka.admin(KafkaSettings(bootstrap_servers=broker.bootstrap_servers), logs.configure(level="error"))
    if broker.kind == "apache-kafka":
        topics.create(client, (*TOPICS, CHAT_STATUS_TOPIC))
    else:
        for topic in (*TOPICS, CHAT_STATUS_TOPIC):
            client.list_topics(topic.name, timeout=10)


@contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    path = state_directory("environment.lock", directory)
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_config(path: Path, url: str, broker: Broker, public_key: str) -> None:
    # Every JSON string is a TOML string.
    lines = [
        "# Written by `crmctl dev up`, removed by `crmctl dev down`.",
        f"database_url = {json.dumps(url)}",
        "",
        "[kafka]",
        f"bootstrap_servers = {json.dumps(broker.bootstrap_servers)}",
        "",
        "[auth]",
        f"issuer = {json.dumps(identity.ISSUER)}",
        f"audience = {json.dumps(identity.AUDIENCE)}",
        f"algorithm = {json.dumps(identity.ALGORITHM)}",
        f"public_key = {json.dumps(public_key)}",
    ]
    unfinished = path.with_suffix(".unfinished")
    write_private(unfinished, "\n".join(lines) + "\n")
    unfinished.replace(path)
