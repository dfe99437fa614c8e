"""The speculation controller on a simulated clock: texts and machines of all kinds, answer after answer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamspec.runtime.costs.speculation_controller import (
    ATTEMPT,
    FRESH_START,
    REFILL,
    START,
    WAKING,
    SpeculationController,
)

Text = Callable[[int, np.random.Generator], int]  # (tokens so far, dice) -> tokens a verification step commits there


def clock(
    cost: float, text: Text, answers: int, length: int, seed: int = 0, believed: float | None = None, noise: float = 0.0
) -> float:
    """Time in plain steps, plain decoding's being answers * length. `believed`: what the calibration says, and steps
    are timed then, with an error of `noise` and ten times that in one step of twenty."""
    controller, dice, time = SpeculationController(), np.random.default_rng(seed), 0.0

    def timed(true: float) -> float | None:
        late = noise * (10 if dice.random() < 0.05 else 1)
        return None if believed is None else true * (1 + late * dice.random())

    for _ in range(answers):
        controller.begin()
        done = 0
        while done < length:
            if controller.on and not controller.probe_due:
                committed = min(text(done, dice), length - done)
                time += cost
                controller.step(committed, believed or cost, timed(cost))
            else:
                committed, time = 1, time + 1
                controller.plain_step(timed(1.0))
            done += committed
    return time


@settings(max_examples=200, deadline=None)
@given(
    st.floats(1.02, 6),
    st.lists(st.floats(0, 1), min_size=1, max_size=5),
    st.integers(1, 20),
    st.integers(1, 300),
    st.integers(0, 99),
)
def test_no_text_costs_more_than_the_budget_allows(
    cost: float, skills: list[float], answers: int, length: int, seed: int
) -> None:
    """Skill changes within a text at will; the last step of an answer may be cut short, which costs up to `cost`
    each.
    """

    def text(done: int, dice: np.random.Generator) -> int:
        return 1 + int(dice.binomial(6, skills[(done // 40) % len(skills)]))

    time, plain = clock(cost, text, answers, length, seed), answers * length
    assert time <= plain * (1 + REFILL) + START + answers * FRESH_START + cost + 1e-9


@pytest.mark.parametrize("cost", [1.05, 1.5, 4.0])
def test_drafts_in_a_pause_that_never_come_true_cost_few_steps_an_answer_and_no_later_one(cost: float) -> None:
    controller = SpeculationController()
    for _ in range(3):
        controller.begin()
        while controller.on:
            controller.step(1, cost)
        lost = 0.0
        while controller.may_wake:
            controller.step(1, cost)
            lost += cost - 1
        assert lost + 1e-9 >= WAKING and lost < WAKING + cost - 1
    controller.begin()
    steps = 0
    while not controller.on:  # as after any text that did not pay
        controller.plain_step()
        steps += 1
    assert steps <= ATTEMPT * (cost - 1) / REFILL


def test_drafts_in_a_pause_that_come_true_end_it() -> None:
    controller = SpeculationController()
    while controller.on:
        controller.step(1, 2.0)
    for _ in range(3):
        controller.step(5, 2.0)
    assert controller.on


@pytest.mark.parametrize("price", [0.15, 0.45])
def test_a_drafter_none_of_whose_drafts_pay_costs_no_more_either(price: float) -> None:
    """The drafter runs at the end of plain steps, and no draft is verified."""
    controller, time = SpeculationController(), 0.0
    controller.begin()
    for _ in range(500):
        ran = price if controller.on or controller.about_to_resume else 0.0
        time += 1 + ran
        controller.plain_step(None, ran)
    assert time <= 500 * (1 + REFILL) + START + FRESH_START + 2 * price


@pytest.mark.parametrize("cost", [1.2, 2.0, 4.0])
def test_hopeless_texts_run_at_plain_speed_after_warm_up(cost: float) -> None:
    warm = clock(cost, lambda done, dice: 1, 20, 100)
    later = clock(cost, lambda done, dice: 1, 60, 100) - warm
    assert 40 * 100 / later > 0.97


@pytest.mark.parametrize(("cost", "skill"), [(1.5, 0.5), (2.0, 0.5), (2.0, 0.3), (3.0, 0.6)])
def test_good_texts_keep_nearly_all_of_their_gain(cost: float, skill: float) -> None:
    mean = 1 + 6 * skill
    time = clock(cost, lambda done, dice: 1 + int(dice.binomial(6, skill)), 40, 200)
    assert 40 * 200 / time > 0.95 * mean / cost


@pytest.mark.parametrize(("cost", "patience"), [(2.0, 400), (4.0, 800), (6.0, 1000)])
def test_a_text_that_turns_good_is_noticed(cost: float, patience: int) -> None:
    controller = SpeculationController()
    while controller.on:
        controller.step(1, cost)
    waited = 0
    while not controller.on:
        controller.plain_step()
        waited += 1
        assert waited < patience
    for _ in range(50):
        controller.step(5, 2.0)
    assert controller.on and controller.describe(8).startswith("on")


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize(("believed", "cost", "mean"), [(3.8, 2.0, 4.4), (6.0, 1.5, 3.0), (5.0, 2.0, 3.0)])
def test_a_calibration_that_says_too_much_does_not_switch_good_drafts_off(
    believed: float, cost: float, mean: float, noise: float
) -> None:
    time = clock(cost, lambda done, dice: 1 + int(dice.binomial(8, (mean - 1) / 8)), 40, 200, 0, believed, noise)
    assert 40 * 200 / time > 0.9 * mean / cost


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize(("believed", "cost", "mean"), [(1.2, 3.0, 2.0), (1.1, 2.0, 1.5), (1.5, 4.0, 3.0)])
def test_a_calibration_that_says_too_little_is_found_out(
    believed: float, cost: float, mean: float, noise: float
) -> None:
    def text(done: int, dice: np.random.Generator) -> int:
        return 1 + int(dice.binomial(6, (mean - 1) / 6))

    warm = clock(cost, text, 20, 200, 0, believed, noise)
    later = clock(cost, text, 80, 200, 0, believed, noise) - warm
    assert 60 * 200 / later > 0.96


def test_a_right_calibration_stays_as_it_is() -> None:
    time = [
        clock(2.0, lambda done, dice: 1 + int(dice.binomial(6, 0.4)), 40, 200, 0, believed, 0.1)
        for believed in (None, 2.0)
    ]
    assert time[1] < 1.02 * time[0]
