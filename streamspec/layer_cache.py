"""Describes what each layer keeps of the tokens before: which rows, for how many tokens, in which type.

The one table of the KV cache: exporter, runtime, memory estimate and saved conversations read it. A layer whose rows
see only a window keeps the rows of that window and some more, in a ring: token t lies in slot t modulo the slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

KEY, VALUE = "key", "value"
UPDATE, INPUT, DECAY, STATE, MARK = "update", "input", "decay", "state", "mark"  # of a layer with a recurrent state
BESIDE = "beside_"  # before the parts of what mixes rows beside a layer's attention
DTYPES = ("float32", "float16")
# Slots; CPU matrix products add up their inner dimension in blocks of this many or of a multiple. A ring has whole
# blocks, so that a token's slot lies in the same block whoever wrote it.
SUM_BLOCK = 128
# Slots of a ring beyond its window, for the rows of a call and for what is taken back: an answer of the default length
# and its last draft.
LEAST_SLACK = 320
# A recurrent state is kept at every token of this number's multiples, and a call has at most as many rows.
STATE_BLOCK = 64
STATE_WINDOW = 3 * STATE_BLOCK  # tokens back to the oldest that a row needs; with a call's rows the ring is full


class CacheKind(NamedTuple):
    """`parts`: what is kept of a token, each [heads, width]; these are dimension symbols of `streamspec.step_graph`."""

    parts: tuple[str, ...]
    heads: str
    width: str


ATTENTION, CONV, RECURRENT, STATE_SPACE = "attention", "conv", "recurrent", "state_space"
SHARED, NONE = "shared", "none"
LAYER_KINDS = {
    ATTENTION: CacheKind((KEY, VALUE), "Hkv", "D"),
    CONV: CacheKind((KEY,), "one", "H"),  # inputs of a short convolution
    RECURRENT: CacheKind((KEY, VALUE, UPDATE, INPUT, DECAY, STATE, MARK), "Hkv", "D"),  # export/layers
    STATE_SPACE: CacheKind((KEY, VALUE, INPUT, DECAY, STATE, MARK), "Hkv", "D"),  # of Mamba-2
    SHARED: CacheKind((), "Hkv", "D"),  # nothing: the layer attends to what one below keeps
    NONE: CacheKind((), "Hkv", "D"),  # nothing: the layer has no attention
}
WITH_STATE = (RECURRENT, STATE_SPACE)


@dataclass(frozen=True)
class LayerCache:
    """One layer's share of the cache. `window`: how many tokens back its rows see, themselves included, where it keeps
    no more than that needs; None: all tokens are kept. `kind`: of `LAYER_KINDS`; `dtype`: of `DTYPES`; `heads`,
    `width`: of its keys where they differ from the model's, else 0; `parts`: of all its parts, heads and width in turn,
    where they differ from each other; `beside`: what else the layer keeps, for what mixes rows beside this."""

    kind: str = ATTENTION
    window: int | None = None
    dtype: str = DTYPES[0]
    heads: int = 0
    width: int = 0
    parts: tuple[int, ...] = ()
    beside: LayerCache | None = None

    @property
    def own(self) -> LayerCache:
        """The same without what the layer keeps beside it."""
        return self if self.beside is None else replace(self, beside=None)

    @property
    def named_parts(self) -> tuple[str, ...]:
        """All that the layer keeps of a token, by the names in a graph."""
        others = () if self.beside is None else LAYER_KINDS[self.beside.kind].parts
        return *LAYER_KINDS[self.kind].parts, *(f"{BESIDE}{part}" for part in others)

    def of(self, part: str) -> tuple[LayerCache, str]:
        """The cache that a part of `named_parts` belongs to, and the part's name there."""
        if self.beside is not None and part.startswith(BESIDE):
            return self.beside, part.removeprefix(BESIDE)
        return self.own, part

    def slots(self, limit: int) -> int:
        """Slots where the sequence has at most `limit` rows."""
        return limit if self.window is None else min(limit, self._ring(self.window))

    def size(self, part: int) -> tuple[int, int]:
        """Heads and their width of one of its parts; 0: the model's."""
        return self.parts[2 * part : 2 * part + 2] or (self.heads, self.width)  # type: ignore[return-value]

    def _ring(self, window: int) -> int:
        return window + STATE_BLOCK if self.kind in WITH_STATE else window_slots(window)


def window_slots(window: int) -> int:
    """Counts the slots of the ring of a layer with a window of `window` tokens."""
    return -(-(window + max(window // 4, LEAST_SLACK)) // SUM_BLOCK) * SUM_BLOCK


def dtype_of(caches: Sequence[LayerCache]) -> str:
    """The type of keys and values; what else layers keep may be of another."""
    return next((cache.dtype for cache in caches if cache.kind == ATTENTION), DTYPES[0])


def dtype_in_words(caches: Sequence[LayerCache]) -> str:
    """Describes how a cache is rounded, such as ` with K/V in float16`; empty where it is not rounded."""
    rounded = dtype_of(caches)
    return "" if rounded == DTYPES[0] else f" with K/V in {rounded}"
