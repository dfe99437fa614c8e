"""Every benchmark's imports of the package, most of them inside functions, exist, and what it measures is installed."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[2] / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_imports_what_exists(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("streamspec"):
            module = import_module(node.module)
            for name in (alias.name for alias in node.names):
                assert hasattr(module, name) or find_spec(f"{node.module}.{name}"), f"{node.module}.{name}"


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_runs_the_installed_package(path: Path) -> None:
    """From a clone's root `python -m` would find the clone first, which has no native library."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        words = [e.value for e in node.elts if isinstance(e, ast.Constant)] if isinstance(node, ast.List) else []
        if "-m" in words and words[words.index("-m") + 1 :][:1] == ["streamspec"]:
            assert "-P" in words, f"line {node.lineno}"
