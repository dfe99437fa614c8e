"""The decoding loop writes what `reference_decode` writes, and that writes what plain decoding does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from streamspec.runtime.decoding.loop import SpeculativeDecoder
from streamspec.runtime.decoding.policy import DecodingPolicy
from streamspec.runtime.decoding.reference import Distribution, reference_decode
from streamspec.runtime.options import GenerationOptions
from streamspec.runtime.sampling.sampling_params import Sampling
from tests.support.toy_runner import ToyRunner

VOCABULARY, EOS = 8, (5,)
PROMPT = [1, 2, 3]
seeds, gammas, limits = st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 40)


def random_distribution(seed: int) -> Distribution:
    """Another distribution after every text."""
    return lambda text: np.random.default_rng([seed, *text]).dirichlet(np.ones(VOCABULARY))


def loops_answer(runner: ToyRunner, sampling: Sampling, rows: int, limit: int) -> list[int]:
    options = GenerationOptions(max_new_tokens=limit, sampling=sampling)
    decoder = SpeculativeDecoder(runner, options, DecodingPolicy(EOS, rows))
    return [token for committed in decoder.run(PROMPT) for token in committed.tokens]


@given(seeds, seeds, gammas, limits, st.booleans())
def test_whatever_the_drafter_the_text_is_that_of_plain_decoding(
    target: int, drafter: int, gamma: int, limit: int, sampled: bool
) -> None:
    p, q = random_distribution(target), random_distribution(drafter)
    uniform = Sampling(temperature=1.0, seed=target).uniform if sampled else None
    plain = reference_decode(p, q, PROMPT, limit, 0, EOS, uniform)
    assert reference_decode(p, q, PROMPT, limit, gamma, EOS, uniform) == plain
    assert 0 < len(plain) <= limit and not set(plain[:-1]) & set(EOS)
    assert len(plain) == limit or plain[-1] in EOS


def test_a_drafter_that_is_the_target_needs_one_call_for_gamma_plus_one_tokens() -> None:
    p, calls = random_distribution(7), list[int]()

    def counted(text: Sequence[int]) -> np.ndarray:
        calls.append(len(text))
        return p(text)

    answer = reference_decode(counted, p, PROMPT, 20, 4)
    assert len(answer) == 20 and len(calls) == 4 * 5  # four calls of five rows


@settings(max_examples=60, deadline=None)
@given(seeds, gammas, limits, st.integers(1, 20), st.floats(0, 1), st.booleans())
def test_the_loop_writes_what_the_reference_writes(
    seed: int, gamma: int, limit: int, rows: int, skill: float, sampled: bool
) -> None:
    p, q = random_distribution(seed), random_distribution(seed + 1)
    sampling = Sampling(temperature=1.0, seed=seed) if sampled else Sampling()

    def chosen(text: Sequence[int]) -> int:  # by the graph
        if not sampled:
            return int(np.argmax(p(text)))
        return int(np.searchsorted(np.cumsum(p(text)), sampling.uniform(len(text)), side="right"))

    runner = ToyRunner(chosen, VOCABULARY, gamma=3, context=64, skill=skill, seed=seed)
    expected = reference_decode(p, q, PROMPT, limit, gamma, EOS, sampling.uniform if sampled else None)
    assert loops_answer(runner, sampling, rows, limit) == expected


@settings(max_examples=40, deadline=None)
@given(seeds, gammas, limits, st.integers(1, 20), st.sampled_from([0.0, 0.7, 1.3]))
def test_logits_that_the_runtime_adjusts_give_what_the_reference_gives(
    seed: int, gamma: int, limit: int, rows: int, temperature: float
) -> None:
    bias = {2: 1.5, 6: -3.0}
    sampling = Sampling(temperature=temperature, seed=seed, logit_bias=bias)

    def p(text: Sequence[int]) -> np.ndarray:  # of the toy's logits
        scores = np.random.default_rng([*text]).normal(size=VOCABULARY).astype(np.float32).astype(np.float64)
        scores[list(bias)] += list(bias.values())
        weights = np.exp((scores - scores.max()) / (temperature or 1.0))
        return np.asarray(weights / weights.sum())

    runner = ToyRunner(lambda text: seed % VOCABULARY, VOCABULARY, context=64, seed=seed)
    uniform = sampling.uniform if temperature else None
    expected = reference_decode(p, random_distribution(seed), PROMPT, limit, gamma, EOS, uniform)
    assert loops_answer(runner, sampling, rows, limit) == expected
