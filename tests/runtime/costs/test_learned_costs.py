"""Costs are learned on a machine whose step times are known (`tests.support.simulated_machine`)."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest

from streamspec.runtime.costs import learned_costs as learned
from streamspec.runtime.costs.learned_costs import CostRecord, LearnedRowCosts, describe
from tests.support.simulated_machine import MEASURED, ROWS, Run, SimulatedMachine, drafts, run, share

SEEDS = 3
KNOWN: dict[str, Mapping[int, float] | None] = {**MEASURED, "nothing": None}


@cache
def texts(kind: str) -> np.ndarray:
    return drafts(kind)


def runs(machine: str, known: str, mode: str = "quiet", kind: str = "task", steps: int = 600) -> list[Run]:
    marks = range(0, steps + 1, 10)
    return [
        run(SimulatedMachine(machine, seed, mode=mode), texts(kind), None, KNOWN[known], steps, marks=marks)
        for seed in range(SEEDS)
    ]


def reached(found: list[Run], within: float) -> int:
    """Steps after which the chosen drafts stay, on the median of the seeds, within that of the best speed."""
    marks = list(found[0].shares)
    median = [float(np.median([one.shares[mark] for one in found])) for mark in marks]
    return next((mark for i, mark in enumerate(marks) if min(median[i:]) >= 1 - within), 10**9)


@pytest.mark.parametrize(
    ("machine", "known", "steps"),
    [
        ("flat", "steep", 30),
        ("steep", "flat", 30),
        ("flat", "nothing", 60),
        ("steep", "nothing", 60),
        ("blocks of eight", "steep", 100),
        ("wide", "steep", 60),
        ("int4", "flat", 100),
        ("int4", "nothing", 100),
        ("linear", "flat", 300),
        ("flat", "low", 60),
    ],
)
def test_the_best_drafts_are_found_after_few_steps_whatever_was_known(machine: str, known: str, steps: int) -> None:
    assert reached(runs(machine, known), 0.025) <= steps


@pytest.mark.parametrize(("machine", "known"), [("wide", "steep"), ("int4", "flat"), ("flat", "low")])
def test_without_learning_wrong_costs_stay_wrong(machine: str, known: str) -> None:
    frozen = LearnedRowCosts(ROWS, True, CostRecord(MEASURED[known]))
    assert share(texts("chat"), frozen.with_drafter, SimulatedMachine(machine).costs(True, 64)) < 0.93


@pytest.mark.parametrize(("machine", "known"), [("flat", "steep"), ("steep", "flat"), ("flat", "nothing")])
def test_a_machine_that_is_busy_at_first_is_not_busy_for_good(machine: str, known: str) -> None:
    """Twice the time, and a third more or less at random, for 200 steps."""
    found = runs(machine, known, "busy at first")
    assert reached(found, 0.03) <= 300
    assert np.median([one.lost for one in found]) < 0.04


@pytest.mark.parametrize("kind", ["task", "chat"])
@pytest.mark.parametrize("machine", ["flat", "steep"])
def test_a_machine_whose_speed_changes_all_the_time_does_not_confuse_ratios(machine: str, kind: str) -> None:
    found = runs(machine, "flat", "drifts", kind)
    assert np.mean([one.lost for one in found]) < 0.025
    assert np.mean([list(one.shares.values())[20:] for one in found]) > 0.98


@pytest.mark.parametrize("machine", ["flat", "wide", "int4", "linear"])
def test_trials_lose_less_than_a_hundredth_of_the_time(machine: str) -> None:
    """What they lost in truth, which may be more than they were allowed to expect."""
    for kind in ("task", "chat", "hopeless"):
        assert np.mean([one.tried for one in runs(machine, "steep", kind=kind)]) < 0.01


def test_trials_find_larger_drafts_that_turn_out_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    def shares() -> float:
        return float(np.mean([list(one.shares.values())[20:] for one in runs("wide", "high", kind="chat")]))

    with_trials = shares()
    monkeypatch.setattr(learned, "SHARE", 0.0)
    monkeypatch.setattr(learned, "MAX_SAVED_UP", 0.0)
    assert with_trials > 0.96 and shares() < 0.95


def test_more_rows_never_cost_less() -> None:
    random = np.random.default_rng(0)
    costs = LearnedRowCosts(ROWS, True)
    for _ in range(300):
        rows, drafter = int(random.integers(1, 65)), bool(random.integers(2))
        costs.observe(rows, drafter, float(np.exp(random.normal(-4, 1))), int(random.integers(3000)))
        for curve in (costs.curve, costs.without_drafter, costs.with_drafter):
            assert np.all(np.diff(curve) >= 0) and np.isfinite(curve).all() and curve[0] >= 1
        assert costs.curve[0] == 1 and costs.price >= 0


def test_times_that_make_no_sense_are_no_times() -> None:
    costs = LearnedRowCosts(16, True, CostRecord(MEASURED["flat"]))
    before = costs.curve.copy()
    for rows, seconds in ((8, 0.0), (8, -1.0), (8, float("nan")), (8, float("inf")), (17, 0.01)) * 5:
        costs.observe(rows, True, seconds, 64)
    assert costs.steps == 0 and costs.curve.tolist() == before.tolist()


def test_a_long_sleep_of_the_machine_changes_little() -> None:
    costs = run(SimulatedMachine("flat"), texts("task"), known=MEASURED["flat"], steps=200).costs
    before = costs.curve[[3, 7]]
    costs.observe(6, True, 3600.0, 100)
    for _ in range(4):
        costs.observe(5, True, 0.016, 100)
    assert costs.curve[[3, 7]] == pytest.approx(before, rel=0.06)


def test_the_first_call_of_a_shape_counts_for_little() -> None:
    """It takes twice the time, as it does in ONNX Runtime."""

    def after(calls: int) -> float:
        costs = LearnedRowCosts(8, True, CostRecord(MEASURED["flat"]))
        for _ in range(20):
            costs.observe(1, False, 0.0113, 64)
        for _ in range(calls):
            costs.observe(8, True, 2 * 0.0166, 64)
        costs._catch_up()
        costs._make()
        return float(costs.curve[7])

    known, first, second = (after(calls) for calls in range(3))
    assert known < first < known + 0.4 * (second - known) and second > 1.5 * known


def test_what_the_cache_adds_is_learned() -> None:
    """Each row of a long context costs more, so large drafts do."""
    machine, random = SimulatedMachine("flat"), np.random.default_rng(1)
    costs = LearnedRowCosts(ROWS, True)
    for _ in range(3000):
        rows, cached = int(random.choice([1, 2, 4, 8, 16])), int(random.integers(4000))
        costs.observe(rows, rows > 1, machine.seconds(rows, rows > 1, cached), cached)
    for cached in (64, 4000):
        for _ in range(10):
            costs.observe(8, True, machine.seconds(8, True, cached), cached)
        true = machine.costs(True, cached) / machine.cost(1, False, cached)
        assert costs.with_drafter[[3, 7, 15]] == pytest.approx(true[[3, 7, 15]], rel=0.06)
    assert machine.costs(True, 64)[15] < 0.6 * machine.costs(True, 4000)[15]


def test_the_price_of_a_window_is_foretold_for_other_contexts_and_taken_where_an_answer_begins() -> None:
    """A plain step takes 1 + 0.3 for each 1,024 tokens, a draft token of a window 1.15 anywhere."""
    costs, random = LearnedRowCosts(8, True, CostRecord(price=1.0)), np.random.default_rng(0)
    for step in range(600):
        cached = 600 if step // 20 % 2 else 4000
        rows, calls = ((1, 0), (3, 2), (2, 1))[step % 3]
        ratio = 1 + 0.05 * (rows - 1) + 1.15 * calls + 0.3 * cached / 1024
        costs.observe(rows, calls, 0.01 * ratio * random.normal(1, 0.02), cached)
    for cached in (1024, 8192):
        plain = 1 + 0.3 * cached / 1024
        assert costs.at(cached)[1] == pytest.approx(1.15 / plain, rel=0.15)
        costs.begin(cached)
        assert costs.price == costs.at(cached)[1]


def test_the_price_of_streams_grows_with_the_context_as_they_attend_to_it() -> None:
    """A plain step takes 1 + 0.4 for each 1,024 tokens, the streams beside it 0.4 + 0.2; learned, kept, foretold."""
    costs, random = LearnedRowCosts(8, True), np.random.default_rng(0)
    for step in range(600):
        cached = 600 if step // 20 % 2 else 4000
        rows, calls = ((1, 0), (1, 1), (3, 1))[step % 3]
        ratio = 1 + 0.05 * (rows - 1) + 0.4 * calls + (0.4 + 0.2 * calls) * cached / 1024
        costs.observe(rows, calls, 0.01 * ratio * random.normal(1, 0.02), cached)
    for known in (costs, LearnedRowCosts(8, True, costs.record())):
        for cached in (1024, 8192):
            tokens = cached / 1024
            assert known.at(cached)[1] == pytest.approx((0.4 + 0.2 * tokens) / (1 + 0.4 * tokens), rel=0.1)


def test_an_older_record_says_that_the_drafter_grows_as_a_plain_step_does() -> None:
    older = LearnedRowCosts(8, True, CostRecord({1: 0.01, 8: 0.015}, 0.5, (0.3, 0.1, None)))
    near, far = (older.at(cached)[1] for cached in (64, 8192))
    assert near == pytest.approx(far, rel=0.1) and far > 0.4


def test_a_plain_step_is_timed_where_the_context_is_far_beyond_what_was() -> None:
    costs = LearnedRowCosts(8, True, CostRecord(MEASURED["flat"]))
    due = list[bool]()
    for cached in (500, 1000, 7000, 7001):
        costs.begin(cached)
        due.append(costs.plain_due)
        costs.observe(1, 0, 0.01, cached)
    assert due == [False, False, True, False]


def test_the_price_of_the_drafter_is_learned_beside_the_rows() -> None:
    machine, costs = SimulatedMachine("steep"), LearnedRowCosts(ROWS, True)
    for step in range(400):
        rows, drafter = 2 + step % 7, step % 3 > 0
        costs.observe(rows, drafter, machine.seconds(rows, drafter, 64), 64)
        if step % 40 == 0:
            costs.observe(1, False, machine.seconds(1, False, 64), 64)
    assert costs.price == pytest.approx(0.25, abs=0.04)
    assert costs.without_drafter[7] == pytest.approx(1.45, abs=0.08)
    assert costs.with_drafter[0] == pytest.approx(1 + costs.price)


def test_without_a_drafter_there_is_no_price() -> None:
    costs = run(SimulatedMachine("steep"), texts("task"), LearnedRowCosts(ROWS, False), drafter=False).costs
    assert costs.price == 0 and costs.curve.tolist() == costs.without_drafter.tolist()


def test_a_disturbed_measurement_does_not_lift_those_of_more_rows() -> None:
    even = LearnedRowCosts(8, True, CostRecord({1: 1.0, 2: 1.2, 4: 1.4, 8: 2.0}))
    odd = LearnedRowCosts(8, True, CostRecord({1: 1.0, 2: 1.9, 4: 1.4, 8: 2.0}))
    assert even.curve[[1, 3, 7]] == pytest.approx([1.2, 1.4, 2.0], rel=0.1)
    assert odd.curve[[3, 7]] == pytest.approx(even.curve[[3, 7]], rel=0.06) and odd.curve[1] < 1.5


def test_what_one_process_learned_the_next_one_knows() -> None:
    machine = SimulatedMachine("blocks of eight", noise=0.02)
    costs = run(machine, texts("task"), known=MEASURED["steep"], steps=400).costs
    assert isinstance(costs, LearnedRowCosts)
    record = costs.record()
    assert record.steps > 380 and record.seconds[1] == pytest.approx(0.0127, rel=0.12) and record.price is not None
    later = LearnedRowCosts(ROWS, True, record)
    assert later.sure and later.curve[2:9] == pytest.approx(costs.curve[2:9], rel=0.1)
    assert share(texts("task"), later.with_drafter, machine.costs(True, 64)) > 0.94
    again = later.record()  # nothing was learned
    assert again.seconds == pytest.approx(record.seconds, rel=0.05) and again.steps == record.steps


def test_seconds_of_a_plain_step_fall_at_once_and_rise_slowly() -> None:
    def after(factor: float) -> float:
        costs = LearnedRowCosts(8, False, CostRecord({1: 0.01, 4: 0.012}))
        for _ in range(100):
            costs.observe(1, False, 0.01 * factor, 64)
        return costs.record().seconds[1]

    assert after(3.0) == pytest.approx(0.011) and after(0.5) == pytest.approx(0.005, rel=0.05)


def test_it_says_what_it_knows() -> None:
    assert LearnedRowCosts(16, True).describe() == "not known yet"
    assert describe(CostRecord({1: 0.01})) == "plain step 10.00 ms (measured)"
    words = describe(CostRecord({1: 0.01, 8: 0.015, 3: 0.012}, 0.25, (0.1, 0.0), 1234))
    assert words == "plain step 10.00 ms; over it 8 rows 1.50, the drafter 0.25 of it (learned from 1,234 steps)"


def test_it_is_kept_where_an_answer_ends_if_anything_was_learned() -> None:
    kept: list[bool] = []
    costs = LearnedRowCosts(16, True, keep=lambda one, closing: kept.append(closing))
    costs.end()
    for _ in range(2):
        costs.observe(4, True, 0.01, 64)
    costs.end()
    costs.end(closing=True)
    assert kept == [False, True]


def test_sessions_of_several_threads_share_it() -> None:
    """Times that come while another thread's are learned from are left out; what was learned stays sound."""
    costs = LearnedRowCosts(16, True)

    def work(seed: int) -> None:
        machine = SimulatedMachine("flat", seed, sleeps=0.0)
        for step in range(400):
            rows = 1 + step % 9
            costs.observe(rows, rows > 1, machine.seconds(rows, rows > 1, 64), 64)
            costs.trial(True)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < costs.steps <= 1600
    work(4)
    assert costs.curve[7] == pytest.approx(1.46, rel=0.15)


