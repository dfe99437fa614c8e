"""Observes the steps of an answer: one small observer for each learner.

A further learner is a class here and a line in `observers_of`. tests/runtime/decoding/test_loop.py covers this module.
"""

from __future__ import annotations

from collections.abc import Sequence

from streamspec.runtime.costs.draft_depth import DraftDepth
from streamspec.runtime.costs.drafter_gate import DrafterGate, ExplorationGate
from streamspec.runtime.costs.row_costs import RowCosts
from streamspec.runtime.costs.speculation_controller import SpeculationController
from streamspec.runtime.decoding.draft_tree_search import DraftCalibration, DraftSearch
from streamspec.runtime.decoding.planner import Planner
from streamspec.runtime.decoding.policy import AdaptiveState
from streamspec.runtime.decoding.stats import Stats
from streamspec.runtime.decoding.step_plan import StepObserver, StepOutcome
from streamspec.runtime.draft_sources.lookup import SourceLookup


def observers_of(planner: Planner, adaptive: AdaptiveState, stats: Stats) -> list[StepObserver]:
    """Returns the observers that an answer needs. The costs come last: their time of a step includes that of the
    others."""
    observers: list[StepObserver] = [
        StatsObserver(stats, planner.sources),
        ControllerObserver(adaptive.controller, planner.policy.costs),
    ]
    if planner.rows > 1:
        observers.append(SourceObserver(planner.sources))
        observers.append(CalibrationObserver(adaptive.calibration, planner.sources, planner.policy.search))
    if planner.sources.explorer:
        observers.append(ExplorationObserver(adaptive.exploration, planner.sources.explorer))
    if planner.gate is not None:
        observers.append(GateObserver(planner.gate, planner))
    if planner.depth is not None:
        observers.append(DepthObserver(planner.depth))
    if planner.policy.costs is not None and planner.rows > 1:
        observers.append(CostObserver(planner.policy.costs, planner))
    return observers


class StatsObserver(StepObserver):
    """Counts steps and drafts."""

    def __init__(self, stats: Stats, sources: SourceLookup) -> None:
        self._stats = stats
        self._sources = sources

    def observe(self, outcome: StepOutcome) -> None:
        plan, path, stats = outcome.plan, outcome.path, self._stats
        if not plan.plain:
            accepted = path[: 1 + sum(outcome.committed.drafted)]  # before an end of the text
            stats.sources = self._sources.count(stats.sources, plan.draft.sources, accepted)
            stats.drafts = stats.drafts.after(plan.draft.tree, path, outcome.drafter_calls)
        stats.count(len(outcome.tokens), plan.rows)
        stats.shared_steps += outcome.result.sequences > 1


class SourceObserver(StepObserver):
    """Shows draft sources what the model chose, and gives the answer to those that collect answers."""

    def __init__(self, sources: SourceLookup) -> None:
        self._sources = sources

    def observe(self, outcome: StepOutcome) -> None:
        if not outcome.constrained:
            draft = outcome.plan.draft
            self._sources.learn(draft.tokens, draft.tree.parents, outcome.result.choices, outcome.path)

    def end(self, answer: Sequence[int]) -> None:
        self._sources.keep(answer)


class ControllerObserver(StepObserver):
    """Keeps the budget of speculation."""

    def __init__(self, controller: SpeculationController, costs: RowCosts | None) -> None:
        self._controller = controller
        self._costs = costs

    def begin(self, prompt_tokens: int) -> None:
        self._controller.begin()

    def observe(self, outcome: StepOutcome) -> None:
        plan = outcome.plan
        if plan.plain:
            timed = outcome.alone and not plan.drafter.runs
            price = 0.0 if self._costs is None else self._costs.price * outcome.drafter_calls
            self._controller.plain_step(outcome.seconds() if timed else None, price)
        elif not plan.paused:
            self._controller.step(len(outcome.tokens), plan.cost, outcome.seconds() if outcome.alone else None)


class CalibrationObserver(StepObserver):
    """Learns how often candidates of the drafter and of each source come true: of sources also in a plain step, before
    which they were asked in vain, else rates that are too low to pay would stay so."""

    def __init__(self, calibration: DraftCalibration, sources: SourceLookup, search: DraftSearch) -> None:
        self._calibration = calibration
        self._sources = sources
        self._search = search

    def observe(self, outcome: StepOutcome) -> None:
        plan = outcome.plan
        if not outcome.constrained and (not plan.plain or plan.proposal is None):
            self._calibration.observe(plan.proposal, self._sources.found, outcome.tokens, self._search)


class ExplorationObserver(StepObserver):
    """Learns whether rows that teach a source pay. `explorer`: the source's bit."""

    def __init__(self, gate: ExplorationGate, explorer: int) -> None:
        self._gate = gate
        self._explorer = explorer

    def observe(self, outcome: StepOutcome) -> None:
        plan = outcome.plan
        if plan.plain:
            self._gate.step(1, 1.0, 0, 0.0)
        elif plan.costs is not None and outcome.alone:
            brought = sum(plan.draft.sources[node] == self._explorer for node in outcome.path)
            cost = plan.costs.item(plan.rows - 1)
            self._gate.step(len(outcome.tokens), cost, brought, cost - plan.costs.item(plan.rows - 1 - plan.explored))


class GateObserver(StepObserver):
    """Compares steps with what the sources alone would have brought."""

    def __init__(self, gate: DrafterGate, planner: Planner) -> None:
        self._gate = gate
        self._planner = planner

    def begin(self, prompt_tokens: int) -> None:
        self._gate.begin()

    def observe(self, outcome: StepOutcome) -> None:
        plan, tokens = outcome.plan, len(outcome.tokens)
        if not outcome.alone:
            return
        if not plan.plain and plan.proposal is not None:
            without = self._planner.without_drafter(plan, outcome.tokens)
            calls = 1 if plan.drafter.depth is None else plan.proposal.depths
            self._gate.compare(tokens, plan.rows - plan.explored, *without, calls)
        self._gate.step(tokens, plan.rows, outcome.drafter_calls)


class DepthObserver(StepObserver):
    """Learns how far the drafts of a second model come true."""

    def __init__(self, depth: DraftDepth) -> None:
        self._depth = depth

    def observe(self, outcome: StepOutcome) -> None:
        proposal = outcome.plan.proposal
        if not outcome.plan.plain and not outcome.constrained and proposal is not None:
            self._depth.observe(proposal.firsts, outcome.tokens, proposal.confidences)


class CostObserver(StepObserver):
    """Learns what steps cost by their rows: later, while the planner does not ask for it."""

    def __init__(self, costs: RowCosts, planner: Planner) -> None:
        self._costs = costs
        self._planner = planner

    def begin(self, prompt_tokens: int) -> None:
        self._costs.begin(prompt_tokens)

    def observe(self, outcome: StepOutcome) -> None:
        plan = outcome.plan
        if outcome.alone:
            seconds = outcome.seconds()
            self._costs.observe(plan.rows, outcome.drafter_calls, seconds, plan.cached, self._planner.idle)

    def end(self, answer: Sequence[int]) -> None:
        self._costs.end()
