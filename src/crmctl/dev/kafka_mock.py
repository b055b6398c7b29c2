"""The stand-in where Java is missing: librdkafka's mock cluster, in a process of its own.

It keeps records in memory only, creates every topic that is asked for with four partitions, and knows
neither group administration nor offsets by time.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

from crmctl.dev.kafka_process import BackgroundProcess
from crmctl.domain.errors import UnavailableError

PARTITIONS: Final = 4

_START_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 5.0
_ADDRESS: Final = "mock.address"


class MockCluster:
    """The mock cluster of one directory, also when another process started it. Stopping it loses its records."""

    kind: Final = "librdkafka-mock"

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self._process = BackgroundProcess(self.directory, "mock")
        self._address_file = self.directory / _ADDRESS

    @property
    def pid(self) -> int | None:
        """The process id, or None while it does not run."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether its process is there."""
        return self.pid is not None

    @property
    def bootstrap_servers(self) -> str:
        """Where clients connect; another one after every start. Raises UnavailableError if it does not run."""
        if self.running and self._address_file.exists():
            return self._address_file.read_text()
        raise UnavailableError(f"The mock cluster in {self.directory} is not running")

    def start(self, *, dies_with_parent: bool) -> None:
        """Start it and wait until it has an address; one that already runs is left as it is."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self.running:
            self._address_file.unlink(missing_ok=True)
            command = [sys.executable, "-P", "-m", "crmctl.dev.kafka_mock"]
            self._process.launch(command, os.environ, dies_with_parent=dies_with_parent)
        deadline = time.monotonic() + _START_SECONDS
        while not self._address_file.exists():
            if not self.running or time.monotonic() > deadline:
                self.stop()
                raise self._process.failure(f"The mock cluster in {self.directory} does not start", 0)
            time.sleep(0.01)

    def stop(self) -> None:
        """End it. Nothing to do is success."""
        self._process.stop(_STOP_SECONDS)


def _serve() -> None:
    """Run the cluster and write its address to the working directory; only a signal ends this."""
    from confluent_kafka import Producer

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cluster = Producer({"test.mock.num.brokers": 1, "log_level": 4})
    brokers = cluster.list_topics(timeout=_START_SECONDS).brokers.values()
    unfinished = Path(f"{_ADDRESS}.unfinished")
    unfinished.write_text(",".join(f"{broker.host}:{broker.port}" for broker in brokers))
    unfinished.replace(_ADDRESS)
    while True:
        signal.pause()


if __name__ == "__main__":
    _serve()
