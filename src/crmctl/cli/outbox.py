"""`crmctl outbox …`: relay, list."""

import gc
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any

import typer

from crmctl.cli import output
from crmctl.cli.options import Database, DryRun, Output, Strict, TimeBudget
from crmctl.domain.databases import DatabaseName

app = typer.Typer(help="The outbox: publish it to Kafka, look at it.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def relay(
    batch_size: Annotated[int, typer.Option(min=1, max=10_000, help="Messages per transaction.")] = 500,
    drain: Annotated[bool, typer.Option("--drain", help="Go on, batch by batch, until nothing is left.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until SIGTERM (exit 0); waits for servers that are away.")
    ] = False,
    time_budget: TimeBudget = timedelta(seconds=50),
    database: Database = DatabaseName.MAIN,
    dry_run: DryRun = False,
    strict: Strict = False,
    form: Output = output.Format.TABLE,
) -> None:
    """Publish outbox messages to Kafka, in order per aggregate, at least once each.

    A message is marked on its own delivery report only. One that the broker refuses is tried again later and holds
    back its aggregate alone. A second relay leaves at once. With --dry-run the batch is listed, nothing is sent.

    \b
    Examples:
      crmctl outbox relay --drain
      crmctl outbox relay --follow -o json
      crmctl outbox relay --drain --database installations
    """
    from crmctl.cli.command import Command
    from crmctl.cli.run import Plan, View, run_job

    if follow and (drain or dry_run):
        raise typer.BadParameter("--follow does not go with --drain or --dry-run")
    with Command(form) as command:
        from crmctl.adapters import kafka
        from crmctl.adapters.publisher import Publisher
        from crmctl.jobs import relay_outbox

        command.use_database(database)
        # What is loaded by now stays; the collector need not walk through it again with every few batches.
        gc.freeze()
        publisher = Publisher(lambda: kafka.producer(command.settings.kafka, command.log))
        run_job(
            command,
            relay_outbox.job(publisher),
            relay_outbox.Options(batch_size=batch_size, dry_run=dry_run),
            View(form, _render_relay, strict=strict),
            Plan(drain=drain, follow=follow, time_budget=None if follow else time_budget, dry_run=dry_run),
        )


@app.command("list")
def list_messages(
    everything: Annotated[bool, typer.Option("--all", help="Published ones as well.")] = False,
    held: Annotated[bool, typer.Option("--held", help="Only those that wait behind a refusal.")] = False,
    topic: Annotated[str | None, typer.Option(metavar="TOPIC", help="Only this topic.")] = None,
    aggregate_id: Annotated[str | None, typer.Option("--aggregate", metavar="ID", help="Only this aggregate.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Rows at the most.")] = 50,
    database: Database = DatabaseName.MAIN,
    form: Output = output.Format.TABLE,
) -> None:
    """List outbox messages: those that are not published yet, in position order; with --all the latest first.

    \b
    Examples:
      crmctl outbox list
      crmctl outbox list --held -o json
    """
    from crmctl.cli.run import View, run_query
    from crmctl.jobs import list_outbox as job

    if everything and held:
        raise typer.BadParameter("--held lists unpublished messages; it does not go with --all")
    options = job.Options(all=everything, held=held, topic=topic, aggregate_id=aggregate_id, limit=limit)
    run_query("outbox list", lambda tx: job.query(tx, options), View(form, _render_list), database)


def _render_relay(document: Mapping[str, Any]) -> str:
    text = output.fields(
        {
            "Would publish" if document["dry_run"] else "Published": document["published_count"],
            "Refused": document["refused_count"],
            "Held back": document["held_count"],
            "More to publish": document["has_more"],
            "Batches": document["batches"],
            "Duration, ms": document["duration_ms"],
        }
    )
    for title in ("refused", "messages"):
        if rows := document[title]:
            text += f"\n{title.capitalize()}:\n" + output.table(list(rows[0]), [list(row.values()) for row in rows])
    return text


_LIST_COLUMNS = ("position", "state", "message_id", "topic", "aggregate_id", "created_at", "attempts", "last_error")


def _render_list(document: Mapping[str, Any]) -> str:
    messages = document["messages"]
    if not messages:
        return "No messages.\n"
    return output.table(_LIST_COLUMNS, [[row[column] for column in _LIST_COLUMNS] for row in messages])
