"""The embedded broker comes up, keeps what it acknowledged, and leaves nothing running."""

import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from crmctl.dev import kafka_maven
from crmctl.dev.kafka import start_broker, stop_broker, temporary_broker, temporary_kafka
from crmctl.dev.kafka_mock import MockCluster
from crmctl.dev.kafka_process import BackgroundProcess
from crmctl.dev.kafka_server import KafkaServer
from crmctl.domain.errors import ConfigurationError, UnavailableError
from tests.kafka_fixtures import (
    Kafka,
    MakeTopic,
    Outgoing,
    create_topic,
    eventually,
    produce,
    read_topic,
    wait_for_topic,
)

_START_AND_WAIT = """
import time
from crmctl.dev.kafka import temporary_broker
with temporary_broker() as broker:
    print(broker.directory, flush=True)
    time.sleep(600)
"""

_START_AND_LEAVE = """
import sys
from pathlib import Path
from crmctl.dev.kafka import start_broker
start_broker(Path(sys.argv[1]), dies_with_parent=False)
"""

_PRODUCE = """
import sys
from confluent_kafka import Producer
producer = Producer({"bootstrap.servers": sys.argv[1], "enable.idempotence": True})
producer.produce(sys.argv[2], b"from afar", b"key")
sys.exit(producer.flush(20))
"""

_FAKE_MVN = """
PATH=/usr/bin:/bin
for argument; do
  case $argument in -DoutputDirectory=*) jars=${argument#*=} ;; esac
done
echo run >> "$0.runs"
sleep 0.2
mkdir "$jars" && touch "$jars/kafka_2.13-%s.jar"
"""


