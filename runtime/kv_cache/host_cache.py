"""The KV cache in the machine's memory: one array for all layers, grown on demand, compacted in place after each step.

Where the system allows it, address space for the whole limit is taken at once and memory as rows are written: nothing
is copied, nothing taken for rows that never come. `device_cache` is the same in a device's memory.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from streamspec.errors import ResourceError
from streamspec.runtime.kv_cache.compaction import compaction

FIRST_CAPACITY = 1024  # where memory is taken at once
RESERVED = 1 << 30  # bytes of address space to begin with: some systems refuse more than they could ever fill
LAZY = hasattr(mmap, "MAP_ANONYMOUS")  # no Windows, which counts what is reserved as used


class Cache(Protocol):
    """The keys and values of one sequence; rows `[0, length)` are committed. `on_device`: outside of the machine's
    memory."""

    on_device: bool
    length: int
    data: Any  # replaced whenever it moves

    @property
    def capacity(self) -> int: ...

    def reserve(self, rows: int) -> bool:
        """Makes room for `rows` rows after the committed ones; true if `data` moved."""

    def compact(self, path: Sequence[int], above: tuple[int, Sequence[int]] | None = None) -> None:
        """Commits the rows of an accepted path (nodes of the last call, root first) and drops its other rows.

        `above`: the first layer that saw fewer rows, and the path among those.
        """

    def rows(self) -> np.ndarray:
        """A copy of the committed rows [layers, 2, 1, kv_heads, length, head_dim]."""

    def fill(self, rows: np.ndarray) -> None:
        """Commits what `rows` returned, in place of everything. There must be room (`reserve`)."""

    def views(self) -> Sequence[tuple[Any, Any]]:
        """Per layer: key and value [1, kv_heads, capacity, head_dim]."""


class KeyValueCache:
    """A cache in the machine's memory: `data` [layers, 2, 1, kv_heads, capacity, head_dim].

    `limit` bounds the capacity. Growing makes a new array: views of the old one must be replaced.
    """

    on_device = False

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, limit: int, dtype: np.dtype, first: int | None = None
    ) -> None:
        """`first`: capacity to begin with."""
        self._limit = limit
        self._shape = (layers, 2, 1, kv_heads, head_dim)
        self._dtype = dtype
        self.length = 0
        slot = int(np.prod(self._shape)) * np.dtype(dtype).itemsize
        begin = max(FIRST_CAPACITY, RESERVED // slot) if LAZY else FIRST_CAPACITY
        self.data = self._zeros(min(begin if first is None else first, limit))

    @property
    def capacity(self) -> int:
        return int(self.data.shape[4])

    def reserve(self, rows: int) -> bool:
        """See `Cache`; true if `data` is a new array."""
        capacity = enough(self.capacity, self.length + rows, self._limit)
        if capacity == self.capacity:
            return False
        grown = self._zeros(capacity)
        grown[..., : self.length, :] = self.data[..., : self.length, :]
        self.data = grown
        return True

    def compact(self, path: Sequence[int], above: tuple[int, Sequence[int]] | None = None) -> None:
        """See `Cache`: moves the accepted rows next to the committed ones."""
        layer, upper = above or (len(self.data), ())
        for data, nodes in ((self.data[:layer], path), (self.data[layer:], upper)):
            moves = compaction(nodes, self.length)
            if moves is not None:
                sources, targets = moves
                data[..., targets, :] = data[..., sources, :]  # the right side is copied first
        self.length += len(path)

    def append(self, rows: np.ndarray, path: Sequence[int]) -> None:
        """Commits the rows of an accepted path out of `rows`, which lie outside the cache: as `data`, with those of the
        last call for slots.
        """
        end = self.length + len(path)
        self.data[..., self.length : end, :] = rows[..., list(path), :]
        self.length = end

    def rows(self) -> np.ndarray:
        return self.data[..., : self.length, :].copy()

    def fill(self, rows: np.ndarray) -> None:
        self.length = rows.shape[4]
        self.data[..., : self.length, :] = rows

    def views(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per layer: key and value [1, kv_heads, capacity, head_dim], contiguous views of `data`."""
        return views(self.data)

    def _zeros(self, capacity: int) -> np.ndarray:
        """Zeros: uninitialised rows could hold NaN, which masking does not undo."""
        layers, two, one, heads, dim = self._shape
        shape = (layers, two, one, heads, capacity, dim)
        if not LAZY:
            return np.zeros(shape, dtype=self._dtype)
        # numpy would ask for huge pages, and the first row of every head would take 2 MB.
        size = int(np.prod(shape)) * np.dtype(self._dtype).itemsize
        try:
            room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ResourceError(
                f"no room for {capacity} tokens of context: {error.strerror}",
                f"{size / 1e6:,.0f} MB",
                "give a smaller context",
            ) from None
        if sys.platform == "linux":
            room.madvise(mmap.MADV_NOHUGEPAGE)
        return np.frombuffer(room, self._dtype).reshape(shape)


def enough(capacity: int, needed: int, limit: int) -> int:
    """The capacity that holds `needed` rows: the same, or grown by doubling. Raises ValueError above the limit."""
    if needed <= capacity:
        return capacity
    if needed > limit:
        raise ValueError(f"{needed} cache rows, limit {limit}")  # the caller's arithmetic is wrong
    return min(max(2 * capacity, needed), limit)


def views(data: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per layer: key and value, contiguous views of an array [layers, 2, ..]."""
    return [(layer[0], layer[1]) for layer in data]
