"""Streams run where they bring more than n-grams alone, and never change the text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamspec.runtime.decoding.drafter_gate import PAUSE, DrafterGate
from streamspec.runtime.decoding.loop import DecodingConfig
from tests.runtime.decoding.test_loop import decode
from tests.support.toy_runner import ToyEngine, Untimed, hashed, scripted, varied

COSTS = np.array([1.0, 1.45, 1.5, 1.55, 1.6, 1.65, 1.7, 1.75])  # streams: 0.4; a row: 0.05


def test_the_price_of_streams_is_read_off_the_curve() -> None:
    worth = DrafterGate(COSTS)
    assert worth.price == pytest.approx(0.4)
    assert worth.without == pytest.approx(1 + 0.05 * np.arange(8))
    assert worth.costs(True)[3] == pytest.approx(COSTS[3])
    assert DrafterGate(np.array([1.0, 1.3])).price == pytest.approx(0.3)
    assert DrafterGate(np.array([1.0, 0.9, 0.9, 0.9])).price == 0


def test_streams_that_bring_nothing_are_left_out_and_asked_now_and_then() -> None:
    worth, ran = DrafterGate(COSTS), []
    worth.begin()
    for _ in range(600):
        streams = worth.wanted
        if ran and ran[-1]:
            worth.compare(tokens=2, rows=4, alone=2, alone_rows=3)
        worth.step(2, 4, streams)
        ran.append(streams)
    late = ran[100:]
    assert sum(late) == pytest.approx(len(late) / (PAUSE + 1), abs=2)


def test_streams_that_bring_much_run_always_and_come_back_when_the_text_turns() -> None:
    worth = DrafterGate(COSTS)
    for tokens, alone in [(4, 1)] * 50 + [(2, 2)] * 50:
        assert worth.wanted or tokens == alone
        worth.compare(tokens, 4, alone, 1)
        worth.step(tokens, 4, True)
    assert not worth.wanted
    for _ in range(40):
        worth.compare(5, 4, 1, 1)
        worth.step(5, 4, True)
    assert worth.wanted


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 60), st.integers(4, 80), st.floats(0, 1), st.integers(2, 8))
def test_output_is_plain_decoding_s(seed: int, limit: int, context: int, skill: float, rows: int) -> None:
    rule = varied(3, seed)
    plain, *_ = decode(ToyEngine(rule, 8, context=context), DecodingConfig(limit), [1, 2, 3])
    worth = DrafterGate(COSTS[:rows])
    for _ in range(seed % 5):
        worth.compare(1, 2, 1, 1)
    engine = ToyEngine(rule, 8, gamma=3, width=2, context=context, skill=skill, seed=seed)
    plan = DecodingConfig(limit, rows=rows, costs=COSTS[:rows], governor=Untimed(), worth=worth)
    assert decode(engine, plan, [1, 2, 3])[0] == plain


@pytest.mark.parametrize(("skill", "repeats", "most", "least"), [(0.0, True, 0.25, 0.0), (1.0, False, 1.0, 0.95)])
def test_the_loop_asks_for_streams_where_they_pay(skill: float, repeats: bool, most: float, least: float) -> None:
    rule = scripted(3, [1, 4, 2, 3, 7, 6, 2, 8] * 60) if repeats else hashed(50, 1)
    engine = ToyEngine(rule, 50, gamma=3, width=2, context=600, skill=skill)
    plan = DecodingConfig(400, rows=6, costs=COSTS[:6], governor=Untimed(), worth=DrafterGate(COSTS[:6]))
    _, _, run = decode(engine, plan, [1, 2, 3])
    drafted = [draft for _, draft in engine.calls]
    assert least <= sum(drafted) / len(drafted) <= most
    assert run.stats.tau > 2
