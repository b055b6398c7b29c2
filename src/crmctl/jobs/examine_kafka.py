"""Kafka's side of `doctor` and `status`. Reads only, joins no group."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient, ClusterMetadata

from crmctl.adapters import groups, kafka, topics
from crmctl.domain.errors import ConfigurationError, TryAgainError
from crmctl.domain.health import Check, ok, skipped, warning
from crmctl.domain.topics import (
    BOOKING_EXPIRED_TOPIC,
    CHAT_STATUS_TOPIC,
    INSTALLATION_MARKED_STALE_TOPIC,
    faults,
)
from crmctl.domain.topics import ours as our_topics
from crmctl.jobs import figures
from crmctl.jobs.examine import Part
from crmctl.jobs.figures import PartitionFigures
from crmctl.settings import ChatStatusSettings

CHECKS: Final = ("kafka", "topics", "acls", "group")
_METADATA_SECONDS: Final = 4.0
# The alert on the consumer's lag fires at the same age.
_BEHIND_AFTER: Final = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """The consumer group: its members, the age in seconds of the oldest unread record, its place in each partition."""

    group: str
    members: int
    lag_seconds: float
    partitions: list[PartitionFigures]

    def document(self) -> dict[str, object]:
        """The figures as `status` prints them."""
        return {
            "group": self.group,
            "members": self.members,
            "lag_messages": sum(place.lag for place in self.partitions),
            "lag_seconds": self.lag_seconds,
            "partitions": [
                {**asdict(place), "lag_messages": place.lag, "headroom_messages": place.headroom}
                for place in self.partitions
            ],
        }


@dataclass(frozen=True, slots=True)
class Look:
    """How to look: an admin client and a reader on demand, and the consumer's topics and group."""

    admin: Callable[[], AdminClient]
    reader: Callable[[], Consumer]
    chat: ChatStatusSettings


def examine_kafka(part: Part, look: Look) -> None:
    """Fill in the checks, and the figures `group`: members, and the group's place in each partition."""
    client = part.attempt("kafka", look.admin)
    if client is None:
        return
    cluster = part.attempt("kafka", lambda: _cluster(client))
    if cluster is None:
        return
    part.add(ok("kafka", f"{len(cluster.brokers)} brokers, {len(cluster.topics)} topics"))
    if kafka.is_mock(cluster.cluster_id):
        for name in CHECKS[1:]:
            part.add(skipped(name, "librdkafka's mock cluster does not answer for topics and groups"))
        return
    checks: dict[str, Callable[[], Check]] = {
        "topics": lambda: _topics(client, look.chat),
        "acls": lambda: _acls(client, look.chat),
        "group": lambda: _group(part, client, look),
    }
    for name, check in checks.items():
        if (found := part.attempt(name, check)) is not None:
            part.add(found)


def _cluster(client: AdminClient) -> ClusterMetadata:
    try:
        return client.list_topics(timeout=_METADATA_SECONDS)
    except KafkaException as error:
        raise kafka.unavailable(error.args[0]) from None


def _topics(client: AdminClient, chat: ChatStatusSettings) -> Check:
    ours = our_topics(chat.dlq_topic)
    # Messenger's: any number of partitions will do, and its retention is messenger's business.
    source = replace(CHAT_STATUS_TOPIC, name=chat.topic, partitions=1, config={})
    found = topics.read(client, (*ours, source))
    wrong = {
        topic.name: names
        for topic in (*ours, source)
        if (names := faults(topic, found[topic.name].partitions, found[topic.name].config))
    }
    if not wrong:
        return ok("topics", ", ".join(f"{name} ({topic.partitions})" for name, topic in found.items()))
    missing = [name for name in wrong if found[name].partitions is None]
    if missing == [source.name]:
        fix = f"{source.name} is messenger's to create; check CRMCTL_CHAT_STATUS__TOPIC"
    elif missing:
        fix = "run: crmctl topics create"
    else:
        name = next(iter(wrong))
        fix = f"change it with Kafka's tools, for instance: kafka-topics.sh --alter --topic {name} --partitions …"
    text = "; ".join(f"{name}: {', '.join(names)}" for name, names in wrong.items())
    raise ConfigurationError(f"topics fall short of their contracts: {text}", hint=fix)


def _acls(client: AdminClient, chat: ChatStatusSettings) -> Check:
    """What this user may do with the topics, as the brokers tell it; one that does not exist is not asked for."""
    needed = {
        BOOKING_EXPIRED_TOPIC.name: {AclOperation.WRITE},
        INSTALLATION_MARKED_STALE_TOPIC.name: {AclOperation.WRITE},
        chat.dlq_topic: {AclOperation.WRITE, AclOperation.READ},
        chat.topic: {AclOperation.READ},
    }
    futures = client.describe_topics(
        TopicCollection(list(needed)), include_authorized_operations=True, request_timeout=_METADATA_SECONDS
    )
    lacking = []
    for name, future in futures.items():
        try:
            allowed = set(future.result().authorized_operations or ())
        except KafkaException as error:
            if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                continue
            if error.args[0].code() != KafkaError.TOPIC_AUTHORIZATION_FAILED:
                raise kafka.unavailable(error.args[0]) from None
            allowed = set()
        lacking += [f"{operation.name} on {name}" for operation in sorted(needed[name] - allowed, key=lambda o: o.name)]
    if lacking:
        detail = f"this Kafka user lacks {', '.join(lacking)}"
        return warning(
            "acls", detail, "grant what its jobs need: the relay and the consumer may have users of their own"
        )
    return ok("acls", "this user may write to our topics and read messenger's")


def _group(part: Part, client: AdminClient, look: Look) -> Check:
    chat, reader = look.chat, look.reader()
    found = figures.partitions(client, reader, chat.topic)
    if not found:
        return skipped("group", f"topic {chat.topic} does not exist")
    members = groups.member_count(client, chat.group)
    oldest = figures.oldest_unread_seconds(reader, chat.topic, found)
    reader.close()
    part.figures["group"] = GroupFigures(chat.group, members, round(oldest, 3), found)
    if lost := [place for place in found if place.headroom is not None and place.headroom < 0]:
        raise _lost(lost, chat)
    unread = sum(place.lag for place in found)
    waiting = f"{unread} records are unread, the oldest for {oldest:.0f} s"
    if not members and unread:
        detail = f"the consumer is stopped: group {chat.group} has no members, {waiting}"
        fix = "start it: crmctl chat-status consume, or once: crmctl chat-status consume --until-caught-up"
        if oldest > _BEHIND_AFTER.total_seconds():
            raise TryAgainError(detail, hint=fix)
        return warning("group", detail, fix)
    if oldest > _BEHIND_AFTER.total_seconds():
        raise TryAgainError(
            f"the consumer is behind: {waiting}", hint="its log says what it waits for; runbooks/consume-chat-status.md"
        )
    return ok("group", f"{chat.group} has {members} members; {waiting if unread else 'everything is read'}")


def _lost(partitions: Sequence[PartitionFigures], chat: ChatStatusSettings) -> ConfigurationError:
    places = ", ".join(f"partition {p.partition}: {-(p.headroom or 0)}" for p in partitions)
    return ConfigurationError(
        f"retention took records that group {chat.group} had not read ({places})",
        hint=f"raise retention.ms of {chat.topic}, ask messenger to send the statuses again, start the consumer",
    )
