"""Calls of an ONNX decoder that others exported: rows of a chain after the text, logits out, tokens chosen on the host.

Its attention is causal, so that a draft is a chain. The keys and values of rows that are not accepted are left out of
the cache, which goes back by its length.

Covered by tests/runtime/onnx_decoder/test_folder.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamspec import step_graph as sg
from streamspec.runtime.decoding.model_runner import StepRequest, StepResult
from streamspec.runtime.engine.graph_call import CallContext, CallRows, checked_tokens
from streamspec.runtime.engine.io_binding import IoBinding
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.kv_cache.handed_cache import HandedCache
from streamspec.runtime.kv_cache.host_cache import Cache, CacheMemory, KeyValueCache
from streamspec.runtime.kv_cache.layout import cache_groups
from streamspec.runtime.onnx_decoder.interface import ATTENTION_MASK, CACHE_BRANCH, KEPT_LOGITS, LOGITS
from streamspec.runtime.onnx_decoder.manifest import DecoderManifest
from streamspec.runtime.sampling.sampling_params import drawn, penalize

ALL_LOGITS = 64 << 20  # bytes of the logits of a call that reads a prompt, where the graph gives those of all its rows
FEWEST, MOST = 64, 512  # rows of it


def decoder_cache(model: LoadedModel, rows: int) -> Cache:
    """Returns a cache of at most `rows` rows as the graph takes it: in place, or handed from call to call."""
    manifest = model.manifest
    in_place = isinstance(manifest, DecoderManifest) and manifest.shares_cache
    return (KeyValueCache if in_place else HandedCache)(cache_groups(model.features), rows)


class _HandingBinding(IoBinding):
    """Binds the cache at each call, since its shape is another."""

    def follow(self, cache: CacheMemory) -> None:
        """Nothing is bound before a call's rows are known."""

    def hand(self, cache: HandedCache, rows: int) -> None:
        for layer, (reads, writes) in enumerate(zip(*cache.handed(rows), strict=True)):
            for kind, old, new in zip(sg.CACHE_KINDS, reads, writes, strict=True):
                self.io.bind_ortvalue_input(sg.past(layer, kind), self._value(old))
                self.io.bind_ortvalue_output(sg.present(layer, kind), self._value(new))


class DecoderCall:
    """See `streamspec.runtime.engine.graph_call.GraphCall`."""

    max_rows: int | None = None
    together = 1

    def __init__(self, context: CallContext) -> None:
        self._executor, self._cache, self._sampling_state = context.executor, context.cache, context.sampling_state
        model = context.executor.model
        self._vocab = model.manifest.model.vocab_size
        kind = _HandingBinding if isinstance(self._cache, HandedCache) else IoBinding
        self._binding = kind(model.ort, model.session, self._cache, context.adapter, model.in_place)
        inputs = {value.name: value for value in model.session.get_inputs()}
        # Of the number of logits: [] or [1].
        self._kept = [1] * len(inputs[KEPT_LOGITS].shape) if KEPT_LOGITS in inputs else None
        fitting = ALL_LOGITS // (4 * self._vocab)
        self.prompt_rows: int | None = min(MOST, max(FEWEST, fitting)) if self._kept is None else None

    def begin(self) -> None:
        """Nothing is bound: the host chooses tokens."""

    def follow_cache(self) -> None:
        self._binding.follow(self._cache)

    def run(self, rows: CallRows, request: StepRequest, forced_node: int = -1, shrink: bool = False) -> StepResult:
        logits = self._run(rows, shrink)
        choices = checked_tokens(self._chosen(logits, rows, request.mask), self._vocab)
        return StepResult(choices, logits=logits if self._sampling_state.logits else None)

    def logits(self, rows: CallRows) -> np.ndarray:
        return np.array(self._run(rows))

    def commit(self, path: Sequence[int]) -> None:
        self._cache.compact(path)

    def _run(self, rows: CallRows, shrink: bool = False) -> np.ndarray:
        """Returns the logits float32 [r, vocabulary] after `logit_rows`, good until the next call."""
        n, past, binding = len(rows.tokens), self._cache.length, self._binding
        if rows.tree is not None and rows.tree.depth != n - 1:
            raise ValueError("a tree for a graph that takes chains")  # the caller's arithmetic is wrong
        self._cache.reserve(n)
        if isinstance(binding, _HandingBinding):
            assert isinstance(self._cache, HandedCache)
            binding.hand(self._cache, n)
        else:
            binding.follow(self._cache)
        binding.numbers(sg.INPUT_IDS, (1, n), rows.tokens)
        binding.input(sg.POSITION_IDS, np.asarray(rows.positions, np.int64).reshape(1, n))
        binding.input(ATTENTION_MASK, np.ones((1, past + n), np.int64))
        binding.input(CACHE_BRANCH, np.array([past > 0]))
        first = 0
        if self._kept is not None:
            first = int(rows.logit_rows[0])
            binding.input(KEPT_LOGITS, np.full(self._kept, n - first, np.int64))
        out = binding.output(LOGITS, (1, n - first, self._vocab))[0]
        self._executor.run(binding.io, shrink)
        wanted = out if len(rows.logit_rows) == len(out) else out[rows.logit_rows - first]
        return np.asarray(wanted, np.float32)

    def _chosen(self, logits: np.ndarray, rows: CallRows, mask: np.ndarray | None) -> np.ndarray:
        """Returns int64 [r]: the tokens after `logit_rows`, out of those that `mask` allows."""
        sampling = self._sampling_state.sampling
        if sampling.plain_argmax and mask is None:
            return np.argmax(logits, axis=1)
        uniforms = self._sampling_state.uniforms(rows) if sampling.random else np.zeros(len(logits), np.float32)
        seen = self._sampling_state.seen.copy()
        chosen, read = [], 0
        for at, row in enumerate(rows.logit_rows.tolist()):
            scores = logits[at].astype(np.float64)
            seen[list(rows.tokens[read : row + 1])] = True
            read = row + 1
            penalize(scores, seen, sampling.repetition_penalty)
            if mask is not None:
                scores[~mask[at]] = -np.inf
            chosen.append(drawn(scores, sampling, float(uniforms[at])))
        return np.array(chosen)
