"""The command tree. Modules under cli/ import nothing heavy at their top, so that --help is fast."""

import sys
from itertools import pairwise
from typing import Annotated

import typer

from crmctl import __version__
from crmctl.cli import (
    bookings,
    chat_status,
    db,
    dev,
    dlq,
    health,
    installations,
    jobs,
    metrics,
    outbox,
    prune,
    runs,
    topics,
)

app = typer.Typer(
    name="crmctl",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bookings.app, name="bookings")
app.add_typer(installations.app, name="installations")
app.add_typer(outbox.app, name="outbox")
app.add_typer(chat_status.app, name="chat-status")
app.add_typer(dlq.app, name="dlq")
app.add_typer(db.app, name="db")
app.add_typer(topics.app, name="topics")
app.add_typer(jobs.app, name="jobs")
app.add_typer(runs.app, name="runs")
app.command("prune")(prune.prune)
app.add_typer(metrics.app, name="metrics")
app.command("doctor")(health.doctor)
app.command("status")(health.status)
app.add_typer(dev.app, name="dev")
app.command("demo")(dev.demo)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"crmctl {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[  # noqa: ARG001  its callback reads it
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Batch operations of the CRM: one subcommand is one idempotent transaction.

    Exit codes: 0 done, 1 a bug, 2 usage, 3 rows need a person (--strict), 10 not found, 11 forbidden, 12 invalid
    state, 69 unreachable, 74 output not written, 75 try again later, 78 configuration, 130/143 interrupted.
    """
    for before, argument in pairwise(sys.argv):
        if before == "--key" or argument.startswith("--key="):
            continue  # a record's key is any bytes
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise typer.BadParameter("an argument is not UTF-8") from None
