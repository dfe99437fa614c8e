"""Keeps the KV cache in the machine's memory: an array for all layers of one shape, grown on demand, compacted in place
after each step. A ring, of layers that keep a window, has all its slots at once.

Where the system allows it, address space for the whole limit is taken at once and memory as rows are written: nothing
is copied, nothing taken for rows that never come. `device_cache` is the same in a device's memory.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from streamspec.errors import ResourceError
from streamspec.runtime.kv_cache.compaction import runs
from streamspec.runtime.kv_cache.layout import CacheGroup, SequenceRows

FIRST_CAPACITY = 1024  # where memory is taken at once
RESERVED = 1 << 30  # bytes of address space to begin with: some systems refuse more than they could ever fill
LAZY = hasattr(mmap, "MAP_ANONYMOUS")  # no Windows, which counts what is reserved as used


class CacheMemory(Protocol):
    """The cache as a call binds it. `on_device`: it lies outside the machine's memory."""

    on_device: bool
    data: Any  # replaced whenever it moves

    def views(self) -> list[Sequence[Any]]:
        """Per layer: its parts [sequences, heads, slots, width], such as key and value."""


class Cache(CacheMemory, Protocol):
    """The keys and values of one sequence; the first `length` rows are committed. See
    `streamspec.runtime.kv_cache.layout.SequenceRows` for what rings hold."""

    length: int
    groups: tuple[CacheGroup, ...]

    @property
    def capacity(self) -> int: ...

    @property
    def max_call_rows(self) -> int | None: ...

    def reachable(self, length: int) -> int: ...

    def keep(self, length: int, turn: bool = True) -> None: ...

    def rewind(self, length: int) -> None: ...

    def reserve(self, rows: int, spare: int = 0) -> bool:
        """Makes room for `rows` rows after the committed ones, which the next call writes, and `spare` more; true if
        `data` moved."""

    def compact(self, path: Sequence[int], above: tuple[int, Sequence[int]] | None = None) -> None:
        """Commits the rows of an accepted path (nodes of the last call, root first) and drops its other rows.

        `above`: the first layer that saw fewer rows, and the path among those.
        """

    def rows(self) -> list[np.ndarray]:
        """Copies the committed rows that each of `groups` holds [layers, parts, 1, heads, rows, width]: all, or of a
        ring the last ones."""

    def fill(self, rows: Sequence[np.ndarray], length: int) -> None:
        """Replaces all rows by those that `rows` returned for a sequence of `length` rows, and commits them. There
        must be room (`reserve`)."""


