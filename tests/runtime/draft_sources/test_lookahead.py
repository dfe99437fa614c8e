"""Lookahead decoding: n-grams that the model wrote in guesses ahead of the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamspec.layer_cache import SUM_BLOCK
from streamspec.runtime import Sampling, load
from streamspec.runtime.costs.drafter_gate import EXPLORED_PAUSE, DrafterGate, ExplorationGate
from streamspec.runtime.costs.row_costs import RowCosts
from streamspec.runtime.decoding.draft_tree_search import build_draft_tree, with_rows
from streamspec.runtime.decoding.observers import ExplorationObserver
from streamspec.runtime.decoding.stats import SourceCounts
from streamspec.runtime.decoding.step_plan import StepPlan
from streamspec.runtime.draft_sources.lookahead import (
    ASSUMED,
    BYTES,
    LOOKAHEAD,
    NGRAM,
    NGRAMS,
    WINDOW,
    LookaheadPool,
)
from streamspec.runtime.draft_sources.recycling import RECYCLING
from streamspec.runtime.draft_sources.source import NO_CLAIM, AcceptanceRates, CandidateTree, Continuations, Stems
from streamspec.runtime.sampling.grammar_state import GrammarState
from tests.runtime.decoding.test_loop import decode
from tests.support.toy_runner import Setup, ToyMatcher, ToyRunner, adaptive, scripted, varied

ROOT = Stems((0,), (0,), (1.0,), (0,))
LIMIT = 99


def verified(pool: LookaheadPool, root: int, choose: Callable[[int], int]) -> None:
    """A step that verifies the window alone; `choose`: the token after a token."""
    window = pool.explore(LIMIT)
    assert window is not None and set(window.levels) == {NO_CLAIM}
    tokens = [root, *window.tokens]
    pool.chosen(tokens, [0, *(parent + 1 for parent in window.parents)], [choose(token) for token in tokens], [0])
    pool.extend([choose(root)])


def begun(prompt: Sequence[int]) -> LookaheadPool:
    pool = LookaheadPool()
    pool.begin()
    pool.extend(prompt)
    return pool


def test_the_window_is_a_chain_of_guesses_and_the_columns_after_them() -> None:
    pool = begun([5])
    assert pool.explore(LIMIT) == Continuations([5] * (WINDOW - 1), [-1, 0, 1], [NO_CLAIM] * 3)
    assert begun([5]).explore(WINDOW) is None  # no room
    verified(pool, 5, lambda token: token + 1)
    window = pool.explore(LIMIT)
    assert window is not None and len(set(zip(window.parents, window.tokens, strict=True))) == len(window.tokens)
    assert 6 in window.tokens  # what was chosen after a guess of 5


def test_columns_that_are_full_become_n_grams_of_the_pool() -> None:
    pool = begun([10, 20, 30, 40])
    for root in range(1, 12):
        verified(pool, root, lambda token: token + 1)
    every = [(first, found) for first in range(60) for found in pool.after(first)]
    assert every and all(found == [first + 1, first + 2] for first, found in every)
    assert all(len(found) == NGRAM - 1 for _, found in every)


def test_the_newest_distinct_n_grams_are_kept() -> None:
    pool = LookaheadPool()
    for last in (1, 2, 3, 4, 5, 3):
        pool._keep([7, 8, last])
    assert [found[-1] for found in pool.after(7)] == [3, 5, 4, 2] and NGRAMS == 4
    pool.begin()  # a new text knows them, too
    pool.extend([6, 7])
    found = pool.graft(LIMIT, ROOT, AcceptanceRates(ASSUMED))
    assert found == Continuations([8, 3, 5, 4, 2], [-1, 0, 0, 0, 0], [0, 1, 3, 5, 7])
    short = pool.graft(1, ROOT, AcceptanceRates(ASSUMED))
    assert short is not None and short.tokens == [8]
    pool.extend([300_000])
    assert pool.graft(LIMIT, ROOT, AcceptanceRates(ASSUMED)) is None


def test_a_step_without_the_window_or_with_pruned_rows_leaves_it_usable() -> None:
    pool = begun([1, 2, 3])
    before = pool.explore(LIMIT)
    assert before is not None
    pool.chosen([9], [0], [-1], [0])
    assert pool.explore(LIMIT) == before
    tokens = [3, *before.tokens]
    pool.chosen(tokens, [0, *(parent + 1 for parent in before.parents)], [4, *[-1] * len(before.tokens)], [0])
    assert pool.explore(LIMIT) is not None


def test_rows_join_a_draft_once_and_are_the_least_likely() -> None:
    others = CandidateTree([4, 5], [-1, 0], [0.9] * 6, [2, 2])
    draft = build_draft_tree(3, None, others, 8)
    more = with_rows(draft, Continuations([4, 6, 7, 7], [-1, 0, -1, 2], [NO_CLAIM] * 4), 8)
    assert more.tokens == [*draft.tokens, 6, 7, 7] and more.sources[3:] == [8] * 3
    assert more.tree.parents == (*draft.tree.parents, 1, 0, 4) and more.probabilities[3:] == [0.0] * 3


def test_rows_are_left_out_while_they_cost_more_than_they_bring() -> None:
    gate, closed = ExplorationGate(), 0
    while gate.open:
        gate.step(1, 1.4, 0, 0.4)
        closed += 1
    assert 3 < closed < 60
    for _ in range(EXPLORED_PAUSE):
        assert not gate.open
        gate.step(1, 1.0, 0, 0.0)
    assert gate.open
    for _ in range(200):
        gate.step(2, 1.4, 1, 0.4)
    assert gate.open


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 60), st.integers(4, 80), st.floats(0, 1), st.integers(2, 30), st.booleans())
def test_output_is_plain_decoding_s(
    seed: int, limit: int, context: int, skill: float, rows: int, drafter: bool
) -> None:
    rule, state = varied(3, seed), adaptive()
    plain, *_ = decode(ToyRunner(rule, 8, context=context), Setup(limit), [1, 2, 3])
    for ngram in (True, False):  # the second answer knows the first
        runner = ToyRunner(rule, 8, gamma=3 * drafter, width=2, context=context, skill=skill, seed=seed)
        costs = None if seed % 3 else np.linspace(1, 1 + seed / 500, rows)
        sources = ((RECYCLING,), (LOOKAHEAD,), (RECYCLING, LOOKAHEAD))[seed % 4 % 3]
        setup = Setup(limit, rows=rows, costs=costs, ngram=ngram, sources=sources, adaptive=state)
        assert decode(runner, setup, [1, 2, 3])[0] == plain


def test_an_answer_drafts_from_its_own_guesses() -> None:
    script = [(7 * i) % 40 for i in range(80)]

    def rule(ids: Sequence[int]) -> int:
        return (ids[-1] + 7) % 40  # follows from the last token, as what a model says partly does

    taus = []
    for sources in ((), (LOOKAHEAD,)):
        setup = Setup(70, rows=30, ngram=False, sources=sources, adaptive=adaptive())
        tokens, _, run = decode(ToyRunner(rule, 50, gamma=0, context=200), setup, [1, 20, 33])
        assert tokens == script[:70]
        taus.append(run.stats.new_tokens / (run.stats.steps + run.stats.plain_steps))
    assert taus[0] <= 70 / 69 and taus[1] > 1.5


def test_rows_are_counted_by_their_source_and_reserved_from_the_draft() -> None:
    runner = ToyRunner(scripted(3, [*range(30)]), 40, gamma=0, context=200)
    _, _, run = decode(runner, Setup(25, rows=12, ngram=False, sources=(LOOKAHEAD,), adaptive=adaptive()), [1, 2, 3])
    assert run.stats.sources["lookahead"].drafted > 0
    assert max(rows for rows, _ in runner.calls[1:]) <= 12
    small = ToyRunner(scripted(3, [*range(30)]), 40, gamma=0, context=200)
    decode(small, Setup(25, rows=3, ngram=False, sources=(LOOKAHEAD,), adaptive=adaptive()), [1, 2, 3])
    assert max(rows for rows, _ in small.calls[1:]) == 1  # no room for the window


def test_the_drafter_is_not_charged_for_the_window_s_rows() -> None:
    compared = list[int]()

    class Recording(DrafterGate):
        def compare(self, tokens: int, rows: int, *more: float) -> None:
            compared.append(rows)

    costs = np.linspace(1, 1.1, 30)
    state = adaptive(gate=Recording(RowCosts(costs)))
    runner = ToyRunner(scripted(3, [*range(30)]), 40, gamma=3, context=200)
    setup = Setup(25, rows=30, costs=costs, ngram=False, sources=(LOOKAHEAD,), adaptive=state)
    decode(runner, setup, [1, 2, 3])
    window = [rows - own for (rows, _), own in zip(runner.calls[1:], compared, strict=False)]
    assert compared and min(window) >= 0 and max(window) > WINDOW and min(compared) > 0


def test_of_a_draft_cut_at_a_summation_border_only_rows_that_are_left_count_as_explored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans = list[StepPlan]()
    monkeypatch.setattr(ExplorationObserver, "observe", lambda _, outcome: plans.append(outcome.plan))
    for begin, gamma in product(range(SUM_BLOCK - 8, SUM_BLOCK), (0, 3)):
        runner = ToyRunner(scripted(begin, [*range(60)]), 80, gamma=gamma, context=400)
        setup = Setup(20, rows=20, ngram=False, sources=(LOOKAHEAD,), adaptive=adaptive())
        decode(runner, setup, [i % 7 for i in range(begin)])
    across = [plan for plan in plans if plan.cached < SUM_BLOCK < plan.cached + plan.rows]
    assert {plan.explored > 0 for plan in across} == {True, False}
    for plan in plans:  # what explores claims nothing
        assert plan.explored == sum(probability == 0.0 for probability in plan.draft.probabilities)


def test_steps_without_drafts_count_until_it_is_tried_again() -> None:
    state = adaptive()
    state.exploration._advantage = -1.0
    runner = ToyRunner(scripted(3, [*range(300)]), 400, gamma=0, context=900)
    _, _, run = decode(runner, Setup(299, rows=30, ngram=False, sources=(LOOKAHEAD,), adaptive=state), [1, 2, 3])
    assert run.stats.plain_steps >= EXPLORED_PAUSE and run.stats.sources["lookahead"].drafted > 0


def test_nothing_is_explored_under_a_grammar() -> None:
    state = adaptive()
    setup = Setup(
        30,
        rows=20,
        ngram=False,
        sources=(LOOKAHEAD,),
        adaptive=state,
        grammar=GrammarState(ToyMatcher(8, 3), ()),
    )
    _, _, run = decode(ToyRunner(varied(3, 0), 8, gamma=0, context=60), setup, [1, 2, 3])
    assert "lookahead" not in run.stats.sources


def test_its_size_is_known() -> None:
    assert LookaheadPool()._pool.nbytes == BYTES


@pytest.mark.parametrize("bundle", ["fp32", "int8", "endless fp32"])
def test_answers_of_a_bundle_are_plain_decoding_s(bundles: Callable[[str], Path], bundle: str) -> None:
    """The window's rows lie beside the drafter's in the same call."""
    session = load(bundles(bundle), threads=1, tree=24, lookahead=True)
    brought = 0
    for sampling in (Sampling(), Sampling(1.0, seed=5), Sampling(0.8, repetition_penalty=1.3, seed=7)):
        for prompt in ("hello", "a b c d e f", "hello"):
            plain, found = (
                session.generate(prompt, max_new_tokens=40, sampling=sampling, speculate=speculate)
                for speculate in (False, True)
            )
            assert found.text == plain.text
            brought += found.stats.sources.get("lookahead", SourceCounts()).drafted
    assert brought
