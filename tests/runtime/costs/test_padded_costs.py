"""Costs of steps that are padded to few row counts."""

from __future__ import annotations

import numpy as np

from streamspec.runtime.costs.learned_costs import PaddedRowCosts


def test_rows_up_to_a_count_cost_what_the_count_does() -> None:
    seconds = {1: 0.010, 4: 0.011, 8: 0.016}
    costs, random = PaddedRowCosts((1, 4, 8), 8), np.random.default_rng(0)
    for step in range(400):
        rows = (1, 2, 3, 5, 7)[step % 5]
        padded = 1 if rows == 1 else 4 if rows <= 4 else 8
        costs.observe(rows, 1, seconds[padded] * random.uniform(0.98, 1.02), 64)
    curve = costs.curve
    assert curve[0] == 1 and len({*curve[1:4]}) == 1 and len({*curve[4:]}) == 1
    assert abs(curve[1] - 1.1) < 0.1 and abs(curve[7] - 1.6) < 0.2
    assert costs.price == 0  # the drafter runs in every call
    trial = costs.trial(1)
    assert trial is None or len({*trial.low[1:4]}) == len({*trial.high[4:]}) == 1


def test_fewer_rows_than_a_count_has_are_possible() -> None:
    costs = PaddedRowCosts((1, 8, 16), 11)  # what n-grams alone draft
    costs.observe(11, 0, 0.01, 64)
    costs.observe(12, 0, 0.01, 64)  # more than there are: ignored
    assert len(costs.curve) == 11 and len({*costs.curve[1:8]}) == 1 and costs.steps == 1
