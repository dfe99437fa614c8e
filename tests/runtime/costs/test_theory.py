"""The theory of speculative decoding's speed, against its own experiment: coins, counted."""

from __future__ import annotations

import numpy as np
import pytest

from streamspec.draft_tree import DraftTree, chain
from streamspec.runtime.costs.theory import DraftCounts, best_gamma, expected_speedup, expected_tokens


def drafted(alpha: float, gamma: int, steps: int) -> tuple[DraftCounts, int]:
    """Counts of `steps` chains of `gamma` tokens, each accepted with probability `alpha`; and the tokens they bring."""
    random, counts = np.random.default_rng(0), [DraftCounts()]
    for _ in range(steps):
        accepted = next((i for i in range(gamma) if random.random() >= alpha), gamma)
        counts.append(DraftCounts().after(chain(gamma), range(accepted + 1), gamma))
    total = DraftCounts.sum(counts)
    return total, total.accepted + steps


@pytest.mark.parametrize(("alpha", "gamma"), [(0.2, 1), (0.6, 3), (0.9, 7)])
def test_expected_tokens_and_the_estimate_of_alpha_agree_with_coins_thrown(alpha: float, gamma: int) -> None:
    counts, tokens = drafted(alpha, gamma, 20_000)
    assert tokens / counts.steps == pytest.approx(expected_tokens(alpha, gamma), rel=0.02)
    assert counts.accepted / counts.tried == pytest.approx(alpha, abs=0.01)


def test_the_papers_own_figures() -> None:
    """Its table 1: alpha 0.6 and 0.8 with gamma 2 and 5 for c = 0 (speed 1.96 and 3.69), 0.9 with 10 (6.86)."""
    assert [round(expected_speedup(*case, 0.0), 2) for case in ((0.6, 2), (0.8, 5), (0.9, 10))] == [1.96, 3.69, 6.86]
    assert expected_tokens(1.0, 4) == 5 and expected_tokens(0.0, 4) == 1


def test_a_draft_that_costs_more_than_it_is_right_never_pays() -> None:
    """Corollary 3.9: some gamma pays where alpha > c, and gamma 1 then gives (1 + alpha) / (1 + c)."""
    for alpha, c in ((0.5, 0.3), (0.9, 0.7)):
        assert expected_speedup(alpha, best_gamma(alpha, c, 16), c) >= (1 + alpha) / (1 + c) > 1
    assert expected_speedup(0.3, best_gamma(0.3, 0.5, 16), 0.5) < 1


def test_the_best_gamma_grows_with_alpha_and_falls_with_every_price() -> None:
    found = [best_gamma(alpha, 0.1, 16) for alpha in (0.3, 0.6, 0.9)]
    assert found == sorted(found) and found[0] < found[2]
    assert best_gamma(0.9, 0.4, 16) < best_gamma(0.9, 0.1, 16)
    assert best_gamma(0.9, 0.1, 16, lambda gamma: 1 + 0.2 * gamma) < best_gamma(0.9, 0.1, 16)


def test_of_a_tree_depths_are_counted_at_which_any_candidate_may_be_right() -> None:
    tree = DraftTree((0, 0, 0, 1, 1), (0, 0, 1, 0, 1))  # two candidates, then two after the first
    found = [DraftCounts().after(tree, path, 1) for path in ((0,), (0, 1), (0, 2), (0, 1, 4))]
    assert [(one.tried, one.accepted) for one in found] == [(1, 0), (2, 1), (1, 1), (2, 2)]
    assert {(one.steps, one.rows, one.depth, one.calls) for one in found} == {(1, 5, 2, 1)}
