"""Two bundles in one session: the second drafts, the first answers. Nothing but speed may depend on the second."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from streamspec.errors import ConfigError, ResourceError
from streamspec.export import export_swappable
from streamspec.runtime import Completion, Grammar, Pruning, Sampling, Session, load
from streamspec.runtime.costs.draft_depth import DraftDepth
from streamspec.runtime.costs.row_costs import RowCosts
from streamspec.runtime.decoding.model_runner import StepRequest, StepResult
from streamspec.runtime.decoding.policy import AdaptiveState
from streamspec.runtime.draft_model import runner as two_models
from streamspec.runtime.draft_model.runner import TwoModelRunner, confidence, likeliest
from streamspec.runtime.draft_sources.source import SourceCounts
from tests.support.tiny_bundles import tiny_bundle

Bundles = Callable[[str], Path]
PROMPTS = ["hello", "hello again", "abc", "The lighthouse", "a b c d e f", "x", "hello", "zzz. zzz. zzz."]
SAMPLINGS = [Sampling(seed=0), Sampling(1.0, seed=5), Sampling(0.8, top_k=20, repetition_penalty=1.3, seed=7)]
ALONE = {"ngram": False, "recycling": False}


@pytest.fixture(scope="module")
def near(bundles: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a model near that of `bundles("endless fp32")`: it often says the same."""
    folder = tmp_path_factory.mktemp("near")
    base = bundles("endless fp32").parent / "base"
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(0)
    with torch.no_grad():
        for weights in model.parameters():
            weights += 0.01 * torch.randn_like(weights)
    shutil.copytree(base, folder / "base")
    model.save_pretrained(folder / "base")
    return tiny_bundle(folder, streams=False, base=folder / "base")


def two(target: Path, draft: Path, **options: Any) -> Session:
    return load(target, draft=draft, **{"threads": 1, "tree": 8, "cache_dir": target.parent / "cache"} | options)


def runner(session: Session) -> TwoModelRunner:
    assert isinstance(session.runner, TwoModelRunner)
    return session.runner


def check_cache(session: Session) -> None:
    """What the draft model remembers is what it would of its tokens alone."""
    draft = runner(session).draft
    logits = [one.forward([5], [0], np.zeros((1, 1), np.float32)) for one in (draft, _read(draft.fork(), draft.tokens))]
    np.testing.assert_allclose(*logits, atol=1e-4)
    assert draft.length == len(draft.tokens)


def _read(fresh: Any, tokens: list[int]) -> Any:
    fresh.reset()
    fresh.prefill(StepRequest(tokens))
    return fresh


@pytest.fixture(scope="module")
def plainly(bundles: Bundles) -> Callable[[str, str, str, Sampling], Completion]:
    """What plain decoding of a target on a provider answers to a prompt."""
    session = cache(lambda target, provider: load(bundles(target), threads=1, tree="plain", provider=provider))

    @cache
    def answer(target: str, provider: str, prompt: str, sampling: Sampling) -> Completion:
        return session(target, provider).generate(prompt, max_new_tokens=40, sampling=sampling)

    return answer


@pytest.mark.parametrize(
    ("target", "draft", "sources", "samplings"),
    [
        ("fp32", "int8", {}, SAMPLINGS[::2]),
        ("endless fp32", "near", {}, SAMPLINGS[::2]),
        ("endless fp32", "near", ALONE, SAMPLINGS[::2]),
        ("lora", "full", ALONE, SAMPLINGS[:1]),
        ("jakiro", "lora", {}, SAMPLINGS[:1]),
        ("static full", "fp32", ALONE, SAMPLINGS[::2]),  # sampled on the host
        ("int8", "eagle", ALONE, SAMPLINGS[:1]),
    ],
)
def test_the_answers_are_those_of_plain_decoding(
    target: str,
    draft: str,
    sources: dict[str, bool],
    samplings: list[Sampling],
    bundles: Bundles,
    near: Path,
    plainly: Any,
) -> None:
    session = two(bundles(target), near if draft == "near" else bundles(draft), **sources)
    for prompt, sampling in product(PROMPTS, samplings):
        expected = plainly(target, session.provider.name, prompt, sampling)
        answer = session.generate(prompt, max_new_tokens=40, sampling=sampling)
        assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
        check_cache(session)


