"""Builds the chat-status consumer out of the settings, and runs it under the command's signals."""

import gc
from datetime import timedelta
from uuid import uuid4

from crmctl.adapters import groups, kafka
from crmctl.adapters.dead_letters import DeadLetters
from crmctl.adapters.publisher import Publisher
from crmctl.adapters.record_source import RecordSource
from crmctl.adapters.records import Topic
from crmctl.cli.command import Command
from crmctl.cli.readers import open_topic
from crmctl.domain.errors import ConfigurationError
from crmctl.domain.jobs import kind_of
from crmctl.jobs.consume_chat_status import JOB_NAME, Consumption, Options
from crmctl.jobs.job import Budget, Run
from crmctl.jobs.preview_chat_status import query
from crmctl.telemetry import metrics
from crmctl.telemetry.trace_context import traceparent
from crmctl.telemetry.tracing import Tracing

_DLQ_TIMEOUT_SECONDS = 10.0
# A source record of any size fits, with our headers on top.
_DLQ_MAX_BYTES = 12 * 1024 * 1024


def run_consumer(
    command: Command, until_caught_up: bool, batch_size: int, time_budget: timedelta | None
) -> dict[str, object]:
    """Consume until it ends by itself or by a signal; return the result document."""
    chat, brokers = command.settings.chat_status, command.settings.kafka
    run = Run(uuid4(), traceparent(), Budget(time_budget), stopping=lambda: command.interrupts.pending is not None)
    command.kind = kind_of(JOB_NAME)
    command.bind(job=JOB_NAME, run_id=str(run.id))
    log = command.log
    dead_letters = Publisher(
        lambda: kafka.producer(
            brokers,
            log,
            delivery_timeout_ms=round(_DLQ_TIMEOUT_SECONDS * 1000),
            message_max_bytes=_DLQ_MAX_BYTES,
        ),
        delivery_timeout=_DLQ_TIMEOUT_SECONDS,
    )
    member: dict[str, str | int | bool] = {
        "partition_assignment_strategy": "cooperative-sticky",
        "enable_partition_eof": True,
    }
    if chat.group_instance_id:
        member["group_instance_id"] = chat.group_instance_id
    source = RecordSource(
        kafka.consumer(brokers, log, group=chat.group, **member),
        kafka.admin(brokers, log),
        Topic(chat.topic),
        chat.group,
        log,
    )
    consumption = Consumption(
        source=source,
        database=command.database(f"crmctl {JOB_NAME}"),
        dead_letters=DeadLetters(dead_letters, chat.dlq_topic, chat.group),
        metrics=metrics.ChatStatusMetrics(lambda: source.oldest_unread_ms),
        tracing=Tracing(),
        log=command.log,
        group=chat.group,
        run=run,
        options=Options(batch_size=batch_size, until_caught_up=until_caught_up),
    )
    if chat.metrics_port is not None:
        try:
            metrics.serve(consumption.metrics.registry, chat.metrics_host, chat.metrics_port, lambda: consumption.ready)
        except OSError as error:
            raise ConfigurationError(
                f"the metrics port {chat.metrics_port} cannot be had: {error.strerror}",
                hint="set CRMCTL_CHAT_STATUS__METRICS_PORT",
            ) from None
    # What is loaded by now stays; the collector need not walk through it again with every few batches.
    gc.freeze()
    command.interrupts.settle()
    try:
        totals = consumption.consume()
    finally:
        source.close()
        consumption.tracing.close()
    paused = totals.pause.document() if totals.pause else {}
    log.info("run finished", **totals.counts, **paused, duration_ms=command.elapsed_ms)
    return {"job": JOB_NAME, "run_id": run.id, "dry_run": False, **totals.document(), "duration_ms": command.elapsed_ms}


def preview_consumer(command: Command, batch_size: int) -> dict[str, object]:
    """Return what a run to today's end of the topic would report; nothing is changed, no group is joined."""
    chat = command.settings.chat_status
    reader = open_topic(command, chat.topic, chat.group)
    database = command.database(f"crmctl {JOB_NAME}")
    try:
        committed = groups.committed(reader.consumer, chat.topic, reader.first)
        totals = query(database.begin(), reader, chat.group, committed, batch_size)
    finally:
        database.rollback()
        reader.close()
    return {"job": JOB_NAME, "dry_run": True, **totals, "duration_ms": command.elapsed_ms}
