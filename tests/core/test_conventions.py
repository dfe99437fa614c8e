"""The conventions of CONTRIBUTING.md that a machine can check, on the product's four folders and on the docs."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("streamspec", "adapters", "export", "runtime")
GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
MOST_LINES, MOST_FILES = 100, 12  # of a function; of a folder
MANY_FILES = {"streamspec/cli"}  # one file per command
# What users' programs read stays as it is: keys and names in --json output.
KEPT = ('"first guesses right"', 'f"chance {')


def sources() -> list[Path]:
    return [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def forbidden() -> list[str]:
    """Words in code type in the last column of the glossary's tables."""
    rows = [line for line in GLOSSARY.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return sorted({word for row in rows for word in re.findall(r"`(\w+)`", row.split("|")[-2])})


def test_the_glossary_names_the_words_that_are_not_used() -> None:
    assert {"guess", "chance", "behind", "governor"} <= set(forbidden())


@pytest.mark.parametrize("word", [*forbidden(), "knows nothing"])
def test_product_code_uses_the_glossarys_words(word: str) -> None:
    found = [
        f"{named(path)}:{number}: {line.strip()}"
        for path in sources()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if word in line.lower() and not any(kept in line for kept in KEPT)
    ]
    assert not found, "\n".join(found)


def test_each_class_name_occurs_once() -> None:
    where = defaultdict(list)
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(named(path))
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "streamspec" else ("streamspec", *parts))


def imported(path: Path, modules: set[str]) -> Iterator[str]:
    """Modules of the package that a file imports anywhere, but for type checkers."""
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else node.module for name in names)


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {module_of(path): path for path in sources()}
    TopologicalSorter({name: set(imported(path, set(modules))) for name, path in modules.items()}).prepare()


def test_no_function_is_long_and_no_folder_crowded() -> None:
    functions = {
        f"{named(path)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(functions) > 1000
    assert {name: lines for name, lines in functions.items() if lines > MOST_LINES} == {}
    files = defaultdict(list)
    for path in sources():
        if path.name not in ("__init__.py", "__main__.py"):
            files[named(path.parent)].append(path.name)
    crowded = {folder: names for folder, names in files.items() if len(names) > MOST_FILES}
    assert set(crowded) <= MANY_FILES, crowded


def test_pyproject_lists_every_package() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = {module_of(path) for path in sources() if path.name == "__init__.py"}
    data_only = {"streamspec.demo.sql_adapter"}
    assert set(setuptools["packages"]) == found | data_only


def test_docs_hold_no_targets_and_no_commits() -> None:
    """What was aimed at and which commit measured what is history: docs/lab has it."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [
        f"{named(page)}:{number}"
        for page in pages
        if (ROOT / "docs" / "lab") not in page.parents
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1)
        if "Asked:" in line or re.search(r"commit `?[0-9a-f]{7}", line)
    ]
    assert not found, found


def test_the_loop_is_the_algorithm_alone() -> None:
    """What a call computes is the planner's, what is learned from it the observers'."""
    source = (ROOT / "runtime" / "decoding" / "loop.py").read_text(encoding="utf-8")
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    features = re.compile(r"gate|depth|explor|lookahead|recycl|ngram|store|window|prun|logprob|sampler|costs|together")
    assert not [name for name in names if features.search(name.lower())]
    assert len(source.splitlines()) <= 200
