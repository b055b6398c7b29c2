"""`crmctl metrics serve`."""

import time
from datetime import timedelta
from typing import Annotated

import typer

from crmctl.cli import output

app = typer.Typer(help="Metrics for Prometheus.", no_args_is_help=True, rich_markup_mode=None)

_LOOK_SECONDS = 0.1
_GUARDS = {
    "connect_timeout": timedelta(seconds=3),
    "statement_timeout": timedelta(seconds=5),
    "lock_timeout": timedelta(seconds=1),
}


@app.callback()
def _group() -> None:
    """Metrics for Prometheus."""


@app.command()
def serve(
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Where to listen.")] = "0.0.0.0",  # noqa: S104
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="0 takes a free one and logs it.")] = 9464,
) -> None:
    """Serve the figures of the database and of Kafka at /metrics, with /healthz and /readyz, until SIGTERM (exit 0).

    The database role needs to read only. A source that is away is crm_scrape_up 0, and the rest is still served.

    \b
    Examples:
      crmctl metrics serve
      crmctl metrics serve --host 127.0.0.1 --port 9500
    """
    from crmctl.cli.command import Command

    with Command(output.Format.TABLE) as command:
        from prometheus_client import CollectorRegistry

        from crmctl.adapters import kafka
        from crmctl.adapters.postgres import Database
        from crmctl.cli.readers import open_letters
        from crmctl.domain.databases import DatabaseName
        from crmctl.domain.errors import ConfigurationError
        from crmctl.domain.jobs import names_in
        from crmctl.jobs import serve_metrics as job
        from crmctl.telemetry import metrics

        settings, chat = command.settings, command.settings.chat_status
        limits = settings.database.model_copy(update=_GUARDS)

        def database(which: DatabaseName = DatabaseName.MAIN) -> Database:
            """A connection of its own: the sources are read side by side."""
            return Database(command.dsn(which), limits, application_name="crmctl metrics serve")

        main, portals = database(), database(DatabaseName.INSTALLATIONS)
        places = {which: job.Place(which, names_in(which, command.databases)) for which in command.databases}
        client = kafka.admin(command.settings.kafka, command.log)
        member = kafka.consumer(settings.kafka, command.log, group=chat.group, queued_max_messages_kbytes=16_384)
        cluster = job.Cluster(client, member, chat.topic)
        source = job.Exporter(
            {
                "database": lambda: job.read_database(main, places[DatabaseName.MAIN]),
                "kafka": lambda: job.read_kafka(cluster),
                "dead_letters": job.OpenLetters(database(), lambda: open_letters(command)).read,
                "installations": lambda: job.read_installations(
                    portals, settings.bitrix24, places.get(DatabaseName.INSTALLATIONS)
                ),
            },
            command.log,
        )
        registry = CollectorRegistry()
        registry.register(source)
        try:
            server = metrics.serve(registry, host, port, lambda: source.ready)
        except OSError as error:
            raise ConfigurationError(
                f"the metrics port {port} cannot be had: {error.strerror}", hint="name another with --port"
            ) from None
        command.log.info("serving metrics", host=host, port=server.server_port)
        command.interrupts.settle()
        while command.interrupts.pending is None:
            time.sleep(_LOOK_SECONDS)
        server.shutdown()
        command.exit(0)
