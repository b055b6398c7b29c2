"""Fixtures: one embedded server per session, one migrated database per test."""

import itertools
import os
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from crmctl.adapters import migrations
from crmctl.dev.bitrix24_portal import Bitrix24StandIn
from crmctl.dev.postgres import PostgresServer, temporary_server
from tests.support import Database

pytest_plugins = ["tests.kafka_fixtures"]

_TEMPLATE = "crmctl_template"
_numbers = itertools.count(1)


@pytest.fixture(scope="session", autouse=True)
def _no_inherited_configuration() -> Iterator[None]:
    """Neither crmctl's settings nor libpq's reach a test from the shell that started it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("CRMCTL_", "PG")) and not name.startswith(
                ("CRMCTL_TEST_", "CRMCTL_PG_BIN", "CRMCTL_CACHE_DIR")
            ):
                patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    with temporary_server() as server:
        yield server


@pytest.fixture(scope="session")
def template_database(postgres_server: PostgresServer) -> str:
    """The name of a migrated database that tests copy and never connect to."""
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(_TEMPLATE)))
    migrations.upgrade(postgres_server.url(_TEMPLATE))
    return _TEMPLATE


@pytest.fixture
def database(postgres_server: PostgresServer, template_database: str) -> Iterator[Database]:
    name = f"test_{next(_numbers)}"
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        strategy = sql.SQL("strategy file_copy" if connection.info.server_version >= 150_000 else "")
        connection.execute(
            sql.SQL("create database {} template {} {}").format(
                sql.Identifier(name), sql.Identifier(template_database), strategy
            )
        )
    database = Database(postgres_server.url(name))
    yield database
    database.close()
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def portal() -> Iterator[Bitrix24StandIn]:
    """Bitrix24, its portals and its OAuth server, on loopback."""
    with Bitrix24StandIn() as stand_in:
        yield stand_in
