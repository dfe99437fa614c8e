"""Plans the calls of one answer: what is drafted, how many rows are verified, and whether the drafter runs.

What a plan rests on is learned by `observers`, except for what trials of row costs may lose, which
is settled here.

Words of this module and of `draft_sources`:

- source tree: the candidate tree of all draft sources, beside the drafter's `proposal`.
- lasting: a source whose index remembers all texts of the session; others index one text.
- stem: a row of the draft as it would be without a lasting source; it grafts its tokens onto stems.
- exploration: rows verified for what they teach a source (the `explorer`), however unlikely.
- waking: a source that is asked while speculation is paused; a draft of its tokens ends the pause.
- shared: a call with rows of several sequences; `together` counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from streamspec.runtime.costs.row_costs import Trial
from streamspec.runtime.decoding.acceptance import off_borders
from streamspec.runtime.decoding.draft_proposal import SHARPNESS, DraftProposal
from streamspec.runtime.decoding.draft_tree_search import MAX_ROWS, Draft, build_draft_tree, with_rows
from streamspec.runtime.decoding.model_runner import ROOT_ONLY, TINY, ModelRunner
from streamspec.runtime.decoding.policy import AdaptiveState, DecodingPolicy
from streamspec.runtime.decoding.step_plan import DrafterPlan, StepPlan
from streamspec.runtime.draft_sources.lookup import SourceLookup
from streamspec.runtime.draft_sources.source import CandidateTree, Continuations
from streamspec.runtime.sampling.grammar_state import GrammarState

STEM_ROWS = 24  # of a draft that lasting sources add to
ROOT_PROBABILITY, ROOT_SOURCES = [1.0], [0]  # of a draft without drafted tokens; never changed
NO_DRAFTER = DrafterPlan(runs=False)


class Planner:
    """Plans the calls of one answer. `rows`: most of a verification step; 1: every step is plain. `clock`: seconds."""

    def __init__(
        self,
        runner: ModelRunner,
        policy: DecodingPolicy,
        adaptive: AdaptiveState,
        grammar: GrammarState | None,
        rows: int,
        clock: Callable[[], float],
    ) -> None:
        self.policy = policy
        self.rows = min(rows, MAX_ROWS)
        self.sources = SourceLookup(policy.sources if rows > 1 else (), adaptive.calibration, policy.search)
        self.depth = adaptive.depth if policy.max_draft_tokens and rows > 1 else None  # of a second model's drafts
        compares = runner.gamma and rows > 1 and (policy.sources or self.depth is not None)
        self.gate = adaptive.gate if compares else None
        self._runner = runner
        self._adaptive = adaptive
        self._controller = adaptive.controller
        self._grammar = grammar
        self._clock = clock

    def plan_prefill(self, tokens: int, limit: int) -> DrafterPlan:
        """Plans the drafter for the call that reads the end of a prompt of so many tokens, whose answer has at most
        `limit`."""
        return self._after_prompt(self._drafter(together=1), tokens, limit)

    @property
    def idle(self) -> bool:
        """Tells whether the next step is plain whatever is known, so that nothing is weighed for it: without drafts,
        and while speculation pauses, but for what a grammar forces, for sources that end pauses and for the drafter at
        the pause's end."""
        paused = not self._controller.on and not self._controller.about_to_resume and not self.sources.waking
        return self.rows == 1 or (paused and self._grammar is None)

    def step(self, new_tokens: Sequence[int], remaining: int, proposal: DraftProposal | None) -> StepPlan:
        """Plans the next step, after the `new_tokens` of the call before, whose drafter made this `proposal`, None
        where it did not run. `remaining`: most tokens that the answer may still have."""
        began = self._clock()
        self.sources.read(new_tokens)
        self.sources.found.clear()  # of the step before
        together, idle = self._sequences(), self.idle
        drafter = NO_DRAFTER if idle else self._drafter(together)
        plan = StepPlan(
            draft=Draft(ROOT_ONLY, [new_tokens[-1]], ROOT_PROBABILITY, ROOT_SOURCES, 1.0),
            drafter=drafter,
            proposal=proposal,
            costs=None if idle else self._costs(together, drafter),
            explored=0,
            together=together,
            paused=not self._controller.on,
            cached=self._runner.length,
            began=began,
        )
        if idle:
            return plan
        timing = together == 1 and self._timing_due()
        if remaining > 1 and not timing:
            drafted = self._draft(plan, remaining - 1)
            if drafted is not None:
                return drafted
            # A draft that was not worth a step is no part of a plain one.
            plan = plan._replace(began=self._clock())
        return plan._replace(drafter=self._after_plain(plan, remaining, timing)) if drafter.runs else plan

    # ---- the draft

    def _draft(self, plan: StepPlan, most: int) -> StepPlan | None:
        """Returns the plan with the draft that pays most, at most `most` tokens deep, and with rows that teach a source
        where those pay; None where there is nothing to verify, or no room left in the context."""
        if self._grammar is not None and self._grammar.limited:
            return None
        room = min(most, self._runner.context_length - plan.cached - self._runner.gamma - 1)
        rows = self.rows if plan.together == 1 or plan.costs is None else len(plan.costs)
        exploration = self._exploration(plan, room)
        spare = 0 if exploration is None else len(exploration.tokens)
        draft = self._likeliest(plan, room, rows - spare, spare) if rows > 1 else None
        likeliest = draft or plan.draft
        if exploration is not None:
            draft = with_rows(likeliest, exploration, self.sources.explorer)
        if draft is None:
            return None
        if self.policy.call_rows is None:  # static graphs are exact but for near-ties
            draft = off_borders(draft, plan.cached)
        if self._grammar is not None and not self._grammar.follows(draft.tree, draft.tokens):
            return None
        explored = max(0, len(draft.tree) - len(likeliest.tree))  # they come last, so a cut takes them first
        drafter = self._after_draft(plan)
        pruning, priors = self.policy.pruning, None
        if pruning is not None:
            priors = np.log(np.maximum(draft.probabilities, TINY)).astype(np.float32)
        paused = plan.paused and self.sources.source_tree is None
        return plan._replace(
            draft=draft, drafter=drafter, explored=explored, paused=paused, pruning=pruning, priors=priors
        )

    def _exploration(self, plan: StepPlan, room: int) -> Continuations | None:
        """Returns the rows to verify for what they teach a source, fewer than a step has; None for none."""
        if self._grammar is not None or plan.together > 1 or plan.paused or not self._adaptive.exploration.open:
            return None
        found = self.sources.explore(room)
        return found if found is not None and 0 < len(found.tokens) < self.rows else None

    def _likeliest(self, plan: StepPlan, room: int, rows: int, spare: int) -> Draft | None:
        """Returns the draft of at most `rows` rows that pays most, None if none does; `spare` further rows of the step
        are taken by exploration. While speculation pauses only what a grammar forces is drafted, and what sources
        propose that end pauses."""
        grammar, root = self._grammar, plan.draft.tokens[0]
        costs = None if plan.costs is None else plan.costs[spare:]
        source_tree = self._source_tree(plan, room, rows, costs)
        forced = grammar is not None and grammar.after().forced is not None
        if not forced and not self._promising(plan, source_tree):
            return None
        if grammar is not None:
            rows = min(rows, room + 1)  # a chain of forced tokens may be long
        proposal = None if plan.paused else plan.proposal
        trial = None if forced or spare else self._trial(plan)
        sharpness, search = self._adaptive.calibration.sharpness, self.policy.search
        draft = build_draft_tree(root, proposal, source_tree, rows, costs, sharpness, grammar, trial, search)
        if trial is not None and self.policy.costs is not None:
            self.policy.costs.tried(trial.loss)
        draft = draft.down_to(room)
        if len(draft.tree) == 1:
            return None
        # Where the drafter runs in any case, a plain step in the draft's place would cost its price, too.
        drafter_runs_anyway = plan.proposal is not None and plan.drafter.runs
        return draft if costs is None or drafter_runs_anyway or draft.pays(costs) else None

    def _source_tree(self, plan: StepPlan, room: int, rows: int, costs: np.ndarray | None) -> CandidateTree | None:
        """Returns what the sources propose, at most `room` tokens deep; while speculation pauses, those that end it."""
        found = self.sources.look_up(0 if plan.paused and not self._controller.may_wake else room, plan.paused)
        if plan.paused or room <= 0 or not self.sources.lasting:
            return found
        root_only = self._grammar is not None
        return self.sources.graft(room, plan.draft.tokens[0], plan.proposal, min(rows, STEM_ROWS), costs, root_only)

    def _promising(self, plan: StepPlan, source_tree: CandidateTree | None) -> bool:
        """Tells whether there is anything to draft. Together with a drafter that no gate compares with them, sources
        alone are not drafted from."""
        compared = not self._runner.gamma or self.gate is not None
        return (plan.proposal is not None and not plan.paused) or (source_tree is not None and compared)

    def _trial(self, plan: StepPlan) -> Trial | None:
        """Returns the trial with which the step may learn what rows cost; None for none."""
        costs = self.policy.costs
        if costs is None or plan.paused or plan.together > 1:
            return None
        return costs.trial(plan.drafter.calls)

    def without_drafter(self, plan: StepPlan, actual_tokens: Sequence[int]) -> tuple[int, int]:
        """Counts the tokens that the plan's draft would have brought without the drafter's proposal, and its rows."""
        source_tree, gate = self.sources.source_tree, self.gate
        if gate is None or (source_tree is None and self._grammar is None):
            return 1, 1
        costs, root, search = gate.costs(0), plan.draft.tokens[0], self.policy.search
        rows = min(self.rows, MAX_ROWS)
        taken = search.take(root, None, source_tree, rows, costs, SHARPNESS, self._grammar)
        if not taken.pays(costs):
            return 1, 1
        return min(taken.follow(actual_tokens) + 1, len(actual_tokens)), taken.size

    # ---- whether the drafter runs

    def _drafter(self, together: int) -> DrafterPlan:
        """Tells whether the drafter is worth running in the next call, of a prompt or a step, and how far it drafts."""
        gate, costs = self.gate, self.policy.costs
        runs = (
            self.rows > 1
            and self._runner.gamma > 0
            and together == 1  # it does not run in shared calls
            and (gate is None or (gate.open and (gate.due or self._window_pays())))
        )
        if self.depth is None:
            return DrafterPlan(runs)
        return DrafterPlan(runs, self.depth.best(costs, self.rows), self.depth.early_end(costs, self.rows))

    def _after_prompt(self, drafter: DrafterPlan, tokens: int, limit: int) -> DrafterPlan:
        """After a prompt: not where no draft can follow; while speculation pauses a second model does not run, as it
        would read the prompt first."""
        needless = limit <= 2 or (self.depth is not None and not self._controller.on)
        return drafter._replace(runs=drafter.runs and not needless and self._fits(tokens - 1))

    def _after_draft(self, plan: StepPlan) -> DrafterPlan:
        """After the rows of a draft: not while speculation pauses, when it is of forced tokens or a waking source's."""
        return plan.drafter._replace(runs=False) if plan.paused else plan.drafter

    def _after_plain(self, plan: StepPlan, remaining: int, timing: bool) -> DrafterPlan:
        """After a plain step: not where that is timed or no draft can follow, and during a pause only at its end."""
        resumes = (not plan.paused and not timing) or self._controller.about_to_resume
        runs = resumes and remaining > 2 and self._fits(plan.cached)
        return plan.drafter if runs else plan.drafter._replace(runs=False)

    def _window_pays(self) -> bool:
        """False where the latency model says that a window's drafts do not pay at this context (`costs.theory`): its
        price, unlike others', follows from the context."""
        costs, depth = self.policy.costs, self.depth
        return not self.policy.window or costs is None or depth is None or depth.pays(costs, self.rows)

    def _fits(self, position: int) -> bool:
        """Tells whether tokens drafted after the row at `position` can be used, and stay within the context."""
        return self._runner.gamma < self._runner.context_length - position

    # ---- costs

    def _sequences(self) -> int:
        """Sequences that share the next call, this one included."""
        return self._runner.together if self._grammar is None and self.policy.pruning is None else 1

    def _timing_due(self) -> bool:
        """Tells whether the next step is to be a plain one, to be timed."""
        costs = self.policy.costs
        return self._controller.probe_due or (costs is not None and costs.plain_due)

    def _costs(self, together: int, drafter: DrafterPlan) -> np.ndarray | None:
        costs = self.policy.costs
        if costs is None:
            return None if self.gate is None or together > 1 else self.gate.costs(drafter.calls)
        if together > 1:
            return costs.shared(together)
        return costs.curve if self.gate is None else self.gate.costs(drafter.calls)
