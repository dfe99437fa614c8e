"""Draft trees of the drafter's candidates and of other sources'."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamspec.draft_tree import DraftTree
from streamspec.runtime.decoding.draft_proposal import SHARPNESS, DraftProposal, IndependentProposal, TreeProposal
from streamspec.runtime.decoding.draft_tree_search import (
    MAX_ROWS,
    MIN_SHARPNESS,
    PYTHON_SEARCH,
    Draft,
    DraftCalibration,
    build_draft_tree,
)
from streamspec.runtime.draft_sources.ngram import NGRAM, NgramIndex
from streamspec.runtime.draft_sources.source import (
    AGREES,
    ALONE,
    DIFFERS,
    DRAFTER,
    NO_CLAIM,
    AcceptanceRates,
    CandidateTree,
    Continuations,
    Found,
    merged,
)
from streamspec.runtime.hardware import native_library, native_search
from tests.runtime.decoding.test_loop import decode
from tests.support.toy_runner import Setup, ToyRunner, adaptive, scripted, varied


def chain(tokens: Sequence[int], rates: Sequence[float]) -> CandidateTree:
    """One after the other, each with these rates by kind."""
    return CandidateTree(list(tokens), list(range(-1, len(tokens) - 1)), list(rates) * len(tokens), [2] * len(tokens))


def sure(tokens: Sequence[int], probability: float) -> CandidateTree:
    return chain(tokens, [probability] * 3)


def test_the_rates_follow_what_came() -> None:
    index, calibration = NgramIndex(), DraftCalibration()
    index.extend([1, 2, 3, 1, 2])
    rates, level = calibration.rates_of(NGRAM), 2
    first = index.find()
    assert first == Continuations([3, 1, 2], [-1, 0, 1], [level] * 3)
    found = [Found(first, rates, 2)]
    proposal = IndependentProposal(np.array([[3], [4]]), np.zeros((2, 1)))
    for _ in range(300):
        calibration.observe(proposal, found, [3, 1, 9])  # 3 agrees, 1 differs, 2 is beyond the streams
    of = rates.of(level)
    assert of[AGREES] > 0.98 and of[DIFFERS] > 0.95 and of[ALONE] < 0.05
    for _ in range(400):
        calibration.observe(proposal, found, [4])
    assert rates.of(level)[AGREES] < 0.2  # the past fades
    assert calibration.rates_of(NGRAM) is rates


@pytest.mark.parametrize("boast", [0.7, 1.0, 3.0])
def test_the_streams_are_believed_as_far_as_what_came_bears_them_out(boast: float) -> None:
    random = np.random.default_rng(0)
    calibration, late = DraftCalibration(), []
    for step in range(4000):
        probabilities = random.dirichlet(np.full(6, 0.3), 2)
        proposal = IndependentProposal(np.array([range(6), range(6)]), boast * np.log(probabilities + 1e-9))
        calibration.observe(proposal, [], [random.choice(6, p=row) for row in probabilities])
        late += [calibration.sharpness] if step >= 2000 else []
    assert np.mean(late) == pytest.approx(1 / boast, rel=0.1)


def test_tokens_that_no_stream_proposes_make_them_less_believed_but_not_without_end() -> None:
    calibration = DraftCalibration()
    for _ in range(3000):
        calibration.observe(PROPOSAL, [], [99, 99])
    assert calibration.sharpness == MIN_SHARPNESS
    calibration.observe(None, [], [99])
    calibration.observe(PROPOSAL, [], [])
    assert calibration.sharpness == MIN_SHARPNESS


def proposal_of(tokens: np.ndarray, probabilities: np.ndarray) -> IndependentProposal:
    return IndependentProposal(tokens, np.log(probabilities) / SHARPNESS)


PROPOSAL = proposal_of(np.array([[10, 11], [20, 21], [30, 31]]), np.array([[0.75, 0.25], [0.75, 0.25], [0.6, 0.4]]))


def paths(made: Draft) -> set[tuple[int, ...]]:
    return {tuple(int(made.tokens[i]) for i in made.tree.path(node)) for node in range(len(made.tree))}


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 3), st.integers(0, 10_000))
def test_the_tree_holds_the_likeliest_paths(rows: int, gamma: int, width: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    probabilities = np.sort(random.dirichlet(np.ones(width), gamma))[:, ::-1]
    proposal = proposal_of(np.arange(gamma * width).reshape(gamma, width), probabilities)
    every = {
        tuple(d * width + r for d, r in enumerate(ranks)): float(
            np.prod([probabilities[d, r] for d, r in enumerate(ranks)])
        )
        for depth in range(gamma + 1)
        for ranks in product(range(width), repeat=depth)
    }
    made = build_draft_tree(99, proposal, None, rows)
    best = sorted(every.values(), reverse=True)[:rows]
    found = {path[1:] for path in paths(made)}
    assert len(found) == len(made.tree) == len(best)
    assert sorted((every[path] for path in found), reverse=True) == pytest.approx(best)
    assert made.expected == pytest.approx(sum(best))


def test_trees_of_one_shape_share_their_mask() -> None:
    one, other = (build_draft_tree(root, PROPOSAL, None, 6) for root in (98, 99))
    assert one.tree is other.tree and one.tokens[0] == 98 and other.tokens[0] == 99


def test_numbers_that_are_none_give_a_draft_all_the_same() -> None:
    """Scores come from a graph, which may be hostile."""
    for odd in (np.nan, np.inf, -np.inf):
        for at in (0, 1):
            logits = np.array([[0.0, 1.0, 1e30]] * 2, np.float32)
            logits[:, at] = odd
            proposal = IndependentProposal(np.array([[1, 2, 3], [4, 5, 6]]), logits)
            made = build_draft_tree(9, proposal, None, 4, np.linspace(1, 2, 4))
            assert made.tokens[0] == 9 and len(made.tree) <= 4
            DraftCalibration().observe(proposal, [], [2, 6])


def test_no_draft_outgrows_the_cache_however_many_rows_are_asked_for() -> None:
    proposal = proposal_of(np.arange(60).reshape(6, 10), np.full((6, 10), 0.1))
    assert len(build_draft_tree(99, proposal, None, 100_000).tree) == MAX_ROWS == 64


def test_costs_decide_how_many_rows_a_draft_has() -> None:
    assert len(build_draft_tree(5, PROPOSAL, None, 16, np.ones(16)).tree) == 15  # all there are
    assert len(build_draft_tree(5, PROPOSAL, None, 16, np.arange(1.0, 17.0)).tree) == 2
    priced = build_draft_tree(5, PROPOSAL, None, 16, 1 + 0.1 * np.arange(16))
    sizes = {n: build_draft_tree(5, PROPOSAL, None, n).expected / (1 + 0.1 * (n - 1)) for n in range(2, 16)}
    assert len(priced.tree) == max(sizes, key=lambda n: sizes[n])


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 40), st.integers(1, 5), st.integers(1, 5), st.integers(0, 10_000))
def test_ending_the_search_early_does_not_change_the_draft(rows: int, gamma: int, width: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    proposal = proposal_of(
        np.arange(gamma * width).reshape(gamma, width), random.dirichlet(np.full(width, 0.5), gamma) + 1e-9
    )
    costs = np.cumsum(random.exponential(0.2, rows)) + 1
    whole = build_draft_tree(99, proposal, None, rows)
    probabilities = np.sort(whole.probabilities)[::-1]
    sizes = range(2, len(whole.tree) + 1)
    best = max(sizes, key=lambda n: probabilities[:n].sum() / costs[n - 1], default=len(whole.tree))
    assert len(build_draft_tree(99, proposal, None, rows, costs).tree) == best


def test_streams_and_text_compete_and_agreeing_nodes_are_one() -> None:
    made = build_draft_tree(5, PROPOSAL, sure((10, 50, 51), 0.5), 6)
    # 10: 0.75 by both; 10 50: 0.375, the text's, which leaves 0.28 to 10 20; 11: 0.25; 10 50 51: 0.19; 10 20 30: 0.17
    assert paths(made) == {(5,), (5, 10), (5, 10, 50), (5, 10, 20), (5, 11), (5, 10, 50, 51)}
    assert made.tokens[:4] == [5, 10, 50, 51]  # the likeliest path first


def test_a_certain_continuation_takes_the_rows_and_goes_deeper_than_the_streams() -> None:
    made = build_draft_tree(5, PROPOSAL, sure(tuple(range(70, 80)), 0.95), 6)
    assert made.tree.depth == 5 and made.tokens == [5, 70, 71, 72, 73, 74]
    alone = build_draft_tree(5, None, sure((7, 8), 0.5), 6)
    assert alone.tokens == [5, 7, 8] and build_draft_tree(5, None, None, 6).tokens == [5]


def test_probabilities_are_a_candidate_s_share_of_its_row_given_the_candidate_before() -> None:
    tokens = np.array([[10, 11], [20, 21]])
    pairs = np.zeros((2, 2, 2), np.float32)
    pairs[1, 1] = [0, 10 / SHARPNESS]  # after 11, 21 is all but certain
    proposal = IndependentProposal(tokens, np.zeros((2, 2), np.float32), pairs)
    assert proposal.after(1, 0) == [(20, 0.5, 0), (21, 0.5, 1)] == proposal.after(1, None)
    (token, probability, number), _ = proposal.after(1, 1)
    assert (token, number) == (21, 1) and probability == pytest.approx(1, abs=1e-4)
    assert paths(build_draft_tree(5, proposal, None, 5)) == {(5,), (5, 10), (5, 11), (5, 11, 21), (5, 10, 20)}


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 60), st.integers(4, 80), st.floats(0, 1), st.integers(2, 9))
def test_output_is_plain_decoding_s_with_ngram(seed: int, limit: int, context: int, skill: float, rows: int) -> None:
    rule = varied(3, seed)
    plain, *_ = decode(ToyRunner(rule, 8, context=context), Setup(limit), [1, 2, 3])
    runner = ToyRunner(rule, 8, gamma=3, width=2, context=context, skill=skill, seed=seed)
    assert decode(runner, Setup(limit, rows=rows), [1, 2, 3])[0] == plain


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 60), st.integers(4, 80), st.integers(2, 9), st.booleans())
def test_output_is_plain_decoding_s_with_ngrams_alone(
    seed: int, limit: int, context: int, rows: int, costly: bool
) -> None:
    rule = varied(3, seed)
    plain, *_ = decode(ToyRunner(rule, 8, context=context), Setup(limit), [1, 2, 3])
    costs = np.linspace(1, 4 if costly else 1.5, rows)
    runner = ToyRunner(rule, 8, gamma=0, context=context)
    assert decode(runner, Setup(limit, rows=rows, costs=costs), [1, 2, 3])[0] == plain
    assert not any(drafted for _, drafted in runner.calls)


def test_without_streams_a_draft_that_does_not_pay_is_not_verified() -> None:
    rule = scripted(3, [1, 4, 2, 3, 7, 6, 2, 8] * 12)
    runs = [
        decode(
            ToyRunner(rule, 50, gamma=0, context=200),
            Setup(90, rows=6, costs=np.r_[1, [cost] * 5], adaptive=adaptive()),
            [1, 2, 3],
        )[2]
        for cost in (1.1, 99.0)
    ]
    assert runs[0].stats.tau > 3 and runs[0].stats.steps > 10
    assert runs[1].stats.steps == 0


def test_repeating_text_is_drafted_without_any_help_of_the_streams() -> None:
    rule = scripted(3, [1, 4, 2, 3, 7, 6, 2, 8] * 12)
    runner = ToyRunner(rule, 50, gamma=3, width=2, context=200, skill=0.0)
    _, _, run = decode(runner, Setup(90, rows=6), [1, 2, 3])
    assert run.stats.tau > 3
    _, _, without = decode(
        ToyRunner(rule, 50, gamma=3, width=2, context=200, skill=0.0),
        Setup(90, rows=6, ngram=False),
        [1, 2, 3],
    )
    assert without.stats.tau < 1.2


def test_a_continuation_that_a_layer_did_not_foresee_stands_alone() -> None:
    tokens, logits = np.array([[10, 11], [20, 21]]), np.zeros((2, 2), np.float32)
    grown = TreeProposal(tokens, logits, np.array([-1, 0]), (1, 1))  # the second level follows 10 only
    found = chain((7, 8), (0.65, 0.95, 0.25))
    made = build_draft_tree(5, grown, found, 8)
    probability = {
        tuple(made.tokens[i] for i in made.tree.path(node)): made.probabilities[node] for node in range(len(made.tree))
    }
    assert probability[5, 7] == pytest.approx(0.25) and probability[5, 7, 8] == pytest.approx(0.25 * 0.65)


def test_tokens_that_a_source_only_passes_through_stay_as_likely_as_the_drafter_says() -> None:
    rates = AcceptanceRates([(0.9, 0.9, 0.9)])
    passed = merged([Found(Continuations([10, 20, 70], [-1, 0, 1], [NO_CLAIM, NO_CLAIM, 0]), rates, 2)])
    made, without = (build_draft_tree(5, PROPOSAL, others, 5) for others in (passed, None))
    probability = dict(zip(made.tokens, made.probabilities, strict=True))
    assert probability[10] == pytest.approx(0.75) and probability[70] == pytest.approx(0.75 * 0.75 * 0.9)
    assert dict(zip(without.tokens, without.probabilities, strict=True))[20] == pytest.approx(probability[20])
    assert made.sources[made.tokens.index(10)] == DRAFTER and made.sources[made.tokens.index(70)] == 2
    claimed = merged([Found(Continuations([11, 10], [-1, -1], [0, NO_CLAIM]), rates, 2)])
    made = build_draft_tree(5, PROPOSAL, claimed, 12)
    assert dict(zip(made.tokens, made.probabilities, strict=True))[10] == pytest.approx(0.1)  # what 11 leaves
    assert build_draft_tree(5, None, passed, 5).tokens == [5]  # nobody says how likely 10 is


def random_case(seed: int) -> tuple[DraftProposal | None, CandidateTree | None, np.random.Generator]:
    """A proposal of any kind, with ties and candidates that come twice, and what other sources propose; either may be
    none."""
    random = np.random.default_rng(seed)
    depths, width, kind = (int(n) for n in random.integers([1, 1, 0], [6, 9, 4]))
    levels = tuple(int(n) for n in (1, *random.integers(1, 4, depths - 1)))
    rows = sum(levels) if kind == 2 else depths
    tokens = random.integers(0, 8, (rows, width))
    logits = np.round(random.normal(0, 2, (rows, width)), int(random.integers(0, 4))).astype(np.float32)
    proposal: DraftProposal | None = None
    if kind == 2:
        proposal = TreeProposal(tokens, logits, random.integers(-1, 2 * width, rows), levels)
    elif kind < 2:
        pairs = np.round(random.normal(0, 1, (depths, width, width)), 1).astype(np.float32)
        proposal = IndependentProposal(tokens, logits, pairs if kind else None)
    found = []
    for bit in (2, 4)[: random.integers(0, 3) if proposal is not None else 2]:
        rates = AcceptanceRates(random.uniform(0, 1, (3, 3)).tolist())
        found.append(Found(random_continuations(random), rates, bit))
    return proposal, merged(found), random


def random_continuations(random: np.random.Generator) -> Continuations:
    """A chain or a tree of up to 12 tokens, some of them only passed through."""
    places = dict[tuple[int, int], int]()
    narrow = random.random() < 0.5
    for _ in range(random.integers(0, 13)):
        parent = len(places) - 1 if narrow else int(random.integers(-1, len(places)))
        places.setdefault((parent, int(random.integers(0, 9))), len(places))
    parents, tokens = [parent for parent, _ in places], [token for _, token in places]
    return Continuations(tokens, parents, random.integers(-1, 3, len(places)).tolist())


NATIVE = native_search.find()


@pytest.mark.skipif(NATIVE is None, reason=native_library.why_not())
@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_native_library_takes_the_same_nodes_and_compares_alike(seed: int) -> None:
    assert NATIVE is not None
    proposal, others, random = random_case(seed)
    rows, sharpness = int(random.integers(1, 65)), float(random.uniform(0.2, 2))
    costs = None if random.random() < 0.3 else 1 + np.cumsum(random.exponential(0.1, 64))
    assert NATIVE.take(7, proposal, others, rows, costs, sharpness) == PYTHON_SEARCH.take(
        7, proposal, others, rows, costs, sharpness
    )
    if proposal is not None:
        came = random.integers(0, 9, int(random.integers(1, 9))).tolist()
        assert NATIVE.compare(proposal, came, sharpness) == PYTHON_SEARCH.compare(proposal, came, sharpness)


@pytest.mark.skipif(NATIVE is None, reason=native_library.why_not())
def test_numbers_that_are_none_do_the_native_library_no_harm() -> None:
    assert NATIVE is not None
    for value in (np.nan, np.inf, -np.inf):
        logits = np.full((3, 32), value, np.float32)
        proposal = IndependentProposal(np.arange(96).reshape(3, 32), logits, np.zeros((3, 32, 32), np.float32))
        found = NATIVE.take(5, proposal, None, 64, np.ones(64), 1.0)
        assert all(parent < max(i, 1) for i, parent in enumerate(found.parents)) and 1 <= found.size <= 64
        NATIVE.compare(proposal, [1, 2, 3], 1.0)
    with pytest.raises(ValueError, match="2 costs of 3 rows"):
        NATIVE.take(5, None, None, 3, np.ones(2), 1.0)


def test_candidates_whose_arrays_do_not_fit_are_refused() -> None:
    tokens, logits = np.zeros((3, 4), np.int64), np.zeros((3, 4), np.float32)
    for one, other in ((tokens, logits[:2]), (tokens[:, :0], logits[:, :0])):
        with pytest.raises(ValueError, match="tokens"):
            IndependentProposal(one, other)
    with pytest.raises(ValueError, match="tokens"):
        IndependentProposal(tokens, logits, np.zeros((3, 4, 3), np.float32))
    for origins, levels in ((np.zeros(2, np.int64), (1, 2)), (np.zeros(4, np.int64), (1, 3))):
        with pytest.raises(ValueError, match="tokens"):
            TreeProposal(tokens, logits, origins, levels)


def test_a_draft_is_cut_at_a_depth() -> None:
    tree = DraftTree((0, 0, 1, 2, 1, 0, 5), (0, 0, 0, 0, 1, 1, 0))
    draft = Draft(tree, [9, 1, 2, 3, 4, 5, 6], [1.0, 0.5, 0.25, 0.1, 0.2, 0.4, 0.3], [0, 1, 1, 1, 1, 2, 2], 2.75)
    cut = draft.down_to(2)
    assert cut.tree.parents == (0, 0, 1, 1, 0, 4) and cut.tree.ranks == (0, 0, 0, 1, 1, 0)
    assert cut.tokens == [9, 1, 2, 4, 5, 6] and cut.sources == [0, 1, 1, 1, 2, 2]
    assert cut.expected == pytest.approx(2.65) and draft.down_to(3) is draft
    assert draft.down_to(0).tokens == draft.down_to(-1).tokens == [9]
