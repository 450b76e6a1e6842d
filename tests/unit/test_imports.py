"""The arrows of the house: who may import whom, who may see torch and LLVM, and that nobody sees `torch._inductor`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ferrite"

# What each part may import from Ferrite. A part is a file or a folder right below the package.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "collection": set(),
    "process": set(),
    "decisions": set(),
    "step_cost": set(),
    "options": {"errors"},
    "syntax": {"errors"},
    "loops": {"errors", "syntax"},
    "graph": {"decisions", "errors", "syntax"},
    "host": {"decisions", "errors", "syntax", "loops"},
    "lower": {"decisions", "errors", "syntax", "graph", "host", "loops"},
    "schedule": {"decisions", "errors", "syntax", "host", "loops", "step_cost"},
    "native": {"decisions", "errors", "loops", "process", "schedule"},
    "artifact": {"decisions", "errors", "graph", "host", "identity", "loops", "native", "syntax"},
    "report": {"artifact", "decisions", "errors", "graph", "options", "step_cost"},
    "registry": {"extension"},  # for the type of what it holds
    "failure": set(),
    "identity": {"errors", "graph", "process"},
    "extension": {"errors", "graph", "identity", "registry"},
    "passes": {"errors", "graph", "options", "report"},
    "numeric_check": {"decisions", "errors", "graph", "options", "passes", "report"},
    "pipeline": {
        "artifact",
        "decisions",
        "errors",
        "extension",
        "graph",
        "host",
        "loops",
        "lower",
        "native",
        "numeric_check",
        "options",
        "passes",
        "registry",
        "report",
        "schedule",
    },
    "schemes": {"artifact", "errors", "options", "pipeline", "report"},
    "carried": {"caching"},
    "caching": {
        "artifact",
        "carried",
        "collection",
        "errors",
        "graph",
        "host",
        "identity",
        "options",
        "registry",
        "report",
    },
    "cache": {"artifact", "caching", "errors", "options"},
    "command": {"cache", "errors"},
    "__main__": {"command"},
    "interface": {"graph"},
    "variants": {"errors", "failure", "graph"},
    "packaging": {"artifact", "caching", "errors", "options", "registry"},
    "compilation": {
        "artifact",
        "caching",
        "collection",
        "errors",
        "failure",
        "graph",
        "options",
        "packaging",
        "pipeline",
        "report",
        "schemes",
    },
    "backend": {
        "caching",
        "collection",
        "compilation",
        "decisions",
        "errors",
        "failure",
        "graph",
        "interface",
        "options",
        "packaging",
        "passes",
        "pipeline",
        "report",
        "variants",
    },
    "registration": {"backend"},
    "bisection": {"backend", "graph", "options", "passes", "report"},
    "__init__": {"artifact", "backend", "bisection", "cache", "carried", "errors", "extension", "options", "report"},
}
# Only the record may be written to from below; the rest of `report` belongs to the door.
KNOWS_REPORT = {
    "passes": {"report.record"},
    "numeric_check": {"report.record"},
    "pipeline": {"report.record"},
    "schemes": {"report.record"},
    "caching": {"report.record"},
}
SEES_TORCH = {
    "backend",
    "registration",
    "compilation",
    "failure",
    "bisection",
    "cache",
    "caching",
    "carried",
    "extension",
    "identity",
    "interface",
    "packaging",
    "schemes",
    "variants",
    "graph",
    "lower",
    "artifact",
    "report",
    "__init__",
}
SEES_LLVM = {"native", "host"}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_modules(path: Path) -> Iterator[str]:
    """Dotted names of everything that a file imports, wherever the statement stands, typing-only imports left out."""
    tree = ast.parse(path.read_text())
    for_types = {id(child) for node in ast.walk(tree) if is_type_checking(node) for child in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_arrows(path: Path) -> None:
    part = part_of(path)
    for module in imported_modules(path):
        words = module.split(".")
        if words[0] == "ferrite":
            target = words[1]
            assert target == part or target in ARROWS[part], f"{part} must not import {module}"
            if target == "report" and part in KNOWS_REPORT:
                assert ".".join(words[1:3]) in KNOWS_REPORT[part], f"{part} must not import {module}"
        elif words[0] == "torch":
            assert part in SEES_TORCH, f"{part} must not import {module}"
        elif words[0] == "llvmlite":
            assert part in SEES_LLVM, f"{part} must not import {module}"


def test_every_part_has_its_arrows() -> None:
    assert {part_of(path) for path in sources()} == set(ARROWS)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_inductor(path: Path) -> None:
    """Neither imported, nor reached by attributes, nor named in a string that could be imported."""
    tree = ast.parse(path.read_text())
    for module in imported_modules(path):
        assert "_inductor" not in module.split(".")
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            assert node.attr != "_inductor"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            assert "_inductor" not in node.value
