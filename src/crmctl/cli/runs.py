"""`crmctl runs …`: list, show."""

from collections.abc import Mapping
from typing import Annotated, Any
from uuid import UUID

import typer

from crmctl.cli import output
from crmctl.cli.options import Database, Output
from crmctl.domain.databases import DatabaseName

app = typer.Typer(help="The record of runs.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
def list_runs(
    job: Annotated[str | None, typer.Option("--job", metavar="JOB", help="Only this job's.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only those that rolled something back.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Rows at the most.")] = 20,
    database: Database = DatabaseName.MAIN,
    form: Output = output.Format.TABLE,
) -> None:
    """List runs that did something or failed, the latest first. Of those with nothing to do, one in five minutes stays.

    \b
    Examples:
      crmctl runs list --job expire-bookings
      crmctl runs list --failed -o json
      crmctl runs list --job sweep-installations --database installations
    """
    from crmctl.cli.run import View, run_query
    from crmctl.domain.jobs import NAMES
    from crmctl.jobs import list_runs as query

    if job is not None and job not in NAMES:
        raise typer.BadParameter(f"no such job: {job}; the jobs are {', '.join(NAMES)}")
    options = query.Options(job=job, failed=failed, limit=limit)
    run_query("runs list", lambda tx: query.query(tx, options), View(form, _render_list), database)


@app.command()
def show(
    run_id: Annotated[UUID, typer.Argument(metavar="RUN_ID")],
    database: Database = DatabaseName.MAIN,
    form: Output = output.Format.TABLE,
) -> None:
    """Show one run, batch by batch. Its id is in the run's result and in its log lines.

    \b
    Example:
      crmctl runs show 6f1c9a52-8a2e-4c1b-9a53-0d3f3f6b9e11 -o json
    """
    from crmctl.cli.run import View, run_query
    from crmctl.jobs import show_run as query

    run_query("runs show", lambda tx: query.query(tx, run_id), View(form, _render_show), database)


_LIST_COLUMNS = ("run_id", "job", "outcome", "batches", "started_at", "finished_at", "counts", "error_code")


def _render_list(document: Mapping[str, Any]) -> str:
    runs = document["runs"]
    if not runs:
        return "No runs.\n"
    return output.table(_LIST_COLUMNS, [[row[column] for column in _LIST_COLUMNS] for row in runs])


_BATCH_COLUMNS = ("batch", "outcome", "as_of", "started_at", "finished_at", "counts", "error_code", "error")


def _render_show(document: Mapping[str, Any]) -> str:
    head = {name: value for name, value in document.items() if name != "batches"}
    rows = [[row[column] for column in _BATCH_COLUMNS] for row in document["batches"]]
    return f"{output.fields(head)}\n{output.table(_BATCH_COLUMNS, rows)}"
