"""An embedded Kafka: Apache Kafka's own broker where Java is, else librdkafka's mock cluster."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from crmctl.dev import kafka_maven
from crmctl.dev.kafka_mock import MockCluster
from crmctl.dev.kafka_server import KafkaServer
from crmctl.domain.errors import UnavailableError

_TEMPORARY: Final = "crmctl-kafka-"

Broker = KafkaServer | MockCluster


def start_broker(
    directory: Path,
    *,
    dies_with_parent: bool,
    settings: Mapping[str, str] | None = None,
    announce: Callable[[str], None] | None = None,
) -> Broker:
    """Start Apache Kafka, or the mock where Java or Maven is missing; what runs in the directory is kept.

    `announce` is told what takes long: the one download. `settings` are the Apache Kafka broker's.
    """
    server, mock = KafkaServer(directory, settings=settings), MockCluster(directory)
    if mock.running or (not server.running and kafka_maven.why_not_here() is not None):
        mock.start(dies_with_parent=dies_with_parent)
        return mock
    if announce is not None and not server.running and kafka_maven.cached_libraries() is None:
        announce(f"fetching Apache Kafka {kafka_maven.VERSION} with mvn, about 45 MB, once")
    server.start(dies_with_parent=dies_with_parent)
    return server


def stop_broker(directory: Path) -> bool:
    """Stop whichever broker runs in the directory; whether there was one."""
    brokers: tuple[Broker, ...] = (KafkaServer(directory), MockCluster(directory))
    running = [broker for broker in brokers if broker.running]
    for broker in running:
        broker.stop()
    return bool(running)


@contextlib.contextmanager
def temporary_kafka(*, settings: Mapping[str, str] | None = None) -> Iterator[KafkaServer]:
    """An Apache Kafka broker in a directory of its own, which is gone afterwards; it dies with the calling thread."""
    with _temporary_directory() as directory:
        server = KafkaServer(directory, settings=settings)
        server.start(dies_with_parent=True)
        yield server


@contextlib.contextmanager
def temporary_broker(
    *, settings: Mapping[str, str] | None = None, announce: Callable[[str], None] | None = None
) -> Iterator[Broker]:
    """What `start_broker` starts, in a directory of its own, which is gone afterwards; it dies with the thread."""
    with _temporary_directory() as directory:
        yield start_broker(directory, dies_with_parent=True, settings=settings, announce=announce)


@contextlib.contextmanager
def _temporary_directory() -> Iterator[Path]:
    """A directory whose broker is stopped in the end. What a killed owner left in the temp folder is removed first."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*/owner.lock"):
        with contextlib.suppress(OSError, UnavailableError), lock.open("r+") as owner:
            if lock.parent.lstat().st_uid != os.geteuid():
                continue
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(lock.parent)
    directory = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
    with (directory / "owner").open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        # Only now does the lock count: a sweep in between must not see a directory without its owner.
        (directory / "owner").rename(directory / "owner.lock")
        try:
            yield directory
        finally:
            _remove(directory)


def _remove(directory: Path) -> None:
    stop_broker(directory)
    shutil.rmtree(directory)
