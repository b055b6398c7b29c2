"""`crmctl jobs …`: pause, resume, list."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crmctl.cli import output
from crmctl.cli.options import Databases, Output
from crmctl.domain.databases import DatabaseName

if TYPE_CHECKING:
    from crmctl.adapters.postgres import Transaction
    from crmctl.cli.command import Command

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
    database: Databases = None,
    form: Output = output.Format.TABLE,
) -> None:
    """Pause jobs: from their next batch on, every run of them ends at once with exit 0.

    A batch that has begun finishes. `--follow` and the consumer stay alive and wait. Nothing is lost: what is due stays
    due. A job that is paused already keeps its first reason. Where bitrix24-php-lib's tables are in a database of
    their own, the pause is set wherever the job runs; if one of the databases is away, nothing is paused.

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
        from crmctl.jobs import job_pauses

        why, who = reason.strip(), by or operator()
        named = _names(job, everything)
        paused = _everywhere(
            command, "pause", named, database, lambda tx, names: job_pauses.pause(tx, names, reason=why, by=who)
        )
        document = {
            "paused": sorted(name for name, new in paused.items() if new),
            "already_paused": sorted(name for name, new in paused.items() if not new),
            "reason": why,
            "paused_by": who,
        }
        command.report(document, _render_pause)


@app.command()
def resume(
    job: Names = None, everything: All = False, database: Databases = None, form: Output = output.Format.TABLE
) -> None:
    """Let paused jobs go on, wherever they run.

    \b
    Examples:
      crmctl jobs resume relay-outbox
      crmctl jobs resume --all
    """
    from crmctl.cli.command import Command

    with Command(form) as command:
        from crmctl.jobs import job_pauses

        resumed = _everywhere(command, "resume", _names(job, everything), database, job_pauses.resume)
        document = {
            "resumed": sorted(name for name, had in resumed.items() if had),
            "not_paused": sorted(name for name, had in resumed.items() if not had),
        }
        command.report(document, _render_resume)


@app.command("list")
def list_jobs(database: Databases = None, form: Output = output.Format.TABLE) -> None:
    """List the jobs, their pauses, and when each last did something and last failed.

    A job that runs in two databases has a line for each.

    \b
    Example:
      crmctl jobs list -o json
    """
    from crmctl.cli.command import Command

    with Command(form) as command:
        from crmctl.domain.jobs import names_in
        from crmctl.jobs import job_pauses

        rows: list[dict[str, Any]] = []
        for where in _places(command, database):
            command.use_database(where)
            connection = command.database("crmctl jobs list")
            rows += job_pauses.query(connection.begin(read_only=True), names_in(where, command.databases), where)
            connection.rollback()
        command.report({"jobs": rows}, _render_list)


def _names(jobs: list[str] | None, everything: bool) -> list[str]:
    """The jobs that are named; none stands for all. Raises UsageError for one that is not there, and for nothing."""
    from crmctl.domain.errors import UsageError
    from crmctl.domain.jobs import NAMES, known

    if everything == bool(jobs):
        raise UsageError("name the jobs, or write --all", hint=f"the jobs are {', '.join(NAMES)}")
    return [known(name) for name in dict.fromkeys(jobs or ())]


def _places(command: "Command", database: DatabaseName | None) -> tuple[DatabaseName, ...]:
    return command.databases if database is None else (database,)


def _everywhere(
    command: "Command",
    verb: str,
    named: Sequence[str],
    database: DatabaseName | None,
    change: Callable[["Transaction", Sequence[str]], set[str]],
) -> dict[str, bool]:
    """Make a change in each database where one of the jobs runs; say of each job whether anything changed.

    Nothing is committed before all of them took it. Raises UsageError for a job that does not run in the one that is
    named.
    """
    from crmctl.domain.errors import UsageError
    from crmctl.domain.grants import Kind
    from crmctl.domain.jobs import names_in

    command.kind = Kind.MAINTENANCE
    places = {where: names_in(where, command.databases) for where in _places(command, database)}
    if astray := [name for name in named if not any(name in names for names in places.values())]:
        raise UsageError(
            f"{astray[0]} does not run in the {database} database", hint="leave --database out: it is found by itself"
        )
    changed: dict[str, bool] = {}
    connections = []
    for where, names in places.items():
        here = [name for name in names if not named or name in named]
        if not here:
            continue
        command.use_database(where)
        connection = command.database(f"crmctl jobs {verb}")
        connections.append(connection)
        new = change(connection.begin(), here)
        changed |= {name: changed.get(name, False) or name in new for name in here}
    for connection in connections:
        connection.commit()
    return changed


def _render_pause(document: Mapping[str, Any]) -> str:
    lines = [f"paused {name}" for name in document["paused"]]
    return "\n".join([*lines, *(f"{name} was paused already" for name in document["already_paused"]), ""])


def _render_resume(document: Mapping[str, Any]) -> str:
    lines = [f"resumed {name}" for name in document["resumed"]]
    return "\n".join([*lines, *(f"{name} was not paused" for name in document["not_paused"]), ""])


_LIST_COLUMNS = ("job", "paused", "paused_by", "paused_at", "pause_reason", "last_success_at", "last_failure_at")


def _render_list(document: Mapping[str, Any]) -> str:
    rows = document["jobs"]
    columns = list(_LIST_COLUMNS)
    if len({row["database"] for row in rows}) > 1:
        columns.insert(1, "database")
    return output.table(columns, [[row[column] for column in columns] for row in rows])
