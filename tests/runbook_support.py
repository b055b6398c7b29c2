"""How the pages' commands are found, run and compared: the fenced blocks of runbooks/ and of both README.md.

The convention, which docs/architecture.md explains to whoever writes a page:

- A block marked `console` holds command lines, each after `$ ` (a line that ends in `\\` goes on in the next one), and
  below each what it prints on stdout. A command must exit with 0, unless `$ echo $?` follows, with the code below it.
- `<!-- state: NAME -->` above a block puts the world into that state (tests/runbook_states.py) before it. The blocks
  up to the next such comment go on in the same world.
- Capitals in a command stand for what the operator fills in; the state says what that is.
- `…` on a line of its own stands for any lines, but never for all that an output has to say. Ids, moments, durations
  and ages are compared as such, whatever they are.
- SQL blocks are run as well, and committed. Of other programs only curl is, against this machine: what `export` and
  kubectl do beforehand is the state's business. A block with neither is not run.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = [ROOT / "README.md", ROOT / "deploy" / "README.md", *sorted((ROOT / "runbooks").glob("*.md"))]

_FENCE: Final = re.compile(r"^(\s*)```(\w*)\s*$")
_COMMENT: Final = re.compile(r"^\s*<!-- state: (.+?) -->\s*$")
# crmctl where a shell would start it: first on the line, or after an operator or an assignment.
_CRMCTL: Final = re.compile(
    r"(?:^|&&|\|\||[|;(]|\bsudo|\s[A-Z_]+=\S+|^[A-Z_]+=\S+)\s*(?:\.venv/bin/)?crmctl\s+([a-z-]+)"
)
_CURL: Final = re.compile(r"^curl .*\bhttp://127\.0\.0\.1[:/]")
_BEFOREHAND: Final = ("export ", "kubectl ")
_TIMEOUT: Final = 180.0


@dataclass(frozen=True, slots=True)
class Command:
    """A command line of a page, or SQL, and what it should print; `exit_code` as `echo $?` below it says."""

    line: int
    text: str
    expected: tuple[str, ...]
    exit_code: int = 0
    is_sql: bool = False

    @property
    def is_run(self) -> bool:
        """Whether it runs crmctl, or asks one that listens on this machine."""
        return _CRMCTL.search(self.text) is not None or _CURL.match(self.text) is not None

    @property
    def printed(self) -> tuple[str, tuple[str, ...], int]:
        """The command and what comes of it, as it is compared."""
        return self.text, tuple(normalise("\n".join(self.expected))), self.exit_code


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block; `state` is that of the comment directly above it, `section` the heading that it stands under."""

    line: int
    language: str
    text: str
    state: str | None = None
    section: str = ""

    @property
    def steps(self) -> list[Command]:
        """What there is to run."""
        if self.language == "sql":
            return [Command(self.line, self.text, (), is_sql=True)]
        return [command for command in self.commands if not command.text.startswith(_BEFOREHAND)]

    @property
    def commands(self) -> list[Command]:
        """The command lines of a console block."""
        found: list[Command] = []
        lines = self.text.splitlines()
        index = 0
        while index < len(lines):
            if not lines[index].startswith("$ "):
                index += 1
                continue
            start, text = index, lines[index][2:]
            while text.endswith("\\"):
                index += 1
                text = text[:-1] + lines[index].strip()
            index += 1
            expected = []
            while index < len(lines) and not lines[index].startswith("$ "):
                expected.append(lines[index])
                index += 1
            if text == "echo $?":
                last = found.pop()
                found.append(Command(last.line, last.text, last.expected, int(expected[0])))
            else:
                found.append(Command(self.line + 1 + start, text, tuple(expected)))
        return found


