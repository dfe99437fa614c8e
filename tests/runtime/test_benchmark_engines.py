"""What the benchmarks decode with beside the runtime itself writes plain decoding's tokens too; what they train
learns.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamspec.draft_tree import DraftTree
from streamspec.runtime import load
from streamspec.runtime.costs.row_costs import RowCosts
from streamspec.runtime.decoding.loop import SpeculativeDecoder
from streamspec.runtime.decoding.model_runner import StepRequest, StepResult
from streamspec.runtime.decoding.policy import DecodingPolicy
from streamspec.runtime.options import GenerationOptions

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROMPTS = ["hello", "abc", "The lighthouse", "a b c d e f"]
Bundles = Callable[[str], Path]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("trees", "long_context", "typical", "ablations"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def written(decoder: SpeculativeDecoder, prompt: list[int]) -> list[int]:
    return [token for done in decoder.run(prompt) for token in done.tokens]


def test_cartesian_has_all_combinations_depth_first(scripts: Any) -> None:
    from trees import cartesian

    tree = cartesian(3, 2)
    assert len(tree) == 1 + 3 + 9
    assert {tree.ranks_to(i) for i in range(len(tree)) if tree.depths[i] == 2} == {
        (a, b) for a in range(3) for b in range(3)
    }
    assert tree.path(2) == (0, 1, 2)


def test_long_contexts_are_measured_and_predicted(
    bundles: Bundles, scripts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sides' answers are compared by the script itself."""
    import long_context

    with gzip.open(tmp_path / "books", "wt") as file:
        file.write("".join(json.dumps({"text": f"{line} once upon a time " * 20}) + "\n" for line in range(3)))
    monkeypatch.setattr(long_context, "bundle_of", lambda out, base, dtype: bundles("endless fp32"))
    words = ["x", tmp_path / "out", "--books", tmp_path / "books", "--contexts", 160, "--draft", "window:128"]
    monkeypatch.setattr(sys, "argv", list(map(str, [*words, "--max-new-tokens", 30, "--threads", 1])))
    for _ in range(2):
        long_context.main()
        monkeypatch.setattr(long_context, "load", None)  # the second time nothing is measured
    found = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert list(found) == [
        f"smollm2-135m-{d} 160 {what}" for d in ("float32", "float16") for what in ("costs", "speeds")
    ]
    sides = found["smollm2-135m-float32 160 speeds"]
    assert sides["plain"]["steps"] == sides["plain"]["new"] == 58 and sides["plain"]["tried"] == 0
    assert sides["window, gamma 4"]["steps"] < 58 and sides["window, gamma 4"]["accepted"] > 0
    shown = capsys.readouterr().out.splitlines()
    assert sum("window, gamma 4" in line and not line.endswith("- |") for line in shown) == 4


