"""Builds what the sweep asks portals with, out of the settings."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import typer

from crmctl.adapters.bitrix24 import Bitrix24
from crmctl.adapters.postgres import Database
from crmctl.cli.command import Command
from crmctl.jobs.sweep_claims import LEASE_MARGIN, Claims
from crmctl.jobs.sweep_installations import JOB_NAME


@contextmanager
def sweep_claims(command: Command, time_budget: timedelta) -> Iterator[Claims]:
    """The claims of a run, whose leases outlast its time budget. A run that fails gives them back."""
    settings = command.settings
    dsn = command.dsn()
    claims = Claims(
        settings.bitrix24,
        Bitrix24(settings.bitrix24),
        lambda: Database(dsn, settings.database, application_name=f"crmctl {JOB_NAME}"),
        time_budget + 2 * settings.bitrix24.request_timeout + LEASE_MARGIN,
    )
    try:
        yield claims
    except typer.Exit:
        raise
    except BaseException:
        claims.give_back()
        raise
    finally:
        claims.close()
