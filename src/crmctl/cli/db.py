"""`crmctl db …`: bring the schema up to date, and say whether it is."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from crmctl.cli import output
from crmctl.cli.options import Output

app = typer.Typer(help="The database schema.", no_args_is_help=True, rich_markup_mode=None)


class Only(StrEnum):
    """The values of `--only`."""

    CORE = "core"
    BOOKKEEPING = "bookkeeping"


class Which(StrEnum):
    """The values of `--database`."""

    MAIN = "main"
    INSTALLATIONS = "installations"


Database = Annotated[
    Which,
    typer.Option(help="`installations`: the one of CRMCTL_INSTALLATIONS_DATABASE_URL, where that is another one."),
]


@app.command()
def upgrade(
    only: Annotated[
        Only | None,
        typer.Option(help="Only one part; `bookkeeping` where the CRM itself owns the core tables."),
    ] = None,
    database: Database = Which.MAIN,
    form: Output = output.Format.TABLE,
) -> None:
    """Create or upgrade the schema, in one transaction. Safe to run again, and by several at once.

    \b
    Examples:
      crmctl db upgrade
      crmctl db upgrade --only bookkeeping
      crmctl db upgrade --database installations
    """
    from crmctl.cli.run import Command

    with Command(form) as command:
        from crmctl.adapters import migrations

        if database is Which.INSTALLATIONS:
            command.use_installations_database()
        applied = migrations.upgrade(
            command.dsn(), only=None if only is None else only.value, settings=command.settings.database
        )
        command.report({"applied": applied}, _render_upgrade)


@app.command()
def check(database: Database = Which.MAIN, form: Output = output.Format.TABLE) -> None:
    """Say whether this crmctl fits the database's schema: exit 0, or 78 when the schema is behind.

    \b
    Example:
      crmctl db check -o json
    """
    from crmctl.cli.run import Command
    from crmctl.jobs import check_schema as job

    with Command(form) as command:
        if database is Which.INSTALLATIONS:
            command.use_installations_database()
        connection = command.database("crmctl db check")
        document = job.query(connection.begin(read_only=True))
        connection.rollback()
        command.report(document, _render_check)


def _render_upgrade(document: Mapping[str, Any]) -> str:
    return "".join(f"applied {revision}\n" for revision in document["applied"]) or "nothing to do\n"


def _render_check(document: Mapping[str, Any]) -> str:
    rows = [(part["part"], part["revision"], part["expected"], part["state"]) for part in document["parts"]]
    return output.table(("part", "revision", "expected", "state"), rows)
