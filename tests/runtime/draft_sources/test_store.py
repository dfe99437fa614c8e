"""Drafts from a store of answers."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamspec.bundle.store_section import suffix_array
from streamspec.runtime.draft_sources.registry import SourceData, chosen
from streamspec.runtime.draft_sources.store import (
    ASSUMED,
    ENOUGH,
    LONGEST,
    MIN_SHARE,
    SAMPLE,
    AnswerStore,
    StoreIndex,
    _level,
    store_source,
)
from streamspec.runtime.options import LoadOptions
from tests.runtime.decoding.test_loop import decode
from tests.support.toy_runner import Setup, ToyRunner, hashed, scripted

END = 9


def store_of(*texts: list[int]) -> AnswerStore:
    tokens = np.array([token for text in texts for token in (*text, END)])
    return AnswerStore(tokens, suffix_array(tokens), END)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=6), st.lists(st.integers(0, 2), max_size=10)
)
def test_the_longest_match_with_enough_places_is_found_and_its_continuations_counted(
    texts: list[list[int]], text: list[int]
) -> None:
    store, flat = store_of(*texts), [token for one in texts for token in (*one, END)]
    text = [END, *text]
    places = {
        n: [i + n for i in range(len(flat) - n + 1) if flat[i : i + n] == text[-n:]]
        for n in range(1, min(LONGEST, len(text)) + 1)
    }
    enough = [n for n in places if len(places[n]) >= ENOUGH] or [n for n in places if places[n]]
    found = store.find([text], 1)
    if not enough:
        assert found is None
        return
    assert found is not None
    at = places[max(enough)]
    if len(at) > SAMPLE:
        return
    counted = Counter(flat[i] for i in at if i < len(flat))
    kept = {token: count for token, count in counted.items() if count >= MIN_SHARE * len(at)}
    assert dict(zip(found.tokens, found.levels, strict=True)) == {
        token: _level(max(enough), count / len(at), len(at)) for token, count in kept.items()
    }
    assert found.parents == [-1] * len(kept)


def test_what_follows_is_a_tree_that_ends_where_the_texts_end() -> None:
    store = store_of(*[[1, 2, 3, 4]] * 6, *[[1, 2, 5]] * 4)
    found = store.find([[END, 1]], 16)
    assert found is not None
    paths = {}
    for node, (token, parent) in enumerate(zip(found.tokens, found.parents, strict=True)):
        paths[node] = (*paths.get(parent, ()), token)
    assert list(paths.values()) == [(2,), (2, 3), (2, 5), (2, 3, 4), (2, 3, 4, END), (2, 5, END)]
    limited = store.find([[END, 1]], 2)
    assert limited is not None and limited.tokens == [2, 3, 5]
    assert store.find([[7]], 16) is None


def test_many_places_are_sampled_evenly() -> None:
    store = store_of(*([[1, 2]] * 300 + [[1, 3]] * 100))
    found = store.find([[1]], 1)
    assert found is not None and found.tokens == [2, 3]
    assert found.levels == [_level(1, 0.75, 400), _level(1, 0.25, 400)]


def test_every_level_has_a_rate_and_more_agreement_a_higher_one() -> None:
    levels = [
        [_level(8, share, places) for share in np.linspace(0.001, 1, 300)] for places in (2, 3, 4, 15, 16, 10_000)
    ]
    levels.append([_level(length, 1.0, 1) for length in range(1, 30)])
    assert {level for row in levels for level in row} == set(range(len(ASSUMED)))
    for row in levels:
        assert all(np.diff([ASSUMED[level][0] for level in row]) >= 0)


def test_an_answer_begins_as_those_of_the_store_do_and_a_text_goes_on_from_the_prompt() -> None:
    index = StoreIndex(store_of(*[[1, 2, 3]] * 9, *[[5, 6, 7, 1, 4]] * 9))
    index.extend([8, 5, 6, 7])
    begun = index.find(1)
    assert begun is not None and begun.tokens == [1]  # `5 6 7` goes on with 1, too
    index.extend([1])
    found = index.find(1)
    assert found is not None and found.tokens == [4]  # four tokens agree; as an answer's beginning, two
    index.extend([2])
    assert index.find(1) is not None


def test_the_option_turns_the_source_off() -> None:
    data = SourceData(store_of([1]))
    assert [source.name for source in chosen(LoadOptions(), data)] == ["n-grams", "recycling", "store"]
    assert [source.name for source in chosen(LoadOptions(store=False), data)] == ["n-grams", "recycling"]
    assert [source.name for source in chosen(LoadOptions(ngram=False))] == ["recycling"]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 40), st.integers(0, 3), st.integers(2, 9))
def test_output_is_plain_decoding_s_with_any_store(seed: int, limit: int, gamma: int, rows: int) -> None:
    rule, random = hashed(4, seed), np.random.default_rng(seed)
    source = store_source(store_of(*random.integers(0, 4, (5, 12)).tolist()))
    plain, *_ = decode(ToyRunner(rule, 10, context=60), Setup(limit), [1, 2, 3])
    runner = ToyRunner(rule, 10, gamma=gamma, width=2, context=60, seed=seed)
    assert decode(runner, Setup(limit, rows=rows, sources=(source,)), [1, 2, 3])[0] == plain


def test_answers_like_those_of_the_store_take_few_steps() -> None:
    random = np.random.default_rng(0)
    answers = random.integers(0, 50, (4, 40)).tolist()
    rule = scripted(3, [*answers[2], 1])
    _, _, run = decode(
        ToyRunner(rule, 60, gamma=0, context=200),
        Setup(40, rows=16, ngram=False, sources=(store_source(store_of(*answers)),)),
        [51, 52, 53],
    )
    assert run.stats.tau > 5
    drafted, accepted = run.stats.sources["store"]
    assert set(run.stats.sources) == {"store"}
    assert drafted >= accepted and run.stats.step_tokens - run.stats.steps <= accepted <= run.stats.step_tokens
    assert f"drafts accepted: store {accepted} of {drafted}; " in str(run.stats)


def test_drafts_count_for_every_source_that_proposed_them() -> None:
    text = [1, 4, 2, 3, 7, 6, 2, 8] * 6
    runner = ToyRunner(scripted(3, text), 50, gamma=3, width=2, context=200, skill=1.0)
    setup = Setup(40, rows=6, sources=(store_source(store_of(text)),))
    _, _, run = decode(runner, setup, [11, 12, 13])
    counts = run.stats.sources
    assert set(counts) == {"drafter", "n-grams", "store"}
    assert all(0 < accepted <= drafted for drafted, accepted in counts.values())
    assert sum(accepted for _, accepted in counts.values()) > run.stats.step_tokens - run.stats.steps


@pytest.mark.parametrize("size", [300_000])
def test_a_look_up_takes_no_time_that_counts(size: int) -> None:
    """Half a millisecond here, on a machine that may be busy; 0.06 ms on an idle one (docs/lab/decisions)."""
    tokens = np.minimum(np.random.default_rng(0).zipf(1.3, size), 40_000)
    store = AnswerStore(tokens, np.argsort(tokens, kind="stable"), 1)  # near enough for its speed
    times = []
    for at in range(0, 60_000, 200):
        began = time.thread_time()
        store.find([tokens[at : at + 9].tolist()], 16)
        times.append(time.thread_time() - began)
    assert np.median(times) < 5e-4
