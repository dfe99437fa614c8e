"""Calls of a captured step graph (docs/guides/cuda-graphs.md): one of few row counts, everything bound beforehand.

A call is padded to the next row count. The graph chooses, greedily or by drawing, and drafts after that. Where it is
`unsure` of a token that counts, and with grammars, `choose.onnx` chooses on the CPU from the logits, which are copied
for that; a proposal after another token is dropped, as in a static call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streamspec.captured.packed_call import Numbers, pack, pack_draw, unpack, unsure
from streamspec.errors import BundleError
from streamspec.runtime.decoding.verify import accept
from streamspec.runtime.engine.captured.device_buffers import BoundCall
from streamspec.runtime.engine.executor import GraphExecutor
from streamspec.runtime.engine.graph_call import CallRows, DrafterShape, SamplingState
from streamspec.runtime.engine.static_call import StaticCall
from streamspec.runtime.kv_cache.captured_cache import CapturedCache
from streamspec.runtime.kv_cache.host_cache import Cache


class CapturedCall(StaticCall):
    """See `streamspec.runtime.engine.graph_call.GraphCall`. `max_rows`: the largest of the row counts."""

    _raw: Any  # the logits of the last call, by row

    def __init__(
        self,
        executor: GraphExecutor,
        cache: Cache,
        choice: SamplingState,
        drafter: DrafterShape,
        adapter: Mapping[str, Any],
    ) -> None:
        model = executor.model
        assert model.captured is not None and isinstance(cache, CapturedCache)  # see graph_kinds
        self._executor, self._captured, self._choice, self._drafter = executor, cache, choice, drafter
        self._sizes, self._features = model.captured, model.features
        self._vocab = model.manifest.model.vocab_size
        self._calls = cache.calls
        self.max_rows = self._sizes.margin
        self._root_matters = self._features.root

    def follow_cache(self) -> None:
        """Nothing is to be bound: a cache is filled where it lies."""

    def logits(self, rows: CallRows) -> np.ndarray:
        self._compute(rows, forced_node=0)
        return self._raw[np.arange(len(rows.tokens))]

    def commit(self, path: Sequence[int]) -> None:
        self._captured.compact(path)

    def _chosen(self, rows: CallRows, allowed: np.ndarray | None) -> tuple[np.ndarray, bool]:
        if allowed is not None or self._choice.sampling.plain_argmax:
            return super()._chosen(rows, allowed)
        own, coarse = self._own[rows.logit_rows], self._unsure[rows.logit_rows]
        # Rows beside the accepted path choose nothing that anybody reads.
        path = [0] if rows.tree is None else list(accept(rows.tree, rows.tokens, own.tolist())[1])
        if not coarse[path].any():
            return own, True
        return np.where(coarse, self._sample(rows, None), own), False

    def _compute(self, rows: CallRows, forced_node: int, shrink: bool = False, by_graph: bool = False) -> None:
        n, cache, choice = len(rows.tokens), self._captured, self._choice
        cache.reserve(n)
        call = self._calls[self._sizes.padded(n)]
        row = rows.tokens, rows.positions, rows.parents
        numbers = Numbers(cache.length, forced_node)
        pack(call.packed, self._sizes, numbers, row, rows.mask == 0, cache.sources(), rows.next_ids)
        call.send()
        run = call.greedy
        if by_graph and not choice.sampling.plain_argmax:
            run = call.sampled
            uniforms = choice.uniforms(rows) if choice.sampling.random else np.zeros(len(rows.logit_rows))
            pack_draw(run.draw, [*choice.sampling.scalars().values()], rows.logit_rows, uniforms)
            call.send_draw(choice.seen if choice.sampling.repetition_penalty != 1 else None)
        try:
            self._executor.run(run.io, options=run.options)
        except BundleError:
            cache.failed()
            raise
        cache.moved()
        said, *self._drafted = unpack(call.result(), call.parts)
        self._own, self._unsure = unsure(said)
        self._raw = _Logits(call)


class _Logits:
    """The logits of a call, copied from the device when rows of them are asked for."""

    def __init__(self, call: BoundCall) -> None:
        self._call = call

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """float32 [r, vocabulary]"""
        return self._call.logits()[rows]
