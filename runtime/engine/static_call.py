"""Calls of a static step graph (docs/guides/static-shapes.md): one shape for prompts, drafts and plain steps.

A call pads its rows to the graph's. The graph only reads the cache; the accepted rows alone are written here, so
nothing is ever compacted. The graph chooses greedily and drafts after that; where tokens are sampled, a second small
graph chooses on the CPU, and drafts after another token are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streamspec import step_graph as sg
from streamspec.bundle.manifest import CHOICE
from streamspec.draft_tree import MASKED
from streamspec.errors import BundleError
from streamspec.runtime.decoding.draft_proposal import IndependentProposal, TreeProposal
from streamspec.runtime.decoding.model_runner import StepRequest, StepResult
from streamspec.runtime.decoding.verify import accept
from streamspec.runtime.engine.executor import GraphExecutor
from streamspec.runtime.engine.graph_call import CallRows, DrafterShape, SamplingState, checked_tokens
from streamspec.runtime.engine.io_binding import IoBinding
from streamspec.runtime.kv_cache.host_cache import Cache, KeyValueCache, views


class StaticCall:
    """See `streamspec.runtime.engine.graph_call.GraphCall`. Every call is padded to the graph's `max_rows` rows."""

    def __init__(
        self,
        executor: GraphExecutor,
        cache: Cache,
        choice: SamplingState,
        drafter: DrafterShape,
        adapter: Mapping[str, Any],
    ) -> None:
        model = executor.model
        assert model.rows is not None and isinstance(cache, KeyValueCache)  # see graph_kinds
        self.max_rows: int = model.rows
        self._executor, self._cache, self._choice, self._drafter = executor, cache, choice, drafter
        self._vocab = model.manifest.model.vocab_size
        binding = self._binding = IoBinding(model.ort, model.session, cache, adapter, model.in_place)
        self._new = [np.zeros(group.shape(self.max_rows), group.dtype) for group in cache.groups]  # of the last call
        for layer, parts in enumerate(views(cache.groups, self._new)):
            for kind, rows in zip(sg.CACHE_KINDS, parts, strict=False):
                binding.output(sg.new_rows(layer, kind), rows)
        self._raw = binding.output(sg.RAW_LOGITS, np.zeros((self.max_rows, self._vocab), np.float32))
        self._own = binding.output(sg.CHOICES, (self.max_rows,))
        self._drafted = self._bind_drafts()
        self._root_matters = binding.has(sg.FORCED_ROOT)  # candidates depend on the token after the accepted node

    def begin(self) -> None:
        """Nothing is bound: the graph chooses greedily, and its logits are bound in any case."""

    def follow_cache(self) -> None:
        self._binding.follow(self._cache)

    def run(self, rows: CallRows, request: StepRequest, forced_node: int = -1, shrink: bool = False) -> StepResult:
        self._compute(rows, forced_node, shrink, by_graph=request.mask is None)
        chosen, graph_chose = self._chosen(rows, request.mask)
        own, logits = self._own[rows.logit_rows], self._raw[rows.logit_rows] if self._choice.logits else None
        choices = checked_tokens(chosen, self._vocab)
        if not request.run_drafter or not self._drafted:
            return StepResult(choices, logits=logits)
        accepted, candidates, scores, *more = self._drafted
        node = int(accepted[0])
        at = np.flatnonzero(rows.logit_rows == node)
        if not len(at):
            raise BundleError(
                f"a graph that accepted row {node} of {len(rows.logit_rows)}",
                "one of the rows it was given",
                "export the bundle again",
            )
        other_root = self._root_matters and choices[at[0]] != own[at[0]]
        if other_root or (
            not graph_chose and rows.tree is not None and accept(rows.tree, rows.tokens, choices)[0] != node
        ):
            return StepResult(choices, logits=logits)
        if levels := self._drafter.levels:
            return StepResult(choices, node, TreeProposal(candidates, scores, more[0], levels), logits)
        return StepResult(choices, node, IndependentProposal(candidates, scores, more[0] if more else None), logits)

    def logits(self, rows: CallRows) -> np.ndarray:
        self._compute(rows, forced_node=0)
        return self._raw[: len(rows.tokens)].copy()

    def commit(self, path: Sequence[int]) -> None:
        self._cache.append(self._new, path)

    def _chosen(self, rows: CallRows, allowed: np.ndarray | None) -> tuple[np.ndarray, bool]:
        """int64 [r]: the tokens after `logit_rows`, and whether they are those that the graph drafts after."""
        if self._choice.sampling.plain_argmax and allowed is None:
            return self._own[rows.logit_rows], True
        return self._sample(rows, allowed), False

    def _compute(self, rows: CallRows, forced_node: int, shrink: bool = False, by_graph: bool = False) -> None:
        """Runs the graph; `by_graph`: nothing but the sampling's parameters chooses tokens. Padding rows see no row of
        the call, themselves included, so that none can be accepted."""
        binding, length, n = self._binding, self._cache.length, len(rows.tokens)
        for name, value, rest in ((sg.INPUT_IDS, rows.tokens, 0), (sg.POSITION_IDS, rows.positions, length)):
            binding.numbers(name, (1, self.max_rows), [*value, *[rest] * (self.max_rows - n)])
        mask = np.full((self.max_rows, self.max_rows), MASKED, np.float32)
        mask[:n, :n] = rows.mask
        binding.input(sg.TREE_MASK, mask)
        binding.numbers(sg.PAST_LENGTH, (1,), (length,))
        parents = np.zeros(self.max_rows, np.int64)
        parents[: len(rows.parents)] = rows.parents
        binding.input(sg.PARENTS, parents)
        binding.input(sg.FORCED_NODE, np.array([forced_node]))
        binding.input(sg.FORCED_ROOT, np.array([-1]))
        next_ids = np.full(self.max_rows, -1)
        if rows.next_ids is not None:
            next_ids[:n] = rows.next_ids
        binding.input(sg.NEXT_IDS, next_ids)
        binding.follow(self._cache)
        self._executor.run(binding.io, shrink)

    def _sample(self, rows: CallRows, allowed: np.ndarray | None) -> np.ndarray:
        """Samples on the CPU: int64 [r], the tokens after `logit_rows`, out of those `allowed`."""
        logit_rows, choice = rows.logit_rows, self._choice
        feed = (
            choice.sampling.scalars()
            | {
                sg.RAW_LOGITS: self._raw[logit_rows],
                sg.INPUT_IDS: np.array([rows.tokens], np.int64),
                sg.TREE_MASK: np.ascontiguousarray(rows.mask[logit_rows, : len(rows.tokens)]),
                sg.UNIFORMS: choice.uniforms(rows),
                sg.SEEN: choice.seen,
                sg.FREE: np.array([allowed is None]),
            }
            | ({} if allowed is None else {sg.ALLOWED: allowed})
        )
        try:
            choices: np.ndarray = self._executor.model.sampler.run([sg.CHOICES], feed)[0]
        except Exception as error:
            raise BundleError(
                f"{CHOICE} failed: {error}", "a graph that chooses tokens", "export the bundle again"
            ) from None
        if not isinstance(choices, np.ndarray) or choices.shape != logit_rows.shape or choices.dtype != np.int64:
            raise BundleError(
                f"a {CHOICE} that chose {str(choices)[:100]}", f"{len(logit_rows)} tokens", "export the bundle again"
            )
        return choices

    def _bind_drafts(self) -> list[np.ndarray]:
        """Buffers of what the drafter returns: accepted node, candidates, their logits and, with a bigram, their
        pairs', of a draft layer their origins.
        """
        drafter = self._drafter
        if not drafter.gamma:
            return []
        shape = sum(drafter.levels) or drafter.gamma, drafter.candidates
        forms: list[tuple[str, tuple[int, ...]]] = [
            (sg.ACCEPTED_NODE, (1,)),
            (sg.CANDIDATES, shape),
            (sg.CANDIDATE_LOGITS, shape),
        ]
        if drafter.bigram:
            forms.append((sg.PAIR_LOGITS, (*shape, drafter.candidates)))
        if drafter.levels:
            forms.append((sg.ORIGINS, shape[:1]))
        return [self._binding.output(name, form) for name, form in forms]
