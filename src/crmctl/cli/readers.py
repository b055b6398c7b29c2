"""Opens a topic for a command that reads it to its end without joining a group."""

from typing import Any

from crmctl.adapters import kafka
from crmctl.adapters.topic_reader import TopicReader
from crmctl.cli.command import Command


def open_topic(command: Command, topic: str, group: str, **options: Any) -> TopicReader:
    """A reader whose committed offsets are the group's; `options` are those of `TopicReader.open`.

    Raises UnavailableError, or ConfigurationError if the topic does not exist.
    """
    brokers, log = command.settings.kafka, command.log
    consumer = kafka.consumer(brokers, log, group=group, enable_partition_eof=True)
    return TopicReader.open(consumer, kafka.admin(brokers, log), topic, log, **options)


def open_letters(command: Command, **options: Any) -> TopicReader:
    """A reader of the dead-letter topic; as `open_topic`."""
    chat = command.settings.chat_status
    return open_topic(command, chat.dlq_topic, chat.dlq_group, **options)
