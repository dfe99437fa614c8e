"""Binds calls to a captured step graph (docs/guides/cuda-graphs.md): a few row counts, everything
bound beforehand.

A call is padded to the next row count. The graph chooses, greedily or by drawing. The logits are
copied from the device only where they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamspec.captured.packed_call import Numbers, pack, pack_draw, unpack, unsure
from streamspec.runtime.decoding.model_runner import Cancelled
from streamspec.runtime.engine.graph_call import CallContext, CallRows
from streamspec.runtime.engine.padded.padded_call import PaddedOutputs
from streamspec.runtime.kv_cache.captured_cache import CapturedCache


class CapturedBinding:
    """See `streamspec.runtime.engine.padded.padded_call.PaddedBinding`. `max_rows`: the largest of the row counts."""

    def __init__(self, context: CallContext) -> None:
        model, cache = context.executor.model, context.cache
        assert model.captured is not None and isinstance(cache, CapturedCache)  # see graph_kinds
        self.max_rows = model.captured.margin
        self.root_matters = model.features.root
        self._sizes = model.captured
        self._executor = context.executor
        self._cache = cache
        self._sampling_state = context.sampling_state

    def follow_cache(self) -> None:
        """Nothing is to be bound: a cache is filled where it lies."""

    def run(self, rows: CallRows, forced_node: int, shrink: bool = False, draws: bool = False) -> PaddedOutputs:
        n, cache, state = len(rows.tokens), self._cache, self._sampling_state
        cache.reserve(n)
        call = cache.calls[self._sizes.padded(n)]
        row = rows.tokens, rows.positions, rows.parents
        numbers = Numbers(cache.length, forced_node)
        pack(call.packed, self._sizes, numbers, row, rows.mask == 0, cache.sources(), rows.next_ids)
        run, seen = call.greedy, None
        if draws and not state.sampling.plain_argmax:
            run = call.sampled
            uniforms = state.uniforms(rows) if state.sampling.random else np.zeros(len(rows.logit_rows))
            pack_draw(run.draw, [*state.sampling.scalars().values()], rows.logit_rows, uniforms)
            seen = state.seen if state.sampling.uses_seen else None
        try:
            result = self._executor.run_there(lambda: call.run(self._executor.model.session, run, seen))
        except Cancelled:  # before it ran
            raise
        except BaseException:  # Ctrl-C included
            cache.failed()
            raise
        cache.moved()
        choices, *drafts = unpack(result, call.parts)
        tokens, coarse = (choices, None) if run is call.greedy else unsure(choices)
        return PaddedOutputs(tokens, coarse, lambda rows: self._executor.model.on_device(call.logits)[rows], drafts)

    def commit(self, path: Sequence[int]) -> None:
        self._cache.compact(path)
