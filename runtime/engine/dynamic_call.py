"""Calls of a dynamic step graph: any number of rows, the KV cache written in place and compacted after each step.

One ONNX Runtime session serves prompt chunks and draft trees. The cache is bound as past and present at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamspec import step_graph as sg
from streamspec.draft_tree import frozen
from streamspec.runtime.decoding.model_runner import Pruning, StepRequest, StepResult
from streamspec.runtime.engine.graph_call import (
    CallContext,
    CallRows,
    checked_tokens,
    counted,
    repeated,
)
from streamspec.runtime.engine.io_binding import IoBinding

NO_LIMIT = frozen(np.array([-np.inf], np.float32))
FREE, BOUND = frozen(np.array([True])), frozen(np.array([False]))  # by a grammar


class DynamicCall:
    """See `streamspec.runtime.engine.graph_call.GraphCall`."""

    max_rows: int | None = None
    prompt_rows: int | None = None
    together = 1

    def __init__(self, context: CallContext) -> None:
        self._executor = context.executor
        self._cache = context.cache
        self._adapter = context.adapter
        self._sampling_state = context.sampling_state
        self._drafter = context.drafter
        self._draft_outputs = [self._drafter.outputs(runs) for runs in (False, True)]
        self._vocab = context.executor.model.manifest.model.vocab_size
        self._survivors: list[int] | None = None  # rows of the last call that passed the early exit; None for all
        self._logits_bound = False
        self._binding = self._bind()
        self._scoring: dict[str, IoBinding] = {}  # by the output that a call computes alone

    def begin(self) -> None:
        if self._sampling_state.logits != self._logits_bound:  # an output that is bound once stays so
            self._binding, self._logits_bound = self._bind(), self._sampling_state.logits
        for name, value in self._sampling_state.sampling.scalars().items():
            self._binding.input(name, value)

    def follow_cache(self) -> None:
        self._scoring.clear()  # they would keep the old one alive
        self._binding.follow(self._cache)

    def run(self, rows: CallRows, request: StepRequest, forced_node: int = -1, shrink: bool = False) -> StepResult:
        self._reserve(len(rows.tokens))
        binding, count, draft = self._binding, len(rows.logit_rows), request.run_drafter
        prunes = self._drafter.exit_layer is not None and not self._logits_bound
        pruning, priors = request.pruning if prunes else None, request.priors
        self._bind_rows(binding, rows, draft, forced_node, pruning)
        if pruning is not None:
            binding.input(sg.PRIORS, pruning.asked(np.zeros(count, np.float32) if priors is None else priors))
        self._bind_choice(binding, rows, request.mask)
        scaled = self._bind_logits(binding, count) if self._logits_bound else None
        choices = binding.output(sg.CHOICES, (count,))
        drafted = [binding.output(name, shape) for name, shape in self._draft_outputs[draft]]
        self._survivors = None
        self._executor.run(binding.io, shrink)
        chosen = checked_tokens(choices, self._vocab)
        if pruning is not None:
            self._survivors = [row for row, token in enumerate(chosen) if token >= 0]
        logits = None if scaled is None else scaled[0] * scaled[1]
        if not draft or not drafted:
            return StepResult(chosen, logits=logits)
        accepted, *candidates = drafted
        return StepResult(chosen, accepted.item(0), self._drafter.proposal(*candidates), logits)

    def logits(self, rows: CallRows) -> np.ndarray:
        n = len(rows.tokens)
        out = np.empty((n, self._vocab), np.float32)
        binding = self._bind_alone(sg.RAW_LOGITS, rows, out)
        scale = binding.output(sg.LOGIT_SCALE, (n, 1))
        self._executor.run(binding.io)
        return np.multiply(out, scale, out=out)

    def states(self, rows: CallRows) -> np.ndarray:
        """Runs the rows; returns the states that the LM head reads, float32 [r, hidden], of the rows with logits."""
        out = np.empty((len(rows.logit_rows), self._executor.model.manifest.model.hidden_size), np.float32)
        self._executor.run(self._bind_alone(sg.HIDDEN_STATES, rows, out).io)
        return out

    def commit(self, path: Sequence[int]) -> None:
        above = None
        if self._survivors is not None and self._drafter.exit_layer is not None:
            above = self._drafter.exit_layer, np.searchsorted(self._survivors, path).tolist()
        self._cache.compact(path, above)

    def _bind(self) -> IoBinding:
        model = self._executor.model
        return IoBinding(model.ort, model.session, self._cache, self._adapter, model.in_place)

    def _bind_alone(self, output: str, rows: CallRows, out: np.ndarray) -> IoBinding:
        """Binds the rows, and `out` as the only output except the cache."""
        self._survivors = None
        self._reserve(len(rows.tokens))
        if output not in self._scoring:
            self._scoring[output] = self._bind()
        binding = self._scoring[output]
        binding.follow(self._cache)
        self._bind_rows(binding, rows, draft=False, forced_node=0 if self._drafter.gamma else -1)
        binding.output(output, out)
        return binding

    def _reserve(self, rows: int) -> None:
        """Makes room in the cache for `rows` rows and the drafter's, and binds the cache where it moved."""
        if self._cache.reserve(rows, self._drafter.gamma):
            self._scoring.clear()  # they would keep the old one alive
        self._binding.follow(self._cache)

    def _bind_rows(
        self, binding: IoBinding, rows: CallRows, draft: bool, forced_node: int, pruning: Pruning | None = None
    ) -> None:
        n, gamma = len(rows.tokens), self._drafter.gamma
        binding.numbers(sg.INPUT_IDS, (1, n), rows.tokens)
        binding.numbers(sg.POSITION_IDS, (1, n), rows.positions)
        binding.input(sg.TREE_MASK, rows.mask)
        binding.input(sg.PARENTS, rows.parents)
        binding.numbers(sg.PAST_LENGTH, (1,), (self._cache.length,))
        binding.input(sg.LOGIT_ROWS, rows.logit_rows)
        settings = n, draft, forced_node, pruning
        if settings == binding.settings and rows.next_ids is None:
            return  # the other inputs are bound already
        binding.settings = settings if rows.next_ids is None else ()
        max_rows, above = n, NO_LIMIT
        if pruning is not None:
            max_rows = min(n, pruning.rows or n)
            above = np.array([pruning.lowest], np.float32)
        binding.input(sg.NEXT_IDS, repeated(-1, n) if rows.next_ids is None else rows.next_ids)
        binding.input(sg.KEEP_ROWS, repeated(max_rows))
        binding.input(sg.KEEP_ABOVE, above)
        if gamma:
            binding.input(sg.STREAM_IDS, counted(gamma if draft else 0))
            binding.input(sg.FORCED_NODE, repeated(forced_node))
            binding.input(sg.FORCED_ROOT, repeated(-1))

    def _bind_choice(self, binding: IoBinding, rows: CallRows, mask: np.ndarray | None) -> None:
        """Binds the inputs that choose tokens, out of those that `mask` allows."""
        binding.input(sg.FREE, FREE if mask is None else BOUND)
        if mask is not None:
            binding.input(sg.ALLOWED, mask)
        sampling = self._sampling_state.sampling
        if sampling.random:
            binding.input(sg.UNIFORMS, self._sampling_state.uniforms(rows))
        if sampling.uses_seen:
            binding.input(sg.SEEN, self._sampling_state.seen)

    def _bind_logits(self, binding: IoBinding, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Binds buffers for raw logits [rows, vocabulary] and their scale [rows, 1]; returns both."""
        return binding.output(sg.RAW_LOGITS, (rows, self._vocab)), binding.output(sg.LOGIT_SCALE, (rows, 1))
