"""Streams run where they bring more than n-grams alone, and never change the text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamspec.runtime.costs.drafter_gate import PAUSE, DrafterGate
from streamspec.runtime.costs.row_costs import RowCosts
from tests.runtime.decoding.test_loop import decode
from tests.support.toy_runner import Setup, ToyRunner, adaptive, hashed, scripted, varied

COSTS = np.array([1.0, 1.45, 1.5, 1.55, 1.6, 1.65, 1.7, 1.75])  # streams: 0.4; a row: 0.05


def test_the_price_of_streams_is_read_off_the_curve() -> None:
    gate, costs = DrafterGate(RowCosts(COSTS)), RowCosts(COSTS)
    assert costs.price == pytest.approx(0.4)
    assert gate.costs(False) == pytest.approx(1 + 0.05 * np.arange(8))
    assert gate.costs(True)[3] == pytest.approx(COSTS[3])
    assert RowCosts(np.array([1.0, 1.3])).price == pytest.approx(0.3)
    assert RowCosts(np.array([1.0, 0.9, 0.9, 0.9])).price == 0


def test_streams_that_bring_nothing_are_left_out_and_asked_now_and_then() -> None:
    gate, ran = DrafterGate(RowCosts(COSTS)), []
    gate.begin()
    for _ in range(600):
        streams = gate.open
        if ran and ran[-1]:
            gate.compare(tokens=2, rows=4, source_tokens=2, source_rows=3)
        gate.step(2, 4, streams)
        ran.append(streams)
    late = ran[100:]
    assert sum(late) == pytest.approx(len(late) / (PAUSE + 1), abs=2)


def test_streams_that_bring_much_run_always_and_come_back_when_the_text_turns() -> None:
    gate = DrafterGate(RowCosts(COSTS))
    for tokens, alone in [(4, 1)] * 50 + [(2, 2)] * 50:
        assert gate.open or tokens == alone
        gate.compare(tokens, 4, alone, 1)
        gate.step(tokens, 4, True)
    assert not gate.open
    for _ in range(40):
        gate.compare(5, 4, 1, 1)
        gate.step(5, 4, True)
    assert gate.open


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 60), st.integers(4, 80), st.floats(0, 1), st.integers(2, 8))
def test_output_is_plain_decoding_s(seed: int, limit: int, context: int, skill: float, rows: int) -> None:
    rule = varied(3, seed)
    plain, *_ = decode(ToyRunner(rule, 8, context=context), Setup(limit), [1, 2, 3])
    gate = DrafterGate(RowCosts(COSTS[:rows]))
    for _ in range(seed % 5):
        gate.compare(1, 2, 1, 1)
    runner = ToyRunner(rule, 8, gamma=3, width=2, context=context, skill=skill, seed=seed)
    setup = Setup(limit, rows=rows, costs=COSTS[:rows], adaptive=adaptive(gate=gate))
    assert decode(runner, setup, [1, 2, 3])[0] == plain


@pytest.mark.parametrize(("skill", "repeats", "most", "least"), [(0.0, True, 0.25, 0.0), (1.0, False, 1.0, 0.95)])
def test_the_loop_asks_for_streams_where_they_pay(skill: float, repeats: bool, most: float, least: float) -> None:
    rule = scripted(3, [1, 4, 2, 3, 7, 6, 2, 8] * 60) if repeats else hashed(50, 1)
    runner = ToyRunner(rule, 50, gamma=3, width=2, context=600, skill=skill)
    setup = Setup(400, rows=6, costs=COSTS[:6], adaptive=adaptive(gate=DrafterGate(RowCosts(COSTS[:6]))))
    _, _, run = decode(runner, setup, [1, 2, 3])
    drafted = [draft for _, draft in runner.calls]
    assert least <= sum(drafted) / len(drafted) <= most
    assert run.stats.tau > 2
