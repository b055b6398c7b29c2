"""`crmctl chat-status …`: consume, lag, rewind."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any

import typer

from crmctl.cli import output
from crmctl.cli.options import Output, duration

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
    form: Output = output.Format.TABLE,
) -> None:
    """Project messenger's chat-status events onto deals, until SIGTERM (exit 0).

    Each batch is one transaction; offsets are committed after it. An event whose deal is missing waits for it
    without delaying others; what can never be applied goes to the dead-letter topic. While PostgreSQL or Kafka is
    away the consumer waits; with --until-caught-up it exits 69 instead.

    \b
    Examples:
      crmctl chat-status consume
      crmctl chat-status consume --until-caught-up -o json
    """
    from crmctl.cli.run import Command

    with Command(form) as command:
        from crmctl.cli.consumer import run_consumer

        command.report(run_consumer(command, until_caught_up, batch_size, time_budget), _render_consume)


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
