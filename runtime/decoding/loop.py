"""Runs the decoding loop: prefill, then plan, verify, accept and commit until the text ends.

The loop is the algorithm alone (`reference` has it in forty lines), but for its order: a call of the
model verifies one draft and, at its end, runs the drafter for the next, so the graph accepts too, by
the same rule. The `planner` decides what a call computes, the `observers` learn from its outcome, and
`token_choice` chooses tokens in ways that graphs do not know.
Works on any `ModelRunner`: token ids in, token ids out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from streamspec.errors import BundleError
from streamspec.runtime.decoding.acceptance import Committed, accept, committed_tokens
from streamspec.runtime.decoding.draft_proposal import DraftProposal
from streamspec.runtime.decoding.model_runner import ModelRunner, StepResult
from streamspec.runtime.decoding.observers import observers_of
from streamspec.runtime.decoding.planner import Planner
from streamspec.runtime.decoding.policy import PLAIN_REQUESTED, AdaptiveState, DecodingPolicy
from streamspec.runtime.decoding.stats import Stats
from streamspec.runtime.decoding.step_plan import StepObserver, StepOutcome, StepPlan
from streamspec.runtime.decoding.token_choice import TokenChoice
from streamspec.runtime.sampling.grammar_state import GrammarState

if TYPE_CHECKING:
    from streamspec.runtime.options import GenerationOptions


class SpeculativeDecoder:
    """Decodes one generation. Iterate `run()`; `stats` is up to date whenever it yields.

    `options`: of the call. `policy` and `adaptive`: of the session; default: plain decoding that has learned nothing.
    """

    def __init__(
        self,
        runner: ModelRunner,
        options: GenerationOptions,
        policy: DecodingPolicy | None = None,
        adaptive: AdaptiveState | None = None,
    ) -> None:
        self.runner = runner
        self.options = options
        self.policy = policy or DecodingPolicy()
        self.adaptive = adaptive or AdaptiveState()
        self.stats = Stats(call_rows=self.policy.call_rows)
        self.consumer_seconds = 0.0  # spent by the consumer between calls: no decode time
        rows = min(self.policy.rows, self.policy.call_rows or self.policy.rows)
        self.rows = rows if options.speculate else 1  # maximum of a verification step; 1: plain

    def run(self, prompt: Sequence[int], grammar: GrammarState | None = None) -> Iterator[Committed]:
        """Yields the tokens of every call, the last with a finish reason. `prompt` must fit (0 < tokens < context).
        `grammar`: what limits the answer, in its first state, for `options.grammar` or a thinking budget."""
        planner = self.planner(grammar)
        choice = TokenChoice(self.options, grammar)
        observers = observers_of(planner, self.adaptive, self.stats)
        answer: list[int] = []
        for observer in observers:
            observer.begin(len(prompt))
        try:
            for committed in self._decode(prompt, planner, choice, observers):
                answer += committed.tokens
                yield committed
        finally:
            for observer in observers:
                observer.end(answer)

    def planner(self, grammar: GrammarState | None) -> Planner:
        """Makes the planner of an answer."""
        return Planner(self.runner, self.policy, self.adaptive, grammar, self.rows, self.clock)

    def clock(self) -> float:
        """Seconds, without those in the scheduler's queue."""
        return time.perf_counter() - self.runner.waited_seconds

    def describe(self) -> str:
        """Says for the user whether speculation is on, and why not."""
        if self.rows > 1:
            return self.adaptive.controller.describe(self.rows)
        return self.policy.describe() if self.options.speculate else f"off ({PLAIN_REQUESTED})"

    def _decode(
        self, prompt: Sequence[int], planner: Planner, choice: TokenChoice, observers: list[StepObserver]
    ) -> Iterator[Committed]:
        """Yields the first token, which belongs to the prefill, and then what each step commits."""
        limit = min(self.options.max_new_tokens, self.runner.context_length - len(prompt))
        committed, proposal = self._prefill(prompt, planner, choice, limit)
        began = time.perf_counter()
        graph_began, waited_began = self.runner.graph_seconds, self.runner.waited_seconds
        planner.sources.read(prompt)
        while True:
            self.stats.decode_seconds = time.perf_counter() - began - self.consumer_seconds
            self.stats.graph_seconds = self.runner.graph_seconds - graph_began
            self.stats.waited_seconds = self.runner.waited_seconds - waited_began
            yield committed
            if committed.finish_reason:
                return
            remaining = limit - self.stats.new_tokens
            plan = planner.step(committed.tokens, remaining, proposal)
            outcome = self._step(plan, choice, remaining)
            proposal = outcome.result.proposal
            for observer in observers:
                observer.observe(outcome)
            committed = outcome.committed
            choice.advance(committed.tokens)
            self._update_stats(choice)

    def _prefill(
        self, prompt: Sequence[int], planner: Planner, choice: TokenChoice, limit: int
    ) -> tuple[Committed, DraftProposal | None]:
        """Reads what the cache does not hold of the prompt, and commits the first token. Returns the drafter's proposal
        beside it."""
        started = time.perf_counter()
        reused = choice.begin(prompt, self.runner)
        progress = self.options.progress
        report = None if progress is None else lambda read: progress(reused + read, len(prompt))
        plan, mask = planner.plan_prefill(len(prompt), limit), choice.mask()
        result = choice.choose(self.runner.prefill(plan.request(prompt[reused:], mask), report), mask)
        committed = choice.finish(committed_tokens((), result.choices, (0,), self.policy.eos, limit), result, (0,))
        choice.advance(committed.tokens)
        self.stats.prompt_tokens = len(prompt)
        self.stats.reused_tokens = choice.reused
        self.stats.prefill_seconds = time.perf_counter() - started
        self.stats.count(len(committed.tokens), rows=0)
        self._update_stats(choice)
        return committed, result.proposal

    def _step(self, plan: StepPlan, choice: TokenChoice, remaining: int) -> StepOutcome:
        """Verifies the planned rows, accepts the longest path that the target agrees with, and commits it."""
        tree, tokens = plan.draft.tree, plan.draft.tokens
        mask = choice.mask(tokens, tree)
        result = choice.choose(self.runner.verify(plan.request(mask)), mask, tokens, tree)
        node, path = accept(tree, tokens, result.choices)
        check_accepted(result, node)
        self.runner.commit(path)
        committed = choice.finish(
            committed_tokens(tokens, result.choices, path, self.policy.eos, remaining), result, path
        )
        return StepOutcome(plan, result, path, committed, choice.constrained, self.clock)

    def _update_stats(self, choice: TokenChoice) -> None:
        self.stats.forced_tokens = choice.forced_tokens
        self.stats.speculation = self.describe()


def check_accepted(result: StepResult, node: int) -> None:
    """Raises BundleError where the graph accepted another node than its own choices imply: the proposal would belong to
    another text, and a graph that errs here is not to be trusted elsewhere."""
    if result.accepted is not None and result.accepted != node:
        raise BundleError(
            f"the graph accepted node {result.accepted}",
            f"node {node}, which its own choices imply",
            'run with tree="plain" and report the bundle',
        )
