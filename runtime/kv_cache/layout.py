"""Groups the layers of a cache whose rows have one shape, and counts which tokens the rings among them still hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streamspec.layer_cache import LAYER_KINDS, LayerCache
from streamspec.step_graph import GraphFeatures


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share an array [layers, parts, 1, heads, slots, width]: `shape` without slots. `part`: the one of
    their parts that it holds, where these differ in size; None: all."""

    layers: tuple[int, ...]
    cache: LayerCache
    heads: int
    width: int
    part: str | None = None

    @property
    def name(self) -> str:
        """Name of its rows in a saved conversation."""
        cache = self.cache
        kind = "rows" if cache == LayerCache(dtype=cache.dtype) else f"rows.{cache.kind}"
        kind = kind if self.part is None else f"{kind}.{self.part}"
        kind = kind if cache.window is None else f"{kind}.{cache.window}"
        return f"{kind}.{cache.heads}x{cache.width}" if cache.heads or cache.width else kind

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.cache.dtype)

    @property
    def parts(self) -> int:
        return len(LAYER_KINDS[self.cache.kind].parts) if self.part is None else 1

    def shape(self, slots: int) -> tuple[int, int, int, int, int, int]:
        """Shape of an array with so many slots."""
        return len(self.layers), self.parts, 1, self.heads, slots, self.width

    def bytes(self, slots: int) -> int:
        """Size of an array with so many slots."""
        return int(np.prod(self.shape(slots))) * self.dtype.itemsize


def cache_groups(features: GraphFeatures) -> tuple[CacheGroup, ...]:
    """Groups the layers of a graph's cache that keep something, in the order of their first layers."""
    grouped: dict[LayerCache, list[int]] = {}
    for layer in range(features.cache_layers):
        if LAYER_KINDS[features.cache(layer).kind].parts:
            grouped.setdefault(features.cache(layer), []).append(layer)
    sizes = {"Hkv": features.kv_heads, "D": features.head_dim, "one": 1, "H": features.hidden}
    return tuple(
        CacheGroup(tuple(layers), cache, heads or sizes[kind.heads], width or sizes[kind.width], part)
        for cache, layers in grouped.items()
        for kind in (LAYER_KINDS[cache.kind],)
        for number, part in enumerate(kind.parts if cache.parts else (None,))
        for heads, width in (cache.size(number),)
    )


class SequenceRows:
    """Counts the committed rows of a sequence, `length`, and tells which of them the rings of `groups` still hold.

    Rows that were written and never committed count as well: they have overwritten what lay in their slots.
    """

    capacity: int  # rows that there is room for, of layers that keep all

    def __init__(self, groups: Sequence[CacheGroup], limit: int) -> None:
        """`limit`: maximum number of rows."""
        self.groups, self.limit, self.length = tuple(groups), limit, 0
        self._written = 0  # the row after the last one ever written
        self._first = 0  # the first row that the rings were filled with
        self._rings = [
            (window, group.cache.slots(limit))
            for group in groups
            if (window := group.cache.window) is not None and group.cache.slots(limit) < limit
        ]

    def slots(self, group: CacheGroup) -> int:
        """Returns the slots of a layer of `group`: all slots of a ring, else the capacity."""
        return self.capacity if group.cache.window is None else group.cache.slots(self.limit)

    @property
    def max_call_rows(self) -> int | None:
        """Maximum rows of a call, the slots that a ring has beyond its window; None: any number."""
        return min((slots - window for window, slots in self._rings), default=None)

    def holds(self, length: int) -> bool:
        """Tells whether all layers hold the rows that a row after the first `length` attends to."""
        return all(self._oldest(slots) <= max(0, length + 1 - window) for window, slots in self._rings)

    def reachable(self, length: int) -> int:
        """Returns to how many tokens the sequence can go back: the first `length`, or 0."""
        return length if self.holds(length) else 0

    def rewind(self, length: int) -> None:
        """Forgets all rows after the first `length`. Raises ValueError where they cannot be gone back to."""
        if not 0 <= length <= self.length or not (length == 0 or self.holds(length)):
            raise ValueError(f"rewind to {length} of {self.length} tokens")
        self.length = length
        if not length:
            self._written = self._first = 0

    def write(self, rows: int) -> None:
        """Notes that the next call writes `rows` rows after the committed ones. Raises ValueError for more than
        `max_call_rows`."""
        if self.max_call_rows is not None and rows > self.max_call_rows:
            raise ValueError(f"a call of {rows} rows, limit {self.max_call_rows}")  # the caller's arithmetic is wrong
        self._written = max(self._written, self.length + rows)

    def grow(self, rows: int, spare: int) -> bool:
        """Doubles the capacity where it is too small for `rows` rows of the next call and `spare` more. Returns whether
        it was. Raises ValueError above the limit, and as `write`."""
        self.write(rows)
        needed = self.length + rows + spare
        if needed <= self.capacity:
            return False
        if needed > self.limit:
            raise ValueError(f"{needed} cache rows, limit {self.limit}")  # the caller's arithmetic is wrong
        self.capacity = min(max(2 * self.capacity, needed), self.limit)
        return True

    def restart(self, length: int, rows: Sequence[np.ndarray]) -> None:
        """Counts anew after each group was filled with the last of `length` rows: `rows` [.., rows, width]."""
        self.length = self._written = length
        counts = [filled.shape[4] for group, filled in zip(self.groups, rows, strict=True) if group.cache.window]
        self._first = length - min(counts, default=length)

    def held_rows(self, group: CacheGroup, slots: int) -> np.ndarray:
        """Returns the numbers of the committed rows, ascending, that a group of `slots` slots holds."""
        return np.arange(0 if group.cache.window is None else self._oldest(slots), self.length)

    def _oldest(self, slots: int) -> int:
        """Returns the number of the oldest row in a ring."""
        return max(self._first, self._written - slots)
