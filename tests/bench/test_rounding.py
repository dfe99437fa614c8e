"""Logits that round differently by the number of rows of a call, as on CUDA and in captured graphs: what differs by
that alone is a near-tie, anything else a mismatch. Covers SessionTieBreaker with compare_outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streamspec.bench.arms import SessionTieBreaker
from streamspec.bench.tie_breaker import Agreement, compare_outputs
from streamspec.runtime import Sampling
from streamspec.runtime.decoding.model_runner import StepRequest, StepResult
from tests.support.toy_runner import Setup, ToyRunner

VOCAB, ROUNDING, LIMIT = 6, 1e-4, 40
PROMPTS = [[1, 2, seed] for seed in range(6)]


class RoundingRunner(ToyRunner):
    """Its logits are a hash of the text; in a fifth of all places the best two are closer than the rounding of calls,
    which depends on their rows. `wrong`: by how much rows of a draft with branches are off besides."""

    def __init__(self, wrong: float = 0.0) -> None:
        super().__init__(lambda ids: int(self.logits(ids, self.calls[-1][0]).argmax()), VOCAB, context=128)
        self.wrong, self.branched = wrong, False

    def logits(self, ids: Sequence[int], rows: int) -> np.ndarray:
        random = np.random.default_rng([VOCAB, *ids])
        logits = random.permutation(VOCAB) + random.random(VOCAB) / 4
        if random.random() < 0.2:
            second, best = np.argsort(logits)[-2:]
            logits[second] = logits[best] - ROUNDING * random.random()
        logits += np.random.default_rng([rows, *ids]).uniform(-ROUNDING, ROUNDING, VOCAB)
        return logits + self.wrong * self.branched * random.standard_normal(VOCAB)

    def verify(self, request: StepRequest) -> StepResult:
        self.branched = len(request.tree) > request.tree.depth + 1
        try:
            return super().verify(request)
        finally:
            self.branched = False


class RoundingArm:
    """An arm of `bench` over such a runner, and its session."""

    def __init__(self, wrong: float = 0.0) -> None:
        self.runner, self.sampling, self.session = RoundingRunner(wrong), Sampling(), self
        self.manifest = SimpleNamespace(model=SimpleNamespace(vocab_size=100))

    def answer(self, prompt: Sequence[int], limit: int, rows: int = 6) -> Any:
        self.runner.reset()
        decoder = Setup(limit, rows=rows).decoder(self.runner)
        return SimpleNamespace(token_ids=[token for done in decoder.run(prompt) for token in done.tokens])

    def score(self, ids: Sequence[int], start: int = 0) -> np.ndarray:
        return np.stack([self.runner.logits(ids[: end + 1], len(ids) - start) for end in range(start, len(ids))])

    def score_one_by_one(self, ids: Sequence[int]) -> np.ndarray:
        return np.stack([self.runner.logits(ids[: end + 1], 1) for end in range(len(ids))])


def agreements(wrong: float) -> tuple[list[Agreement], SessionTieBreaker]:
    arm = RoundingArm(wrong)
    plain = [arm.answer(prompt, LIMIT, rows=1).token_ids for prompt in PROMPTS]
    breaker: Any = SessionTieBreaker(arm, [p + a for p, a in zip(PROMPTS, plain, strict=True)])  # type: ignore[arg-type]
    asked = zip(PROMPTS, plain, strict=True)
    return [compare_outputs(p, a, arm.answer(p, LIMIT).token_ids, breaker) for p, a in asked], breaker


def test_what_rounds_differently_by_rows_is_a_near_tie() -> None:
    found, breaker = agreements(wrong=0)
    assert breaker.tolerance() == pytest.approx(4 * ROUNDING, rel=0.2)
    assert sum(one.near_ties for one in found) > 3 and not any(one.mismatches for one in found)
    assert all(0 <= margin <= 3 * ROUNDING for one in found for margin in one.margins)


def test_anything_else_is_a_mismatch() -> None:
    """Nodes of a tree that are off are no rounding: prompts, which the tolerance is measured on, do not show it."""
    found, breaker = agreements(wrong=1.0)
    assert breaker.tolerance() == pytest.approx(4 * ROUNDING, rel=0.2)
    assert sum(one.mismatches for one in found) > 3
    assert all(one.margins[-1] > breaker.tolerance() for one in found if one.mismatches)
