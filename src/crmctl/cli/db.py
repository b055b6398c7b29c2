"""`crmctl db …`: bring the schema up to date, and say whether it is."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from crmctl.cli import output
from crmctl.cli.options import Database, Output
from crmctl.domain.databases import DatabaseName

app = typer.Typer(help="The database schema.", no_args_is_help=True, rich_markup_mode=None)


class Only(StrEnum):
    """The values of `--only`."""

    CORE = "core"
    BOOKKEEPING = "bookkeeping"


@app.command()
def upgrade(
    only: Annotated[
        Only | None,
        typer.Option(help="Only one part; `bookkeeping` where the CRM itself owns the core tables."),
    ] = None,
    database: Database = DatabaseName.MAIN,
    form: Output = output.Format.TABLE,
) -> None:
    """Create or upgrade the schema, in one transaction. Safe to run again, and by several at once.

    \b
    Examples:
      crmctl db upgrade
      crmctl db upgrade --only bookkeeping
      crmctl db upgrade --database installations
    """
    from crmctl.cli.command import Command

    with Command(form) as command:
        from crmctl.adapters import migrations

        command.use_database(database)
        applied = migrations.upgrade(
            command.dsn(), only=None if only is None else only.value, settings=command.settings.database
        )
        command.report({"applied": applied}, _render_upgrade)


@app.command()
def check(database: Database = DatabaseName.MAIN, form: Output = output.Format.TABLE) -> None:
    """Say whether this crmctl fits the database's schema: exit 0, or 78 when it does not.

    Its own tables by their revision; the CRM's core tables by columns, types and the four indexes of bookings, whoever
    created them.

    \b
    Example:
      crmctl db check -o json
    """
    from crmctl.cli.command import Command

    with Command(form) as command:
        from crmctl.cli.exits import Exit
        from crmctl.jobs import check_schema as job

        command.use_database(database)
        connection = command.database("crmctl db check")
        document = job.query(connection.begin(read_only=True))
        connection.rollback()
        command.report(document, _render_check)
        if document["faults"]:
            command.log.error("the core tables fall short of their contract", faults=document["faults"])
            command.exit(Exit.CONFIGURATION)


@app.command()
def roles(
    prefix: Annotated[
        str | None,
        typer.Option(metavar="PREFIX", help="What their names begin with. Default: CRMCTL_DATABASE__ROLE_PREFIX."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the SQL and change nothing.")] = False,
    database: Database = DatabaseName.MAIN,
    form: Output = output.Format.TABLE,
) -> None:
    """Create the least-privilege roles, or bring their grants up to date, in one transaction.

    One group role for each kind of work (bookings, relay, chat, installations, dead_letters, maintenance) and one that
    reads only. None of them can log in: grant them to the users that do. Needs CREATEROLE and the tables' owner.

    \b
    Examples:
      crmctl db roles --dry-run
      crmctl db roles
      crmctl db roles --database installations
    """
    from crmctl.cli.command import Command

    with Command(form) as command:
        from crmctl.jobs import roles as job

        command.kind = None
        command.use_database(database)
        connection = command.database("crmctl db roles")
        tx = connection.begin()
        statements = job.plan(tx, prefix or command.settings.database.role_prefix)
        if dry_run:
            connection.rollback()
        else:
            job.apply(tx, statements)
            connection.commit()
        command.report({"dry_run": dry_run, "statements": statements}, _render_roles)


def _render_roles(document: Mapping[str, Any]) -> str:
    return "".join(f"{statement};\n" for statement in document["statements"]) or "nothing to do\n"


def _render_upgrade(document: Mapping[str, Any]) -> str:
    return "".join(f"applied {revision}\n" for revision in document["applied"]) or "nothing to do\n"


def _render_check(document: Mapping[str, Any]) -> str:
    rows = [(part["part"], part["revision"], part["expected"], part["state"]) for part in document["parts"]]
    text = output.table(("part", "revision", "expected", "state"), rows)
    return text + "".join(f"{fault}\n" for fault in document["faults"])
