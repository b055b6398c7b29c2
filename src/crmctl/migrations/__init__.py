"""The schema's revisions, as constants: jobs compare them with the database without importing Alembic.

Two branches: `core` is the CRM's own tables, for a new installation; `bookkeeping` is crmctl's. Revision
ids are `<branch>_<number>`, and each tuple lists its branch from base to head.
"""

from collections.abc import Iterable
from typing import Final

from crmctl import __version__
from crmctl.domain.errors import SchemaError

SCHEMA: Final = "crm"
VERSION_TABLE: Final = "crmctl_schema_version"

REVISIONS: Final[dict[str, tuple[str, ...]]] = {
    "core": ("core_0001", "core_0002"),
    "bookkeeping": (
        "bookkeeping_0001",
        "bookkeeping_0002",
        "bookkeeping_0003",
        "bookkeeping_0004",
        "bookkeeping_0005",
        "bookkeeping_0006",
        "bookkeeping_0007",
    ),
}


def heads() -> dict[str, str]:
    """The newest revision of each branch that this version of crmctl knows."""
    return {branch: revisions[-1] for branch, revisions in REVISIONS.items()}


def check_revisions(found: Iterable[str] | None, minimum_version: str | None) -> list[str]:
    """Say whether a job may run on a database at these revisions.

    A branch that is behind is a SchemaError, and so is no bookkeeping at all; no core means that the CRM owns
    those tables. A revision that we do not know is ahead of us: the job runs, and the returned warning says
    so, unless the database asks for a newer crmctl than this one.
    """
    found = set(found or ())
    warnings = []
    for branch, revisions in REVISIONS.items():
        mine = {revision for revision in found if revision.startswith(f"{branch}_")}
        if not mine and branch == "core":
            continue
        if not mine or mine & set(revisions[:-1]):
            at = ", ".join(sorted(mine)) or "nothing"
            raise SchemaError(
                f"the database schema is behind: {branch} is at {at}, this crmctl needs {revisions[-1]}",
                hint="run: crmctl db upgrade",
            )
        if revisions[-1] not in mine:
            warnings.append(f"schema ahead: {branch} is at {', '.join(sorted(mine))}, newer than {revisions[-1]}")
    if minimum_version is not None and _ordered(minimum_version) > _ordered(__version__):
        raise SchemaError(
            f"the database schema asks for crmctl {minimum_version} or newer; this is {__version__}",
            hint="deploy the newer crmctl",
        )
    return warnings


def _ordered(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
