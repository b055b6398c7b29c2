"""`crmctl topics check|create` on a real broker: what is missing, what falls short, and that nothing is changed."""

import json
import uuid
from collections.abc import Iterator
from typing import Final

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from crmctl.dev.kafka import temporary_kafka
from crmctl.dev.kafka_server import KafkaServer
from crmctl.domain.topics import BOOKING_EXPIRED_TOPIC, TOPICS
from tests.expire_support import log_lines, wait_until
from tests.kafka_fixtures import create_topic
from tests.prefork import run_crmctl
from tests.relay_support import error_of
from tests.support import CallResult

WEEK: Final = "604800000"

# A broker of its own, because the topics of the contracts are removed again and again.
pytestmark = pytest.mark.real_kafka(embedded=True)


@pytest.fixture(scope="module")
def broker() -> Iterator[KafkaServer]:
    with temporary_kafka() as server:
        yield server


def topics(broker: KafkaServer, command: str, form: str = "json") -> CallResult:
    """Run `crmctl topics …`; it needs no database."""
    return run_crmctl("topics", command, "-o", form, env={"CRMCTL_KAFKA__BOOTSTRAP_SERVERS": broker.bootstrap_servers})


def remove(broker: KafkaServer) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    for future in admin.delete_topics([topic.name for topic in TOPICS]).values():
        try:
            future.result(30)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
    gone = {topic.name for topic in TOPICS}
    wait_until(lambda: not gone & set(admin.list_topics(timeout=10).topics), "the removal of the topics")


@pytest.fixture(autouse=True)
def _none_of_them(broker: KafkaServer) -> Iterator[None]:
    remove(broker)
    yield
    remove(broker)


def described(broker: KafkaServer, name: str) -> tuple[int, dict[str, str]]:
    """The partitions of a topic and its settings."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    (future,) = admin.describe_configs([ConfigResource(ResourceType.TOPIC, name)]).values()
    config = {key: str(entry.value) for key, entry in future.result(30).items()}
    return len(admin.list_topics(name, timeout=10).topics[name].partitions), config


def faults(result: CallResult) -> dict[str, list[str]]:
    return {row["topic"]: row["faults"] for row in result.json["topics"]}


def test_missing_topics_are_a_configuration_error_that_names_the_fix(broker: KafkaServer) -> None:
    result = topics(broker, "check")
    assert result.exit_code == 78
    assert faults(result) == {topic.name: ["it does not exist"] for topic in TOPICS}
    assert [row["partitions"] for row in result.json["topics"]] == [None] * len(TOPICS)
    (line,) = log_lines(result, "topics fall short of their contracts")
    assert line["hint"] == "run: crmctl topics create"
    assert "it does not exist" in topics(broker, "check", "table").stdout


def test_create_makes_them_as_their_contracts_say_and_then_they_pass(broker: KafkaServer) -> None:
    result = topics(broker, "create")
    assert result.exit_code == 0
    assert sorted(result.json["created"]) == sorted(topic.name for topic in TOPICS)
    for topic in TOPICS:
        partitions, config = described(broker, topic.name)
        assert partitions == topic.partitions
        assert topic.config.items() <= config.items()
    _, config = described(broker, BOOKING_EXPIRED_TOPIC.name)
    assert (config["cleanup.policy"], config["retention.ms"]) == ("delete", WEEK)
    check = topics(broker, "check")
    assert check.exit_code == 0
    assert faults(check) == {topic.name: [] for topic in TOPICS}


def test_the_dead_letters_topic_is_created_under_its_configured_name(broker: KafkaServer) -> None:
    name = f"letters-{uuid.uuid4().hex[:8]}"
    env = {"CRMCTL_KAFKA__BOOTSTRAP_SERVERS": broker.bootstrap_servers, "CRMCTL_CHAT_STATUS__DLQ_TOPIC": name}
    assert name in run_crmctl("topics", "create", "-o", "json", env=env).json["created"]
    partitions, config = described(broker, name)
    assert (partitions, config["retention.ms"]) == (3, "-1")
    assert run_crmctl("topics", "check", env=env).exit_code == 0


def test_create_twice_does_nothing_the_second_time(broker: KafkaServer) -> None:
    assert topics(broker, "create").exit_code == 0
    again = topics(broker, "create")
    assert (again.exit_code, again.json["created"]) == (0, [])
    assert topics(broker, "create", "table").stdout == "nothing to do\n"


@pytest.mark.parametrize(
    ("partitions", "config", "words"),
    [
        (2, {"cleanup.policy": "delete", "retention.ms": WEEK}, ["2 partitions"]),
        (6, {"cleanup.policy": "compact", "retention.ms": WEEK}, ["cleanup.policy is compact"]),
        (6, {"cleanup.policy": "compact,delete", "retention.ms": WEEK}, ["cleanup.policy is compact,delete"]),
        (6, {"cleanup.policy": "delete", "retention.ms": "3600000"}, ["retention.ms is 3600000"]),
        (
            1,
            {"cleanup.policy": "compact", "retention.ms": "0"},
            ["1 partitions", "cleanup.policy is compact", "retention.ms is 0"],
        ),
    ],
    ids=["too few partitions", "compacted", "compacted as well", "forgotten too soon", "all of it"],
)
def test_one_that_falls_short_is_reported_and_never_changed(
    broker: KafkaServer, partitions: int, config: dict[str, str], words: list[str]
) -> None:
    name = BOOKING_EXPIRED_TOPIC.name
    create_topic(broker.bootstrap_servers, name, partitions=partitions, config=config)
    before = described(broker, name)
    created = topics(broker, "create")
    assert created.exit_code == 0
    assert name not in created.json["created"]
    check = topics(broker, "check")
    assert check.exit_code == 78
    found = faults(check)[name]
    assert len(found) == len(words)
    assert all(word in fault for word, fault in zip(words, found, strict=True))
    assert described(broker, name) == before
    (line,) = log_lines(check, "topics fall short of their contracts")
    assert line["hint"] == f"change with Kafka's tools (kafka-topics.sh, kafka-configs.sh): {name}"


def test_one_that_is_missing_beside_one_that_falls_short_needs_both_steps(broker: KafkaServer) -> None:
    create_topic(broker.bootstrap_servers, BOOKING_EXPIRED_TOPIC.name, partitions=2)
    (line,) = log_lines(topics(broker, "check"), "topics fall short of their contracts")
    assert line["hint"].startswith("run: crmctl topics create; change with Kafka's tools")
    assert line["hint"].endswith(f": {BOOKING_EXPIRED_TOPIC.name}")


@pytest.mark.parametrize("retention", ["-1", "31536000000"], ids=["for ever", "a year"])
def test_one_with_more_than_is_asked_for_passes(broker: KafkaServer, retention: str) -> None:
    topics(broker, "create")
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    admin.delete_topics([BOOKING_EXPIRED_TOPIC.name])[BOOKING_EXPIRED_TOPIC.name].result(30)
    config = {"cleanup.policy": "delete", "retention.ms": retention}
    create_topic(broker.bootstrap_servers, BOOKING_EXPIRED_TOPIC.name, partitions=12, config=config)
    check = topics(broker, "check")
    assert (check.exit_code, faults(check)[BOOKING_EXPIRED_TOPIC.name]) == (0, [])


@pytest.mark.parametrize("command", ["check", "create"])
def test_without_a_broker_the_error_says_what_to_set(command: str) -> None:
    result = run_crmctl("topics", command, "-o", "json")
    assert result.exit_code == 78
    assert "CRMCTL_KAFKA__BOOTSTRAP_SERVERS" in json.dumps(error_of(result))
