"""Runs the decoding loop: prefill, then draft, verify, accept and commit until the text ends.

Works on any `ModelRunner`: token ids in, token ids out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from streamspec.draft_tree import DraftTree
from streamspec.errors import BundleError
from streamspec.runtime.costs.draft_depth import EarlyEnd
from streamspec.runtime.costs.drafter_gate import DrafterGate
from streamspec.runtime.costs.row_costs import RowCosts
from streamspec.runtime.decoding.draft_proposal import DraftProposal
from streamspec.runtime.decoding.draft_tree_search import Draft, build_draft_tree, with_rows
from streamspec.runtime.decoding.grammar_state import GrammarState
from streamspec.runtime.decoding.model_runner import ROOT_ONLY, ModelRunner, StepRequest, StepResult
from streamspec.runtime.decoding.policy import PLAIN_REQUESTED, AdaptiveState, DecodingPolicy
from streamspec.runtime.decoding.sampling_params import AdjustedSampler, Logprob, logprob, prompt_logprobs
from streamspec.runtime.decoding.stats import Stats
from streamspec.runtime.decoding.verify import Committed, accept, commit, cut, follow, off_borders
from streamspec.runtime.draft_sources.lookup import SourceLookup

if TYPE_CHECKING:
    from streamspec.runtime.options import GenerationOptions

STEMS = 24  # rows of a draft that lasting sources add to
TINY = 1e-30  # probabilities of which a logarithm is taken are at least this


class SpeculativeDecoder:
    """Decodes one generation. Iterate `run()`; `stats` is up to date whenever it yields.

    `options`: of the call. `policy` and `adaptive`: of the session; default: plain decoding that has learned nothing.
    `grammar`: the state of `options.grammar`, at the beginning of the answer.
    """

    def __init__(
        self,
        runner: ModelRunner,
        options: GenerationOptions,
        policy: DecodingPolicy | None = None,
        adaptive: AdaptiveState | None = None,
        grammar: GrammarState | None = None,
    ) -> None:
        self.runner, self.options, self.policy = runner, options, policy or DecodingPolicy()
        self.adaptive, self.grammar = adaptive or AdaptiveState(), grammar
        rows = min(self.policy.rows, self.policy.call_rows or self.policy.rows)
        self.rows = rows if options.speculate else 1  # most of a verification step; 1: plain
        self.stats = Stats(call_rows=self.policy.call_rows)
        self.consumer_seconds = 0.0  # that the consumer spent between calls: no decode time
        self._controller = self.adaptive.controller
        self._step_began = 0.0  # in `_clock`
        self._calls = 0  # of the drafter in the last step
        self._root = -1
        self._together = 1  # sequences that the step under way is shared with, itself included
        self._spare = 0  # rows of the step under way for what they teach
        self._sampler: AdjustedSampler | None = None  # chooses in the graph's place
        self._proposal: DraftProposal | None = None
        sources = self.policy.sources if self.rows > 1 else ()
        self._sources = SourceLookup(sources, self.adaptive.calibration, self.policy.search)
        self._answer: list[int] = []
        self._prompt_logprobs: list[Logprob] | None = None
        self._depth = (
            self.adaptive.depth if self.policy.deepest and self.rows > 1 else None
        )  # of a second model's drafts
        self._draft_depth: int | None = None
        self._early_end: EarlyEnd | None = None
        self._gate = self.adaptive.gate if runner.gamma and (sources or self._depth is not None) else None

    def run(self, prompt: Sequence[int]) -> Iterator[Committed]:
        """Yields the tokens of every call, the last with a finish reason. `prompt` must fit (0 < tokens < context)."""
        limit = min(self.options.max_new_tokens, self.runner.context_length - len(prompt))
        costs = self.policy.costs if self.rows > 1 else None
        try:
            if costs is not None:
                costs.begin(len(prompt))
            yield from self._decode(prompt, limit, costs)
        finally:
            self._sources.keep(self._answer)
            if costs is not None:
                costs.end()

    def _decode(self, prompt: Sequence[int], limit: int, costs: RowCosts | None) -> Iterator[Committed]:
        done = self._prefill(prompt, limit)
        graph_before, waited_before, decoding = (
            self.runner.graph_seconds,
            self.runner.waited_seconds,
            time.perf_counter(),
        )
        self._sources.read(prompt)
        while True:
            self.stats.decode_seconds = time.perf_counter() - decoding - self.consumer_seconds
            self.stats.graph_seconds = self.runner.graph_seconds - graph_before
            self.stats.waited_seconds = self.runner.waited_seconds - waited_before
            self._answer += done.tokens
            yield done
            if done.finish_reason:
                return
            began = self._clock()
            self._root = done.tokens[-1]
            self._sources.read(done.tokens)
            remaining, cached = limit - self.stats.new_tokens, self.runner.length
            self._together = self.runner.together if self.grammar is None and self.policy.pruning is None else 1
            self._step_began = self._clock()
            draft = self._draft() if self.rows > 1 and remaining > 1 and not self._probe_due else None
            if draft is None:
                began = self._clock()  # a draft that was not worth a step is no part of a plain one
                done = self._plain_step(remaining)
            else:
                done = self._tree_step(draft, remaining)
            if costs is not None and self._together == 1:
                costs.observe(self.stats.rows, self._calls, self._clock() - began, cached)

    def describe(self) -> str:
        """Says for the user whether speculation is on, and why not."""
        if self.rows > 1:
            return self._controller.describe(self.rows)
        return self.policy.describe() if self.options.speculate else f"off ({PLAIN_REQUESTED})"

    def _prefill(self, prompt: Sequence[int], limit: int) -> Committed:
        """Reads what the cache does not hold of the prompt and commits the first token."""
        options, total = self.options, len(prompt)
        self.stats.prompt_tokens = total
        if options.prompt_logprobs is not None:
            chunks = self.runner.score_chunks(prompt)  # the cache holds the prompt then
            self._prompt_logprobs = prompt_logprobs(prompt, chunks, options.prompt_logprobs)
        sampling = options.sampling.for_answer()
        self._sampler = AdjustedSampler(sampling, prompt) if sampling.adjusted else None
        started, logits = time.perf_counter(), options.logprobs is not None or sampling.adjusted
        known = self.stats.reused_tokens = self.runner.begin(prompt, sampling, logits)
        self._controller.begin()
        if self._gate is not None:
            self._gate.begin()
        progress = options.progress
        report = None if progress is None else lambda read: progress(known + read, total)
        drafts, allowed = self._runs_drafter() and self._may_draft(total - 1), self._allowed()
        if self._depth is not None:
            drafts = drafts and self._controller.on  # it would have to read the prompt, too
            self._set_depth()
        request = StepRequest(
            prompt[known:],
            run_drafter=drafts,
            mask=allowed,
            draft_depth=self._draft_depth,
            early_end=self._early_end,
        )
        first = self.runner.prefill(request, report)
        first = self._choose(first, [-1], ROOT_ONLY, allowed)
        self.stats.prefill_seconds = time.perf_counter() - started
        self._proposal = first.proposal
        done = self._finish_step(cut([first.choices[0]], [False], self.policy.eos, limit), first, (0,))
        self._count(done, 0)
        return done

    def take_prompt_logprobs(self) -> list[Logprob] | None:
        """Gives the log-probabilities of the prompt's tokens, once; None where they are not requested."""
        scored, self._prompt_logprobs = self._prompt_logprobs, None
        return scored

    def _clock(self) -> float:
        """Seconds, without those in line for the model."""
        return time.perf_counter() - self.runner.waited_seconds

    def _draft(self) -> Draft | None:
        """Builds the next step's draft, and adds rows that teach a source where those pay; None where there is nothing
        to verify, or no room left in the context."""
        room = self.runner.context_length - self.runner.length - self.runner.gamma - 1
        free = self.grammar is None and self._together == 1
        explores = free and self.adaptive.exploration.open and self._controller.on
        later = self._sources.explore(room) if explores else None
        self._spare = 0 if later is None or len(later.tokens) >= self.rows else len(later.tokens)
        most = self.rows if self._together == 1 or (costs := self._costs()) is None else len(costs)
        draft = self._likeliest_draft(room, most - self._spare) if most > 1 else None
        if later is not None and self._spare:
            likeliest = draft or Draft(ROOT_ONLY, [self._root], [1.0], [0], 1.0)
            draft = with_rows(likeliest, later, self._sources.explorer)
            self._spare = len(draft.tree) - len(likeliest.tree)
        if draft is None or self.policy.call_rows is not None:
            return draft
        cut = off_borders(draft, self.runner.length)
        if len(cut.tree) < len(draft.tree):
            self._spare = 0  # its first path stays
        return cut

    def _likeliest_draft(self, room: int, rows: int) -> Draft | None:
        """Builds the draft of at most so many rows that pays most; None where none does. While speculation pauses only
        what a grammar forces is drafted."""
        grammar, paused, costs = self.grammar, not self._controller.on, self._costs()
        if costs is not None:
            costs = costs[self._spare :]
        others = self._sources.look_up(0 if paused else room)
        if self._sources.lasting and room > 0 and not paused:
            most, alone = min(rows, STEMS), grammar is not None
            others = self._sources.graft(room, self._root, self._proposal, most, costs, alone)
        forced = grammar is not None and grammar.after().forced is not None
        if not forced and (
            paused or (self._proposal is None and (others is None or (self.runner.gamma and self._gate is None)))
        ):
            return None
        if grammar is not None:
            rows = min(rows, room + 1)  # a chain of forced tokens may be long
        learned, proposal = self.policy.costs, None if paused else self._proposal
        tries = not (forced or paused or self._spare) and self._together == 1
        trial = learned.trial(self._planned_calls()) if learned is not None and tries else None
        sharpness, search = self.adaptive.calibration.sharpness, self.policy.search
        draft = build_draft_tree(self._root, proposal, others, rows, costs, sharpness, grammar, trial, search)
        if learned is not None and trial is not None:
            learned.tried(trial.loss)
        if len(draft.tree) == 1 or draft.tree.depth > room:
            return None
        # A plain step instead would run the drafter all the same, for the step after it.
        wasted = self._proposal is not None and self._runs_drafter()
        if costs is not None and not wasted and not draft.pays(costs):
            return None
        return draft

    def _tree_step(self, draft: Draft, remaining: int) -> Committed:
        tree, tokens = draft.tree, draft.tokens
        pruning, priors = self.policy.pruning, None
        if pruning is not None:
            priors = np.log(np.maximum(draft.probabilities, TINY)).astype(np.float32)
        paused = not self._controller.on
        costs, drafter = self._costs(), self._runs_drafter() and not paused
        self._set_depth()
        grammar = self.grammar
        masks = None if grammar is None else grammar.tree_masks(tree, tokens)
        depth, end = self._draft_depth, self._early_end
        result = self.runner.verify(StepRequest(tokens, tree, drafter, pruning, priors, masks, depth, end))
        self._calls = self._calls_of(result, drafter)
        result = self._choose(result, tokens, tree, masks)
        node, path = accept(tree, tokens, result.choices)
        if self.grammar is None:  # whose choices say nothing about other texts
            self._sources.learn(tokens, tree.parents, result.choices, path)
        if result.accepted is not None and result.accepted != node:
            # The proposal would belong to another text, and a graph that errs here is not to be trusted elsewhere.
            raise BundleError(
                f"the graph accepted node {result.accepted}",
                f"node {node}, which its own choices imply",
                'run with tree="plain" and report the bundle',
            )
        self.runner.commit(path)
        proposal, self._proposal = self._proposal, result.proposal
        done = commit(tokens, result.choices, path, self.policy.eos, remaining)
        self.stats.sources = self._sources.count(self.stats.sources, draft.sources, path[: 1 + sum(done.drafted)])
        self.stats.drafts = self.stats.drafts.after(tree, path, self._calls)
        if not paused:
            cost = None if costs is None else costs.item(len(tree) - 1)
            self._controller.step(len(path), cost, None if self._together > 1 else self._clock() - self._step_began)
        if self._sources.explorer and costs is not None and self._together == 1:
            alone = sum(draft.sources[node] == self._sources.explorer for node in path)
            spare = costs.item(len(tree) - 1) - costs.item(len(tree) - 1 - self._spare)
            self.adaptive.exploration.step(len(done.tokens), costs.item(len(tree) - 1), alone, spare)
        if self._gate is not None and self._together == 1:
            if proposal is not None:
                calls = 1 if self._depth is None else proposal.depths
                without = self._without_drafter(self._gate, done.tokens)
                self._gate.compare(len(done.tokens), len(tree) - self._spare, *without, calls)
            self._gate.step(len(done.tokens), len(tree), self._calls)
        if grammar is None:  # what a grammar lets through says nothing about other texts
            self.adaptive.calibration.observe(proposal, self._sources.found, done.tokens, self.policy.search)
            if self._depth is not None and proposal is not None:
                self._depth.observe(proposal.firsts, done.tokens, proposal.confidences)
        done = self._finish_step(done, result, path)
        self._count(done, len(tree))
        return done

    def _plain_step(self, remaining: int) -> Committed:
        controller = self._controller
        speculates_next = (controller.on and not self._probe_due) or controller.about_to_resume
        draft_next = speculates_next and remaining > 1 and self._runs_drafter() and self._may_draft(self.runner.length)
        self._set_depth()
        allowed = self._allowed()
        request = StepRequest(
            [self._root],
            run_drafter=draft_next,
            mask=allowed,
            draft_depth=self._draft_depth,
            early_end=self._early_end,
        )
        result = self.runner.verify(request)
        self._calls = self._calls_of(result, draft_next)
        result = self._choose(result, [self._root], ROOT_ONLY, allowed)
        self.runner.commit((0,))
        if self.grammar is None:  # whose choices say nothing about other texts
            self._sources.learn([self._root], (0,), result.choices, (0,))
        self._proposal = result.proposal
        if self._sources.explorer:
            self.adaptive.exploration.step(1, 1.0, 0, 0.0)
        timed = not draft_next and self._together == 1
        controller.plain_step(self._clock() - self._step_began if timed else None)
        if self._gate is not None and self._together == 1:
            self._gate.step(1, 1, self._calls)
        done = self._finish_step(cut([result.choices[0]], [False], self.policy.eos, remaining), result, (0,))
        self._count(done, 1)
        return done

    def _choose(
        self, result: StepResult, tokens: Sequence[int], tree: DraftTree, masks: np.ndarray | None
    ) -> StepResult:
        """Chooses anew along the accepted path where options ask for what graphs do not know. The drafter's proposal
        stays where the graph has accepted the same path and chosen the same token after it.
        """
        sampler, logits = self._sampler, result.logits
        if sampler is None:
            return result
        assert logits is not None
        choices, reached = list(result.choices), list[int]()
        for node, parent in enumerate(tree.parents):
            if not node or (parent in reached and tokens[node] == choices[parent]):
                reached.append(node)
                path = [tokens[i] for i in tree.path(node)[1:]]
                choices[node] = sampler.choose(logits[node], path, None if masks is None else masks[node])
        node, _ = accept(tree, tokens, choices)
        if result.choices[node] == choices[node] and (len(tree) == 1 or result.accepted == node):
            return result._replace(choices=choices)
        return StepResult(choices, logits=logits)

    def _allowed(self) -> np.ndarray | None:
        """Bool [1, vocabulary]: what may follow the text; None for anything."""
        return None if self.grammar is None else self.grammar.after().mask[None]

    def _finish_step(self, done: Committed, result: StepResult, path: Sequence[int]) -> Committed:
        """Cuts `done` where the grammar is over, advances the grammar, and adds log-probabilities of the rows of
        `path`.
        """
        grammar, count = self.grammar, self.options.logprobs
        self.stats.shared_steps += result.sequences > 1
        if self._sampler is not None:
            self._sampler.extend(done.tokens)
        if grammar is not None:
            over = grammar.over_after(done.tokens)
            if over is not None:
                done = Committed(done.tokens[:over], done.drafted[:over], "stop")
            grammar.advance(done.tokens)
            self.stats.forced_tokens = grammar.forced_tokens
        if count is None or result.logits is None:
            return done
        logprobs = [logprob(result.logits[row], token, count) for row, token in zip(path, done.tokens, strict=False)]
        return replace(done, logprobs=logprobs)

    @property
    def _probe_due(self) -> bool:
        """Whether the next step is to be a plain one, to be timed."""
        costs, due = self.policy.costs, self._controller.probe_due
        return self._together == 1 and (due or (costs is not None and costs.plain_due))

    def _runs_drafter(self) -> bool:
        """Whether the drafter is to run at the end of the step under way."""
        gate = self._gate
        return (
            self.runner.gamma > 0
            and self._together == 1
            and (gate is None or (gate.open and (gate.due or self._pays_here())))
        )

    def _pays_here(self) -> bool:
        """False where the latency model says that a window's drafts do not pay at this context (`costs.theory`): its
        price, unlike others', follows from the context."""
        costs, depth = self.policy.costs, self._depth
        return not self.policy.window or costs is None or depth is None or depth.pays(costs, self.rows)

    def _set_depth(self) -> None:
        """Tells a second model how many tokens to draft."""
        if self._depth is not None:
            self._draft_depth = self._depth.best(self.policy.costs, self.rows)
            self._early_end = self._depth.early_end(self.policy.costs, self.rows)

    def _planned_calls(self) -> int:
        """Calls of the drafter in the step under way, as it seems before."""
        return 0 if not self._runs_drafter() else self._draft_depth or 1

    def _calls_of(self, result: StepResult, drafter: bool) -> int:
        """Calls of the drafter, which was to run or not, for this result."""
        if self._depth is None:
            return int(drafter)
        return 0 if result.proposal is None else result.proposal.depths

    def _costs(self) -> np.ndarray | None:
        if self._together > 1:
            return None if self.policy.costs is None else self.policy.costs.shared(self._together)
        if self._gate is not None:
            return self._gate.costs(self._planned_calls())
        return None if self.policy.costs is None else self.policy.costs.curve

    def _without_drafter(self, gate: DrafterGate, came: Sequence[int]) -> tuple[int, int]:
        """Counts the tokens that the last draft would have brought without the drafter's proposal, and its rows."""
        others = self._sources.others
        if others is None and self.grammar is None:
            return 1, 1
        costs = gate.costs(False)
        search, grammar = self.policy.search, self.grammar
        draft = build_draft_tree(self._root, None, others, self.rows, costs, grammar_state=grammar, search=search)
        if not draft.pays(costs):
            return 1, 1
        return min(len(follow(draft.tree, draft.tokens, came)), len(came)), len(draft.tree)

    def _may_draft(self, position: int) -> bool:
        """Whether draft tokens after the row at `position` can be used and stay within the context."""
        gamma = self.runner.gamma
        return self.rows > 1 and 0 < gamma < self.runner.context_length - position

    def _count(self, done: Committed, rows: int) -> None:
        """`rows`: that the call verified; 1: a plain step, 0: it read the prompt."""
        self.stats.rows = rows
        self.stats.new_tokens += len(done.tokens)
        if rows > 1:
            self.stats.steps += 1
            self.stats.step_tokens += len(done.tokens)
        elif rows == 1:
            self.stats.plain_steps += 1
        self.stats.speculation = self.describe()
