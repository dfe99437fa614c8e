"""The decoding loop: prefill, then verify, accept and commit until the text ends.

Works on any `Engine`. Knows nothing about text: token ids in, token ids out.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from streamspec.errors import BundleError
from streamspec.runtime.decoding import Committed, accept, commit, cut, off_borders
from streamspec.runtime.drafting import draft
from streamspec.runtime.governor import Governor
from streamspec.runtime.interface import ROOT_ONLY, Engine
from streamspec.runtime.ngram import NgramIndex
from streamspec.runtime.sampling import GREEDY, Sampling
from streamspec.runtime.stats import Stats
from streamspec.trees import DraftTree, chain


@dataclass
class Plan:
    """How to decode. `tree` None: plain. `wide`: plain steps run two rows (the second is thrown away), so that the same
    attention kernel serves plain and speculative decoding and a chain's output equals plain's bit for bit. `ngram`: what
    followed an earlier occurrence of the newest tokens is drafted as well."""

    limit: int
    eos: Collection[int] = ()
    tree: DraftTree | None = None
    wide: bool = False
    governor: Governor | None = None
    ngram: bool = True
    sampling: Sampling = GREEDY


class Decoder:
    """One generation. Iterate `run()`; `stats` is up to date whenever it yields."""

    def __init__(self, engine: Engine, plan: Plan) -> None:
        self.engine, self.plan, self.stats = engine, plan, Stats()
        self.away = 0.0  # seconds the consumer spent elsewhere between calls: not ours
        self._governor = plan.governor or Governor(None)
        self._root = -1
        self._candidates: np.ndarray | None = None
        self._index = NgramIndex() if plan.tree is not None and plan.ngram else None

    def run(self, prompt: Sequence[int]) -> Iterator[Committed]:
        """Yields the tokens of every call, the last with a finish reason. `prompt` must fit (0 < tokens < context)."""
        limit = min(self.plan.limit, self.engine.context_length - len(prompt))
        self.stats.prompt_tokens = len(prompt)
        started = time.perf_counter()
        self.engine.reset(self.plan.sampling)
        self._governor.begin()
        first = self.engine.prefill(prompt, draft=self._may_draft(len(prompt) - 1))
        self.stats.prefill_seconds = self.stats.first_token_seconds = time.perf_counter() - started
        self._candidates = first.candidates
        done = cut([int(first.choices[0])], [False], self.plan.eos, limit)
        self._count(done, None)
        graph_before, decoding = self.engine.graph_seconds, time.perf_counter()
        if self._index is not None:
            self._index.extend(prompt)
        while True:
            self.stats.decode_seconds = time.perf_counter() - decoding - self.away
            self.stats.graph_seconds = self.engine.graph_seconds - graph_before
            yield done
            if done.finish_reason:
                return
            self._root = done.tokens[-1]
            if self._index is not None:
                self._index.extend(done.tokens)
            remaining = limit - self.stats.new_tokens
            tree = self.plan.tree
            if (
                tree is not None
                and self._candidates is not None
                and self._fits(tree)
                and remaining > 1
                and self._governor.on
            ):
                done = self._tree_step(tree, remaining)
            else:
                done = self._plain_step(remaining)

    def describe(self) -> str:
        """What speculation does, for the user."""
        return "off" if self.plan.tree is None else self._governor.describe(len(self.plan.tree))

    def _tree_step(self, tree: DraftTree, remaining: int) -> Committed:
        assert self._candidates is not None
        room = self.engine.context_length - self.engine.length - self.engine.gamma - 1
        found = self._index.find(room) if self._index is not None else None
        tree, tokens = draft(tree, self._root, self._candidates, found)
        tree, tokens = off_borders(tree, tokens, self.engine.length)
        result = self.engine.verify(tokens, tree, draft=True)
        node, path = accept(tree, tokens, result.choices)
        if result.accepted is not None and result.accepted != node:
            # The candidates would belong to another text, and a graph that errs here is not to be trusted elsewhere.
            raise BundleError(
                f"the graph accepted node {result.accepted}",
                f"node {node}, which its own choices imply",
                'run with tree="plain" and report the bundle',
            )
        self.engine.keep(path)
        self._candidates = result.candidates
        done = commit(tree, tokens, result.choices, path, self.plan.eos, remaining)
        self._governor.step(len(path))
        if found is not None and self._index is not None:
            self._index.observe(found, done.tokens)
        self._count(done, "tree")
        return done

    def _plain_step(self, remaining: int) -> Committed:
        wide = self.plan.wide and self.engine.length + 1 < self.engine.context_length
        tree = chain(1) if wide else ROOT_ONLY
        resume = self._governor.on or self._governor.about_to_resume
        draft = not wide and resume and remaining > 1 and self._may_draft(self.engine.length)
        result = self.engine.verify(np.full(len(tree), self._root, dtype=np.int64), tree, draft=draft)
        self.engine.keep((0,))
        self._candidates = result.candidates
        self._governor.plain_step()
        done = cut([int(result.choices[0])], [False], self.plan.eos, remaining)
        self._count(done, "plain")
        return done

    def _may_draft(self, position: int) -> bool:
        """Whether streams behind the row at `position` are wanted and stay within the context."""
        return self.plan.tree is not None and position + self.engine.gamma < self.engine.context_length

    def _fits(self, tree: DraftTree) -> bool:
        return self._may_draft(self.engine.length + tree.depth)

    def _count(self, done: Committed, kind: str | None) -> None:
        self.stats.new_tokens += len(done.tokens)
        if kind == "tree":
            self.stats.steps += 1
            self.stats.step_tokens += len(done.tokens)
        elif kind == "plain":
            self.stats.plain_steps += 1
        self.stats.speculation = self.describe()