def test_drafts_of_the_target_itself_all_come_true(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_models, "CANDIDATES", 1)  # else tokens beside the likeliest take some of the rows
    session = two(bundles("endless fp32"), bundles("endless fp32"), tree=6, **ALONE)
    answer = session.generate("hello", max_new_tokens=43)
    drafts = answer.stats.drafts
    assert answer.stats.steps == 7 and answer.stats.tau == 6  # 42 tokens after the prompt's, six a step
    assert drafts.depth == drafts.tried == drafts.accepted == drafts.calls == 35
    assert answer.stats.sources["drafter"] == SourceCounts(35, 35)


def test_each_call_reads_at_most_two_tokens_and_drafts_as_many_as_it_is_told(
    bundles: Bundles, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = two(bundles("endless fp32"), near, tree=4, **ALONE)
    draft, read = runner(session).draft, list[int]()
    for name in ("verify", "prefill"):
        run = getattr(draft, name)
        monkeypatch.setattr(
            draft,
            name,
            lambda request, *rest, _run=run: read.append(len(request.tokens)) or _run(request, *rest),
        )
    prompt = session.encode("hello")
    answer = session.generate(prompt, max_new_tokens=60)
    assert read[0] == len(prompt) + 1 and set(read[1:]) == {1, 2}
    assert len(read) % 3 == 0 and answer.stats.drafts.calls == 3 * answer.stats.steps  # three tokens each time
    assert 10 < answer.stats.drafts.accepted < answer.stats.drafts.tried  # some were rejected, and taken back
    check_cache(session)


@pytest.mark.parametrize("part", ["rewind", "cache"])
def test_a_rewind_that_is_left_out_is_noticed(
    bundles: Bundles, near: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """So that `check_cache` proves something, and answers depend on nothing that a draft model does."""
    session = two(bundles("endless fp32"), near, tree=4, **ALONE)
    draft = runner(session).draft
    if part == "rewind":
        monkeypatch.setattr(draft, "rewind", lambda length: draft.tokens.__delitem__(slice(length, None)))
    else:
        monkeypatch.setattr(draft.cache, "rewind", lambda length: None)
    plain = load(bundles("endless fp32"), threads=1, tree="plain")
    assert (
        session.generate("hello", max_new_tokens=60).token_ids == plain.generate("hello", max_new_tokens=60).token_ids
    )
    with pytest.raises(AssertionError):
        check_cache(session)


def test_a_grammar_holds_with_drafts_that_break_it(bundles: Bundles) -> None:
    session = two(bundles("lettered fp32"), bundles("lettered int8"))
    plain = load(bundles("lettered fp32"), threads=1, tree="plain")
    for pattern in ("[a-f]{4,30}", "(ab|cd)+x", "[0-9]+(, [0-9]+){3}"):
        for sampling in SAMPLINGS[:2]:
            some = {"grammar": Grammar.regex(pattern), "sampling": sampling, "max_new_tokens": 40}
            assert session.generate("name", **some).token_ids == plain.generate("name", **some).token_ids


def test_n_grams_and_recycling_draft_beside_it(bundles: Bundles) -> None:
    session = two(bundles("fp32"), bundles("int8"))
    total = set[str]()
    for prompt in PROMPTS:
        total |= session.generate(prompt, max_new_tokens=40).stats.sources.keys()
    assert {"drafter", "n-grams", "recycling"} <= total


def test_the_depth_follows_what_drafts_bring_and_cost(
    bundles: Bundles, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alphas, depths = list[float](), list[int]()
    for draft, price in ((bundles("endless fp32"), 0.02), (near, 0.02), (near, 0.6)):
        session = two(bundles("endless fp32"), draft, **ALONE)
        costs = RowCosts(np.array([1.0, *(1 + 0.05 * row + price for row in range(1, 32))]))
        session.policy = replace(session.policy, rows=32, costs=costs)
        session.adaptive = AdaptiveState(session.policy)
        requests = list[StepRequest]()
        verify = runner(session).verify

        def record(request: StepRequest, into: Any = requests, run: Any = verify) -> StepResult:
            into.append(request)
            return run(request)

        monkeypatch.setattr(runner(session), "verify", record)
        for prompt in PROMPTS:
            session.generate(prompt, max_new_tokens=60)
        alphas.append(session.adaptive.depth.alpha)
        depths.append(next(one.draft_depth for one in reversed(requests) if one.draft_depth))  # speculation may pause
    assert alphas[0] > 0.97 > alphas[1]
    assert depths[0] == two_models.MAX_DEPTH > depths[1] > depths[2] >= 1


def test_drafts_that_are_not_sure_end_early_and_more_of_them_come_true(
    bundles: Bundles, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load(bundles("endless fp32"), threads=1, tree="plain")
    shares, depths = list[float](), list[float]()
    for ends in (True, False):
        if not ends:
            monkeypatch.setattr(DraftDepth, "early_end", lambda *rest: None)
        session = two(bundles("endless fp32"), near, **ALONE)
        costs = RowCosts(np.array([1.0, *(1 + 0.01 * row + 0.1 for row in range(1, 32))]))
        session.policy = replace(session.policy, rows=32, costs=costs)
        session.adaptive = AdaptiveState(session.policy)
        found = [0, 0, 0]
        for prompt in PROMPTS:
            for sampling in SAMPLINGS[:2]:
                answer = session.generate(prompt, max_new_tokens=60, sampling=sampling)
                expected = plain.generate(prompt, max_new_tokens=60, sampling=sampling)
                assert answer.token_ids == expected.token_ids
                drafts = answer.stats.drafts
                found = [a + b for a, b in zip(found, (drafts.accepted, drafts.calls, drafts.steps), strict=True)]
        check_cache(session)
        shares.append(found[0] / found[1])
        depths.append(found[1] / found[2])
    assert shares[0] > shares[1] and depths[0] < depths[1], (shares, depths)


def test_speculation_pauses_where_the_draft_model_never_pays(bundles: Bundles, near: Path) -> None:
    """A draft token costs three plain steps."""
    session = two(bundles("endless fp32"), near, **ALONE)
    costs = RowCosts(np.array([1.0, *(4 + 0.1 * row for row in range(1, 32))]))
    session.policy = replace(session.policy, rows=32, costs=costs)
    session.adaptive = AdaptiveState(session.policy)
    for prompt in PROMPTS:
        last = session.generate(prompt, max_new_tokens=60).stats
    assert last.plain_steps > 45 and last.drafts.calls < 12


def test_a_cancelled_answer_leaves_both_caches_in_order(bundles: Bundles) -> None:
    session = two(bundles("fp32"), bundles("int8"))
    whole = session.generate("hello", max_new_tokens=40).token_ids
    stream = session.stream("hello again", max_new_tokens=60)
    next(stream), next(stream)
    stream.cancel()
    assert list(stream)[-1].finish_reason == "cancelled"
    assert session.generate("hello", max_new_tokens=40).token_ids == whole
    check_cache(session)


def test_cancelling_stops_the_draft_model_too(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    session = two(bundles("fp32"), bundles("int8"), **ALONE)
    draft = runner(session).draft
    verify, calls = draft.verify, list[int]()

    def cancelling(*rest: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            session.cancel()
        return verify(*rest, **named)

    monkeypatch.setattr(draft, "verify", cancelling)
    answer = session.generate("hello", max_new_tokens=60)
    assert answer.finish_reason == "cancelled" and len(calls) == 5
    monkeypatch.undo()
    assert session.generate("hello", max_new_tokens=9).finish_reason == "length"


def test_a_saved_conversation_is_that_of_the_target_and_goes_on_with_drafts(bundles: Bundles, tmp_path: Path) -> None:
    session = two(bundles("chat"), bundles("chat"))
    session.chat("hello", max_new_tokens=20)
    session.save(tmp_path / "saved")
    expected = session.chat("more", max_new_tokens=20)
    for other in (two(bundles("chat"), bundles("chat"), **ALONE), load(bundles("chat"), threads=1, tree="plain")):
        other.restore(tmp_path / "saved")
        answer = other.chat("more", max_new_tokens=20)
        assert answer.token_ids == expected.token_ids and answer.stats.reused_tokens > 20


def test_sessions_over_the_same_two_models_answer_side_by_side(bundles: Bundles) -> None:
    session = two(bundles("fp32"), bundles("int8"), tree="auto")
    expected = [session.generate(prompt, max_new_tokens=40).token_ids for prompt in PROMPTS]
    found: dict[int, list[Completion]] = {}

    def answer(number: int, one: Session) -> None:
        found[number] = one.generate(PROMPTS, max_new_tokens=40)

    threads = [threading.Thread(target=answer, args=(i, session.another())) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[one.token_ids for one in found[i]] for i in range(3)] == [expected] * 3


def test_both_models_are_unloaded_and_come_back(bundles: Bundles) -> None:
    session = two(bundles("fp32"), bundles("int8"))
    before = session.generate("hello", max_new_tokens=30)
    session.unload()
    draft = runner(session).draft
    assert not session.loaded and not draft.model.unloader.loaded and draft.model.session is None
    after = session.generate("hello", max_new_tokens=30)
    assert after.token_ids == before.token_ids and after.stats.sources["drafter"].accepted > 0
    assert draft.model.unloader.loaded


def test_beyond_the_draft_models_context_there_are_no_drafts_and_no_errors(bundles: Bundles) -> None:
    """Of the target's 256 tokens the draft model sees 64."""
    session = two(bundles("endless fp32"), bundles("endless fp32"), **ALONE)
    runner(session).draft = runner(session).draft.fork(64)
    plain = load(bundles("endless fp32"), threads=1, tree="plain")
    answer = session.generate("hello", max_new_tokens=120)
    assert answer.token_ids == plain.generate("hello", max_new_tokens=120).token_ids
    assert answer.stats.steps > 3 and answer.stats.plain_steps > 40
    assert runner(session).draft.length <= 64
    text = "a" * 100
    assert session.generate(text, max_new_tokens=20).token_ids == plain.generate(text, max_new_tokens=20).token_ids


def test_adapters_of_the_target_are_swapped_under_the_draft_model(bundles: Bundles, tmp_path: Path) -> None:
    base, adapter = bundles("fp32").parent / "base", bundles("full").parent / "adapter"
    export_swappable(base, [adapter], tmp_path / "swappable", "fp32", progress=lambda line: None)
    session = two(tmp_path / "swappable", bundles("fp32"), **ALONE)
    plain = load(tmp_path / "swappable", threads=1, tree="plain")
    for one in (session, session.another()):
        for chosen in ("adapter", None, "adapter"):
            one.swap(chosen)
            plain.swap(chosen)
            answer = one.generate("hello", max_new_tokens=30)
            assert answer.token_ids == plain.generate("hello", max_new_tokens=30).token_ids
            assert answer.stats.sources["drafter"].accepted > 0 and one.adapter == chosen
            check_cache(one)


def test_what_cannot_be_is_refused_in_one_line(bundles: Bundles) -> None:
    with pytest.raises(ConfigError, match="draft model with another vocabulary"):
        two(bundles("fp32"), bundles("lettered fp32"))
    with pytest.raises(ConfigError, match="pruning beside a draft model"):
        two(bundles("full"), bundles("fp32"), pruning=Pruning(4))
    with pytest.raises(ResourceError, match="needs"):
        from streamspec.runtime import estimate_memory

        two(bundles("fp32"), bundles("fp32"), memory=estimate_memory(bundles("fp32"), context=128).total + 10)


@pytest.mark.parametrize("size", [3, 128, 1000, 4096])
def test_the_likeliest_tokens_are_those_of_a_full_sort(size: int) -> None:
    random = np.random.default_rng(size)
    for logits in (random.normal(size=size), random.integers(0, 9, size), np.zeros(size)):
        logits = logits.astype(np.float32)
        assert likeliest(logits, 4).tolist() == np.argsort(-logits, kind="stable")[:4].tolist()


def test_confidence_is_the_likeliest_tokens_probability() -> None:
    logits = np.random.default_rng(0).normal(size=500).astype(np.float32) * 4 + 80
    shifted = np.exp(logits.astype(np.float64) - logits.max())
    assert confidence(logits, float(logits.max())) == pytest.approx(float((shifted / shifted.sum()).max()), rel=1e-5)
