from __future__ import annotations

import ast
from pathlib import Path

from streamspec import export
from streamspec.bundle.manifest import METHODS
from streamspec.bundle.swappable_adapters import METHODS as SWAPPABLE
from streamspec.export.drafters.registry import DRAFTERS, row_of
from streamspec.export.weights.model_spec import describe
from tests.support.tiny_exports import tiny_heads, tiny_model, tiny_streams


def test_every_method_that_drafts_has_a_row() -> None:
    assert {*DRAFTERS, "lora"} == set(METHODS)


def test_a_swappable_bundle_takes_the_methods_whose_rows_say_so() -> None:
    assert {"lora", *(method for method, row in DRAFTERS.items() if row.swappable)} == set(SWAPPABLE)


def test_the_row_of_a_drafter_is_found_by_its_spec() -> None:
    spec = describe(tiny_model())
    assert row_of(tiny_streams(spec)) is DRAFTERS["streaming"]
    assert row_of(tiny_heads(spec)) is DRAFTERS["medusa"]


def test_nothing_in_export_asks_which_drafter_it_has() -> None:
    folder = Path(export.__file__).parent
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(folder.rglob("*.py"))}
    named = (f"{kind}{part}" for kind in ("Stream", "Medusa", "DraftLayer", "Draft") for part in ("Spec", "Pass"))
    drafters = {*named, "SwappableStreams"}
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                asked = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
                assert not asked & drafters, f"{file.name}:{node.lineno}: put it in the table of drafters"
