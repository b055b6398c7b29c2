"""The pages say what the code does."""

import re
from pathlib import Path

import pytest
import typer
from pydantic import BaseModel
from typer.core import TyperGroup
from typer.testing import CliRunner

from crmctl.cli.app import app
from crmctl.cli.exits import Exit
from crmctl.domain.events import BOOKING_EXPIRED, INSTALLATION_MARKED_STALE, EventContract
from crmctl.domain.installation_reasons import Reason
from crmctl.domain.jobs import NAMES
from crmctl.settings import Settings

ROOT = Path(__file__).parents[2]


def setting_names(model: type[BaseModel], prefix: str = "") -> set[str]:
    names: set[str] = set()
    for name, info in model.model_fields.items():
        nested = info.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            names |= setting_names(nested, f"{prefix}{name}.")
        else:
            names.add(prefix + name)
    return names


def test_every_setting_is_on_its_page_and_no_other() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert set(re.findall(r"^\| `([a-z0-9_.]+)` \|", page, re.MULTILINE)) == setting_names(Settings)


def test_every_exit_code_is_on_its_page_and_no_other() -> None:
    page = (ROOT / "docs" / "exit-codes.md").read_text()
    assert set(re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", page, re.MULTILINE)) == {
        (str(code.value), code.name) for code in Exit
    }


def test_every_exit_code_is_in_the_help() -> None:
    help_text = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    listed = help_text.split("Exit codes: ")[1].split(" Options:")[0]
    assert re.findall(r"\d+", listed) == [str(code.value) for code in Exit] + ["130", "143"]


def test_the_tree_of_the_architecture_names_its_modules() -> None:
    tree = (ROOT / "docs" / "architecture.md").read_text().split("Arrows run one way")[0]
    source = ROOT / "src" / "crmctl"
    nouns = {group.name for group in app.registered_groups} | {"health", "prune"}
    for package in ("cli", "adapters", "telemetry"):
        for module in (source / package).glob("[a-z]*.py"):
            if package != "cli" or module.stem.replace("_", "-") not in nouns:
                assert re.search(rf"\b{module.name}\b", tree), f"{package}/{module.name}"


@pytest.mark.parametrize("contract", [BOOKING_EXPIRED, INSTALLATION_MARKED_STALE])
def test_the_contract_page_lists_the_payload_exactly(contract: EventContract) -> None:
    page = (ROOT / "docs" / "contracts.md").read_text()
    section = page.split(f"## `{contract.topic}`")[1].split("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == contract.payload_fields


def test_every_reason_of_the_sweep_is_on_its_page_and_no_other() -> None:
    page = (ROOT / "docs" / "stale-installations.md").read_text()
    section = page.split("## Reasons")[1].split("\n## ")[0]
    assert set(re.findall(r"`([A-Z_]+)`", section)) == {reason.value for reason in Reason}


def test_every_runtime_dependency_has_a_line_on_why() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    pyproject = (ROOT / "pyproject.toml").read_text()
    block = pyproject.split("dependencies = [")[1].split("]\n")[0]
    for name in re.findall(r'^  "([a-z-]+)', block, re.MULTILINE):
        assert re.search(rf"^\|[^|]*\b{name}\b", page, re.MULTILINE), name


def test_every_command_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()

    def leaves(command: object, path: str = "") -> list[str]:
        if isinstance(command, TyperGroup):
            return [leaf for name, child in command.commands.items() for leaf in leaves(child, f"{path} {name}")]
        return [path.strip()]

    for leaf in leaves(typer.main.get_command(app)):
        assert f"`{leaf}" in readme, leaf


def test_every_job_has_a_runbook_and_its_links_lead_somewhere() -> None:
    for job in NAMES:
        name = {"discard-dead-letters": "replay-dead-letters"}.get(job, job)
        assert (ROOT / "runbooks" / f"{name}.md").is_file()
    for page in [
        ROOT / "README.md",
        ROOT / "deploy" / "README.md",
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("runbooks/*.md"),
    ]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
