"""The theory's prediction for a run, from its counts and its costs."""

from __future__ import annotations

import numpy as np
import pytest

from streamspec.bench.predicted_speedup import pays_from, predict
from streamspec.runtime.costs.row_costs import RowCosts
from streamspec.runtime.costs.theory import DraftCounts, best_gamma, expected_speedup, expected_tokens
from tests.runtime.costs.test_theory import drafted


def test_a_prediction_adds_drafts_verification_and_plain_steps() -> None:
    costs = RowCosts(np.array([1.0, 1.5, 1.6, 1.7]))  # a row costs 0.1, the drafter 0.4
    counts, _ = drafted(0.5, 3, 4000)
    counts = counts._replace(calls=counts.steps)  # one call drafts all
    found = predict([(counts, 0)], costs)
    assert found is not None and found.best_gamma is None
    assert (found.draft, found.verify) == pytest.approx((0.4, 1.3))
    assert found.speedup == pytest.approx(expected_tokens(found.alpha, 3) / 1.7)
    with_plain = predict([(counts, 4000)], costs)
    assert with_plain is not None
    assert with_plain.speedup == pytest.approx((expected_tokens(found.alpha, 3) + 1) / 2.7)


def test_a_second_model_pays_for_every_draft_token_and_has_a_best_gamma() -> None:
    costs = RowCosts(np.array([1.0, 1.5, 1.6, 1.7, 1.8]))
    found = predict([(drafted(0.5, 3, 4000)[0], 0)], costs, max_gamma=4)
    assert found is not None and found.draft == pytest.approx(1.2)
    assert found.best_gamma == 1 and found.best_speedup == pytest.approx((1 + found.alpha) / 1.5)


class WindowCosts(RowCosts):
    """MagicDec's latency model: a plain step takes 1 + L / 1024 with L tokens in the cache, a draft over 512 of them
    1.5, a row of a draft 0.02 and its attention."""

    def __init__(self) -> None:
        super().__init__(np.ones(8))

    def at(self, cached: int) -> tuple[np.ndarray, float]:
        plain = 1 + cached / 1024
        return 1 + np.arange(8) * (0.02 + 0.05 * cached / 1024) / plain, 1.5 / plain


def test_a_window_pays_from_the_context_at_which_the_best_gamma_gains() -> None:
    costs, found = WindowCosts(), list[int]()
    for alpha in (0.6, 0.9, 0.99):
        first = pays_from(alpha, costs, 7, 8192)
        for cached, gains in ((first, True), (first - 256, False)):
            rows, price = costs.at(cached)
            gamma = best_gamma(alpha, price, 7, lambda n, rows=rows: rows[n])  # type: ignore[misc]
            assert (expected_speedup(alpha, gamma, price, rows[gamma]) > 1) == gains
        found.append(first)
    assert found == sorted(found, reverse=True) and found[0] > found[-1] > 512
    assert pays_from(0.0, costs, 7, 8192) == 0 == pays_from(0.9, costs, 7, 512)


def test_nothing_is_predicted_without_drafts_or_without_costs() -> None:
    assert predict([(DraftCounts(), 9)], RowCosts(np.ones(4))) is None
    assert predict([(drafted(0.5, 3, 4)[0], 0)], None) is None
