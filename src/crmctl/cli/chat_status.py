"""`crmctl chat-status …`: consume, lag, rewind."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer

from crmctl.cli import output
from crmctl.cli.options import Output, duration
from crmctl.domain.times import parse_instant

app = typer.Typer(help="The deal-chat-status projection.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def consume(
    until_caught_up: Annotated[
        bool, typer.Option("--until-caught-up", help="End at the end offsets that are seen at the start.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, max=50_000, help="Events per transaction.")] = 1000,
    time_budget: Annotated[
        timedelta | None,
        typer.Option(metavar="DURATION", parser=duration, help="End after this long. Default: never."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what a run to the end would do, without joining the group.")
    ] = False,
    form: Output = output.Format.TABLE,
) -> None:
    """Project messenger's chat-status events onto deals, until SIGTERM (exit 0).

    Each batch is one transaction; offsets are committed after it. An event whose deal is missing waits for it
    without delaying others; what can never be applied goes to the dead-letter topic. While PostgreSQL or Kafka is
    away the consumer waits; with --until-caught-up, or when its time budget is spent, it exits 69 instead.

    \b
    Examples:
      crmctl chat-status consume
      crmctl chat-status consume --until-caught-up -o json
      crmctl chat-status consume --dry-run
    """
    from crmctl.cli.command import Command

    with Command(form) as command:
        if dry_run:
            from crmctl.cli.consumer import preview_consumer

            command.report(preview_consumer(command, batch_size), _render_consume)
            return
        from crmctl.cli.consumer import run_consumer
        from crmctl.cli.run import render_result

        document = run_consumer(command, until_caught_up, batch_size, time_budget)
        command.report(document, lambda result: render_result(result, _render_consume))


@app.command()
def lag(form: Output = output.Format.TABLE) -> None:
    """Show how far the consumer is behind, per partition, and the events that wait for their deal.

    \b
    Example:
      crmctl chat-status lag -o json
    """
    from crmctl.cli.command import Command

    with Command(form) as command:
        from crmctl.adapters import kafka
        from crmctl.jobs import chat_status_lag as job

        chat, brokers = command.settings.chat_status, command.settings.kafka
        client = kafka.admin(brokers, command.log)
        reader = kafka.consumer(brokers, command.log, group=chat.group)
        database = command.database("crmctl chat-status lag")
        document = job.query(database.begin(read_only=True), client, reader, chat.group, chat.topic)
        reader.close()
        database.rollback()
        command.report(document, _render_lag)


@app.command()
def rewind(
    to: Annotated[str, typer.Option("--to", metavar="WHERE", help="earliest, latest, an offset, or an RFC 3339 time.")],
    partition: Annotated[
        list[int] | None, typer.Option(min=0, metavar="NUMBER", help="Only this partition; may be repeated.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    form: Output = output.Format.TABLE,
) -> None:
    """Move the consumer group's offsets, for a full or partial replay. Refuses while the group has members.

    \b
    Examples:
      crmctl chat-status rewind --to earliest --yes
      crmctl chat-status rewind --to 2026-11-29T00:00:00Z --partition 3
    """
    from crmctl.cli.command import Command

    where = _where(to)
    with Command(form) as command:
        from dataclasses import asdict

        from crmctl.adapters import kafka
        from crmctl.jobs import rewind_chat_status as job

        chat = command.settings.chat_status
        client = kafka.admin(command.settings.kafka, command.log)
        reader = kafka.consumer(command.settings.kafka, command.log, group=chat.group)
        moves = job.plan(client, reader, chat.group, chat.topic, where, partition or ())
        reader.close()
        if not yes:
            summary = ", ".join(f"{m.partition}: {output.cell(m.old)} to {m.new}" for m in moves)
            command.confirm(f"Move group {chat.group} on {chat.topic} ({summary})?")
        job.apply(client, chat.group, chat.topic, moves)
        command.report({"group": chat.group, "topic": chat.topic, "moves": [asdict(m) for m in moves]}, _render_rewind)


def _where(text: str) -> str | int | datetime:
    if text in {"earliest", "latest"}:
        return text
    if text.isdecimal():
        return int(text)
    try:
        return parse_instant(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}; or write earliest, latest or an offset") from None


def _render_lag(document: Mapping[str, Any]) -> str:
    columns = ("partition", "committed_offset", "end_offset", "lag_messages", "lag_seconds")
    text = output.table(columns, [[row[column] for column in columns] for row in document["partitions"]])
    waiting = {"Waiting for their deal": document["deferred_count"], "The oldest since": document["oldest_deferred_at"]}
    return f"{text}\n{output.fields(waiting)}"


def _render_rewind(document: Mapping[str, Any]) -> str:
    columns = ("partition", "old", "new")
    return output.table(columns, [[row[column] for column in columns] for row in document["moves"]])


def _render_consume(document: Mapping[str, Any]) -> str:
    return output.fields(
        {
            "Applied": document["applied_count"],
            "Skipped, stale": document["stale_count"],
            "Skipped, duplicate": document["duplicate_count"],
            "Skipped, soft-deleted": document["soft_deleted_count"],
            "Waiting for their deal": document["deferred_count"],
            "Dead-lettered": document["dead_lettered_count"],
            "Batches": document["batches"],
            "Caught up": document["caught_up"],
            "Duration, ms": document["duration_ms"],
        }
    )
