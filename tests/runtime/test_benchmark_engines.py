"""What the benchmarks decode with beside the runtime itself writes plain decoding's tokens too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamspec.runtime import load
from streamspec.runtime.loop import Decoder, Plan

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROMPTS = ["hello", "abc", "The lighthouse", "a b c d e f"]
Bundles = Callable[[str], Path]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("trees", "two_model"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def written(decoder: Decoder, prompt: list[int]) -> list[int]:
    return [token for done in decoder.run(prompt) for token in done.tokens]


@pytest.mark.parametrize("gamma", [1, 3])
@pytest.mark.parametrize("draft", ["int8", "lora"])
def test_two_models_write_what_the_target_writes(bundles: Bundles, scripts: Any, gamma: int, draft: str) -> None:
    from two_model import TwoModelEngine, decode

    target, small = (load(bundles(name), threads=1, tree="plain") for name in ("fp32", draft))
    steps = tokens = 0
    for prompt in map(target.encode, PROMPTS):
        plain, _, calls = decode(target.engine, prompt, Plan(30))
        assert calls == 29  # the first token is the prompt's
        engine = TwoModelEngine(target.engine, small.engine, gamma)
        drafted, _, calls = decode(engine, prompt, Plan(30, rows=gamma + 1, ngram=False))
        assert drafted == plain
        steps, tokens = steps + calls, tokens + len(plain) - 1
    assert tokens > 1.5 * steps  # a draft model so close to the target is often right


@pytest.mark.parametrize("tree", ["6", "8:3", "8:0.1", "8f", "2x2", "1x3"])
def test_every_tree_writes_what_plain_decoding_writes(bundles: Bundles, scripts: Any, tree: str) -> None:
    from trees import decoder_of

    session = load(bundles("fp32"), threads=1, tree=2)
    steps = tokens = 0
    for prompt in map(session.encode, PROMPTS):
        decoders = [decoder_of(name, session.engine, Plan(40, ngram=False), session.manifest.trees) for name in ("plain", tree)]
        plain, drafted = (written(decoder, prompt) for decoder in decoders)
        assert drafted == plain
        steps, tokens = steps + decoders[1].stats.steps, tokens + decoders[1].stats.step_tokens
    assert steps and tokens >= steps