def test_a_peers_worker_answers_alike_in_all_modes_and_leaves_the_drafter_out_where_told(
    bundles: Bundles, scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peer_engines.worker import Streamspec

    engine = Streamspec({"model": bundles("fp32"), "threads": 1})
    engine.session.policy = replace(engine.session.policy, rows=8, costs=RowCosts(np.linspace(1, 1.2, 8)))
    runner, drafted = engine.session.runner, list[bool]()
    for name, run in (("verify", runner.verify), ("prefill", runner.prefill)):

        def call(request: StepRequest, *rest: Any, _run: Any = run) -> StepResult:
            drafted.append(request.run_drafter)
            return _run(request, *rest)

        monkeypatch.setattr(runner, name, call)
    answers = {}
    for mode in ("plain", "n-grams", "default"):
        drafted.clear()
        answers[mode] = [engine.answer(engine.session.encode(prompt), 24, mode, {}) for prompt in PROMPTS]
        assert any(drafted) == (mode == "default")
    assert len({str([one["tokens"] for one in some]) for some in answers.values()}) == 1
    assert sum(one["step_tokens"] for one in answers["n-grams"]) > 0 == sum(one["steps"] for one in answers["plain"])
    assert all(0 < one["first"] + one["decode"] <= one["whole"] for some in answers.values() for one in some)


def test_a_peers_warm_up_teaches_no_texts(bundles: Bundles, scripts: Any) -> None:
    from peer_engines.worker import Streamspec

    steps = []
    for warm in (False, True):
        engine = Streamspec({"model": bundles("lora"), "threads": 1})
        engine.session.policy = replace(engine.session.policy, rows=8, costs=None)
        prompt = engine.session.encode(PROMPTS[0])
        if warm:
            engine.warm(prompt, 40, "default", {})
        found = [engine.answer(prompt, 40, "default", {}) for _ in range(2)]
        steps.append([one["steps"] + one["plain_steps"] for one in found])
    assert steps[0] == steps[1] and steps[0][1] < steps[0][0]


@pytest.mark.parametrize("tree", ["6", "8:3", "8:0.1", "8f", "2x2", "1x3", "2x2c"])
def test_every_tree_writes_what_plain_decoding_writes(bundles: Bundles, scripts: Any, tree: str) -> None:
    from trees import decoder_of

    session = load(bundles("fp32"), threads=1, tree=2)
    steps = tokens = 0
    for prompt in map(session.encode, PROMPTS):
        decoders = [
            decoder_of(name, session.runner, 40, DecodingPolicy(sources=()), session.manifest.trees)
            for name in ("plain", tree)
        ]
        plain, drafted = (written(decoder, prompt) for decoder in decoders)
        assert drafted == plain
        stats = decoders[1].stats
        steps, tokens = steps + stats.steps, tokens + stats.step_tokens
        if (size := {"8f": 8, "2x2": 7, "1x3": 4, "2x2c": 7}.get(tree)) is not None:  # the same in every step
            assert stats.drafts.rows == size * stats.steps
    assert steps and tokens >= steps


def test_typical_acceptance_is_exact_where_nothing_is_typical_and_lossy_where_all_is(
    bundles: Bundles, scripts: Any
) -> None:
    from typical import TypicalEngine

    session: Any = load(bundles("fp32"), threads=1, tree=8)
    pace = {}
    for name, epsilon, delta in (("exact", 1.0, 1e9), ("lossy", 1e-9, 1e9)):
        engine, tokens, steps, same = TypicalEngine(session.runner, epsilon, delta, 0.7), 0, 0, []
        for prompt in map(session.encode, PROMPTS):
            plain, drafted = (
                SpeculativeDecoder(e, GenerationOptions(30), DecodingPolicy(rows=rows, sources=()))
                for e, rows in ((session.runner, 1), (engine, 8))
            )
            same.append(written(plain, prompt) == written(drafted, prompt))
            tokens, steps = tokens + drafted.stats.step_tokens, steps + drafted.stats.steps
        pace[name] = tokens / steps
        assert all(same) == (name == "exact")
    assert pace["lossy"] > 2 * pace["exact"]


@pytest.mark.parametrize(
    ("root", "child", "accepted"),
    [
        # exp(-H) of the root is 0.216: the limit 0.13 lies below 0.19, though that is less than epsilon
        ((0.35, 0.1, 0.19, 0.18, 0.18, 0), (0.7, 0.1, 0.2, 0, 0, 0), 2),
        # exp(-H) of the root is 0.449: the limit is epsilon, above 0.2; that of the row after the candidate is 0.12
        ((0.7, 0.1, 0.2, 0, 0, 0), (0.3, 0.2, 0.2, 0.14, 0.14, 0.02), 0),
        # exp(-H) of the root is 0.482: epsilon lies below 0.26, delta exp(-H) = 0.29 above it
        ((0.7, 0.26, 0.04, 0, 0, 0), (0.3, 0.2, 0.2, 0.14, 0.14, 0.02), 1),
    ],
)
def test_a_token_is_typical_by_the_entropy_of_the_row_it_follows(
    scripts: Any, root: tuple[float, ...], child: tuple[float, ...], accepted: int
) -> None:
    from typical import TypicalEngine

    temperature = 0.7
    logits = np.log(np.maximum([root, child, child], 1e-12)) * temperature

    class Fixed:
        def forward(self, *_: Any) -> np.ndarray:
            return logits

        def prefill(self, request: StepRequest) -> StepResult:
            return StepResult([5], 0)

    engine: Any = TypicalEngine(Fixed(), 0.25, 0.6, temperature)  # type: ignore[arg-type]
    found = engine.verify(StepRequest([5, 1, 2], DraftTree((0, 0, 0), (0, 0, 1)), run_drafter=True))
    assert (found.accepted, found.choices[0]) == (accepted, (0, 1, 2)[accepted])


def test_of_typical_paths_the_longest_is_taken(scripts: Any) -> None:
    from typical import TypicalEngine

    tree, tokens = (
        DraftTree((0, 0, 0, 2), (0, 0, 1, 0)),
        [9, 1, 2, 3],
    )  # 1 is likelier than 2, but 3 follows 2
    probabilities = np.full((4, 6), 1e-6)
    probabilities[0, [1, 2]], probabilities[2, 3], probabilities[1, 4], probabilities[3, 5] = (0.6, 0.4), 1, 1, 1

    class Fixed:
        def forward(self, *_: Any) -> np.ndarray:
            return np.log(probabilities)

        def prefill(self, request: StepRequest) -> StepResult:
            return StepResult([5], 0)

    engine: Any = TypicalEngine(Fixed(), 0.3, 1e9, 1.0)  # type: ignore[arg-type]
    found = engine.verify(StepRequest(tokens, tree, run_drafter=True))
    assert found.accepted == 3 and [found.choices[row] for row in (0, 2, 3)] == [2, 3, 5]
