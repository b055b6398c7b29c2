"""`crmctl prune`."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any

import typer

from crmctl.cli import output
from crmctl.cli.options import Database, DryRun, Output, TimeBudget, duration
from crmctl.domain.databases import DatabaseName


def prune(
    older_than: Annotated[
        timedelta,
        typer.Option("--older-than", metavar="DURATION", parser=duration, help="Delete what is older; a day at least."),
    ] = timedelta(days=30),
    batch_size: Annotated[int, typer.Option(min=1, max=100_000, help="Rows of each kind per transaction.")] = 5000,
    time_budget: TimeBudget = timedelta(seconds=50),
    database: Database = DatabaseName.MAIN,
    dry_run: DryRun = False,
    form: Output = output.Format.TABLE,
) -> None:
    """Delete old rows batch by batch: published outbox messages, the consumer's marks, run records.

    Of each job its last success is kept. Messages that are not published, and the answers of extensions, stay.

    \b
    Examples:
      crmctl prune --dry-run
      crmctl prune --older-than 90d --time-budget 10m
    """
    from crmctl.cli.command import Command
    from crmctl.cli.run import Plan, View, run_job

    with Command(form) as command:
        from crmctl.jobs import prune as job

        options = job.Options(older_than=older_than, batch_size=batch_size)
        job.check(options)
        command.use_database(database)
        run_job(
            command, job.JOB, options, View(form, _render), Plan(drain=True, time_budget=time_budget, dry_run=dry_run)
        )


def _render(document: Mapping[str, Any]) -> str:
    return output.fields(
        {
            "Would delete, older than" if document["dry_run"] else "Deleted, older than": document["cutoff"],
            "  outbox messages": document["outbox_count"],
            "  marks": document["marks_count"],
            "  run records": document["runs_count"],
            "More to delete": document["has_more"],
            "Batches": document["batches"],
            "Duration, ms": document["duration_ms"],
        }
    )
