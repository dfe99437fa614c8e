"""A model that drafts for itself over attention sinks and a window of its cache. Nothing but speed depends on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamspec.draft_tree import DraftTree
from streamspec.errors import ConfigError, ResourceError
from streamspec.export import export_swappable
from streamspec.runtime import Pruning, Sampling, Session, estimate_memory, load
from streamspec.runtime.costs.row_costs import RowCosts
from streamspec.runtime.decoding.model_runner import StepRequest
from streamspec.runtime.decoding.policy import AdaptiveState
from streamspec.runtime.draft_model import runner as two_models
from streamspec.runtime.draft_model.window import SINKS, WindowDraftRunner
from streamspec.runtime.options import WINDOW_TOKENS, LoadOptions
from tests.support.tiny_bundles import tiny_bundle, tiny_model, tiny_tokenizer

Bundles = Callable[[str], Path]
SHORT, LONG = "hello again", "the lighthouse keeper counts " * 6  # a byte is a token
SAMPLINGS = [Sampling(seed=0), Sampling(0.8, top_k=20, repetition_penalty=1.3, seed=7)]
ALONE = {"ngram": False, "recycling": False}
KEEPS = 128
WINDOW_AND_PLAIN: tuple[dict[str, Any], ...] = ({"draft": f"window:{KEEPS}", "tree": 6}, {"tree": "plain"})


def windowed(bundle: Path, **options: Any) -> Session:
    return load(bundle, draft=f"window:{KEEPS}", **{"threads": 1, "tree": 6} | options)


def plain(bundle: Path) -> Session:
    return load(bundle, threads=1, tree="plain")


def runner(session: Session) -> WindowDraftRunner:
    assert isinstance(session.runner, WindowDraftRunner)
    return session.runner


def check_rows(session: Session) -> int:
    """The window holds the target's rows of the sinks and of the newest tokens. Returns how many tokens it left out."""
    both = runner(session)
    both.draft.follow()
    length = both.target.length
    newest = range(max(SINKS, length - KEEPS + SINKS), length)
    for mine, rows in zip(both.draft.cache.data, both.target.cache.data, strict=True):
        for token in (*range(min(SINKS, length)), *newest):
            slot = token if token < KEEPS else SINKS + (token - SINKS) % (KEEPS - SINKS)
            np.testing.assert_array_equal(mine[..., slot, :], rows[..., token, :])
    assert both.draft.position == length and both.draft.length == min(length, KEEPS)
    return max(0, length - KEEPS)


@pytest.mark.parametrize(
    ("name", "sources"),
    [
        ("endless fp32", ALONE),
        ("endless int8", {}),
        ("lettered full", ALONE),
        ("lettered eager", ALONE),
        ("lettered eagle", {}),
    ],
)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_answers_are_those_of_plain_decoding(
    name: str, sources: dict[str, bool], sampling: Sampling, bundles: Bundles
) -> None:
    session, other, left_out = windowed(bundles(name), **sources), plain(bundles(name)), 0
    for prompt in (LONG, SHORT, LONG + "x", LONG):
        answer = session.generate(prompt, max_new_tokens=60, sampling=sampling)
        assert answer.token_ids == other.generate(prompt, max_new_tokens=60, sampling=sampling).token_ids
        left_out += check_rows(session)
    assert left_out > 100


def test_a_text_shorter_than_the_window_is_drafted_as_the_model_writes_it(
    bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two_models, "CANDIDATES", 1)  # else tokens beside the likeliest take some of the rows
    session = windowed(bundles("endless fp32"), **ALONE)
    answer = session.generate(SHORT, max_new_tokens=43)
    drafts = answer.stats.drafts
    assert answer.stats.steps == 7 and answer.stats.tau == 6  # 42 tokens after the prompt's, six a step
    assert drafts.depth == drafts.tried == drafts.accepted == drafts.calls == 35


