"""Penalties and biases that no graph knows: drafted output is plain output, and what transformers and the definitions
give. The distributions that graphs draw from: `tests/stats/test_sampling.py`.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from streamspec.errors import ConfigError
from streamspec.runtime import Grammar, Sampling, Session, load
from streamspec.runtime.sampling.sampling_params import (
    ADJUSTMENTS,
    DRAWN,
    GRAPH_INPUTS,
    PER_SEQUENCE,
    STEPS,
    AdjustedSampler,
)
from streamspec.step_graph import DRAW_INPUTS

Bundles = Callable[[str], Path]
PROMPT = [5, 9, 11, 3]
ADJUSTED: list[dict[str, Any]] = [
    {"frequency_penalty": 0.7, "logit_bias": {2: -100}},
    {"presence_penalty": -1.5, "logit_bias": {7: 2.5, 11: -100, 30: 1}},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2, "temperature": 1.3, "top_p": 0.9},
    {"logit_bias": {9: 1.5}, "temperature": 0.8, "top_k": 12, "min_p": 0.05},
]


@pytest.fixture(scope="module")
def session(bundles: Bundles) -> Session:
    return load(bundles("fp32"), threads=1, tree=8)


def test_each_parameter_is_applied_by_the_graph_or_by_the_host() -> None:
    """A field that neither knows would be ignored; one that only the host knows, in calls without logits."""
    names = {field.name for field in fields(Sampling)}
    assert names == {*GRAPH_INPUTS, *ADJUSTMENTS, "seed"}
    changed = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.2, "repetition_penalty": 1.5, "seed": 7}
    changed |= {"frequency_penalty": 1.0, "presence_penalty": 1.0, "logit_bias": {1: 1.0}}
    for name, value in changed.items():
        sampling = Sampling(**{name: value})  # type: ignore[arg-type]
        assert sampling.adjusted == (name in ADJUSTMENTS)
        assert (sampling.shared_call_key != Sampling().shared_call_key) == (name in {*GRAPH_INPUTS} - {*PER_SEQUENCE})
    assert changed.keys() == names
    assert tuple(name for name, _ in GRAPH_INPUTS.values()) == DRAW_INPUTS  # a captured graph reads them by place


@pytest.mark.parametrize("given", ADJUSTED, ids=str)
@pytest.mark.parametrize("bundle", ["fp32", "jakiro", "static full"])
def test_drafted_output_is_plain_output(bundles: Bundles, bundle: str, given: dict[str, Any]) -> None:
    session, drafted = load(bundles(bundle), threads=1, tree=8), 0
    changed = 0
    for seed in range(3):
        prompt, options = [*PROMPT, 3 + seed], {"max_new_tokens": 40, "seed": seed, **given}
        plain = session.generate(prompt, speculate=False, **options)
        answer = session.generate(prompt, **options)
        assert answer.token_ids == plain.token_ids
        changed += answer.token_ids != session.generate(prompt, max_new_tokens=40, seed=seed).token_ids
        drafted += sum(answer.drafted)
    assert drafted > 0 and changed


def test_also_under_a_grammar(session: Session) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "frequency_penalty": 1.0, "grammar": Grammar.regex("[a-d]{12}")}
    answer, plain = session.generate(PROMPT, **options), session.generate(PROMPT, speculate=False, **options)
    assert answer.token_ids == plain.token_ids and len(answer.text) == 12 and set(answer.text) <= {*"abcd"}
    free = session.generate(PROMPT, max_new_tokens=20, grammar=Grammar.regex("[a-d]{12}")).text
    assert max(Counter(answer.text).values()) <= max(Counter(free).values()) and answer.text != free


def test_the_drafter_goes_on_where_the_graph_chose_the_same(session: Session) -> None:
    """A bias that changes nothing costs no drafts."""
    seldom = {63: -1e-6}
    alike = session.generate(PROMPT, max_new_tokens=40, logit_bias=seldom)
    known = session.generate(PROMPT, max_new_tokens=40)
    assert alike.token_ids == known.token_ids and alike.stats.sources["drafter"].drafted > 0


def test_biases_and_repetition_penalty_are_those_of_transformers(bundles: Bundles, session: Session) -> None:
    base = AutoModelForCausalLM.from_pretrained(bundles("fp32").parent / "base", dtype=torch.float32)
    for bias in ({7: 3.0, 12: -5.0}, {20: 6.0}):
        hf = base.generate(
            torch.tensor([PROMPT]),
            max_new_tokens=24,
            do_sample=False,
            sequence_bias={(token,): value for token, value in bias.items()},
            repetition_penalty=1.3,
        )
        answer = session.generate(PROMPT, max_new_tokens=24, logit_bias=bias, repetition_penalty=1.3)
        assert answer.token_ids == hf[0, len(PROMPT) :].tolist()


def test_penalties_count_the_tokens_of_the_answer_as_openai_defines(session: Session) -> None:
    text: list[int] = []
    answer = session.generate(PROMPT, max_new_tokens=24, frequency_penalty=0.6, presence_penalty=0.9)
    for token in answer.token_ids:
        scores = session.score([*PROMPT, *text], len(PROMPT) + len(text) - 1)[-1].astype(np.float64)
        for seen, times in Counter(text).items():
            scores[seen] -= times * 0.6 + 0.9
        assert token == scores.argmax()
        text.append(token)


@pytest.mark.parametrize(
    "given", [{}, {"top_k": 6}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.7}, {"min_p": 0.2}], ids=str
)
def test_draws_are_those_of_the_graph_where_nothing_is_adjusted(session: Session, given: dict[str, Any]) -> None:
    for seed in range(6):
        options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 1.4, "seed": seed, **given}
        graph = session.generate(PROMPT, **options)
        assert session.generate(PROMPT, frequency_penalty=1e-12, **options).token_ids == graph.token_ids


def test_a_draw_never_takes_a_token_that_was_cut_off() -> None:
    logits = np.array([0.0, 5.0, 4.0, -50.0, 3.0], np.float32)
    for seed in range(200):
        sampler = AdjustedSampler(Sampling(1.0, top_k=2, seed=seed, presence_penalty=0.1), [1])
        assert sampler.choose(logits, ()) in (1, 2)
        assert sampler.choose(logits, (), np.array([True, False, False, True, False])) == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"frequency_penalty": 2.1}, "frequency_penalty 2.1; expected a number from -2 to 2"),
        ({"presence_penalty": "much"}, "presence_penalty 'much'; expected a number"),
        ({"logit_bias": {5: 101}}, "logit_bias 101; expected a number from -100 to 100"),
        ({"logit_bias": {"5": 1}}, "logit_bias token '5'; expected a whole number"),
        ({"logit_bias": [5]}, r"logit_bias \[5\]; expected numbers by token id"),
        ({"logit_bias": {64: 1}}, "logit_bias of token 64; expected 0..63"),
    ],
)
def test_wrong_values_are_refused_by_name(session: Session, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        session.stream(PROMPT, **given)


def test_sampling_with_a_bias_has_a_hash_and_survives_pickling() -> None:
    made = Sampling(logit_bias={5: 1.0})
    assert pickle.loads(pickle.dumps(made)) == made != Sampling() and hash(made) == hash(Sampling())


def test_a_temperature_of_0_turns_the_rest_off_and_other_fields_replace_their_own() -> None:
    recommended = Sampling(temperature=0.6, top_k=20, repetition_penalty=1.1)
    assert recommended.changed() == recommended and recommended.changed(temperature=0) == Sampling()
    assert recommended.changed(temperature=0, top_k=3) == Sampling(top_k=3)
    assert recommended.changed(temperature=1.5) == Sampling(temperature=1.5, top_k=20, repetition_penalty=1.1)
    assert recommended.changed(top_k=0, seed=3) == Sampling(temperature=0.6, repetition_penalty=1.1, seed=3)


def test_sampling_is_described_by_what_is_set() -> None:
    assert Sampling().in_words == "greedy"
    assert Sampling(repetition_penalty=1.1).in_words == "greedy, repetition_penalty 1.1"
    assert Sampling(temperature=0.6, top_k=20, seed=1).in_words == "temperature 0.6, top_k 20, seed 1"


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_a_position_draws_with_its_own_number_however_many_are_made_at_once(seed: int) -> None:
    for position in (1, DRAWN - 1, DRAWN, 5 * DRAWN + 3, 2**24):
        alone = int(np.random.Philox(key=seed, counter=position).random_raw() >> 41) / STEPS
        assert Sampling(temperature=1, seed=seed).uniform(position) == alone
