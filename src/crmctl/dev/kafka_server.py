"""Apache Kafka as an embedded broker: one directory is one broker, its data, its settings and its log.

It runs as a single KRaft node (broker and controller in one process) that listens on loopback only.
"""

import base64
import contextlib
import os
import secrets
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from crmctl.dev import kafka_maven
from crmctl.dev.kafka_process import BackgroundProcess
from crmctl.domain.errors import UnavailableError

_START_SECONDS: Final = 90.0
_STOP_SECONDS: Final = 20.0
_POLL_SECONDS: Final = 0.01
# Below the ephemeral ranges of Linux and macOS: no client's outgoing connection takes the port while
# the broker restarts.
_PORTS: Final = range(20_000, 32_000)
_PORT_TAKEN: Final = "Address already in use"

# One compiler tier and the simple collector: the broker is up in about a second, and small.
_JVM: Final = (
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",
    "-Djava.awt.headless=true",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSSXXX",
)

_SETTINGS: Final = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "auto.create.topics.enable": "false",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "4",
    "group.initial.rebalance.delay.ms": "0",
    # The controller refuses a broker that comes back from SIGKILL until its old session has timed out.
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "400",
    "log.cleaner.dedupe.buffer.size": str(16 * 1024 * 1024),
    "num.network.threads": "2",
    "num.io.threads": "4",
}


