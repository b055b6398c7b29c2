"""Reads and creates topics; never changes one that exists."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType

from crmctl.adapters import kafka
from crmctl.domain.topics import Topic

_TIMEOUT_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Found:
    """A topic as the cluster has it; no partitions means that it does not exist."""

    partitions: int | None
    config: Mapping[str, str]


def read(client: AdminClient, topics: Iterable[Topic]) -> dict[str, Found]:
    """Look the topics up. Raises UnavailableError, or ConfigurationError where we may not look."""
    names = [topic.name for topic in topics]
    try:
        cluster = client.list_topics(timeout=kafka.METADATA_TIMEOUT).topics
        there = [name for name in names if name in cluster]
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in there]
        futures = client.describe_configs(resources, request_timeout=_TIMEOUT_SECONDS) if resources else {}
        configs = {
            resource.name: {name: str(entry.value) for name, entry in future.result().items()}
            for resource, future in futures.items()
        }
    except KafkaException as error:
        raise kafka.unavailable(error.args[0]) from None
    return {
        name: Found(len(cluster[name].partitions), configs[name]) if name in configs else Found(None, {})
        for name in names
    }


def create(client: AdminClient, topics: Iterable[Topic]) -> list[str]:
    """Create those that do not exist, with the cluster's default replication; return the names of the new ones."""
    wanted = {topic.name: NewTopic(topic.name, topic.partitions, -1, config=dict(topic.config)) for topic in topics}
    if not wanted:
        return []
    created = []
    for name, future in client.create_topics(list(wanted.values()), request_timeout=_TIMEOUT_SECONDS).items():
        try:
            future.result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise kafka.unavailable(error.args[0]) from None
        else:
            created.append(name)
    return created
