"""The options that several commands share, and the parsers of their values. Nothing heavy is imported here."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Annotated, TypeVar
from uuid import UUID

import typer

from crmctl.cli.output import Format
from crmctl.domain.databases import DatabaseName
from crmctl.domain.times import parse_duration, parse_instant

T = TypeVar("T")


def _parser(parse: Callable[[str], T]) -> Callable[[str | T], T]:
    def checked(value: str | T) -> T:
        if not isinstance(value, str):
            return value
        try:
            return parse(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return checked


duration = _parser(parse_duration)
instant = _parser(parse_instant)

Output = Annotated[Format, typer.Option("--output", "-o", help="How to print the result.")]
Tenant = Annotated[UUID | None, typer.Option("--tenant", metavar="ID", help="Only this tenant (DeveloperCompanyId).")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Do the same work in one transaction and roll it back. It holds its row locks until then.",
    ),
]
Database = Annotated[
    DatabaseName,
    typer.Option(
        "--database",
        help="`installations`: the one of CRMCTL_INSTALLATIONS_DATABASE_URL, where that is another one.",
    ),
]
Databases = Annotated[
    DatabaseName | None,
    typer.Option("--database", help="Only in this one. Default: in each that is configured, where the job runs."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Exit 3 when some rows need a person.")]
AsOf = Annotated[
    datetime | None,
    typer.Option(
        "--as-of",
        metavar="TIMESTAMP",
        parser=instant,
        help="Decide as of this RFC 3339 time, which needs an offset. Default: PostgreSQL's now.",
    ),
]
TimeBudget = Annotated[
    timedelta,
    typer.Option(
        "--time-budget",
        metavar="DURATION",
        parser=duration,
        help="Start no more work after this long.",
    ),
]