class KafkaServer:
    """The Apache Kafka broker of one directory, also when another process started it.

    `settings` are broker settings (`message.max.bytes`, …); they win over the defaults, and every start
    applies those of the object that starts it.
    """

    kind: Final = "apache-kafka"

    def __init__(self, directory: Path, *, settings: Mapping[str, str] | None = None) -> None:
        self.directory = directory.resolve()
        self.data = self.directory / "data"
        self._settings = dict(settings or {})
        self._process = BackgroundProcess(self.directory, "kafka")
        self._configuration = self.directory / "server.properties"
        self._dies_with_parent = False

    @property
    def log(self) -> Path:
        """What the broker says: warnings and errors."""
        return self._process.log

    @property
    def pid(self) -> int | None:
        """The broker's process id, or None while it does not run."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the broker's process is there (it may still be starting or stopping, or be paused)."""
        return self.pid is not None

    @property
    def bootstrap_servers(self) -> str:
        """Where clients connect, also while the broker is down. Raises UnavailableError before the first start."""
        address = _read_properties(self._configuration).get("advertised.listeners")
        if address is None:
            raise UnavailableError(f"The Kafka broker in {self.directory} was never started")
        return address.removeprefix("PLAINTEXT://")

    def start(self, *, dies_with_parent: bool) -> None:
        """Start the broker and wait until it answers; one that already runs is left as it is.

        It listens where it did the last time, if it can. With `dies_with_parent` it is killed when the thread
        that called this ends, however it ends (elsewhere than on Linux: when the interpreter exits). Without, it
        outlives the process. Raises ConfigurationError without Java, and UnavailableError, with the end of the
        log, when the broker cannot be fetched or does not come up.
        """
        self._dies_with_parent = dies_with_parent
        self._start(moves=True)

    def stop(self) -> None:
        """Shut the broker down, also a paused one; one that takes too long is killed. Nothing to do is success."""
        self._process.stop(_STOP_SECONDS)

    def kill(self) -> None:
        """Crash the broker (SIGKILL). Nothing to do is success."""
        self._process.kill()

    def restart(self) -> None:
        """Stop the broker if it runs, then start it on the same port with the same data."""
        self.stop()
        self._start(moves=False)

    def pause(self) -> None:
        """Freeze the broker (SIGSTOP): connections stay open, nothing answers.

        A pause of more than two seconds costs the broker its session: for a moment after `resume` its
        partitions have no leader, which clients retry.
        """
        self._process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """End a pause (SIGCONT)."""
        self._process.signal(signal.SIGCONT)

    def _start(self, *, moves: bool) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.log.touch(mode=0o600)
        if not self.running:
            kafka_maven.libraries()  # a download's minutes are not the broker's
        deadline = time.monotonic() + _START_SECONDS
        launched = False
        said_before = 0
        try:
            while not self._answers():
                if launched and not self.running:
                    if _PORT_TAKEN not in self._process.output_after(said_before):
                        raise self._process.failure(f"The Kafka broker in {self.directory} exited", said_before)
                    if moves:
                        self._configuration.unlink(missing_ok=True)
                if time.monotonic() > deadline:
                    raise self._process.failure(f"The Kafka broker in {self.directory} does not answer", said_before)
                if not self.running:
                    said_before = self.log.stat().st_size
                    self._launch()
                    launched = True
                time.sleep(_POLL_SECONDS)
        except BaseException:
            if launched:
                self.kill()
            raise

    def _launch(self) -> None:
        program = [str(kafka_maven.find_java()), *_JVM, f"-Djava.io.tmpdir={self._scratch()}"]
        program += ["-cp", f"{kafka_maven.libraries()}/*"]
        if not self.data.exists():
            self._format(program)
        if self._configuration.exists():
            listeners = _read_properties(self._configuration)["listeners"]
        else:
            broker, controller = _two_free_ports()
            listeners = f"PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}"
        self._write_configuration(self._configuration, self.data, listeners)
        self._run([*program, "kafka.Kafka", self._configuration.name])

    def _format(self, program: list[str]) -> None:
        # Under another name until it is complete, so that a format that was killed leaves nothing that looks usable.
        unfinished = self.directory / "data.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        configuration = self.directory / "format.properties"
        self._write_configuration(configuration, unfinished, "PLAINTEXT://127.0.0.1:1,CONTROLLER://127.0.0.1:2")
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        # One argument, because an id may begin with a dash.
        arguments = ["kafka.tools.StorageTool", "format", f"--cluster-id={cluster_id}", "-c", configuration.name]
        said_before = self.log.stat().st_size
        self._run([*program, *arguments])
        while self.running:
            time.sleep(_POLL_SECONDS)
        if not (unfinished / "meta.properties").exists():
            raise self._process.failure(f"The data of the Kafka broker in {self.directory} has no format", said_before)
        configuration.unlink()
        unfinished.rename(self.data)

    def _run(self, command: list[str]) -> None:
        inherited = ("PATH", "JAVA_HOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
        environment = {name: os.environ[name] for name in inherited if name in os.environ} | {"LC_ALL": "C.UTF-8"}
        self._process.launch(command, environment, dies_with_parent=self._dies_with_parent)

    def _scratch(self) -> Path:
        """A temp folder of its own, because a killed broker leaves its unpacked native libraries behind."""
        scratch = self.directory / "tmp"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        return scratch

    def _write_configuration(self, path: Path, data: Path, listeners: str) -> None:
        broker, controller = listeners.split(",")
        settings = _SETTINGS | {
            "listeners": listeners,
            "advertised.listeners": broker,
            "controller.quorum.voters": f"1@{controller.removeprefix('CONTROLLER://')}",
            # Relative to the working directory: a comma in an absolute path would make it two.
            "log.dirs": data.name,
        }
        lines = (f"{name}={value}\n" for name, value in (settings | self._settings).items())
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text("".join(lines))
        unfinished.replace(path)

    def _answers(self) -> bool:
        """Whether this broker, and no other that has its port by now, answers a request for metadata."""
        if not self.running or not self._configuration.exists():
            return False
        host, port = self.bootstrap_servers.split(":")
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex((host, int(port))) != 0:
                return False
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        try:
            metadata = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0}).list_topics(timeout=2)
        except KafkaException:
            return False
        return metadata.cluster_id == _read_properties(self.data / "meta.properties").get("cluster.id")


def _read_properties(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return {}
    pairs = (line.partition("=") for line in lines if not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def _two_free_ports() -> set[int]:
    free: set[int] = set()
    while len(free) < 2:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            free.add(port)
    return free