embedded = pytest.mark.real_kafka(embedded=True)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A directory with a name to trip over; nothing runs in it afterwards."""
    made = tmp_path / "о брокере, v1"
    yield made
    stop_broker(made)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    """A broker that the tests of this module may stop, pause and kill."""
    made = KafkaServer(tmp_path_factory.mktemp("kafka"))
    made.start(dies_with_parent=True)
    yield made
    made.stop()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the PATH, empty; and the cache is empty too."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("CRMCTL_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def add_program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def add_java(folder: Path, version: str = "17.0.15") -> None:
    add_program(folder, "java", f"""echo 'openjdk version "{version}"' >&2""")


def values_in(server: KafkaServer, topic: str) -> list[bytes | None]:
    return [record.value for record in read_topic(server.bootstrap_servers, topic)]


def accepts_connections(bootstrap_servers: str) -> bool:
    host, port = bootstrap_servers.split(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0


@embedded
def test_a_temporary_broker_answers_and_is_gone_afterwards() -> None:
    with temporary_kafka() as server:
        address = server.bootstrap_servers
        assert address.startswith("127.0.0.1:")
        assert len(AdminClient({"bootstrap.servers": address}).list_topics(timeout=10).brokers) == 1
        process = BackgroundProcess(server.directory, "kafka")
    assert process.pid is None
    assert not accepts_connections(address)
    assert not server.directory.exists()


@embedded
def test_a_restart_keeps_the_address_and_the_records(server: KafkaServer) -> None:
    topic = "restarted"
    create_topic(server.bootstrap_servers, topic)
    produce(server.bootstrap_servers, topic, [Outgoing(b"kept", partition=0)])
    address, pid = server.bootstrap_servers, server.pid
    server.restart()
    assert server.bootstrap_servers == address
    assert server.pid != pid
    assert values_in(server, topic) == [b"kept"]


@embedded
def test_stop_and_start_keep_the_records_and_do_nothing_twice(server: KafkaServer) -> None:
    topic = "stopped"
    create_topic(server.bootstrap_servers, topic)
    produce(server.bootstrap_servers, topic, [Outgoing(b"kept", partition=0)])
    server.stop()
    server.stop()
    assert not server.running
    server.start(dies_with_parent=True)
    pid = server.pid
    server.start(dies_with_parent=True)
    assert server.pid == pid
    assert values_in(server, topic) == [b"kept"]


@embedded
def test_a_killed_broker_keeps_what_it_acknowledged(server: KafkaServer) -> None:
    topic = "killed"
    create_topic(server.bootstrap_servers, topic)
    acknowledged = produce(server.bootstrap_servers, topic, (f"{n}" for n in range(5_000)))
    server.kill()
    assert not server.running
    reopened = KafkaServer(server.directory)
    reopened.start(dies_with_parent=True)
    assert reopened.bootstrap_servers == server.bootstrap_servers
    assert len(acknowledged) == 5_000
    assert sorted(values_in(reopened, topic), key=str) == sorted((b"%d" % n for n in range(5_000)), key=str)


@embedded
def test_a_paused_broker_does_not_answer_until_it_is_resumed(server: KafkaServer) -> None:
    topic = "paused"
    create_topic(server.bootstrap_servers, topic)
    server.pause()
    try:
        assert accepts_connections(server.bootstrap_servers)
        with pytest.raises(KafkaException):
            AdminClient({"bootstrap.servers": server.bootstrap_servers, "log_level": 0}).list_topics(timeout=0.5)
    finally:
        server.resume()
    produce(server.bootstrap_servers, topic, ["heard"])
    assert values_in(server, topic) == [b"heard"]


@embedded
def test_a_paused_broker_can_be_stopped(server: KafkaServer) -> None:
    server.pause()
    server.stop()
    assert not server.running
    server.start(dies_with_parent=True)


@embedded
def test_settings_win_and_topics_are_never_made_by_accident(directory: Path) -> None:
    server = KafkaServer(directory, settings={"message.max.bytes": "5000"})
    server.start(dies_with_parent=True)
    topic = "small"
    create_topic(server.bootstrap_servers, topic)
    with pytest.raises(AssertionError, match="MSG_SIZE_TOO_LARGE"):
        produce(server.bootstrap_servers, topic, ["x" * 10_000])
    for codec in ("gzip", "lz4", "snappy", "zstd"):
        produce(server.bootstrap_servers, topic, ["y" * 10_000], compression_type=codec)
    assert len(values_in(server, topic)) == 4
    with pytest.raises(AssertionError, match="UNKNOWN_TOPIC"):
        produce(server.bootstrap_servers, "absent", ["lost"], topic_metadata_propagation_max_ms=0)


@embedded
def test_two_brokers_run_at_once(directory: Path, server: KafkaServer) -> None:
    second = KafkaServer(directory)
    second.start(dies_with_parent=True)
    assert second.bootstrap_servers != server.bootstrap_servers
    create_topic(second.bootstrap_servers, "mine")
    assert "mine" not in AdminClient({"bootstrap.servers": server.bootstrap_servers}).list_topics(timeout=10).topics


@embedded
def test_a_broker_whose_port_was_taken_moves(directory: Path) -> None:
    server = KafkaServer(directory)
    server.start(dies_with_parent=True)
    create_topic(server.bootstrap_servers, "moved")
    address = server.bootstrap_servers
    server.stop()
    with socket.create_server(("127.0.0.1", int(address.split(":")[1]))):
        server.start(dies_with_parent=True)
        assert server.bootstrap_servers != address
        assert values_in(server, "moved") == []


@embedded
def test_a_broker_that_cannot_start_says_why_and_is_not_left_running(directory: Path) -> None:
    server = KafkaServer(directory, settings={"num.io.threads": "many"})
    with pytest.raises(UnavailableError, match=r"many.*num\.io\.threads"):
        server.start(dies_with_parent=True)
    assert not server.running


@embedded
def test_a_format_that_was_killed_is_done_again(directory: Path) -> None:
    (directory / "data.unfinished" / "left-behind").mkdir(parents=True)
    server = KafkaServer(directory)
    server.start(dies_with_parent=True)
    assert server.running
    assert not (directory / "data.unfinished").exists()
    assert not (server.data / "left-behind").exists()


def test_the_broker_dies_with_a_killed_parent_and_its_directory_goes_with_the_next_one() -> None:
    with subprocess.Popen([sys.executable, "-c", _START_AND_WAIT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        directory = Path(parent.stdout.readline().strip())
        brokers = [BackgroundProcess(directory, name) for name in ("kafka", "mock")]
        assert any(broker.pid for broker in brokers)
        parent.kill()
    assert eventually(lambda: not any(broker.pid for broker in brokers))
    with temporary_broker() as broker:
        assert broker.running
        assert not directory.exists()


def test_a_background_broker_survives_its_process_and_is_stopped_by_another(directory: Path) -> None:
    subprocess.run([sys.executable, "-c", _START_AND_LEAVE, str(directory)], check=True)
    broker = start_broker(directory, dies_with_parent=False)
    assert accepts_connections(broker.bootstrap_servers)
    assert stop_broker(directory)
    assert not broker.running
    assert not stop_broker(directory)


def test_the_mock_is_reached_from_another_process(directory: Path) -> None:
    mock = MockCluster(directory)
    mock.start(dies_with_parent=True)
    subprocess.run([sys.executable, "-c", _PRODUCE, mock.bootstrap_servers, "reached"], check=True)
    [record] = read_topic(mock.bootstrap_servers, "reached")
    assert (record.key, record.value) == (b"key", b"from afar")
    mock.stop()
    with pytest.raises(UnavailableError, match="not running"):
        _ = mock.bootstrap_servers


@pytest.mark.parametrize(
    ("java", "reason"),
    [(None, "java is not on the PATH"), ("11.0.2", "is Java 11"), ("1.8.0_392", "is Java 8"), ("17.0.15", "mvn")],
)
def test_without_java_or_maven_it_is_the_mock(directory: Path, programs: Path, java: str | None, reason: str) -> None:
    if java is not None:
        add_java(programs, java)
    assert reason in (kafka_maven.why_not_here() or "")
    with pytest.raises(ConfigurationError, match="PATH"):
        KafkaServer(directory).start(dies_with_parent=True)
    broker = start_broker(directory, dies_with_parent=True)
    assert broker.kind == "librdkafka-mock"
    wait_for_topic(broker.bootstrap_servers, "any")


@embedded
def test_a_filled_cache_needs_no_maven(directory: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = shutil.which("java", path="/usr/bin:/bin") or pytest.skip("java is in an unusual place")
    add_program(programs, "java", f'exec {java} "$@"')
    monkeypatch.delenv("CRMCTL_CACHE_DIR")
    announced: list[str] = []
    broker = start_broker(directory, dies_with_parent=True, announce=announced.append)
    assert broker.kind == "apache-kafka"
    assert announced == []


def test_processes_that_need_the_jars_at_once_download_them_once(programs: Path, tmp_path: Path) -> None:
    add_java(programs)
    mvn = add_program(programs, "mvn", _FAKE_MVN % kafka_maven.VERSION)
    assert kafka_maven.why_not_here() is None
    with ThreadPoolExecutor(3) as pool:
        found = {future.result() for future in [pool.submit(kafka_maven.libraries) for _ in range(3)]}
    [folder] = found
    assert folder.parent == tmp_path / "cache"
    assert [path.name for path in folder.iterdir()] == [f"kafka_2.13-{kafka_maven.VERSION}.jar"]
    assert mvn.with_name("mvn.runs").read_text() == "run\n"
    mvn.unlink()
    assert kafka_maven.libraries() == folder
    assert kafka_maven.why_not_here() is None


def test_a_failed_download_shows_what_maven_said_and_leaves_nothing(programs: Path, tmp_path: Path) -> None:
    add_program(programs, "mvn", "echo '[ERROR] Could not resolve'; echo to stderr >&2; exit 3")
    with pytest.raises(UnavailableError, match=r"exit code 3(.|\n)*Could not resolve\nto stderr") as caught:
        kafka_maven.libraries()
    assert "CRMCTL_KAFKA__BOOTSTRAP_SERVERS" in (caught.value.hint or "")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_what_a_killed_download_left_is_removed(programs: Path, tmp_path: Path) -> None:
    add_program(programs, "mvn", _FAKE_MVN % kafka_maven.VERSION)
    folder = kafka_maven.libraries()
    shutil.rmtree(folder)
    folder.with_name(f"{folder.name}.unfinished-abc").mkdir()
    kafka_maven.libraries()
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, f"{folder.name}.lock"]


def test_a_home_that_cannot_be_written_is_no_obstacle(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_program(programs, "mvn", _FAKE_MVN % kafka_maven.VERSION)
    monkeypatch.delenv("CRMCTL_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = kafka_maven.libraries()
    assert folder.parent.parent == tmp_path
    assert kafka_maven.libraries() == folder
    folder.parent.chmod(0o777)
    assert kafka_maven.cached_libraries() is None
    with pytest.raises(ConfigurationError, match="CRMCTL_CACHE_DIR"):
        kafka_maven.libraries()


def test_topics_of_a_test_are_read_as_they_were_written(kafka: Kafka, make_topic: MakeTopic) -> None:
    topic = make_topic()
    headers = (("a", b"1"), ("a", b"2"), ("empty", None))
    kafka.produce(topic, [Outgoing(b"first", b"k", headers, partition=1), Outgoing(None, b"k", partition=1)])
    first, tombstone = kafka.read(topic)
    assert (first.key, first.value, first.headers, first.offset) == (b"k", b"first", headers, 0)
    assert (tombstone.value, tombstone.partition, tombstone.offset) == (None, 1, 1)
    assert make_topic() != topic


@pytest.mark.real_kafka
def test_topics_have_the_partitions_and_settings_asked_for(kafka: Kafka, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=3, config={"retention.ms": "-1"})
    assert len(kafka.admin().list_topics(topic, timeout=10).topics[topic].partitions) == 3


@pytest.mark.real_kafka
def test_a_group_resumes_after_what_a_transaction_committed(kafka: Kafka, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=1)
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": topic})
    producer.init_transactions(20)
    for value, end in (("aborted", producer.abort_transaction), ("kept", producer.commit_transaction)):
        producer.begin_transaction()
        producer.produce(topic, value)
        producer.flush(20)
        end(20)
    assert [record.value for record in kafka.read(topic)] == [b"kept"]
    assert [record.value for record in kafka.read(topic, isolation_level="read_uncommitted")] == [b"aborted", b"kept"]
    settings = {"bootstrap.servers": kafka.bootstrap_servers, "group.id": topic, "auto.offset.reset": "earliest"}
    with closing(Consumer(settings | {"enable.auto.commit": False})) as consumer:
        consumer.subscribe([topic])
        message = consumer.poll(20)
        assert message is not None
        assert message.value() == b"kept"
        consumer.commit(asynchronous=False)
    kafka.produce(topic, ["later"])
    with closing(Consumer(settings)) as consumer:
        consumer.subscribe([topic])
        message = consumer.poll(20)
        assert message is not None
        assert message.value() == b"later"
