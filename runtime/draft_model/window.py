"""Lets a model draft for itself: the same graph over a second, small KV cache of attention sinks and the newest tokens.

At a long context a step takes its time for the cache, so the same model over a few hundred tokens drafts for a share of
it (MagicDec, Chen et al. 2024, arXiv 2408.11049); what that cache keeps is StreamingLLM's (Xiao et al. 2023, arXiv
2309.17453). Its rows are copies of the target's, which verified them: keys stay rotated by their positions in the text,
and drafts go on at the text's own positions; the tokens between sinks and window are left out. After the sinks lies a
ring, as attention does not depend on the order of keys: token t has slot SINKS + (t - SINKS) modulo its slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import numpy as np

from streamspec.runtime.draft_model.runner import TwoModelRunner
from streamspec.runtime.engine.memory_estimate import DRAFTED
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.kv_cache.host_cache import Cache, KeyValueCache
from streamspec.runtime.kv_cache.layout import cache_groups
from streamspec.runtime.sampling.sampling_params import GREEDY, Sampling

SINKS = 4  # tokens at the beginning that are always kept: softmax needs somewhere to put what it does not use


class WindowRunner(OrtRunner):
    """Runs a target's graph over the sinks and the newest tokens of its cache, at most `window` tokens in all."""

    secondary = True

    def __init__(self, target: OrtRunner, window: int) -> None:
        self.window, self._target = window, target
        self._seen = 0  # tokens of the text so far, in the window or not
        self._copied = 0  # of them, those whose rows are the target's: the last call's may yet be of others
        super().__init__(target.model, target.context_length)

    def _empty_cache(self) -> Cache:
        self._seen = self._copied = 0
        slots = self.window + DRAFTED
        return KeyValueCache(cache_groups(self.model.features), slots, first=slots)

    @property
    def position(self) -> int:
        return self._seen + self.length - min(self._seen, self.window)

    def begin(self, prompt: Sequence[int], sampling: Sampling = GREEDY, logits: bool = False, turn: bool = True) -> int:
        """Forgets all rows and takes up the target's adapter. Returns 0."""
        if self._adapter is not self._target._adapter:
            self._drafter, self._adapter = self._target._drafter, self._target._adapter
            self._call = self._new_call(self._drafter, self._adapter)
        self.rewind(0)
        self._seen = self._copied = 0
        self._choose_by(sampling, logits)
        return 0

    def follow(self, path: Sequence[int] = ()) -> None:
        """Drops its drafts and copies the target's rows that are new: those committed, and those of `path` of its last
        call, which are about to be, or others of it where the host chooses."""
        end, ring = self._target.length, self.window - SINKS
        sinks = min(end, SINKS)
        self._copy(self._copied, self._copied, sinks - self._copied)
        first = max(self._copied, sinks, end - ring)
        self._copy(first, first, end - first)
        for slot, node in enumerate(path):
            self._copy(end + node, end + slot, 1)
        self._copied, self._seen = end, end + len(path)
        self.cache.length = min(self._seen, self.window)
        self.tokens.clear()

    def _copy(self, source: int, position: int, count: int) -> None:
        """Copies `count` neighbouring rows of the target's cache to where tokens from `position` on belong."""
        while count > 0:
            slot = position if position < SINKS else SINKS + (position - SINKS) % (self.window - SINKS)
            run = min(count, self.window - slot)
            for mine, rows in zip(self.cache.data, self._target.cache.data, strict=True):
                mine[..., slot : slot + run, :] = rows[..., source : source + run, :]
            source, position, count = source + run, position + run, count - run

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Forgets earlier cancellations; the scheduler counts the target's request alone."""
        self._executor.clear()
        yield


class WindowDraftRunner(TwoModelRunner):
    """Drafts with a window of the target's own cache. See `ModelRunner`."""

    draft: WindowRunner

    def __init__(self, target: OrtRunner, window: int) -> None:
        super().__init__(target, WindowRunner(target, window))

    def fork(self, context: int | None = None) -> Self:
        return type(self)(self.target.fork(context), self.draft.window)

    def _read(self, came: Sequence[int], path: Sequence[int], depth: int) -> np.ndarray | None:
        """One row: what came before lies in the target's cache."""
        self.draft.follow(path)
        return None if came[-1] in self._eos else self._next(came[-1])
