"""The Dockerfile's promises, read from its text: no image can be built where the tests run."""

import json
import re
from typing import Final

from tests.deploy.support import ROOT

DOCKERFILE: Final = (ROOT / "Dockerfile").read_text(encoding="utf-8")
STAGES: Final = re.split(r"(?m)^FROM ", DOCKERFILE)[1:]


def instructions(stage: str, name: str) -> list[str]:
    return re.findall(rf"(?m)^{name} (.+)$", stage)


def test_there_are_two_stages_and_the_result_takes_only_the_environment_from_the_first() -> None:
    build, result = STAGES
    assert build.startswith("${BASE} AS build\n")
    assert result.startswith("${BASE}\n")
    assert instructions(result, "COPY") == ["--from=build /opt/crmctl /opt/crmctl"]
    assert instructions(result, "RUN") == []


def test_everything_from_an_index_is_named_by_hash_and_comes_as_a_wheel() -> None:
    runs = [json.loads(line) for line in instructions(STAGES[0], "RUN")]
    installs = [run for run in runs if "install" in run]
    assert len(installs) == 2
    for run in installs:
        assert {"--no-deps", "--require-hashes", "--only-binary=:all:"} <= set(run)
    locks = {run[run.index("--requirement") + 1] for run in installs}
    assert locks == {"requirements/runtime.lock", "requirements/build.lock"}
    for lock in locks:
        text = (ROOT / lock).read_text()
        pinned = re.findall(r"(?m)^[a-z0-9.-]+(?:\[[a-z,]+\])?==", text)
        assert pinned
        assert len(pinned) == len(re.findall(r"==[^\n]*\\\n    --hash=sha256:", text))
    (ours,) = (run for run in runs if run[0] == "sh")
    assert "--no-index" in ours[2]
    assert not re.search(r"apt-get|apk |gcc|build-essential|curl|wget", DOCKERFILE)


def test_it_runs_crmctl_as_process_one_and_as_nobody_by_number() -> None:
    result = STAGES[1]
    assert instructions(result, "ENTRYPOINT") == ['["crmctl"]']
    (user,) = instructions(result, "USER")
    assert re.fullmatch(r"\d{5,}:\d{5,}", user)


def test_the_base_is_a_slim_image_of_a_python_that_the_project_supports() -> None:
    (base,) = re.findall(r"(?m)^ARG BASE=python:(\d+)\.(\d+)-slim-[a-z]+$", DOCKERFILE)
    required = re.search(r'requires-python = ">=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert required is not None
    assert tuple(map(int, base)) >= tuple(map(int, required.groups()))


def test_it_says_what_it_is() -> None:
    for label in ("title", "description", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in STAGES[1]


def test_the_build_sees_what_it_copies_and_nothing_else() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignore
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    copied = {source for line in instructions(STAGES[0], "COPY") for source in line.split()[:-1]}
    assert allowed == copied
    assert all((ROOT / path).exists() for path in copied)
