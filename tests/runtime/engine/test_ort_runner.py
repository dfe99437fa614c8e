"""The runner and whole sessions on tiny bundles made by the real exporter: also executor, graph_kinds, graph_call,
dynamic_call, io_binding and loaded_model.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamspec.draft_tree import DraftTree
from streamspec.errors import BundleError, ConfigError, ContextOverflow, DataError
from streamspec.runtime import Session, load
from streamspec.runtime.decoding.model_runner import Cancelled, Pruning, StepRequest
from streamspec.runtime.engine.graph_call import checked_tokens
from streamspec.runtime.engine.ort_runner import OrtRunner, causal_mask
from streamspec.runtime.kv_cache import host_cache as kv

Bundles = Callable[[str], Path]
PROMPTS = ["hello", "abc", "x", "The lighthouse", "Wo ist?", "zzzzzz", "a b c d e f"]


def open_session(folder: Path, tree: int | str = 16) -> Session:
    return load(folder, threads=1, tree=tree, cache_dir=folder.parent / "cache")


def engine_of(session: Session) -> OrtRunner:
    assert isinstance(session.runner, OrtRunner)
    return session.runner


def assert_near_tie(session: Session, prompt: str, plain: list[int], spec: list[int]) -> None:
    """int4 products of one row and of many take different kernels: outputs may part where the two best tokens nearly
    tie, and only there.
    """
    at = next(i for i, (a, b) in enumerate(zip(plain, spec, strict=False)) if a != b)
    ids = session.encode(prompt)
    logits = session.score(ids + plain[:at], start=len(ids) + at - 1)[0]
    best, second = np.argsort(logits)[::-1][:2]
    assert {plain[at], spec[at]} == {best, second}
    assert logits[best] - logits[second] < 0.05 * logits.std()


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4", "full", "jakiro", "lists", "eagle", "eager", "eager8"])
def test_speculative_output_is_plain_output(bundles: Bundles, precision: str) -> None:
    session = open_session(bundles(precision))
    steps = tokens = 0
    answers = [session.generate(prompt, max_new_tokens=40, speculate=False) for prompt in PROMPTS]
    for rows in (2, 13, 32):
        session.policy = replace(session.policy, rows=rows)
        for prompt, plain in zip(PROMPTS, answers, strict=True):
            spec = session.generate(prompt, max_new_tokens=40)
            if precision != "int4" or spec.token_ids == plain.token_ids:
                assert (spec.token_ids, spec.text, spec.finish_reason) == (
                    plain.token_ids,
                    plain.text,
                    plain.finish_reason,
                )
            else:
                assert_near_tie(session, prompt, plain.token_ids, spec.token_ids)
            steps, tokens = steps + spec.stats.steps, tokens + spec.stats.step_tokens
    assert tokens > 1.1 * steps  # drafts were accepted, so the cache was compacted


def test_two_rows_equal_one_bit_for_bit(bundles: Bundles) -> None:
    session = open_session(bundles("int8"))
    session.policy = replace(session.policy, rows=2)
    for prompt in PROMPTS:
        plain = session.generate(prompt, max_new_tokens=40, speculate=False)
        assert session.generate(prompt, max_new_tokens=40).token_ids == plain.token_ids


@pytest.mark.parametrize("pruning", [Pruning(2), Pruning(4), Pruning(min_probability=0.02), Pruning(5, 0.01)])
@pytest.mark.parametrize("bundle", ["int8", "full"])
def test_pruning_changes_no_token(bundle: str, pruning: Pruning, bundles: Bundles) -> None:
    session = open_session(bundles(bundle))
    session.policy = replace(session.policy, rows=12)
    drafted = 0
    for prompt in PROMPTS:
        plain = session.generate(prompt, max_new_tokens=40, speculate=False)
        session.policy = replace(session.policy, pruning=pruning)
        answer = session.generate(prompt, max_new_tokens=40)
        session.policy = replace(session.policy, pruning=None)
        assert answer.token_ids == plain.token_ids
        drafted += sum(answer.drafted)
    assert drafted > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 0},
        {"rows": 2.5},
        {"min_probability": 1.0},
        {"min_probability": -0.1},
        {"min_probability": float("nan")},
    ],
)
def test_senseless_pruning_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="pruning"):
        Pruning(**wrong)


@pytest.mark.parametrize("chosen", [[-1, 3], [4, -2], [64, 0]])
def test_a_graph_that_chooses_no_token_is_refused(chosen: list[int]) -> None:
    with pytest.raises(BundleError, match="chose"):
        checked_tokens(np.array(chosen), 64)


@pytest.mark.parametrize("pruning", [Pruning(4), Pruning(min_probability=0.05)])
def test_a_pruned_step_does_no_more_than_it_was_asked(pruning: Pruning, bundles: Bundles) -> None:
    engine = engine_of(open_session(bundles("fp32")))
    engine.reset()
    engine.prefill(StepRequest(list(range(5, 15))))
    tree = DraftTree((0, 0, 1, 0, 3, 0), (0, 0, 0, 1, 0, 2))
    probabilities = np.array([1, 0.5, 0.04, 0.2, 0.001, 0.0001])
    priors = np.log(probabilities).astype(np.float32)
    request = StepRequest(range(20, 26), tree, run_drafter=True, pruning=pruning, priors=priors)
    choices = engine.verify(request).choices
    kept = [row for row, token in enumerate(choices) if token >= 0]
    assert 0 in kept and all(tree.parents[i] in kept for i in kept)
    assert len(kept) <= (pruning.rows or 6) and len(kept) < 6


def test_the_cache_after_accepted_drafts_is_the_plain_one(bundles: Bundles) -> None:
    session = open_session(bundles("fp32"))
    engine = engine_of(session)
    ids = session.generate("hello", max_new_tokens=16).token_ids
    length = engine.length
    compacted = engine.cache.data[0][..., :length, :].copy()
    everything = session.encode("hello") + ids
    session.score(everything[:length])
    assert np.abs(compacted - engine.cache.data[0][..., :length, :]).max() < 1e-4


def test_small_chunks_and_a_growing_cache_change_nothing(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [open_session(bundles("fp32")).generate(p, max_new_tokens=100).token_ids for p in PROMPTS]
    monkeypatch.setattr("streamspec.runtime.kv_cache.host_cache.FIRST_CAPACITY", 4)
    monkeypatch.setattr("streamspec.runtime.kv_cache.host_cache.RESERVED", 0)
    monkeypatch.setattr("streamspec.runtime.engine.ort_runner.CHUNK", 3)
    monkeypatch.setattr("streamspec.runtime.engine.io_binding.SMALL", 2)
    session = open_session(bundles("fp32"))
    assert [session.generate(p, max_new_tokens=100).token_ids for p in PROMPTS] == expected


def test_score_gives_what_plain_decoding_chose(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(bundles("fp32"))
    prompt = session.encode("hello")
    answer = session.generate(prompt, max_new_tokens=20, speculate=False).token_ids
    logits = session.score(prompt + answer, start=len(prompt) - 1)
    assert logits.shape == (len(answer) + 1, 64) and logits.dtype == np.float32
    assert logits.argmax(axis=1)[:-1].tolist() == answer
    monkeypatch.setattr("streamspec.runtime.engine.ort_runner.SCORE_CHUNK", 3)
    assert np.abs(session.score(prompt + answer)[len(prompt) - 1 :] - logits).max() < 1e-4
    with pytest.raises(ContextOverflow):
        session.score([5] * 129)


def test_text_runs_up_to_the_last_token_of_the_context(bundles: Bundles) -> None:
    session = open_session(bundles("fp32"))
    for room in (1, 2, 5):
        prompt = ([7, 9, 11, 30] * 32)[: 128 - room]
        plain = session.generate(prompt, max_new_tokens=50, speculate=False)
        spec = session.generate(prompt, max_new_tokens=50)
        assert spec.token_ids == plain.token_ids and len(plain.token_ids) <= room
    with pytest.raises(ContextOverflow):
        session.generate([7] * 128)


def test_a_row_sees_only_its_ancestors(bundles: Bundles) -> None:
    engine = engine_of(open_session(bundles("fp32")))
    tree = DraftTree((0, 0, 1, 0, 3), (0, 0, 0, 1, 0))
    engine.reset()
    engine.prefill(StepRequest([5, 6, 7]))
    one = engine.verify(StepRequest([9, 10, 11, 12, 13], tree)).choices
    other = engine.verify(StepRequest([9, 40, 41, 12, 13], tree)).choices
    assert [one[row] for row in (0, 3, 4)] == [other[row] for row in (0, 3, 4)]
    alone = engine.forward([9, 12, 13], [0, 1, 2], causal_mask(3)).argmax(axis=1)
    assert alone.tolist() == [one[row] for row in (0, 3, 4)]


@pytest.mark.parametrize("bundle", ["lora", "static lora"])
def test_a_plain_bundle_drafts_from_its_text_and_says_the_same(bundle: str, bundles: Bundles) -> None:
    session = load(bundles(bundle), threads=1, cache_dir=bundles(bundle).parent / "cache")
    assert session.policy.rows > 1 and session.speculation.startswith("on")
    steps = 0
    for prompt in [*PROMPTS, "abcabcabcabc"]:
        answer = session.generate(prompt, max_new_tokens=60)
        assert answer.token_ids == session.generate(prompt, max_new_tokens=60, speculate=False).token_ids
        steps += answer.stats.steps
    assert steps > 0


def test_a_plain_bundle_without_ngrams_decodes_plainly(bundles: Bundles) -> None:
    session = load(bundles("lora"), threads=1, ngram=False, recycling=False)
    assert session.policy.rows == 1
    assert session.speculation == "off (nothing to draft from: no drafter, no draft sources)"
    answer = session.generate("hello", max_new_tokens=12)
    assert answer.stats.steps == 0 and answer.stats.plain_steps == len(answer.token_ids) - 1
    same = open_session(bundles("fp32"), "plain")
    assert same.generate("hello", max_new_tokens=12).token_ids == answer.token_ids
    asked = load(bundles("lora"), threads=1, ngram=False, recycling=False, tree="plain")
    assert asked.speculation == "off (asked for plain decoding)"


def test_a_chat_bundle_takes_messages(bundles: Bundles) -> None:
    session = load(bundles("chat"), threads=1, tree=4)
    assert session.encode("hi") == session.encode([{"role": "user", "content": "hi"}])
    assert session.tokenizer.decode(session.encode("hi"), skip_special_tokens=False).endswith("<s>a:")
    assert len(session.generate([{"role": "user", "content": "hi"}], max_new_tokens=4).token_ids) <= 4


@pytest.mark.parametrize("bundle", ["fp32", "static fp32"])
def test_a_cancelled_call_leaves_a_usable_engine(bundle: str, bundles: Bundles) -> None:
    engine = engine_of(open_session(bundles(bundle)))
    engine.reset()
    engine.prefill(StepRequest([5, 6, 7]))
    engine.cancel()
    with pytest.raises(Cancelled):
        engine.verify(StepRequest([9]))
    assert engine.length == 3
    engine.reset()
    assert engine.prefill(StepRequest([5, 6, 7], run_drafter=True)).proposal is not None


def test_cancel_from_another_thread(bundles: Bundles) -> None:
    session = open_session(bundles("fp32"))
    for attempt in range(5):
        timer = threading.Timer(0.002 * attempt, session.cancel)
        timer.start()
        reasons = {session.generate("x", max_new_tokens=100).finish_reason for _ in range(3)}
        timer.join()
        assert reasons <= {"cancelled", "length", "eos"}
    assert session.generate("x", max_new_tokens=5).finish_reason in ("length", "eos")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"provider": "abacus"}, "abacus"),
        ({"threads": 0}, "0 threads"),
        ({"threads": "2"}, "'2' threads"),
        ({"threads": 2.0}, "2.0 threads"),
        ({"tree": 0}, "tree 0"),
        ({"tree": "oak"}, "oak"),
    ],
)
def test_senseless_options_are_refused(bundles: Bundles, options: dict[str, object], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        load(bundles("fp32"), **options)  # type: ignore[arg-type]


def test_a_cache_that_grew_is_not_kept_twice(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "FIRST_CAPACITY", 16)
    monkeypatch.setattr(kv, "RESERVED", 0)
    engine: Any = open_session(bundles("fp32")).runner
    engine.score([5, 6, 7])
    old = weakref.ref(engine.cache.data[0])
    engine.prefill(StepRequest(list(range(3, 40))))
    assert engine.cache.capacity > 16 and old() is None


@pytest.mark.parametrize("prompt", [None, b"hi", {"role": "user", "content": "hi"}, 5])
def test_what_is_no_prompt_is_refused(bundles: Bundles, prompt: Any) -> None:
    with pytest.raises(DataError, match="a prompt of type"):
        open_session(bundles("fp32")).generate(prompt)


def test_senseless_lengths_are_refused(bundles: Bundles) -> None:
    session = open_session(bundles("fp32"))
    for wrong in (0, 2.5, "10"):
        with pytest.raises(ConfigError, match="max_new_tokens"):
            session.generate("x", max_new_tokens=wrong)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="a start of 3"):
        session.score([5, 6, 7], start=3)
