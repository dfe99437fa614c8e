"""The decoding loop: prefill, then verify, accept and commit until the text ends.

Works on any `ModelRunner`. Knows nothing about text: token ids in, token ids out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np

from streamspec.errors import BundleError
from streamspec.runtime.decoding.draft_tree_search import Draft, DraftCalibration, DraftProposal, draft
from streamspec.runtime.decoding.drafter_gate import DrafterGate
from streamspec.runtime.decoding.grammar_state import GrammarState
from streamspec.runtime.decoding.logprobs import logprob
from streamspec.runtime.decoding.model_runner import ROOT_ONLY, ModelRunner, Pruning, StepResult
from streamspec.runtime.decoding.ngram import NgramIndex, NgramMatch
from streamspec.runtime.decoding.sampling import GREEDY, Sampling
from streamspec.runtime.decoding.speculation_controller import SpeculationController
from streamspec.runtime.decoding.stats import Stats
from streamspec.runtime.decoding.verify import Committed, accept, commit, cut, off_borders

TINY = 1e-30  # chances of which a logarithm is taken are at least this


@dataclass
class DecodingConfig:
    """How to decode.

    `rows`: most rows of a verification step, 1: plain. `costs` [rows]: time of a step with 1.. rows over a plain
    step's; None (unknown): every step takes all rows. `ngram`: also draft what followed an earlier occurrence of the
    newest tokens, `experience`: what drafts have been worth so far, `worth`: whether to leave streams out where n-grams
    do (None: never). `pruning`: which rows go on above the early exit, None for all. `in_place`: rows of a draft take
    the cache's next slots (`off_borders`). `grammar`: what the answer must follow, at its beginning; for this
    generation alone. `logprobs`: say how likely each token was, and so many of the likeliest.
    """

    limit: int
    eos: Collection[int] = ()
    rows: int = 1
    costs: np.ndarray | None = None
    governor: SpeculationController | None = None
    ngram: bool = True
    experience: DraftCalibration = field(default_factory=DraftCalibration)
    worth: DrafterGate | None = None
    sampling: Sampling = GREEDY
    pruning: Pruning | None = None
    in_place: bool = True
    progress: Callable[[int, int], None] | None = (
        None  # is told how many tokens of the prompt have been read, and of how many
    )
    call_rows: int | None = None  # that every call computes, however few are asked for
    grammar: GrammarState | None = None
    logprobs: int | None = None
    plain: str = "off"  # what to say of speculation where there is none


class SpeculativeDecoder:
    """One generation. Iterate `run()`; `stats` is up to date whenever it yields."""

    def __init__(self, engine: ModelRunner, plan: DecodingConfig) -> None:
        self.engine, self.plan, self.stats = engine, plan, Stats()
        self.away = 0.0  # seconds the consumer spent elsewhere between calls: not ours
        self._governor = plan.governor or SpeculationController()
        self._began = 0.0  # of the step under way, in `_clock`
        self._root = -1
        self._guesses: DraftProposal | None = None
        self._index = NgramIndex(plan.experience.rates) if plan.rows > 1 and plan.ngram else None
        self._found: NgramMatch | None = None  # what the last draft was made with
        self._worth = plan.worth if engine.gamma and self._index is not None else None

    def run(self, prompt: Sequence[int]) -> Iterator[Committed]:
        """Yields the tokens of every call, the last with a finish reason. `prompt` must fit (0 < tokens < context)."""
        limit = min(self.plan.limit, self.engine.context_length - len(prompt))
        self.stats.prompt_tokens = len(prompt)
        started = time.perf_counter()
        known = self.stats.reused_tokens = self.engine.begin(prompt, self.plan.sampling, self.plan.logprobs is not None)
        self._governor.begin()
        if self._worth is not None:
            self._worth.begin()
        progress, total = self.plan.progress, len(prompt)
        report = None if progress is None else lambda read: progress(known + read, total)
        first = self.engine.prefill(
            prompt[known:], self._streams() and self._may_draft(total - 1), report, self._allowed()
        )
        self.stats.prefill_seconds = time.perf_counter() - started
        self._guesses = first.guesses
        done = self._said(cut([int(first.choices[0])], [False], self.plan.eos, limit), first, (0,))
        self._count(done, 0)
        graph_before, waited_before, decoding = (
            self.engine.graph_seconds,
            self.engine.waited_seconds,
            time.perf_counter(),
        )
        if self._index is not None:
            self._index.extend(prompt)
        while True:
            self.stats.decode_seconds = time.perf_counter() - decoding - self.away
            self.stats.graph_seconds = self.engine.graph_seconds - graph_before
            self.stats.waited_seconds = self.engine.waited_seconds - waited_before
            yield done
            if done.finish_reason:
                return
            self._root = done.tokens[-1]
            if self._index is not None:
                self._index.extend(done.tokens)
            remaining = limit - self.stats.new_tokens
            self._began = self._clock()
            made = self._draft() if self.plan.rows > 1 and remaining > 1 and not self._governor.looks else None
            done = self._plain_step(remaining) if made is None else self._tree_step(made, remaining)

    def _clock(self) -> float:
        """Seconds, without those in line for the model."""
        return time.perf_counter() - self.engine.waited_seconds

    def describe(self) -> str:
        """What speculation does, for the user."""
        return self.plan.plain if self.plan.rows == 1 else self._governor.describe(self.plan.rows)

    def _draft(self) -> Draft | None:
        """The next step's draft; None where there is nothing to guess with, or no room left in the context. While
        speculation pauses only what a grammar forces is drafted."""
        room = self.engine.context_length - self.engine.length - self.engine.gamma - 1
        walk, rows, pauses = self.plan.grammar, self.plan.rows, not self._governor.on
        self._found = self._index.find(room) if self._index is not None and not pauses else None
        forced = walk is not None and walk.at().forced is not None
        if not forced and (
            pauses or (self._guesses is None and (self._found is None or (self.engine.gamma and self._worth is None)))
        ):
            return None
        if walk is not None:
            rows = min(rows, room + 1)  # a chain of forced tokens may be long
        costs = self._costs()
        guesses = None if pauses else self._guesses
        made = draft(self._root, guesses, self._found, rows, costs, self.plan.experience.sharpness, walk)
        if len(made.tree) == 1 or made.tree.depth > room:
            return None
        forgoes = (
            self._guesses is not None and self._streams()
        )  # a plain step would be one with streams behind it, for nothing
        if costs is not None and not forgoes and not made.pays(costs):
            return None
        return off_borders(made, self.engine.length) if self.plan.in_place else made

    def _tree_step(self, made: Draft, remaining: int) -> Committed:
        tree, tokens = made.tree, made.tokens
        pruning, priors = self.plan.pruning, None
        if pruning is not None:
            priors = np.log(np.maximum(made.chances, TINY)).astype(np.float32)
        costs, paused = self._costs(), not self._governor.on
        streams = self._streams() and not paused
        walk = self.plan.grammar
        result = self.engine.verify(
            tokens, tree, streams, pruning, priors, None if walk is None else walk.masks(tree, tokens)
        )
        node, path = accept(tree, tokens, result.choices)
        if result.accepted is not None and result.accepted != node:
            # The guesses would belong to another text, and a graph that errs here is not to be trusted elsewhere.
            raise BundleError(
                f"the graph accepted node {result.accepted}",
                f"node {node}, which its own choices imply",
                'run with tree="plain" and report the bundle',
            )
        self.engine.commit(path)
        before, self._guesses = self._guesses, result.guesses
        done = commit(tree, tokens, result.choices, path, self.plan.eos, remaining)
        cost = None if costs is None else float(costs[len(tree) - 1])
        if not paused:
            self._governor.step(len(path), cost, self._clock() - self._began)
        if self._worth is not None:
            if before is not None:
                self._worth.compare(len(done.tokens), len(tree), *self._alone(self._worth, done.tokens))
            self._worth.step(len(done.tokens), len(tree), streams)
        if walk is None:  # what a grammar lets come says nothing about other texts
            self.plan.experience.observe(before, self._found, done.tokens)
        done = self._said(done, result, path)
        self._count(done, len(tree))
        return done

    def _plain_step(self, remaining: int) -> Committed:
        resume = (self._governor.on and not self._governor.looks) or self._governor.about_to_resume
        draft_next = resume and remaining > 1 and self._streams() and self._may_draft(self.engine.length)
        result = self.engine.verify(
            np.array([self._root], dtype=np.int64), ROOT_ONLY, draft_next, allowed=self._allowed()
        )
        self.engine.commit((0,))
        self._guesses = result.guesses
        self._governor.plain_step(None if draft_next else self._clock() - self._began)
        if self._worth is not None:
            self._worth.step(1, 1, draft_next)
        done = self._said(cut([int(result.choices[0])], [False], self.plan.eos, remaining), result, (0,))
        self._count(done, 1)
        return done

    def _allowed(self) -> np.ndarray | None:
        """Bool [1, vocabulary]: what may follow the text; None for anything."""
        return None if self.plan.grammar is None else self.plan.grammar.at().mask[None]

    def _said(self, done: Committed, result: StepResult, path: Sequence[int]) -> Committed:
        """What the rows of `path` said: cut where the grammar is over, which goes on behind it, and with
        log-probabilities.
        """
        walk, count = self.plan.grammar, self.plan.logprobs
        if walk is not None:
            over = walk.over_after(done.tokens)
            if over is not None:
                done = Committed(done.tokens[:over], done.drafted[:over], "stop")
            walk.advance(done.tokens)
            self.stats.forced_tokens = walk.forced_tokens
        if count is None or result.logits is None:
            return done
        said = [logprob(result.logits[row], token, count) for row, token in zip(path, done.tokens, strict=False)]
        return replace(done, logprobs=said)

    def _streams(self) -> bool:
        """Whether streams are to run behind the step under way."""
        return self.engine.gamma > 0 and (self._worth is None or self._worth.wanted)

    def _costs(self) -> np.ndarray | None:
        return self.plan.costs if self._worth is None else self._worth.costs(self._streams())

    def _alone(self, worth: DrafterGate, came: Sequence[int]) -> tuple[int, int]:
        """Tokens that the last draft would have brought without streams' guesses, and its rows."""
        if self._found is None and self.plan.grammar is None:
            return 1, 1
        made = draft(self._root, None, self._found, self.plan.rows, worth.without, walk=self.plan.grammar)
        if not made.pays(worth.without):
            return 1, 1
        right = (said == token for said, token in zip(made.tokens[1:].tolist(), came, strict=False))
        return min(1 + sum(takewhile(bool, right)), len(came)), len(made.tree)

    def _may_draft(self, position: int) -> bool:
        """Whether streams behind the row at `position` are wanted and stay within the context."""
        wanted = self.plan.rows > 1 and self.engine.gamma > 0
        return wanted and position + self.engine.gamma < self.engine.context_length

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
