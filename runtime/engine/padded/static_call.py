"""Binds calls to a static step graph (docs/guides/static-shapes.md): one shape for prompts, drafts and plain steps.

The graph only reads the cache; the accepted rows alone are written here, so nothing is ever compacted. It chooses
greedily.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamspec import step_graph as sg
from streamspec.draft_tree import MASKED
from streamspec.runtime.engine.graph_call import CallContext, CallRows
from streamspec.runtime.engine.io_binding import IoBinding
from streamspec.runtime.engine.padded.padded_call import PaddedOutputs
from streamspec.runtime.kv_cache.host_cache import KeyValueCache, views


class StaticBinding:
    """See `streamspec.runtime.engine.padded.padded_call.PaddedBinding`."""

    def __init__(self, context: CallContext) -> None:
        model, cache = context.executor.model, context.cache
        assert model.rows is not None and isinstance(cache, KeyValueCache)  # see graph_kinds
        self.max_rows = model.rows
        self._executor = context.executor
        self._cache = cache
        self._sampling_state = context.sampling_state
        self._io = IoBinding(model.ort, model.session, cache, context.adapter, model.in_place)
        self.root_matters = self._io.has(sg.FORCED_ROOT)
        self._new = [np.zeros(group.shape(self.max_rows), group.dtype) for group in cache.groups]  # of the last call
        for layer, parts in enumerate(views(cache.groups, self._new)):
            for kind, rows in zip(sg.CACHE_KINDS, parts, strict=False):
                self._io.output(sg.new_rows(layer, kind), rows)
        logits = np.zeros((self.max_rows, model.manifest.model.vocab_size), np.float32)
        self._greedy = PaddedOutputs(
            choices=self._io.output(sg.CHOICES, (self.max_rows,)),
            unsure=None,
            logits=self._io.output(sg.RAW_LOGITS, logits).__getitem__,
            drafts=[self._io.output(name, shape) for name, shape in context.drafter.outputs()],
        )
        self._sampled = self._greedy._replace(unsure=np.ones(self.max_rows, np.bool_))

    def follow_cache(self) -> None:
        self._io.follow(self._cache)

    def run(self, rows: CallRows, forced_node: int, shrink: bool = False, draws: bool = False) -> PaddedOutputs:
        """Padding rows see no row of the call, themselves included, so that none can be accepted."""
        binding, length, n = self._io, self._cache.length, len(rows.tokens)
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
        return self._greedy if self._sampling_state.sampling.plain_argmax else self._sampled

    def commit(self, path: Sequence[int]) -> None:
        self._cache.append(self._new, path)
