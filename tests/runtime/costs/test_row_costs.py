from __future__ import annotations

import numpy as np
import pytest

from streamspec.runtime.costs.row_costs import RowCosts, Trial

COSTS = np.array([1.0, 1.4, 1.6, 1.8, 2.0, 2.2])
EXPECTED = np.array([1.0, 1.8, 2.4, 2.6, 2.7, 2.75])  # three rows bring most per cost


def test_the_price_of_the_drafter_is_read_off_a_curve() -> None:
    costs = RowCosts(COSTS)
    assert costs.price == pytest.approx(0.2)
    assert costs.without_drafter == pytest.approx([1.0, 1.2, 1.4, 1.6, 1.8, 2.0])
    assert costs.with_drafter[1:] == pytest.approx(COSTS[1:]) and costs.curve[0] == 1
    assert RowCosts(np.ones(1)).price == 0 and costs.trial(True) is None


def trial(low: float, high: float, allowed: float) -> Trial:
    """Costs of five and six rows may be lower by `low` and higher by `high`."""
    unsure = np.array([0, 0, 0, 0, 1, 1])
    return Trial(COSTS - low * unsure, COSTS + high * unsure, allowed)


def test_a_trial_takes_what_would_pay_if_it_were_cheap() -> None:
    one = trial(0.3, 0.1, 1.0)
    assert one.size(EXPECTED, COSTS, 3) == 5
    assert one.loss == pytest.approx(2.1 - 2.7 * 1.6 / 2.4)


def test_a_trial_that_may_lose_too_much_is_not_made() -> None:
    one = trial(0.3, 0.9, 1.0)
    assert one.size(EXPECTED, COSTS, 3) == 3 and one.loss == 0


def test_what_cannot_pay_is_not_tried() -> None:
    one = trial(0.1, 0.1, 1.0)
    assert one.size(EXPECTED, COSTS, 3) == 3 and one.loss == 0
