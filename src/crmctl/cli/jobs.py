"""`crmctl jobs …`: pause, resume, list."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from crmctl.cli import output
from crmctl.cli.options import Output

app = typer.Typer(help="The jobs: pause them, let them go on.", no_args_is_help=True, rich_markup_mode=None)

Names = Annotated[list[str] | None, typer.Argument(metavar="[JOB]...", show_default=False)]
All = Annotated[bool, typer.Option("--all", help="Every job.")]


@app.command()
def pause(
    job: Names = None,
    everything: All = False,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; every skipped run repeats it.")] = ...,  # type: ignore[assignment]
    by: Annotated[
        str | None, typer.Option("--by", metavar="NAME", help="Who pauses it. Default: this user at this host.")
    ] = None,
    form: Output = output.Format.TABLE,
) -> None:
    """Pause jobs: from their next batch on, every run of them ends at once with exit 0.

    A batch that has begun finishes. `--follow` and the consumer stay alive and wait. Nothing is lost: what is due stays
    due. A job that is paused already keeps its first reason.

    \b
    Examples:
      crmctl jobs pause relay-outbox --reason "Kafka is being upgraded"
      crmctl jobs pause --all --reason "restore of the database"
    """
    from crmctl.cli.command import Command
    from crmctl.cli.whoami import operator

    if not reason.strip():
        raise typer.BadParameter("--reason says why, in words")
    with Command(form) as command:
        from crmctl.domain.grants import Kind
        from crmctl.jobs import job_pauses

        command.kind = Kind.MAINTENANCE
        names = _names(job, everything)
        database = command.database("crmctl jobs pause")
        document = job_pauses.pause(database.begin(), names, reason=reason.strip(), by=by or operator())
        database.commit()
        command.report(document, _render_pause)


@app.command()
def resume(job: Names = None, everything: All = False, form: Output = output.Format.TABLE) -> None:
    """Let paused jobs go on.

    \b
    Examples:
      crmctl jobs resume relay-outbox
      crmctl jobs resume --all
    """
    from crmctl.cli.command import Command

    with Command(form) as command:
        from crmctl.domain.grants import Kind
        from crmctl.jobs import job_pauses

        command.kind = Kind.MAINTENANCE
        names = _names(job, everything)
        database = command.database("crmctl jobs resume")
        document = job_pauses.resume(database.begin(), names)
        database.commit()
        command.report(document, _render_resume)


@app.command("list")
def list_jobs(form: Output = output.Format.TABLE) -> None:
    """List the jobs, their pauses, and when each last did something and last failed.

    \b
    Example:
      crmctl jobs list -o json
    """
    from crmctl.cli.run import View, run_query
    from crmctl.jobs import job_pauses

    run_query("jobs list", job_pauses.query, View(form, _render_list))


def _names(jobs: list[str] | None, everything: bool) -> list[str]:
    """The jobs that are meant. Raises UsageError for one that is not there, and for none."""
    from crmctl.domain.errors import UsageError
    from crmctl.domain.jobs import NAMES, known

    if everything == bool(jobs):
        raise UsageError("name the jobs, or write --all", hint=f"the jobs are {', '.join(NAMES)}")
    return list(NAMES) if everything else [known(name) for name in dict.fromkeys(jobs or ())]


def _render_pause(document: Mapping[str, Any]) -> str:
    lines = [f"paused {name}" for name in document["paused"]]
    return "\n".join([*lines, *(f"{name} was paused already" for name in document["already_paused"]), ""])


def _render_resume(document: Mapping[str, Any]) -> str:
    lines = [f"resumed {name}" for name in document["resumed"]]
    return "\n".join([*lines, *(f"{name} was not paused" for name in document["not_paused"]), ""])


_LIST_COLUMNS = ("job", "paused", "paused_by", "paused_at", "pause_reason", "last_success_at", "last_failure_at")


def _render_list(document: Mapping[str, Any]) -> str:
    return output.table(_LIST_COLUMNS, [[row[column] for column in _LIST_COLUMNS] for row in document["jobs"]])