@dataclass(slots=True)
class Scenario:
    """The blocks of a page that go on in one world."""

    page: Path
    state: str
    blocks: list[Block] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Page, line and state, as a test's id."""
        return f"{self.page.relative_to(ROOT)}:{self.blocks[0].line}:{self.state.replace(' ', '-')}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, without the indentation that a list gives them."""
    found: list[Block] = []
    state: str | None = None
    section = ""
    opened: tuple[int, str, str] | None = None
    body: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = _FENCE.match(line)
        if opened is None:
            if fence:
                opened, body = (number, fence[1], fence[2]), []
            elif comment := _COMMENT.match(line):
                state = comment[1]
            elif line.strip():
                state = None
                section = line[3:] if line.startswith("## ") else section
        elif fence:
            start, indent, language = opened
            text = "\n".join(each.removeprefix(indent) for each in body)
            found.append(Block(start, language, text, state, section))
            opened, state = None, None
        else:
            body.append(line)
    assert opened is None, f"{page.name}: the block of line {opened} is not closed"
    return found


def is_run(block: Block) -> bool:
    """Whether the tests run it: a console with a command of ours in it, or SQL."""
    return block.language == "sql" or any(command.is_run for command in block.commands)


def scenarios(page: Path) -> list[Scenario]:
    """What there is to run on a page, in its order."""
    found: list[Scenario] = []
    for block in blocks(page):
        if block.state is not None:
            found.append(Scenario(page, block.state))
        if is_run(block):
            assert found, f"{page.name}:{block.line}: no state is named above the first block that is run"
            found[-1].blocks.append(block)
    return [scenario for scenario in found if scenario.blocks]


def crmctl_commands(block: Block) -> list[str]:
    """The first words after `crmctl` on every line of a block that a shell would run."""
    lines = [command.text for command in block.commands] if block.language == "console" else block.text.splitlines()
    return [word for line in lines for word in _CRMCTL.findall(line)]


def run(text: str, *, directory: Path, env: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run a command line as an operator's shell would, with this crmctl first on the PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("CRMCTL_", "PG"))}
    clean |= {name: os.environ[name] for name in ("CRMCTL_PG_BIN", "CRMCTL_CACHE_DIR") if name in os.environ}
    return subprocess.run(
        ["bash", "-c", text],
        cwd=directory,
        env=clean | {"PATH": path} | dict(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=_TIMEOUT,
        check=False,
    )


_NORMAL: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "ID"),
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d(?::?\d\d)?)?"), "TIME"),
    (re.compile(r"(Duration, ms|\"duration_ms\":|pid)\s+\d+"), r"\1 N"),
    (re.compile(r"\b127\.0\.0\.1:\d+"), "127.0.0.1:PORT"),
    # An installation's age: in its row, between what it is and whether it is stale; in the journal.
    (re.compile(r"(?<=\s)(new|active|blocked|deleted|-)(\s+)\d+(\s+)(yes|no)\b"), r"\1\2AGE\3\4"),
    (re.compile(r"\bage=\d+s\b"), "age=AGE"),
    # An age in seconds; what is not late at all stays 0.0.
    (re.compile(r"\b(?!0\.0\b)\d+\.\d+\b"), "SECONDS"),
    (re.compile(r"[ \t]+"), " "),
)


def normalise(text: str, names: Iterable[tuple[str, str]] = ()) -> list[str]:
    """The lines of an output with everything that differs from run to run replaced; `names` as (real, documented)."""
    for real, documented in names:
        text = text.replace(real, documented)
    for pattern, replacement in _NORMAL:
        text = pattern.sub(replacement, text)
    return [line.strip() for line in text.strip().splitlines()]


def differs(expected: list[str], actual: list[str]) -> Literal[False] | str:
    """Say how an output differs from the documented one, in which `…` stands for any lines; False if it does not."""
    pattern = "".join(r"(?:.*\n)*?" if line == "…" else re.escape(line) + r"\n" for line in expected)
    if re.fullmatch(pattern, "".join(f"{line}\n" for line in actual)):
        return False
    return "\n".join(["documented:", *expected, "", "printed:", *actual])
