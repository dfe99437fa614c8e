"""Static bundles through whole sessions: padded calls, rows appended to the cache, sampling beside the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamspec.draft_tree import DraftTree, chain
from streamspec.errors import ContextOverflow, ProviderError
from streamspec.runtime import Completion, Grammar, Sampling, Session, load
from streamspec.runtime.decoding.model_runner import StepRequest
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.engine.padded.padded_call import PaddedCall
from streamspec.runtime.engine.padded.static_call import StaticBinding
from streamspec.runtime.hardware.providers import PROVIDERS, STATIC, find
from tests.runtime.engine.test_ort_runner import PROMPTS

Bundles = Callable[[str], Path]
SOME = PROMPTS[::2]
HOT = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.2, seed=5)


def open_session(folder: Path, tree: int | str = 8, **options: Any) -> Session:
    return load(folder, threads=1, tree=tree, cache_dir=folder.parent / "cache", **options)


def engine_of(session: Session) -> OrtRunner:
    assert isinstance(session.runner, OrtRunner) and isinstance(session.runner._call, PaddedCall)
    assert isinstance(session.runner._call.binding, StaticBinding)
    return session.runner


def case(sampling: Sampling, *names: str) -> list[Any]:
    return [pytest.param(name, sampling, id=f"{name}-{'sampled' if sampling == HOT else 'greedy'}") for name in names]


@pytest.fixture(scope="module")
def plainly(bundles: Bundles) -> Callable[[str, Sampling], list[Completion]]:
    """What plain decoding of a static bundle answers to `SOME`, on the CPU."""

    @cache
    def answers(bundle: str, sampling: Sampling) -> list[Completion]:
        session = open_session(bundles(f"static {bundle}"))
        return [session.generate(one, max_new_tokens=40, speculate=False, sampling=sampling) for one in SOME]

    return answers


@pytest.mark.parametrize(
    ("bundle", "sampling"),
    [
        *case(Sampling(), "fp32", "int8", "int4", "full", "jakiro", "eagle", "lists"),
        *case(HOT, "int8", "full", "lora", "jakiro"),  # a row is sampled on the host, whatever drafted it
    ],
)
def test_speculative_output_is_plain_output(bundle: str, sampling: Sampling, bundles: Bundles, plainly: Any) -> None:
    session = open_session(bundles(f"static {bundle}"))
    steps = tokens = 0
    for rows in (2, 5, 32):  # the graph takes 8
        session.policy = replace(session.policy, rows=rows)
        for prompt, plain in zip(SOME, plainly(bundle, sampling), strict=True):
            spec = session.generate(prompt, max_new_tokens=40, sampling=sampling)
            assert (spec.token_ids, spec.text, spec.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)
            steps, tokens = steps + spec.stats.steps, tokens + spec.stats.step_tokens
    assert tokens > steps


@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize("bundle", ["fp32", "full", "lora", "jakiro", "eagle"])
def test_both_flavours_write_the_same(bundle: str, sampling: Sampling, bundles: Bundles, plainly: Any) -> None:
    dynamic = open_session(bundles(bundle))
    for prompt, static in zip(SOME, plainly(bundle, sampling), strict=True):
        assert dynamic.generate(prompt, max_new_tokens=40, sampling=sampling).token_ids == static.token_ids


def test_every_step_costs_the_same_and_there_is_nothing_to_learn(bundles: Bundles, tmp_path: Path) -> None:
    session = load(bundles("static fp32"), threads=1, cache_dir=tmp_path)
    assert session.policy.rows == 8 and session.policy.costs is not None
    assert session.policy.costs.curve.tolist() == [1.0] * 8
    stats = session.generate("hello", max_new_tokens=8).stats
    assert stats.call_rows == 8 and "every call computes 8 rows, plain ones too" in str(stats)


def test_text_runs_up_to_the_last_token_of_the_context(bundles: Bundles) -> None:
    session, dynamic = open_session(bundles("static fp32")), open_session(bundles("fp32"))
    for room in (1, 2, 5, 12):
        prompt = ([7, 9, 11, 30] * 32)[: 128 - room]
        plain = session.generate(prompt, max_new_tokens=50, speculate=False)
        spec = session.generate(prompt, max_new_tokens=50)
        assert spec.token_ids == plain.token_ids == dynamic.generate(prompt, max_new_tokens=50).token_ids
    with pytest.raises(ContextOverflow):
        session.generate([7] * 128)


def test_the_cache_after_accepted_drafts_is_the_plain_one(bundles: Bundles) -> None:
    session = open_session(bundles("static fp32"))
    engine = engine_of(session)
    prompt = session.encode("hello")
    answer = session.generate(prompt, max_new_tokens=40)
    length = engine.length
    appended = engine.cache.data[0][..., :length, :].copy()
    session.score((prompt + answer.token_ids)[:length])
    assert answer.stats.steps and np.abs(appended - engine.cache.data[0][..., :length, :]).max() < 1e-4


def test_only_the_accepted_path_enters_the_cache(bundles: Bundles) -> None:
    engine = engine_of(open_session(bundles("static fp32")))
    engine.reset()
    engine.prefill(StepRequest([5, 6, 7]))
    engine.verify(StepRequest([9, 10, 11, 12], DraftTree((0, 0, 0, 2), (0, 0, 1, 0))))
    engine.commit((0, 2, 3))
    appended = engine.cache.data[0][..., :6, :].copy()
    engine.score([5, 6, 7, 9, 11, 12])
    assert engine.length == 6 and np.abs(appended - engine.cache.data[0][..., :6, :]).max() < 1e-4


def test_score_gives_what_plain_decoding_chose(bundles: Bundles) -> None:
    session = open_session(bundles("static fp32"))
    prompt = session.encode("hello")
    answer = session.generate(prompt, max_new_tokens=20, speculate=False).token_ids
    logits = session.score(prompt + answer, start=len(prompt) - 1)
    assert logits.shape == (len(answer) + 1, 64) and logits.argmax(axis=1)[:-1].tolist() == answer
    assert np.abs(logits - open_session(bundles("fp32")).score(prompt + answer, start=len(prompt) - 1)).max() < 1e-3
    assert session.score([5] * 128).shape == (128, 64)


def test_padding_is_never_accepted_and_changes_nothing(bundles: Bundles) -> None:
    engine = engine_of(open_session(bundles("static fp32")))
    results = []
    for rows in (2, 8):  # the first two rows are the same
        engine.reset()
        engine.prefill(StepRequest([5, 6, 7]))
        tokens = [9, 10, 0, 0, 0, 0, 0, 0][:rows]
        result = engine.verify(StepRequest(tokens, chain(rows - 1), run_drafter=True))
        assert result.accepted is not None and result.accepted < rows
        results.append((result.choices[:2], engine.forward(tokens, range(rows), chain(rows - 1).mask())[:2]))
    assert results[0][0] == results[1][0]
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_drafts_after_another_token_are_dropped(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(open_session(bundles("static fp32")))
    call: Any = engine._call
    engine.reset(HOT)
    greedy = engine.prefill(StepRequest([5, 6, 7])).choices[0]
    for drawn in (None, 40):  # as the graph chose, and otherwise
        engine.reset(HOT)
        monkeypatch.setattr(
            call,
            "_sample",
            lambda rows, mask, outputs, drawn=drawn: np.where(drawn is None, outputs.choices[rows.logit_rows], drawn),
        )
        engine.prefill(StepRequest([5, 6, 7]))
        result = engine.verify(StepRequest([greedy], run_drafter=True))
        assert (result.proposal is None) == (drawn is not None)


def test_openvino_wants_fixed_shapes(bundles: Bundles) -> None:
    with pytest.raises(ProviderError, match="runs static bundles only|not installed"):
        load(bundles("fp32"), provider="openvino")


@pytest.fixture
def openvino(bundles: Bundles) -> Callable[[str], Session]:
    """Opens static bundles on OpenVINO, all of the graph or nothing."""
    if why := find(PROVIDERS["openvino"], STATIC).why_not:
        pytest.skip(f"openvino: {why}")
    return lambda name: open_session(bundles(name), provider="openvino")


@pytest.mark.parametrize("bundle", ["fp32", "int8", "int4", "full", "lora", "jakiro", "eagle", "lists"])
def test_openvino_takes_the_whole_graph_and_speculates_exactly(
    bundle: str, openvino: Callable[[str], Session], plainly: Any
) -> None:
    session = openvino(f"static {bundle}")
    plain = [session.generate(prompt, max_new_tokens=40, speculate=False).token_ids for prompt in SOME]
    assert [session.generate(prompt, max_new_tokens=40).token_ids for prompt in SOME] == plain
    if bundle in ("fp32", "full", "lora", "jakiro", "eagle"):
        assert [answer.token_ids for answer in plainly(bundle, Sampling())] == plain


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.2}, {"grammar": Grammar.regex("[a-z ]{4,30}")}], ids=str)
def test_greedy_answers_that_are_chosen_on_the_host_need_no_seed(options: dict[str, Any], bundles: Bundles) -> None:
    session, dynamic = open_session(bundles("static fp32")), open_session(bundles("fp32"))
    for prompt in SOME:
        found, wanted = (
            one.generate(prompt, max_new_tokens=20, temperature=0.0, **options).token_ids for one in (session, dynamic)
        )
        assert found == wanted
