"""`crmctl installations …`: sweep, list, show."""

from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any
from uuid import UUID

import typer

from crmctl.cli import output
from crmctl.cli.options import DryRun, Output, Strict, TimeBudget, duration

app = typer.Typer(
    help="Bitrix24 installations: end stale ones, look at them.", no_args_is_help=True, rich_markup_mode=None
)


class Action(StrEnum):
    """The values of `--action`."""

    BLOCK = "block"
    DELETE = "delete"
    ALERT = "alert"


Ttl = Annotated[
    timedelta,
    typer.Option("--ttl", metavar="DURATION", parser=duration, show_default="1h", help="Stale from this age on."),
]


@app.command()
def sweep(
    ttl: Ttl = timedelta(hours=1),
    verify_portal: Annotated[
        bool, typer.Option("--verify-portal", help="Ask the portal before anything changes.")
    ] = False,
    action: Annotated[
        Action, typer.Option(help="Without --verify-portal: what to do. `alert` never changes an installation.")
    ] = Action.BLOCK,
    unfinished_ttl: Annotated[
        timedelta,
        typer.Option(
            metavar="DURATION", parser=duration, show_default="24h", help="How old one may get in its wizard."
        ),
    ] = timedelta(hours=24),
    unclear_ttl: Annotated[
        timedelta,
        typer.Option(
            metavar="DURATION", parser=duration, show_default="30d", help="How old one may get if nobody can tell."
        ),
    ] = timedelta(days=30),
    installation_id: Annotated[
        list[UUID] | None, typer.Option("--id", metavar="ID", help="Only this installation; may be repeated.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=10_000, help="Installations per batch.")] = 100,
    drain: Annotated[bool, typer.Option("--drain", help="Go on, batch by batch, until nothing new is due.")] = False,
    time_budget: TimeBudget = timedelta(seconds=50),
    dry_run: DryRun = False,
    strict: Strict = False,
    form: Output = output.Format.TABLE,
) -> None:
    """End installations whose finish step never arrived; an install is never finished here.

    Both rows of a pair, its comment, journal row and event change together or not at all. What cannot be decided is
    left as it is and asked about again later. With --verify-portal no row is locked while a portal is asked; a
    dry run then asks as well, but renews no token.

    \b
    Examples:
      crmctl installations sweep --verify-portal
      crmctl installations sweep --action alert --strict
      crmctl installations sweep --verify-portal --id 6f1c9a52-8a2e-4c1b-9a53-0d3f3f6b9e11
    """
    from crmctl.cli.command import Command
    from crmctl.cli.run import Plan, View, run_job

    with Command(form) as command:
        from crmctl.cli.sweeper import sweep_claims
        from crmctl.domain import installations
        from crmctl.jobs import sweep_installations as job

        _check(ttl, unfinished_ttl, unclear_ttl, verify=verify_portal, action=action)
        command.use_installations_database()
        options = job.Options(
            policy=installations.Policy(installations.Action(action.value), ttl, unfinished_ttl, unclear_ttl),
            ids=tuple(dict.fromkeys(installation_id or ())),
            batch_size=batch_size,
            dry_run=dry_run,
        )
        with sweep_claims(command, time_budget) if verify_portal else _nothing() as claims:
            run_job(
                command,
                job.job(command.settings.bitrix24, claims),
                options,
                View(form, _render_sweep, strict=strict),
                Plan(drain=drain, time_budget=time_budget, dry_run=dry_run),
            )


@app.command("list")
def list_installations(
    stale: Annotated[bool, typer.Option("--stale", help="Only those that a sweep would look at.")] = False,
    ttl: Ttl = timedelta(hours=1),
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Rows at the most.")] = 50,
    form: Output = output.Format.TABLE,
) -> None:
    """List installations that are not deleted, the oldest first, with what the sweep last found.

    \b
    Examples:
      crmctl installations list --stale
      crmctl installations list -o json --limit 1000
    """
    from crmctl.cli.command import Command

    with Command(form) as command:
        from crmctl.jobs import list_installations as job

        command.use_installations_database()
        options = job.Options(stale=stale, ttl=ttl, limit=limit)
        database = command.database("crmctl installations list")
        document = job.query(database.begin(read_only=True), command.settings.bitrix24, options)
        database.rollback()
        command.report(document, _render_list)


@app.command()
def show(
    installation_id: Annotated[UUID, typer.Argument(metavar="ID")],
    ttl: Ttl = timedelta(hours=1),
    form: Output = output.Format.TABLE,
) -> None:
    """Show an installation with its account, why it is or is not stale, and what the sweep did and why.

    \b
    Example:
      crmctl installations show 6f1c9a52-8a2e-4c1b-9a53-0d3f3f6b9e11 -o json
    """
    from crmctl.cli.command import Command

    with Command(form) as command:
        from crmctl.domain.installations import Policy
        from crmctl.jobs import show_installation as job

        command.use_installations_database()
        database = command.database("crmctl installations show")
        transaction = database.begin(read_only=True)
        document = job.query(transaction, command.settings.bitrix24, installation_id, Policy(ttl=ttl))
        database.rollback()
        command.report(document, _render_show)


def _check(ttl: timedelta, unfinished_ttl: timedelta, unclear_ttl: timedelta, *, verify: bool, action: Action) -> None:
    """Raise UsageError for times and options that do not go together."""
    from crmctl.domain.errors import UsageError
    from crmctl.domain.installations import SHORTEST_TTL

    if ttl < SHORTEST_TTL:
        raise UsageError("--ttl is shorter than 5m: an install by hand takes longer", hint="use 5m or more")
    if min(unfinished_ttl, unclear_ttl) < ttl:
        raise UsageError("--unfinished-ttl and --unclear-ttl are not shorter than --ttl")
    if verify and action is Action.DELETE:
        raise UsageError(
            "--action delete does not go with --verify-portal: there the portal's answer decides",
            hint="leave one of them out",
        )


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def _render_sweep(document: Mapping[str, Any]) -> str:
    would = document["dry_run"]
    text = output.fields(
        {
            "Looked at": document["checked_count"],
            "Would block" if would else "Blocked": document["blocked_count"],
            "Would delete" if would else "Deleted": document["deleted_count"],
            "Left as they are": document["left_count"],
            "Need a look": document["alert_count"],
            "Skipped, locked": document["skipped_locked_count"],
            "Finished meanwhile": document["finished_count"],
            "Not asked": document["unasked_count"],
            "Could not be changed": document["failed_count"],
            "Active again": document["overridden_count"],
            "More are due": document["has_more"],
            "Batches": document["batches"],
            "Duration, ms": document["duration_ms"],
        }
    )
    for title in ("installations", "overridden", "failed", "not_swept"):
        if rows := document[title]:
            heading = title.replace("_", " ").capitalize()
            text += f"\n{heading}:\n" + output.table(list(rows[0]), [list(row.values()) for row in rows])
    return text


_LIST_COLUMNS = (
    "installation_id",
    "status",
    "account_status",
    "age_seconds",
    "stale",
    "verdict",
    "reason",
    "next_check_at",
    "domain_url",
)


def _render_list(document: Mapping[str, Any]) -> str:
    rows = document["installations"]
    if not rows:
        return "No installations.\n"
    return output.table(_LIST_COLUMNS, [[row[column] for column in _LIST_COLUMNS] for row in rows])


_SHOW_COLUMNS = {
    "journal": ("created_at", "level", "label", "message"),
    "events": ("created_at", "published_at", "message_id", "payload"),
}


def _render_show(document: Mapping[str, Any]) -> str:
    text = output.fields(document["installation"])
    text += "\nWhy:\n" + "".join(f"  {sentence}\n" for sentence in document["why"])
    for title, columns in _SHOW_COLUMNS.items():
        rows = document[title]
        text += f"\n{title.capitalize()}:\n"
        text += output.table(columns, [[row[column] for column in columns] for row in rows]) if rows else "  none\n"
    return text
