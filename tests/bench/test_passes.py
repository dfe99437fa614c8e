"""bench on a real bundle: what passes and arms know of each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamspec.bench import bench
from tests.support.tiny_bundles import tiny_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    texts = ["t5 t6 t7", "t9 t8 t40", "t30 t31", "t5 t6 t7 t8"]
    file.write_text("".join(json.dumps({"prompt": text, "completion": "t1"}) + "\n" for text in texts))
    return file


def tau(bundle: Path, prompts: Path, repeats: int, **options: object) -> float:
    report = bench(bundle, prompts, max_new_tokens=60, repeats=repeats, tree=8, threads=1, **options)  # type: ignore[arg-type]
    assert report.identical == 1.0
    return report.speculative.tokens_per_step


def test_five_passes_commit_as_many_tokens_a_step_as_one(bundle: Path, prompts: Path) -> None:
    """A tree of fixed size: drafts do not depend on what steps cost here."""
    once = tau(bundle, prompts, repeats=1)
    assert once > 1.05
    assert tau(bundle, prompts, repeats=5) == once


def test_one_arms_answers_teach_no_other(bundle: Path, prompts: Path) -> None:
    assert tau(bundle, prompts, 1, rows=(4, 6), lookahead=True) == tau(bundle, prompts, 1, lookahead=True)
