"""Every crmctl command of the runbooks and of both README.md, run in the state that the page begins from.

`tests/runbook_support.py` has the convention, `tests/runbook_states.py` the states.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from crmctl.migrations import heads
from tests.runbook_states import STATES, World
from tests.runbook_support import (
    PAGES,
    ROOT,
    Command,
    Scenario,
    blocks,
    crmctl_commands,
    differs,
    normalise,
    run,
    scenarios,
)

HEADINGS = ["Meaning", "Impact", "Diagnosis", "Mitigation", "Verify", "Escalate"]
# A table's header, or the title of a part of an output.
HEADER = re.compile(r"[A-Z_]+(?:\s+[A-Z_]+)+|[A-Z][A-Za-z ]*:")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

every_runbook = pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name == "runbooks"], ids=lambda page: page.name
)


def all_scenarios() -> list[Any]:
    return [
        pytest.param(
            scenario,
            id=scenario.name,
            marks=[pytest.mark.real_kafka] if scenario.state in STATES and STATES[scenario.state].real_kafka else [],
        )
        for page in PAGES
        for scenario in scenarios(page)
    ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command left: its exit code, stdout as it is compared, stderr as it is."""

    exit_code: int
    printed: list[str]
    stderr: str


# Pages share states and commands: what the same commands left in the same state need not be run again.
_RUN: dict[tuple[str, ...], list[Outcome]] = {}


