"""`make chaos` runs at full counts what is marked `chaos`, so what has a full count must be marked."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FULL_COUNTS = {"scaled", "CHAOS_FULL", "full_run_only"}


def unmarked(source: str) -> list[str]:
    """The names in FULL_COUNTS that a module of tests uses outside of what it marks `chaos`, with their lines."""
    tree = ast.parse(source)
    if any(_is_mark(node.value) for node in tree.body if isinstance(node, ast.Assign) and _names(node) == "pytestmark"):
        return []
    return [f"{node.id}, line {node.lineno}" for node in _outside(tree) if node.id in FULL_COUNTS]


def _outside(node: ast.AST) -> Iterator[ast.Name]:
    if isinstance(node, ast.Name):
        yield node
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and any(_is_mark(mark) for mark in node.decorator_list):
        return
    for child in ast.iter_child_nodes(node):
        yield from _outside(child)


def _names(assignment: ast.Assign) -> str:
    return ", ".join(ast.unparse(target) for target in assignment.targets)


def _is_mark(node: ast.expr) -> bool:
    marks = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    return any(ast.unparse(mark) == "pytest.mark.chaos" for mark in marks)


@pytest.mark.parametrize("module", sorted(TESTS.rglob("test_*.py")), ids=lambda module: module.stem)
def test_what_has_a_full_count_is_marked_chaos(module: Path) -> None:
    assert unmarked(module.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def test(): scaled(5)", ["scaled, line 1"]),
        ("class Test:\n    def test(self): return 5 if CHAOS_FULL else 1", ["CHAOS_FULL, line 2"]),
        ("COUNT = scaled(5)", ["scaled, line 1"]),
        ("@pytest.mark.slow\ndef test(): scaled(5)", ["scaled, line 2"]),
        ("pytestmark = pytest.mark.slow\ndef test(): scaled(5)", ["scaled, line 2"]),
        ("@pytest.mark.chaos\ndef test(): scaled(5)", []),
        ("@pytest.mark.chaos\nclass Test:\n    def test(self): scaled(5)", []),
        ("pytestmark = pytest.mark.chaos\ndef test(): scaled(5)", []),
        ("pytestmark = [pytest.mark.real_kafka, pytest.mark.chaos]\ndef test(): scaled(5)", []),
        ("from tests.expire_support import scaled", []),
    ],
)
def test_a_use_without_the_mark_is_found(source: str, found: list[str]) -> None:
    assert unmarked(source) == found
