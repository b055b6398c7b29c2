"""The schema's revisions, as constants: jobs compare them with the database without importing Alembic.

Two branches: `core` is the CRM's own tables, for a new installation; `bookkeeping` is crmctl's. Revision
ids are `<branch>_<number>`, and each tuple lists its branch from base to head.
"""

from typing import Final

SCHEMA: Final = "crm"
VERSION_TABLE: Final = "crmctl_schema_version"

REVISIONS: Final[dict[str, tuple[str, ...]]] = {
    "core": ("core_0001",),
    "bookkeeping": ("bookkeeping_0001",),
}