class KeyValueCache(SequenceRows):
    """A cache in the machine's memory: `data` has an array for each group.

    `limit` bounds the capacity. Growing makes a new list: views of the old one must be replaced.
    """

    on_device = False

    def __init__(self, groups: Sequence[CacheGroup], limit: int, first: int | None = None) -> None:
        """`first`: capacity to begin with."""
        super().__init__(groups, limit)
        token = sum(group.bytes(1) for group in groups if group.cache.window is None)
        begin = max(FIRST_CAPACITY, RESERVED // max(token, 1)) if LAZY else FIRST_CAPACITY
        self.capacity = min(begin if first is None else first, limit)
        self.data = [zeros(group, self.slots(group)) for group in self.groups]

    def _extend(self) -> None:
        self.data = list(map(self._grown, self.groups, self.data))

    def _grown(self, group: CacheGroup, rows: np.ndarray) -> np.ndarray:
        slots = self.slots(group)
        if slots == rows.shape[4]:
            return rows
        grown = zeros(group, slots)
        grown[..., : self.length, :] = rows[..., : self.length, :]
        return grown

    def compact(self, path: Sequence[int], above: tuple[int, Sequence[int]] | None = None) -> None:
        """See `Cache`: moves the accepted rows next to the committed ones."""
        moves = runs(path, self.length)
        if above is None:
            for data in self.data if moves else ():
                for source, target, count in moves:
                    _move(data, source, target, count)
        else:
            first, upper = above[0], runs(above[1], self.length)
            for group, data in zip(self.groups, self.data, strict=True):
                below = sum(layer < first for layer in group.layers)
                for layers, pieces in ((data[:below], moves), (data[below:], upper)):
                    for source, target, count in pieces:
                        _move(layers, source, target, count)
        self.length += len(path)

    def append(self, rows: Sequence[np.ndarray], path: Sequence[int]) -> None:
        """Commits the rows of an accepted path out of `rows`, which lie outside the cache: as `data`, with those of the
        last call for slots.
        """
        self.write(len(path))
        slots = self.length + np.arange(len(path))
        for data, new in zip(self.data, rows, strict=True):
            data[..., slots % data.shape[4], :] = new[..., list(path), :]
        self.length += len(path)

    def fill(self, rows: Sequence[np.ndarray], length: int) -> None:
        self.restart(length, rows)
        for number, (data, filled) in enumerate(zip(self.data, rows, strict=True)):
            count = min(filled.shape[4], data.shape[4])
            self.put(number, np.arange(length - count, length), filled[..., filled.shape[4] - count :, :])

    def taken(self, group: int, numbers: np.ndarray) -> np.ndarray:
        data = self.data[group]
        return np.asarray(data[..., numbers % data.shape[4], :])

    def put(self, group: int, numbers: np.ndarray, rows: np.ndarray) -> None:
        data = self.data[group]
        data[..., numbers % data.shape[4], :] = rows

    def views(self) -> list[Sequence[np.ndarray]]:
        """Per layer: its parts, contiguous views of `data`."""
        return views(self.groups, self.data)


def _move(data: np.ndarray, source: int, target: int, count: int) -> None:
    """Copies `count` neighbouring rows in all layers of `data` [layers, parts, 1, heads, slots, width], a ring or all
    slots."""
    slots = data.shape[4]
    source, target = source % slots, target % slots
    if max(source, target) + count <= slots:
        data[..., target : target + count, :] = data[..., source : source + count, :]  # as if copied aside first
        return
    rows = np.arange(count)
    data[..., (target + rows) % slots, :] = data[..., (source + rows) % slots, :]


def zeros(group: CacheGroup, slots: int) -> np.ndarray:
    """Returns zeros: uninitialised rows could hold NaN, which masking does not undo."""
    shape = group.shape(slots)
    if not LAZY:
        try:
            return np.zeros(shape, dtype=group.dtype)
        except MemoryError:
            raise _no_room(group.bytes(slots), slots, "no memory is left") from None
    return np.frombuffer(address_space(group.bytes(slots), slots), group.dtype).reshape(shape)


def address_space(size: int, slots: int) -> mmap.mmap:
    """Reserves `size` bytes of address space, which reads as zeros and takes memory as it is written. Raises
    ResourceError, which names `slots` tokens, where there is none."""
    try:
        room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _no_room(size, slots, str(error.strerror)) from None
    if sys.platform == "linux":  # numpy would ask for huge pages, and the first row of every head would take 2 MB
        with contextlib.suppress(OSError):  # a kernel without any
            room.madvise(mmap.MADV_NOHUGEPAGE)
    return room


def _no_room(size: int, slots: int, why: str) -> ResourceError:
    return ResourceError(
        f"no room for {slots} tokens of context: {why}", f"{size / 1e6:,.0f} MB", "give a smaller context"
    )


def views(groups: Sequence[CacheGroup], data: Sequence[np.ndarray]) -> list[Sequence[np.ndarray]]:
    """Per layer: its parts, contiguous views of arrays [layers, parts, ..] of each group; none of one that keeps
    nothing."""
    by_layer: dict[int, list[np.ndarray]] = {}
    for group, rows in zip(groups, data, strict=True):
        for layer, parts in zip(group.layers, rows, strict=True):
            by_layer.setdefault(layer, []).extend(parts)
    return [by_layer.get(layer, ()) for layer in range(1 + max(by_layer))]
