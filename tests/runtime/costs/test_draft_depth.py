"""How deep a second model drafts: what is learned of its drafts, and the theory's choice."""

from __future__ import annotations

import numpy as np
import pytest

from streamspec.runtime.costs.draft_depth import ASSUMED, ASSUMED_WINDOW, GAIN, MAX_DEPTH, DraftDepth, EarlyEnd
from streamspec.runtime.costs.row_costs import RowCosts
from streamspec.runtime.costs.theory import best_gamma, expected_speedup


def costs(price: float, row: float) -> RowCosts:
    return RowCosts(np.array([1.0, *(1 + row * n + price for n in range(1, 64))]))


def learned(alpha: float, steps: int = 400) -> DraftDepth:
    depth, random = DraftDepth(), np.random.default_rng(0)
    for _ in range(steps):
        right = int(random.geometric(1 - alpha)) - 1
        depth.observe([1] * 6, ([1] * min(right, 6)) + [2])
    return depth


@pytest.mark.parametrize("alpha", [0.2, 0.6, 0.9])
def test_alpha_is_learned_from_the_tokens_that_came(alpha: float) -> None:
    assert learned(alpha).alpha == pytest.approx(alpha, abs=0.08)
    assert DraftDepth().alpha == ASSUMED


def test_drafts_after_a_wrong_one_say_nothing() -> None:
    depth, other = DraftDepth(), DraftDepth()
    depth.observe([1, 2, 3], [1, 5, 3])
    other.observe([1, 2], [1, 5])
    assert depth.alpha == other.alpha


@pytest.mark.parametrize(("price", "row"), [(0.05, 0.02), (0.2, 0.1), (0.6, 0.0), (0.02, 0.4)])
@pytest.mark.parametrize("alpha", [0.3, 0.7, 0.95])
def test_the_depth_is_the_theorys_best_gamma(alpha: float, price: float, row: float) -> None:
    depth, known = learned(alpha), costs(price, row)
    expected = best_gamma(depth.alpha, known.price, MAX_DEPTH, lambda gamma: known.verify(gamma + 1))
    assert depth.best(known, 64) == expected


def test_fewer_rows_leave_room_for_fewer_drafts() -> None:
    assert learned(0.95).best(costs(0.01, 0.0), 64) == MAX_DEPTH
    assert learned(0.95).best(costs(0.01, 0.0), 4) == 3
    assert DraftDepth().best(None, 6) == 5 and DraftDepth().best(None, 2) == 1


def test_drafts_pay_where_the_theorys_best_gamma_gains() -> None:
    for alpha, price in ((0.9, 0.7), (0.9, 0.85), (0.3, 0.15), (0.3, 0.4)):
        depth, known = learned(alpha), costs(price, 0.02)
        verify = known.without_drafter
        speeds = [
            expected_speedup(depth.alpha, n, known.price, verify[n])
            for n in range(1, min(MAX_DEPTH, len(verify) - 1) + 1)
        ]
        assert depth.pays(known, len(verify)) == (max(speeds) > GAIN) == (price in (0.7, 0.15))


def test_a_window_is_believed_to_be_right_more_often_until_it_is_known() -> None:
    assert DraftDepth(ASSUMED_WINDOW).alpha == ASSUMED_WINDOW > DraftDepth().alpha == ASSUMED


@pytest.mark.parametrize(("price", "row"), [(0.05, 0.02), (0.2, 0.1), (0.6, 0.0), (0.02, 0.4)])
@pytest.mark.parametrize("alpha", [0.3, 0.7, 0.95])
def test_drafts_that_are_as_sure_as_ever_end_where_the_theory_ends_them(alpha: float, price: float, row: float) -> None:
    depth, known = learned(alpha), costs(price, row)
    end, drafted = depth.early_end(known, 64), 1
    assert end is not None and depth.early_end(None, 64) is None
    while drafted < MAX_DEPTH and end.probability(depth.alpha) ** drafted >= end.min_probability:
        drafted += 1
    assert drafted == depth.best(known, 64)
    assert end.min_probability > 0 and end.probability(1.0) == 1.0


@pytest.mark.parametrize("honest", [0.5, 0.8, 1.0])
def test_confidence_is_trusted_as_far_as_it_was_right(honest: float) -> None:
    depth, random = DraftDepth(), np.random.default_rng(1)
    assert depth.trust == 1.0
    for _ in range(600):
        confidences = random.uniform(0.2, 1.0, 6).tolist()
        depth.observe([1] * 6, [1 if random.random() < honest * one else 2 for one in confidences], confidences)
    assert depth.trust == pytest.approx(honest, abs=0.1)
    assert EarlyEnd(0.5, depth.trust).probability(0.5) == pytest.approx(honest * 0.5, abs=0.06)
    before = depth.trust
    depth.observe([1, 1], [1, 2])  # of unknown confidence
    assert depth.trust == before
