"""The decoding loop learns what steps cost as it answers, on a simulated clock; the text stays as it is."""

from __future__ import annotations

import numpy as np
import pytest

from streamspec.runtime.costs.learned_costs import CostRecord, LearnedRowCosts
from streamspec.runtime.costs.row_costs import RowCosts
from streamspec.runtime.decoding import loop
from streamspec.runtime.decoding.loop import SpeculativeDecoder
from streamspec.runtime.decoding.model_runner import StepRequest, StepResult
from streamspec.runtime.decoding.planner import Planner
from streamspec.runtime.decoding.policy import AdaptiveState, DecodingPolicy
from streamspec.runtime.draft_sources import lookup
from streamspec.runtime.draft_sources.ngram import NGRAM
from streamspec.runtime.draft_sources.recycling import RECYCLING
from streamspec.runtime.options import GenerationOptions
from tests.support.simulated_machine import MEASURED, PLAIN, ROWS, SimulatedMachine
from tests.support.toy_runner import Rule, ToyRunner, hashed, scripted

LENGTH, ANSWERS = 150, 8
RULE = hashed(50, 3)


class TimedRunner(ToyRunner):
    """Takes as long over a step as a simulated machine does, and over the prompt."""

    now = 0.0

    def verify(self, request: StepRequest) -> StepResult:
        self.now += self.machine.seconds(len(request.tree), request.run_drafter, self.length)
        return super().verify(request)

    def __init__(self, machine: str, skill: float, seed: int, rule: Rule = RULE) -> None:
        super().__init__(rule, 50, gamma=6, width=4, context=4000, skill=skill, seed=seed)
        self.machine = SimulatedMachine(machine, seed, sleeps=0.0)


def answer(
    monkeypatch: pytest.MonkeyPatch, machine: str, costs: RowCosts | None, skill: float = 0.95, seed: int = 0
) -> tuple[list[list[int]], float, list[int]]:
    """Tokens of answers, seconds of decoding on the simulated clock, and the rows of the last answer's steps."""
    runner, texts, seconds = TimedRunner(machine, skill, seed), [], 0.0
    monkeypatch.setattr(loop.time, "perf_counter", lambda: runner.now)
    policy = DecodingPolicy(rows=ROWS if costs else 1, costs=costs, sources=())
    adaptive = AdaptiveState(policy)
    for prompt in range(ANSWERS):
        runner.reset()
        runner.calls = []
        decoder = SpeculativeDecoder(runner, GenerationOptions(LENGTH), policy, adaptive)
        tokens: list[int] = []
        for done in decoder.run([prompt, 1, 2]):
            tokens += done.tokens
            runner.now += 5.0  # the consumer's time is no step's
            decoder.consumer_seconds += 5.0
        texts.append(tokens)
        seconds += decoder.stats.decode_seconds
    return texts, seconds, [rows for rows, _ in runner.calls[1:]]


def most_seconds(plain: float) -> float:
    """What answers may take: the budget, half a step an answer, what plain steps earn, the last attempt."""
    return 1.02 * plain + (8 + ANSWERS / 2 + 20) * PLAIN


def frozen(known: str) -> RowCosts:
    return RowCosts(LearnedRowCosts(ROWS, True, CostRecord(MEASURED[known])).curve)


@pytest.mark.parametrize(
    ("machine", "known", "gain"), [("wide", "steep", 1.03), ("int4", "flat", 1.02), ("linear", "flat", 1.15)]
)
def test_learning_beats_costs_that_are_wrong_for_good(
    machine: str, known: str, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _, _ = answer(monkeypatch, machine, None)
    fixed, before, _ = answer(monkeypatch, machine, frozen(known))
    learned = LearnedRowCosts(ROWS, True, CostRecord(MEASURED[known]))
    learning, after, _ = answer(monkeypatch, machine, learned)
    assert learning == fixed == plain
    assert before / after > gain and learned.steps > 100


def test_the_most_rows_follow_what_rows_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    most = {}
    for machine in ("wide", "flat", "int4"):
        _, _, rows = answer(monkeypatch, machine, LearnedRowCosts(ROWS, True), skill=0.6)
        most[machine] = float(np.mean([n for n in rows if n > 1]))
    assert most["wide"] > 1.2 * most["flat"] > 1.2**2 * most["int4"]


@pytest.mark.parametrize("machine", ["steep", "int4", "blocks of eight"])
def test_useless_drafts_cost_no_more_than_before(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain speed but for the controller's first budget, and for what it may try again."""
    plain, slow, _ = answer(monkeypatch, machine, None, skill=0.0)
    texts, seconds, _ = answer(monkeypatch, machine, LearnedRowCosts(ROWS, True), skill=0.0)
    assert texts == plain
    assert seconds < most_seconds(slow)


def test_speculation_that_cannot_pay_here_is_not_tried_before_plain_steps_have_earned_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = LearnedRowCosts(ROWS, True, CostRecord({1: 0.01, 2: 0.03, 4: 0.05, 8: 0.09}))
    expected = np.array([1.0, 1.6, 2.0, 2.2, 2.3, 2.4, 2.4, 2.4])
    state = AdaptiveState(DecodingPolicy(rows=ROWS, costs=costs, expected=expected))
    assert not state.controller.on
    assert state.controller.describe(ROWS).startswith("off (2.0 tokens per step expected at 2.7x step cost)")
    for _ in range(600):
        state.controller.plain_step()
    assert state.controller.on
    unknown = DecodingPolicy(rows=ROWS, costs=LearnedRowCosts(ROWS, True), expected=expected)
    assert AdaptiveState(unknown).controller.on


@pytest.mark.parametrize(("machine", "skill"), [("steep", 0.3), ("int4", 0.3), ("flat", 0.0)])
def test_what_a_pause_puts_off_changes_no_later_call(
    machine: str, skill: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, script = np.random.default_rng(3), list[int]()
    while len(script) < 300:  # drafts fail, then come true
        block = random.integers(0, 50, 60).tolist()
        script += block + block[:8] * int(random.integers(12))

    def calls() -> tuple[list[object], int]:
        runner = TimedRunner(machine, skill, 1, scripted(3, script))
        monkeypatch.setattr(loop.time, "perf_counter", lambda: runner.now)
        policy = DecodingPolicy(rows=16, costs=LearnedRowCosts(ROWS, True), sources=(NGRAM, RECYCLING))
        adaptive, found, paused = AdaptiveState(policy), list[object](), 0
        for prompt in range(4):
            runner.reset()
            runner.calls = []
            decoder = SpeculativeDecoder(runner, GenerationOptions(len(script)), policy, adaptive)
            paused += sum(not adaptive.controller.on for _ in decoder.run([prompt, 1, 2]))
            found += runner.calls, decoder.stats.sources
        return found, paused

    putting_off, paused = calls()
    assert 100 < paused < 4 * len(script) - 50
    monkeypatch.setattr(Planner, "idle", False)
    monkeypatch.setattr(lookup, "MOST_WAITING", 1)
    assert calls()[0] == putting_off