def test_learning_from_several_steps_at_once_is_learning_from_each() -> None:
    lazy, eager, random = LearnedRowCosts(16, True), LearnedRowCosts(16, True), np.random.default_rng(5)
    for step in range(100):
        rows, cached = int(random.integers(1, 17)), int(random.integers(3000))
        seconds = 0.01 * (1 + 0.1 * rows) * float(np.exp(random.normal(0, 0.1)))
        for costs in (lazy, eager):
            if step % 9 == 0:
                costs.begin()
            costs.observe(rows, rows > 1, seconds, cached)
        eager._catch_up()
        assert np.array_equal(lazy.curve, eager.curve) and lazy.plain_due == eager.plain_due
    assert len(eager._times) == 0 and lazy.record() == eager.record()


def test_times_that_are_learned_from_later_say_the_same() -> None:
    at_once, later = LearnedRowCosts(ROWS, True), LearnedRowCosts(ROWS, True)
    machine = SimulatedMachine("steep", 1)
    kinds = (
        [(rows, rows > 1) for rows in (1, 4, 1, 8, 3, 1, 5, 2)] + [(1, False)] * 3 * learned.MOST_LATER + [(4, True)]
    )
    for step, (rows, drafter) in enumerate(kinds):
        seconds, before = machine.seconds(rows, drafter, 100 + step), later.curve
        idle = rows == 1 and step + 2 < len(kinds)
        at_once.observe(rows, drafter, seconds, 100 + step)
        later.observe(rows, drafter, seconds, 100 + step, idle)
        if step == 7 + learned.MOST_LATER // 2:
            assert later.curve is before and (later.curve != at_once.curve).any()  # nothing was done for it yet
    assert (later.curve == at_once.curve).all() and later.record() == at_once.record()
    one, other = at_once.trial(1), later.trial(1)
    assert one is not None and other is not None and one.allowed == other.allowed


def test_of_many_plain_steps_some_are_learned_from_and_a_slower_machine_is_noticed_all_the_same() -> None:
    costs = LearnedRowCosts(8, True)
    for seconds in (0.005, 0.010):
        for _ in range(400):
            costs.observe(1, 0, seconds, learned.CONTEXT)
        assert costs.record().seconds[1] == pytest.approx(seconds, rel=0.02)
        for _ in range(20):
            costs.observe(4, 1, 1.5 * seconds, learned.CONTEXT)
    assert costs.steps == 40 + 2 * learned.PLAIN_ALL + 2 * (400 - learned.PLAIN_ALL) // learned.PLAIN_EVERY
