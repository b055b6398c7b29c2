"""Runs the Alembic revisions, and reads the ones that a database is at. The only user of Alembic."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import psycopg
from alembic import command
from alembic.config import Config
from psycopg.rows import tuple_row
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

import crmctl.migrations
from crmctl.adapters import postgres
from crmctl.migrations import REVISIONS, SCHEMA, VERSION_TABLE
from crmctl.settings import DatabaseSettings

Part = Literal["core", "bookkeeping"]

# Two `db upgrade` at once take turns: the number only has to be the same in every crmctl.
_UPGRADE_LOCK: Final = 0x63726D63746C


def upgrade(dsn: str, *, only: Part | None = None, settings: DatabaseSettings | None = None) -> list[str]:
    """Bring the schema to this version's heads in one transaction; return the revisions that were applied.

    `only` limits it to one branch: `bookkeeping` for a CRM that owns its core tables. Waits for a
    concurrent upgrade and then finds nothing to do. Raises what `adapters.postgres` raises.
    """
    settings = settings or DatabaseSettings()
    with _connection(dsn, settings) as connection:
        connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_LOCK})
        connection.execute(text(f"create schema if not exists {SCHEMA}"))
        before = _revisions(connection)
        config = Config()
        config.set_main_option("script_location", str(Path(crmctl.migrations.__file__).parent))
        config.attributes["connection"] = connection
        applied: list[str] = []
        for branch, revisions in REVISIONS.items():
            at = max((revision for revision in before if revision.startswith(f"{branch}_")), default="")
            if only in (None, branch) and at < revisions[-1]:
                command.upgrade(config, f"{branch}@head")
                applied += [revision for revision in revisions if revision > at]
        return applied


def _revisions(connection: Connection) -> set[str]:
    table = f"{SCHEMA}.{VERSION_TABLE}"
    if connection.execute(text("select to_regclass(:table)"), {"table": table}).scalar() is None:
        return set()
    return set(connection.execute(text(f"select version_num from {table}")).scalars())  # noqa: S608


@contextmanager
def _connection(dsn: str, settings: DatabaseSettings) -> Iterator[Connection]:
    def connect() -> psycopg.Connection[Any]:
        connection: psycopg.Connection[Any] = postgres.connect(dsn, settings, application_name="crmctl db upgrade")
        connection.row_factory = tuple_row
        return connection

    engine = create_engine("postgresql+psycopg://", creator=connect, poolclass=NullPool, hide_parameters=True)
    try:
        with engine.begin() as connection:
            yield connection
    except DBAPIError as error:
        if isinstance(error.orig, psycopg.Error):
            raise postgres.translate(error.orig) from None
        raise