def test_drafts_at_a_long_context_are_those_of_a_text_without_its_middle(
    bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's logits are the model's over sinks and window, at the text's own positions, computed by a mask."""
    session = windowed(bundles("endless fp32"), **ALONE)
    both, ids = runner(session), session.encode(LONG)
    both.begin(ids)
    both.prefill(StepRequest(ids))
    seen = np.full((1, len(ids) + 1), -np.inf, np.float32)
    seen[0, [*range(SINKS), *range(len(ids) - KEEPS + SINKS, len(ids) + 1)]] = 0
    both.draft.begin(ids, logits=True)
    found = both._read([7], (), 1)
    mask = np.where(np.tri(len(ids) + 1, dtype=bool), 0, -np.inf).astype(np.float32)
    whole = both.target.fork()
    mask[-1] = seen
    expected = whole.forward([*ids, 7], range(len(ids) + 1), np.maximum(mask, -1e30))[-1]
    np.testing.assert_allclose(found[0], expected, atol=1e-3)
    causal = whole.forward([*ids, 7], range(len(ids) + 1), _causal(len(ids) + 1))[-1]
    tokens = np.isfinite(causal)  # rows of the vocabulary that are none have minus infinity
    assert np.abs(found[0][tokens] - causal[tokens]).max() > 0.01


def _causal(rows: int) -> np.ndarray:
    return np.where(np.tri(rows, dtype=bool), 0, -1e30).astype(np.float32)


def test_a_row_is_read_once_for_each_token_drafted_and_the_prompt_never(
    bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, read = windowed(bundles("endless fp32"), tree=4, **ALONE), list[int]()
    draft = runner(session).draft
    run = draft.verify
    monkeypatch.setattr(draft, "verify", lambda request: read.append(len(request.tokens)) or run(request))
    monkeypatch.setattr(draft, "prefill", None)
    stats = session.generate(LONG, max_new_tokens=40).stats
    assert set(read) == {1} and len(read) >= stats.drafts.calls == 3 * stats.steps


def test_after_steps_without_drafts_the_window_catches_up(bundles: Bundles) -> None:
    session, other = windowed(bundles("endless fp32")), plain(bundles("endless fp32"))
    both = runner(session)
    session.generate(LONG, max_new_tokens=2)
    expected = other.generate(LONG, max_new_tokens=70).token_ids
    ids = [*session.encode(LONG), *expected]
    both.begin(ids)
    both.prefill(StepRequest(ids[both.length :]))
    assert check_rows(session) > 70


def test_the_window_has_the_rows_that_the_host_commits(bundles: Bundles) -> None:
    """Penalties and biases choose others than the graph."""
    session = windowed(bundles("endless fp32"))
    both = runner(session)
    session.generate(SHORT, max_new_tokens=4, speculate=False)
    request = StepRequest([7])
    choice = int(both.target.verify(request).choices[0])
    other = choice + 1 if choice + 1 < session.manifest.model.vocab_size else choice - 1
    tree = DraftTree((0, 0, 0), (0, 0, 1))
    both.verify(StepRequest([7, choice, other], tree, run_drafter=True, draft_depth=1))
    both.commit((0, 2))
    check_rows(session)


def test_conversations_go_on_after_cancelling_restoring_and_unloading(bundles: Bundles, tmp_path: Path) -> None:
    session, other = windowed(bundles("endless fp32")), plain(bundles("endless fp32"))
    expected = other.generate(LONG, max_new_tokens=30).token_ids
    stream = session.stream(LONG, max_new_tokens=30)
    next(stream), next(stream)
    stream.cancel()
    assert list(stream)[-1].finish_reason == "cancelled"
    assert session.generate(LONG, max_new_tokens=30).token_ids == expected
    session.save(tmp_path / "saved")
    session.generate(SHORT, max_new_tokens=30)
    session.restore(tmp_path / "saved")
    assert session.generate(LONG, max_new_tokens=30).token_ids == expected
    assert check_rows(session)
    session.unload()
    assert not session.loaded and session.generate(LONG, max_new_tokens=30).token_ids == expected
    assert session.another().generate(LONG, max_new_tokens=30).token_ids == expected


def test_a_session_and_its_window_are_one_sequence(bundles: Bundles) -> None:
    """So that closing the only session of a bundle with an idle time unloads it."""
    session = windowed(bundles("endless fp32"), idle=1000)
    session.generate(SHORT, max_new_tokens=3)
    assert runner(session).target.model.sequences == 1
    session.close()
    assert not session.loaded


def test_drafts_end_with_the_context(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    session, other = (load(bundles("endless fp32"), threads=1, context=200, **some) for some in WINDOW_AND_PLAIN)
    session.generate(SHORT, max_new_tokens=2)  # binds its calls
    ids, draft, positions = session.encode(LONG), runner(session).draft, list[int]()
    run = draft._call.run
    monkeypatch.setattr(draft._call, "run", lambda rows, *rest: positions.extend(rows.positions) or run(rows, *rest))
    answer = session.generate(ids, max_new_tokens=100)
    assert answer.finish_reason == "length" and len(answer.token_ids) == 200 - len(ids)
    assert answer.token_ids == other.generate(ids, max_new_tokens=100).token_ids
    assert len(ids) == min(positions) and 180 < max(positions) < 200


def test_adapters_are_swapped_under_the_window(bundles: Bundles, tmp_path: Path) -> None:
    base, adapter = bundles("fp32").parent / "base", bundles("full").parent / "adapter"
    export_swappable(base, [adapter], tmp_path / "swappable", "fp32", progress=lambda line: None)
    session, other = windowed(tmp_path / "swappable", **ALONE), plain(tmp_path / "swappable")
    for one in (session, session.another()):
        both = runner(one)
        for chosen in ("adapter", None, "adapter"):
            one.swap(chosen)
            other.swap(chosen)
            answer = one.generate("hello", max_new_tokens=30)
            assert answer.token_ids == other.generate("hello", max_new_tokens=30).token_ids
            assert answer.stats.drafts.tried > 0
            assert both.draft._adapter is both.target._adapter and bool(both.draft._adapter) == (chosen is not None)


def test_half_precision_rows_are_copied_as_they_are(tmp_path: Path) -> None:
    bundle = tiny_bundle(tmp_path, streams=False, kv_cache_dtype="float16")
    session = load(bundle, draft="window", threads=1, tree=4, **ALONE)
    answer = session.generate("hello", max_new_tokens=40)
    assert answer.token_ids == plain(bundle).generate("hello", max_new_tokens=40).token_ids
    assert {data.dtype for data in runner(session).draft.cache.data} == {np.dtype(np.float16)}
    assert answer.stats.drafts.accepted == answer.stats.drafts.tried > 0


def costs_at(price: float) -> RowCosts:
    return RowCosts(np.array([1.0, *(1 + 0.02 * row + price for row in range(1, 16))]))


@pytest.mark.parametrize(("price", "pays"), [(0.2, True), (1.05, False)])
def test_the_window_drafts_where_the_latency_model_says_that_it_pays(
    bundles: Bundles, price: float, pays: bool
) -> None:
    session = windowed(
        bundles("endless fp32"), tree="auto", cache_dir=bundles("endless fp32").parent / "cache", **ALONE
    )
    session.policy = replace(session.policy, rows=16, costs=costs_at(price))
    session.adaptive = AdaptiveState(session.policy)
    stats = session.generate(SHORT, max_new_tokens=60).stats
    assert (stats.drafts.calls > 10) == pays
    assert pays or stats.plain_steps > 50


def test_costs_begin_with_the_price_of_the_model_itself_and_are_kept_apart(bundles: Bundles, tmp_path: Path) -> None:
    for draft in ("window", "window:200", None):
        session = load(bundles("endless fp32"), draft=draft, threads=1, cache_dir=tmp_path)
        if draft is not None:
            assert 0.9 < session.policy.costs.price < 1.1
            assert session.policy.window == LoadOptions(draft=draft).window
        session.generate(SHORT, max_new_tokens=40)
        session.close()
    assert len(list((tmp_path / "calibration").iterdir())) == 3


def test_the_second_cache_counts_as_memory(bundles: Bundles) -> None:
    bundle = bundles("endless fp32")
    alone, both = estimate_memory(bundle, context=256), estimate_memory(bundle, context=256, window=KEEPS)
    session = windowed(bundle)
    assert both.cache - alone.cache == sum(data.nbytes for data in runner(session).draft.cache.data)
    assert both.total - alone.total == both.cache - alone.cache
    with pytest.raises(ResourceError, match="needs"):
        windowed(bundle, context=256, memory=alone.total + 10)


def test_what_has_no_cache_to_take_a_window_of_is_refused_in_one_line(bundles: Bundles, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fixed shapes"):
        windowed(bundles("static full"))
    with pytest.raises(ConfigError, match="on a device"):
        windowed(bundles("device full"))
    with pytest.raises(ConfigError, match="pruning beside a draft model"):
        windowed(bundles("full"), pruning=Pruning(4))
    for family, changes in (
        ("mistral", {"sliding_window": 64, "max_position_embeddings": 2048}),
        ("lfm2", {"max_position_embeddings": 2048}),
    ):
        tiny_model(family, **changes).save_pretrained(tmp_path / family / "base")
        tiny_tokenizer().save_pretrained(tmp_path / family / "base")
        bundle = tiny_bundle(tmp_path / family, streams=False, base=tmp_path / family / "base")
        with pytest.raises(ConfigError, match="windows of their own"):
            windowed(bundle)


def test_a_window_is_named_by_a_string_and_a_folder_by_a_path() -> None:
    assert LoadOptions(draft="window").window == WINDOW_TOKENS
    assert LoadOptions(draft="window:200").window == 200
    assert not any(LoadOptions(draft=draft).window for draft in (None, Path("window"), "windows", "./window"))
    for wrong in ("window:", "window:64", "window:many", "window:-512"):
        with pytest.raises(ConfigError, match="128 tokens or more"):
            LoadOptions(draft=wrong)
