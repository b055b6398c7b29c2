"""`crmctl dev …` and `crmctl demo`: the embedded environment. Never used in production."""

from datetime import timedelta
from pathlib import Path
from typing import Annotated
from uuid import UUID

import typer

from crmctl.cli import output
from crmctl.cli.options import Output, duration

app = typer.Typer(
    help="A local PostgreSQL and Kafka for laptops and tests.", no_args_is_help=True, rich_markup_mode=None
)


@app.command()
def up(form: Output = output.Format.TABLE) -> None:
    """Start the servers in the background, migrate, and write .crmctl/dev.toml, which crmctl then finds.

    \b
    Example:
      crmctl dev up && crmctl dev seed --bookings 10000 && crmctl bookings list --due
    """
    from crmctl.cli.command import Command

    with Command(form) as command:
        from crmctl.dev import environment

        result = environment.up(Path.cwd(), command.log.warning)
        command.report(
            {
                "config_file": str(result.config_file),
                "postgres_directory": str(result.server_directory),
                "postgres_pid": result.pid,
                "kafka": result.kafka,
                "bootstrap_servers": result.bootstrap_servers,
                "server_started": result.server_started,
                "database_created": result.database_created,
            },
            output.fields,
        )


@app.command()
def down(
    purge: Annotated[bool, typer.Option("--purge", help="Remove the data as well.")] = False,
    form: Output = output.Format.TABLE,
) -> None:
    """Stop the servers of `dev up`; their data stays for the next time.

    \b
    Example:
      crmctl dev down --purge
    """
    from crmctl.cli.command import Command

    with Command(form) as command:
        from crmctl.dev import environment

        command.report({"stopped": environment.down(Path.cwd(), purge=purge)}, output.fields)


@app.command()
def seed(
    bookings: Annotated[int, typer.Option(min=1, max=50_000_000, help="How many bookings to add.")] = 10_000,
    random_seed: Annotated[int, typer.Option("--seed", help="The same seed makes the same bookings.")] = 1,
    form: Output = output.Format.TABLE,
) -> None:
    """Add sample bookings with their deals to the embedded environment's database.

    \b
    Example:
      crmctl dev seed --bookings 1000000
    """
    from crmctl.cli.command import Command

    with Command(form) as command:
        from dataclasses import asdict

        from crmctl.adapters import postgres
        from crmctl.dev.seed import seed
        from crmctl.settings import load_embedded

        settings = load_embedded()
        with postgres.connect(
            command.dsn(settings=settings), settings.database, application_name="crmctl dev seed"
        ) as connection:
            result = seed(connection, bookings, seed=random_seed)
        command.report(asdict(result), output.fields)


@app.command()
def token(
    tenant: Annotated[UUID, typer.Option("--tenant", metavar="ID", help="The actor's tenant (DeveloperCompanyId).")],
    subject: Annotated[str, typer.Option(metavar="NAME", help="Whom the token speaks for.")] = "dev-manager",
    permission: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="May be repeated. Default: crm.bookings.decide.")
    ] = None,
    ttl: Annotated[
        timedelta,
        typer.Option(metavar="DURATION", parser=duration, show_default="1h", help="How long it is valid."),
    ] = timedelta(hours=1),
) -> None:
    """Print an actor's token that the embedded environment believes, and nothing else does.

    \b
    Example:
      CRMCTL_ACTOR_TOKEN=$(crmctl dev token --tenant ID) crmctl bookings extend BOOKING_ID
    """
    from crmctl.cli.command import Command

    with Command(output.Format.TABLE) as command:
        from crmctl.dev import identity
        from crmctl.jobs.extend_booking import PERMISSION
        from crmctl.settings import find_dev_directory

        signed = identity.issue(
            find_dev_directory() / "dev-key.pem",
            tenant_id=tenant,
            subject=subject,
            permissions=permission or [PERMISSION],
            ttl=ttl,
        )
        command.report({"token": signed}, lambda document: f"{document['token']}\n")


def demo() -> None:
    """Watch overdue bookings expire, one be extended, and the events arrive in Kafka, step by step.

    \b
    Example:
      crmctl demo
    """
    from crmctl.cli.command import Command

    with Command(output.Format.TABLE):
        from crmctl.dev.demo import tell

        tell(output.write)
