"""The constants that jobs compare the database with, held against Alembic's scripts."""

from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

import crmctl.migrations
from crmctl import __version__
from crmctl.domain.errors import SchemaError
from crmctl.migrations import REVISIONS, check_revisions, heads


def test_the_revision_constants_are_the_scripts() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(crmctl.migrations.__file__).parent))
    scripts = ScriptDirectory.from_config(config)
    assert set(scripts.get_heads()) == set(heads().values())
    for branch, revisions in REVISIONS.items():
        walked = [script.revision for script in scripts.iterate_revisions(f"{branch}@head", "base")]
        assert tuple(reversed(walked)) == revisions


def test_a_schema_at_the_heads_raises_no_warning() -> None:
    assert check_revisions(heads().values(), __version__) == []


def test_a_core_that_the_crm_owns_is_fine() -> None:
    assert check_revisions([heads()["bookkeeping"]], __version__) == []


def test_no_bookkeeping_is_behind() -> None:
    with pytest.raises(SchemaError, match="bookkeeping is at nothing"):
        check_revisions([heads()["core"]], None)


def test_an_unknown_revision_is_ahead_and_only_warned_of() -> None:
    [warning] = check_revisions([heads()["core"], "bookkeeping_9999"], __version__)
    assert "schema ahead: bookkeeping is at bookkeeping_9999" in warning


def test_a_schema_that_asks_for_a_newer_crmctl_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"asks for crmctl 99\.0\.0"):
        check_revisions(heads().values(), "99.0.0")


def test_an_older_revision_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REVISIONS, "bookkeeping", ("bookkeeping_7001", "bookkeeping_7002"))
    with pytest.raises(SchemaError, match="bookkeeping is at bookkeeping_7001, this crmctl needs bookkeeping_7002"):
        check_revisions([heads()["core"], "bookkeeping_7001"], None)
