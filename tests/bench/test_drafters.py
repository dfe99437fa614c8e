"""benchmarks/drafters.py: the sides that a bundle has, and the prediction beside what is measured."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from streamspec.bench.prompts import BenchPrompt
from streamspec.export import export_bundle
from streamspec.export.answer_store import StoreFiles
from streamspec.runtime.costs.row_costs import RowCosts
from streamspec.runtime.decoding.policy import AdaptiveState
from streamspec.runtime.sampling.sampling_params import GREEDY
from tests.support.tiny_bundles import tiny_adapter, tiny_base

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
drafters = __import__("drafters")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """One with streams and a store of answers, and one with a graph of fewer layers."""
    folder = tmp_path_factory.mktemp("drafters")
    base, texts = tiny_base(folder / "base"), folder / "answers.jsonl"
    texts.write_text('{"text": "w1 w2 w3 w4 w5 w6"}\n' * 4, encoding="utf-8")
    adapter, quiet = tiny_adapter(folder / "adapter", base), lambda line: None
    export_bundle(base, adapter, folder / "streams", "fp32", progress=quiet, store=StoreFiles([texts]))
    export_bundle(base, None, folder / "bare", "fp32", progress=quiet, self_draft="2")
    return str(folder / "streams"), str(folder / "bare")


def test_a_side_is_measured_with_everything_that_its_bundle_has(bundles: tuple[str, str]) -> None:
    streams, bare = bundles
    names = [arm.name for arm in drafters.arms([streams, f"{bare}:ngram"], True, 1, GREEDY, None)]
    assert names[:4] == ["plain", "streams", "streams + text", "streams + store"]
    assert names[4:] == ["bare:ngram", "bare:ngram + text", "bare:ngram + fewer layers"]
    assert len(drafters.arms([f"{streams}:store"], False, 1, GREEDY, None)) == 2


@pytest.mark.parametrize("rows", [None, 6])
def test_each_row_has_a_prediction_from_costs_of_the_run(bundles: tuple[str, str], rows: int | None) -> None:
    sides = drafters.arms(list(bundles[:1]), True, 1, GREEDY, rows)
    for session in (
        {side.session for side in sides} if rows is None else ()
    ):  # drafts that always pay, whatever ran beside
        session.policy = replace(session.policy, costs=RowCosts(np.ones(session.policy.rows)))
        session.adaptive = AdaptiveState(session.policy)
    found, unequal = drafters.measure(sides, [BenchPrompt([f"w{i} w7"]) for i in range(6)], 24, 2)
    assert unequal == 0 and len(found) == 3
    own = found[0].theory
    assert own is not None and 0 <= own.alpha <= 1 and own.speedup > 0
    assert rows is None or sides[1].session.policy.costs.steps == 24  # a plain step and its own, of each answer
