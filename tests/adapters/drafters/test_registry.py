"""The table of drafters: every row is whole, and nothing outside it asks which drafter it has."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from streamspec import adapters
from streamspec.adapters.drafters.drafter_method import RECIPES
from streamspec.adapters.drafters.drafting_model import DraftingModel
from streamspec.adapters.drafters.registry import DRAFTERS
from streamspec.adapters.models import drafter_class
from streamspec.adapters.training.config import TrainConfig, grouped_fields
from streamspec.bundle.manifest import METHODS
from tests.support.tiny_models import options

FILES = sorted(Path(adapters.__path__[0]).rglob("*.py"))


def test_the_table_has_the_methods_of_bundles() -> None:
    assert tuple(DRAFTERS) == tuple(METHODS)


@pytest.mark.parametrize("method", DRAFTERS)
def test_a_row_names_options_recipes_and_a_network_that_exist(method: str, tmp_path: Path) -> None:
    row, names = DRAFTERS[method], {one.name for one in fields(TrainConfig)}
    assert all(issubclass(TrainConfig, group) for group in row.options)
    assert {*row.fixed, *row.defaults} <= names and (row.learns_alone or "gamma") in names
    assert set(row.warm_start) <= set(row.recipes) <= set(RECIPES)
    config = options(tmp_path, tmp_path, tmp_path, method=method)
    assert row.model is None or issubclass(drafter_class(config), DraftingModel)


def test_options_are_declared_once() -> None:
    groups = {group for _, group in grouped_fields()}
    assert sum(len(fields(group)) for group in groups) == len(fields(TrainConfig))


def test_no_code_asks_which_drafter_it_has() -> None:
    """No comparison with a method's name, no isinstance on a drafter."""
    found = []
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            words = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and part.value in DRAFTERS}
            names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            of_type = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
            if (isinstance(node, ast.Compare) and words) or (
                of_type and any(name.endswith("Model") or name == "drafter" for name in names)
            ):
                found.append(f"{file.name}:{node.lineno}")
    assert not found


def test_options_need_no_torch() -> None:
    code = "import sys, streamspec.cli.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
