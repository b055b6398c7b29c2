"""A missing ACL ends `chat-status …` and `dlq …` at once, with 78 and its name: time does not mend it."""

import uuid
from collections.abc import Iterator, Mapping

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

from crmctl.dev.kafka import temporary_kafka
from tests.chat_status_support import Chat
from tests.expire_support import finish
from tests.kafka_fixtures import Kafka, create_topic
from tests.support import CallResult, Database, start_crmctl

# A broker of its own: that of the session asks nobody who he is.
pytestmark = pytest.mark.real_kafka(embedded=True)


@pytest.fixture(scope="module")
def guarded() -> Iterator[Kafka]:
    settings = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with temporary_kafka(settings=settings) as server:
        yield Kafka(server.bootstrap_servers, "apache-kafka")


@pytest.fixture
def chat(guarded: Kafka, database: Database) -> Chat:
    def make_topic(name: str | None = None, *, partitions: int = 1, config: Mapping[str, str] | None = None) -> str:
        name = name or f"test-{uuid.uuid4()}"
        create_topic(guarded.bootstrap_servers, name, partitions=partitions, config=config)
        return name

    chat = Chat.make(guarded, database, make_topic)
    chat.send(chat.deal().event("Ready"))
    chat.kafka.produce(chat.dlq_topic, ["a letter"])
    return chat


def deny_read(kafka: Kafka, kind: ResourceType, name: str) -> None:
    """Of the resource, everything but READ is allowed."""
    admin = kafka.admin()
    bindings = [
        AclBinding(kind, name, ResourcePatternType.LITERAL, "User:ANONYMOUS", "*", operation, permission)
        for operation, permission in (
            (AclOperation.ALL, AclPermissionType.ALLOW),
            (AclOperation.READ, AclPermissionType.DENY),
        )
    ]
    for made in admin.create_acls(bindings).values():
        made.result(30)


def run(chat: Chat, *args: str) -> CallResult:
    with start_crmctl(*args, "-o", "json", database=chat.database, env=chat.env) as process:
        try:
            return finish(process, timeout=25)
        finally:
            process.kill()


def assert_forbidden(result: CallResult, what: str) -> None:
    assert (result.exit_code, result.json["error"]["code"]) == (78, "CRMCTL_CONFIGURATION"), result.stderr[-2000:]
    assert f"Kafka forbids READ on {what} (" in result.json["error"]["message"]
    assert "ACL" in result.json["error"]["hint"]


@pytest.mark.parametrize("mode", [(), ("--until-caught-up",), ("--dry-run",)])
def test_without_read_on_the_topic_the_consumer_ends(chat: Chat, mode: tuple[str, ...]) -> None:
    deny_read(chat.kafka, ResourceType.TOPIC, chat.topic)
    assert_forbidden(run(chat, "chat-status", "consume", *mode), f"topic {chat.topic}")


@pytest.mark.parametrize("mode", [(), ("--until-caught-up",)])
def test_without_read_on_the_group_the_consumer_ends(chat: Chat, mode: tuple[str, ...]) -> None:
    deny_read(chat.kafka, ResourceType.GROUP, chat.group)
    assert_forbidden(run(chat, "chat-status", "consume", *mode), f"group {chat.group}")


def test_without_read_on_the_topic_the_lag_is_not_shown(chat: Chat) -> None:
    deny_read(chat.kafka, ResourceType.TOPIC, chat.topic)
    assert_forbidden(run(chat, "chat-status", "lag"), f"topic {chat.topic}")


@pytest.mark.parametrize("command", ["list", "replay"])
def test_without_read_on_the_dead_letter_topic_no_letter_is_read(chat: Chat, command: str) -> None:
    deny_read(chat.kafka, ResourceType.TOPIC, chat.dlq_topic)
    assert_forbidden(run(chat, "dlq", command), f"topic {chat.dlq_topic}")
