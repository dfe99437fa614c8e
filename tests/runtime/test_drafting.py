"""Prompt lookup, and its branch in the streams' tree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamspec.runtime.drafting import draft
from streamspec.runtime.loop import Plan
from streamspec.runtime.ngram import CONTINUATION, LONGEST, MEASURED, Continuation, NgramIndex
from streamspec.trees import DraftTree
from tests.runtime.test_loop import decode
from tests.runtime.toy import ToyEngine, hashed, scripted


def index_of(text: list[int]) -> NgramIndex:
    index = NgramIndex()
    index.extend(text)
    return index


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=40))
def test_find_equals_its_definition(text: list[int]) -> None:
    found = index_of(text).find()
    for n in range(min(LONGEST, len(text)), 0, -1):
        before = [i for i in range(n, len(text)) if text[i - n : i] == text[-n:]]
        if before:
            at = before[-1]
            match = max(m for m in range(n, at + 1) if text[at - m : at] == text[len(text) - m :])
            assert found is not None
            assert found.tokens == tuple(text[at : at + CONTINUATION]) and found.match == min(match, MEASURED)
            return
    assert found is None


def test_the_estimate_follows_what_came() -> None:
    index = index_of([1, 2, 3, 1, 2])
    first = index.find()
    assert first is not None and first.match == 2 and first.tokens == (3, 1, 2)
    for _ in range(40):
        index.observe(first, [3, 1, 9])
    later = index.find(limit=1)
    assert later is not None and later.tokens == (3,)
    assert later.chance == pytest.approx(2 / 3, abs=0.06)


NODES = [(0, 0, 1.0), (0, 0, 0.6), (1, 0, 0.4), (0, 1, 0.2), (2, 0, 0.15), (1, 1, 0.1)]
GUESSES = np.array([[10, 11], [20, 21], [30, 31]])


def paths(tree: DraftTree, tokens: np.ndarray) -> set[tuple[int, ...]]:
    return {tuple(int(tokens[i]) for i in tree.path(node)) for node in range(len(tree))}


def test_nodes_compete_by_chance_and_agreeing_ones_are_one() -> None:
    tree = DraftTree.from_nodes(NODES, 6)
    merged, tokens = draft(tree, 5, GUESSES, Continuation((10, 50, 51), 3, 0.5))
    # 10 is both's (0.6); 50 behind it has 0.25, 51 0.125, which beats the streams' last node, 0.1
    assert paths(merged, tokens) == {(5,), (5, 10), (5, 10, 20), (5, 11), (5, 10, 20, 30), (5, 10, 50)}
    assert len(merged) == len(tree) and merged.path(2) == (0, 1, 2) and tokens[:3].tolist() == [5, 10, 20]


def test_a_certain_continuation_takes_the_rows_and_goes_deeper_than_the_streams() -> None:
    tree = DraftTree.from_nodes(NODES, 6)
    merged, tokens = draft(tree, 5, GUESSES, Continuation(tuple(range(70, 80)), 9, 0.95))
    assert merged.depth == 5 and tokens.tolist() == [5, 70, 71, 72, 73, 74]


@pytest.mark.parametrize("found", [None, Continuation((1, 2), 1, 0.1)])
def test_without_a_worthy_continuation_the_tree_is_the_streams(found: Continuation | None) -> None:
    tree = DraftTree.from_nodes(NODES, 6)
    merged, tokens = draft(tree, 5, GUESSES, found)
    assert merged is tree and tokens[1] == 10


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 60), st.integers(4, 80), st.floats(0, 1), st.integers(2, 6))
def test_output_is_plain_decoding_s_with_ngram(seed: int, limit: int, context: int, skill: float, rows: int) -> None:
    tree = DraftTree.from_nodes(NODES, rows)
    period = [1, 4, 2, 3, 1, 6, 2][: 1 + seed % 7]
    rule = scripted(3, [period[i % len(period)] for i in range(100)]) if seed % 2 else hashed(4, seed)
    plain, *_ = decode(ToyEngine(rule, 8, context=context), Plan(limit), [1, 2, 3])
    engine = ToyEngine(rule, 8, gamma=3, width=2, context=context, skill=skill, seed=seed)
    assert decode(engine, Plan(limit, tree=tree), [1, 2, 3])[0] == plain


def test_repeating_text_is_drafted_without_any_help_of_the_streams() -> None:
    rule = scripted(3, [1, 4, 2, 3, 7, 6, 2, 8] * 12)
    engine = ToyEngine(rule, 50, gamma=3, width=2, context=200, skill=0.0)
    _, _, run = decode(engine, Plan(90, tree=DraftTree.from_nodes(NODES, 6)), [1, 2, 3])
    assert run.stats.tau > 3
    _, _, without = decode(
        ToyEngine(rule, 50, gamma=3, width=2, context=200, skill=0.0),
        Plan(90, tree=DraftTree.from_nodes(NODES, 6), ngram=False),
        [1, 2, 3],
    )
    assert without.stats.tau < 1.2