@pytest.mark.parametrize("scenario", all_scenarios())
def test_the_commands_of_a_page_print_what_it_says(
    scenario: Scenario, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    steps = [step for block in scenario.blocks for step in block.steps]
    key = (scenario.state, *(step.text for step in steps))
    if key not in _RUN:
        world = World(tmp_path, request.getfixturevalue)
        try:
            STATES[scenario.state].prepare(world)
            _RUN[key] = [carry_out(world, step) for step in steps]
        finally:
            for leave in world.afterwards:
                leave()
    for step, outcome in zip(steps, _RUN[key], strict=True):
        check(step, outcome, f"{scenario.page.relative_to(ROOT)}:{step.line}")


def carry_out(world: World, step: Command) -> Outcome:
    """Run a command line or SQL of a page."""
    text = step.text
    for blank, value in world.names.items():
        text = re.sub(rf"\b{blank}\b", value, text)
    if step.is_sql:
        return query(world, text)
    done = run(text, directory=world.directory, env=world.env)
    return Outcome(done.returncode, normalise(done.stdout, world.aliases), done.stderr)


def query(world: World, text: str) -> Outcome:
    """Run SQL in a transaction, and commit it; it must be understood."""
    try:
        with psycopg.connect(world.database.url) as connection:
            connection.execute(text.encode())
    except psycopg.Error as error:
        return Outcome(1, [], str(error))
    return Outcome(0, [], "")


def check(step: Command, outcome: Outcome, where: str) -> None:
    """Hold what a command left against what the page says."""
    if outcome.exit_code != step.exit_code:
        printed = "\n".join(outcome.printed)
        said = (
            f"{where}: {step.text}\nexit {outcome.exit_code}, documented: {step.exit_code}\n{printed}\n{outcome.stderr}"
        )
        pytest.fail(said, pytrace=False)
    if difference := differs(normalise("\n".join(step.expected)), outcome.printed):
        pytest.fail(f"{where}: {step.text}\n{difference}\n\nstderr:\n{outcome.stderr}", pytrace=False)


@every_page
def test_no_crmctl_command_of_a_page_escapes_the_tests(page: Path) -> None:
    for block in blocks(page):
        if crmctl_commands(block):
            assert block.language == "console", f"{page.name}:{block.line} runs crmctl, but is no console block"
    for scenario in scenarios(page):
        assert scenario.state in STATES, f"{page.name}: there is no state {scenario.state!r}"


@every_page
def test_every_command_of_a_console_shows_its_output_or_changes_the_shell_only(page: Path) -> None:
    for block in blocks(page):
        if block.language == "console":
            assert block.commands, f"{page.name}:{block.line} has no command"
            for command in block.commands:
                shown = command.expected or command.exit_code or command.text.startswith("export ")
                assert shown, f"{page.name}:{command.line} shows no output"


@every_page
def test_what_a_page_shows_of_an_output_can_be_wrong(page: Path) -> None:
    for block in blocks(page):
        for command in block.commands:
            shown = [line.strip() for line in command.expected]
            says = [line for line in shown if line not in ("", "…") and not HEADER.fullmatch(line)]
            assert says or not shown, f"{page.name}:{command.line} shows nothing that could differ"


@every_page
def test_the_revisions_that_a_page_expects_are_those_of_the_migrations(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for branch, head in heads().items():
        expected = re.findall(rf"^\s*{branch} +\S+ +({branch}_\d+) ", text, re.MULTILINE)
        assert set(expected) <= {head}, page.name


@every_page
def test_a_line_for_the_shell_can_be_pasted(page: Path) -> None:
    for block in blocks(page):
        lines = [command.text for command in block.commands] or block.text.splitlines()
        for line in lines if block.language in ("console", "sh") else ():
            assert "{{" not in line, f"{page.name}:{block.line} has braces that a template left: {line}"
            if "port-forward" in line:
                assert line.endswith("&"), f"{page.name}:{block.line} goes on before the port is open: {line}"
            if "curl" in line and "127.0.0.1" in line:
                assert "--retry-connrefused" in line, f"{page.name}:{block.line} does not wait for the port: {line}"


@every_runbook
def test_what_verifies_a_runbook_did_not_hold_before(page: Path) -> None:
    """A Verify that prints what the Diagnosis printed passes before anything is mended."""
    diagnosis, verify = (
        {command.printed for block in blocks(page) if block.section == section for command in block.commands}
        for section in ("Diagnosis", "Verify")
    )
    assert not {text for text, *_ in diagnosis & verify}, page.name


@every_runbook
def test_a_runbook_has_its_six_sections_and_a_command_to_verify_with(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS
    assert text.startswith(f"# {page.stem}\n")
    verify = text.split("## Verify")[1].split("## Escalate")[0]
    assert "```" in verify or re.search(r"\]\([^)]+\.md\)", verify)


def test_every_state_is_used() -> None:
    used = {block.state for page in PAGES for block in blocks(page) if block.state}
    assert used == STATES.keys()


def test_a_wrong_page_is_noticed(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- state: overdue bookings -->\n```console\n$ crmctl bookings list --due\nNo bookings.\n```\n")
    (scenario,) = scenarios(page)
    world = World(tmp_path, request.getfixturevalue)
    STATES[scenario.state].prepare(world)
    (command,) = scenario.blocks[0].commands
    outcome = carry_out(world, command)
    with pytest.raises(pytest.fail.Exception, match="documented"):
        check(command, outcome, page.name)
    with pytest.raises(pytest.fail.Exception, match="exit 0, documented: 12"):
        check(replace(command, exit_code=12), outcome, page.name)


def test_the_comparison_forgives_what_differs_from_run_to_run_and_nothing_else() -> None:
    def same(documented: str, printed: str) -> bool:
        return differs(normalise(documented), normalise(printed)) is False

    assert same("id  1b4e28ba-2fa1-41d2-883f-0016d3cca427", "id     6f1c9a52-8a2e-4c1b-9a53-0d3f3f6b9e11")
    assert same("at  2026-11-29T10:00:00+00:00", "at  2025-01-01T23:59:59.999999+00:00")
    assert same("first\n…\nlast", "first\nanything\nat all\nlast")
    assert same("lag  12.3", "lag  3600.001")
    assert same("id  new  -  7200  yes", "id  new  -  7203  yes")
    assert not same("id  new  -  7200  yes", "id  blocked  -  7200  yes")
    assert not same("lag  0.0", "lag  3600.001")
    assert not same("bookkeeping_0003  current", "bookkeeping_0006  current")
    assert not same("Expired  3", "Expired  4")
    assert not same("first\nlast", "first\nanything\nlast")


def test_the_repository_has_pages_to_check() -> None:
    assert ROOT / "README.md" in PAGES
    assert len(PAGES) > 4
