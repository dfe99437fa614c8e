"""Calls of a sequence that it may share with others: `SharingGate` decides, `CallSharing` gathers them.

Covered by tests/runtime/engine/shared/test_call_sharing.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamspec.runtime.decoding.model_runner import StepRequest, StepResult
from streamspec.runtime.engine.dynamic_call import DynamicCall
from streamspec.runtime.engine.graph_call import CallContext, CallRows
from streamspec.runtime.engine.shared.call_sharing import CallSharing
from streamspec.runtime.engine.shared.shared_call import SharedRows
from streamspec.runtime.kv_cache.shared_cache import SharedCache


class ShareableCall:
    """See `streamspec.runtime.engine.graph_call.GraphCall`. Shares calls that neither draft, prune nor mask."""

    max_rows: int | None = None
    prompt_rows: int | None = None

    def __init__(self, context: CallContext, cache: SharedCache, sharing: CallSharing) -> None:
        self._alone = DynamicCall(context)
        self._executor = context.executor
        self._sampling_state = context.sampling_state
        self._cache = cache
        self._sharing = sharing
        self._decoding = 1  # sequences that do, this one included, while calls may be shared
        self._shared = 0  # sequences of the last call, where it was shared

    @property
    def together(self) -> int:
        sampling = self._sampling_state.sampling
        self._decoding = 1
        if self._sampling_state.logits or sampling.uses_seen:
            return 1
        self._decoding = self._sharing.sequences(self._executor, sampling.shared_call_key)
        return self._decoding if self._sharing.gate.shares(self._decoding) else 1

    def begin(self) -> None:
        self._decoding, self._shared = 1, 0
        self._alone.begin()

    def follow_cache(self) -> None:
        self._alone.follow_cache()

    def run(self, rows: CallRows, request: StepRequest, forced_node: int = -1, shrink: bool = False) -> StepResult:
        gate, self._shared = self._sharing.gate, 0
        alone = request.run_drafter or request.mask is not None or request.pruning is not None
        if rows.tree is not None and not alone and gate.shares(self._decoding):
            return self._run_shared(rows)
        before = self._executor.graph_seconds
        result = self._alone.run(rows, request, forced_node, shrink)
        gate.called(self._decoding, False, self._executor.graph_seconds - before)
        return result

    def logits(self, rows: CallRows) -> np.ndarray:
        return self._alone.logits(rows)

    def commit(self, path: Sequence[int]) -> None:
        self._sharing.gate.committed(self._shared or self._decoding, self._shared > 0, len(path))
        self._alone.commit(path)

    def _run_shared(self, rows: CallRows) -> StepResult:
        sampling = self._sampling_state.sampling
        self._cache.reserve(len(rows.tokens))
        mine = SharedRows(self._executor, rows, self._cache.place, self._cache.length, sampling)
        if sampling.random:
            mine.uniforms = self._sampling_state.uniforms(rows)
        self._executor.run_shared(mine, self._sharing)
        self._shared = mine.sequences
        return StepResult(mine.choices, sequences=mine.sequences)
