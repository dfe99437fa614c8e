"""Groups the layers of a cache whose rows have one shape, and counts which tokens the rings among them still hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from streamspec.layer_cache import BESIDE, LAYER_KINDS, LayerCache
from streamspec.runtime.kv_cache.kept_place import KeptPlace
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
    beside: dict[LayerCache, list[int]] = {}  # last: a layer's parts are in the order of their groups
    for layer in range(features.cache_layers):
        cache = features.cache(layer)
        if LAYER_KINDS[cache.kind].parts:
            grouped.setdefault(cache.own, []).append(layer)
        if cache.beside is not None:
            beside.setdefault(cache.beside, []).append(layer)
    sizes = {"Hkv": features.kv_heads, "D": features.head_dim, "one": 1, "H": features.hidden}
    return tuple(
        CacheGroup(tuple(layers), cache, heads or sizes[kind.heads], width or sizes[kind.width], part)
        for prefix, groups in (("", grouped), (BESIDE, beside))
        for cache, layers in groups.items()
        for kind in (LAYER_KINDS[cache.kind],)
        for number, name in enumerate(kind.parts if cache.parts or prefix else (None,))
        for part in (name and f"{prefix}{name}",)
        for heads, width in (cache.size(number),)
    )


@dataclass
class _Window:
    """The slots of group number `group`, whose rows see `window` tokens. `first`: the first row filled in."""

    group: int
    window: int
    slots: int
    first: int = 0


class SequenceRows:
    """Counts the committed rows of a sequence, `length`, and tells which of them the rings of `groups` still hold.

    Rows that were written and never committed have overwritten what lay in their slots. What lay at the end of a prompt
    (`keep`) is copied before.
    """

    capacity: int  # rows that there is room for, of layers that keep all
    # Copies rows of a group by their numbers, [layers, parts, 1, heads, rows, width], and writes what was copied where
    # it lay. Caches without rings that have a `rows` of their own need neither.
    taken: Callable[[int, np.ndarray], np.ndarray]
    put: Callable[[int, np.ndarray, np.ndarray], None]

    def __init__(self, groups: Sequence[CacheGroup], limit: int) -> None:
        """`limit`: maximum number of rows."""
        self.groups, self.limit, self.length = tuple(groups), limit, 0
        self._written = 0  # the row after the last one ever written
        self._windows = [
            _Window(number, window, group.cache.slots(limit))
            for number, group in enumerate(groups)
            if (window := group.cache.window) is not None
        ]
        self._rings = [window for window in self._windows if window.slots < limit]
        self._places: list[KeptPlace] = []

    def slots(self, group: CacheGroup) -> int:
        """Returns the slots of a layer of `group`: all slots of a ring, else the capacity."""
        return self.capacity if group.cache.window is None else group.cache.slots(self.limit)

    @property
    def max_call_rows(self) -> int | None:
        """Maximum rows of a call, the slots that a ring has beyond its window; None: any number."""
        return min((ring.slots - ring.window for ring in self._rings), default=None)

    def holds(self, length: int) -> bool:
        """Tells whether all layers hold the rows that a row after the first `length` attends to."""
        return self._would_hold(length, self._written)

    def reachable(self, length: int) -> int:
        """Returns to how many of the first `length` tokens the sequence can go back: all, or those of a kept place, or
        0. After a call that failed, or a copy that Ctrl-C interrupted, rows may be lost that were committed."""
        length = min(length, self.length)
        if self.holds(length):
            return length
        return max((place.reached(length) for place in self._places), default=0)

    def keep(self, length: int, turn: bool = True) -> None:
        """Notes that the sequence is to be able to go back to its first `length` tokens, a prompt. `turn`: it ends the
        user's turn; else it goes on within one, whose end stays kept beside its own."""
        if self._rings:
            self._places = [*([] if turn else self._places[:1]), KeptPlace(length)]

    def rewind(self, length: int) -> None:
        """Forgets all rows after the first `length`. Raises ValueError where they cannot be gone back to."""
        if not 0 <= length <= self.length or self.reachable(length) != length:
            raise ValueError(f"rewind to {length} of {self.length} tokens")
        if length and not self.holds(length):
            self.length = 0  # until all is copied
            self._go_back_to(next(place for place in self._places if place.reached(length) == length), length)
        self.length = length
        self._places = [place for place in self._places if place.lowest <= length]
        for place in self._places:
            place.length = min(place.length, length)
        if not length:
            self._written, self._places = 0, []
            for window in self._windows:
                window.first = 0

    def write(self, rows: int) -> None:
        """Notes that the next call writes `rows` rows after the committed ones. Raises ValueError for more than
        `max_call_rows`."""
        if self.max_call_rows is not None and rows > self.max_call_rows:
            raise ValueError(f"a call of {rows} rows, limit {self.max_call_rows}")  # the caller's arithmetic is wrong
        written = max(self._written, self.length + rows)
        for place in self._places:
            if place.rows is None and place.length <= self.length and not self._would_hold(place.lowest, written):
                place.lowest = max(place.lowest, self._earliest)
                place.rows = [self.taken(ring.group, place.numbers(ring.window)) for ring in self._rings]
        self._written = written

    def reserve(self, rows: int, spare: int = 0) -> bool:
        """Doubles the capacity where it is too small for `rows` rows of the next call and `spare` more. Returns whether
        it was: then `data` is another list. Raises ValueError above the limit, and as `write`."""
        self.write(rows)
        needed = self.length + rows + spare
        if needed <= self.capacity:
            return False
        if needed > self.limit:
            raise ValueError(f"{needed} cache rows, limit {self.limit}")  # the caller's arithmetic is wrong
        before, self.capacity = self.capacity, min(max(2 * self.capacity, needed), self.limit)
        try:
            self._extend()
        except BaseException:
            self.capacity = before
            raise
        return True

    def _extend(self) -> None:
        """Makes `data` of the capacity, or leaves it as it is where that fails."""

    def restart(self, length: int, rows: Sequence[np.ndarray]) -> None:
        """Counts anew after each group was filled with the last of `length` rows: `rows` [.., rows, width]."""
        self.length = self._written = length
        self._places = []
        for window in self._windows:
            window.first = length - rows[window.group].shape[4]

    def rows(self) -> list[np.ndarray]:
        """See `Cache`."""
        return [self.taken(number, self._held(group)) for number, group in enumerate(self.groups)]

    def _held(self, group: CacheGroup) -> np.ndarray:
        """Returns the numbers of the committed rows, ascending, that a group holds."""
        filled = [each.first for each in self._windows if self.groups[each.group] is group]
        return np.arange(max(filled[0], self._written - self.slots(group)) if filled else 0, self.length)

    @property
    def _earliest(self) -> int:
        """The fewest tokens that can be gone back to without a kept place, but for none."""
        oldest = [(max(each.first, self._written - each.slots), each.window) for each in self._windows]
        return max((first + window - 1 for first, window in oldest if first > 0), default=0)

    def _would_hold(self, length: int, written: int) -> bool:
        """Tells what `holds` does, after rows up to `written` were written."""
        return all(max(each.first, written - each.slots) <= max(0, length + 1 - each.window) for each in self._windows)

    def _go_back_to(self, place: KeptPlace, length: int) -> None:
        """Fills the rings with what they held at `place`, of its first `length` tokens."""
        assert place.rows is not None
        for ring, rows in zip(self._rings, place.rows, strict=True):
            ring.first = place.first(ring.window)
            self.put(ring.group, np.arange(ring.first, length), rows[..., : length - ring.first, :])
        self._written = length
