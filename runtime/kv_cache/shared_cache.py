"""KV caches of several sequences side by side, so that one call may have rows of all of them.

The array of a group of layers has a place for each sequence. A place is contiguous in each layer: a call of one
sequence binds it alone, as any other cache, and a call of several binds all places at once.
"""

from __future__ import annotations

import mmap
import sys
import threading
import weakref
from collections.abc import Sequence

import numpy as np

from streamspec.layer_cache import SUM_BLOCK
from streamspec.runtime.kv_cache.host_cache import KeyValueCache, address_space, views
from streamspec.runtime.kv_cache.layout import CacheGroup, SequenceRows


class CachePlaces:
    """Room for `places` sequences of at most `limit` rows. Address space is taken at once, memory as rows are written.
    `data`: of each group [layers, parts, places, heads, slots, width]. Raises ResourceError where the system refuses so
    much address space.
    """

    on_device = False

    def __init__(self, groups: Sequence[CacheGroup], limit: int, places: int) -> None:
        self.groups, self.places = tuple(groups), places
        self.limit = -(-limit // SUM_BLOCK) * SUM_BLOCK  # so that a place has whole pages
        self._rooms, self.data = list[mmap.mmap](), list[np.ndarray]()
        for group in self.groups:
            layers, parts, _, *rest = group.shape(self.limit)
            room = address_space(places * group.bytes(self.limit), self.limit)
            self._rooms.append(room)
            self.data.append(np.frombuffer(room, group.dtype).reshape(layers, parts, places, *rest))
        self._free = list(range(places))
        self._lock = threading.RLock()  # a cache may be collected while another one is made

    def take(self, limit: int) -> SharedCache | None:
        """Returns an empty cache in a free place; None where there is none, or none so large."""
        with self._lock:
            if limit > self.limit or not self._free:
                return None
            return SharedCache(self, self._free.pop(0))

    def views(self) -> list[Sequence[np.ndarray]]:
        """Per layer: its parts [places, heads, slots, width]."""
        return views(self.groups, self.data)

    def give_back(self, place: int) -> None:
        """Frees a place and its memory."""
        if sys.platform == "linux":  # elsewhere memory stays taken, and old rows lie beyond what is read
            for group, room in zip(self.groups, self._rooms, strict=True):
                size = group.bytes(self.limit) // (len(group.layers) * group.parts)
                for part in range(len(group.layers) * group.parts):
                    begin = (part * self.places + place) * size
                    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
                    pages = (begin + size - first) // mmap.PAGESIZE * mmap.PAGESIZE
                    if pages > 0:
                        room.madvise(mmap.MADV_DONTNEED, first, pages)
        with self._lock:
            self._free.append(place)


class SharedCache(KeyValueCache):
    """The cache of one sequence in a `place`, which is free again when nobody holds this any more."""

    def __init__(self, places: CachePlaces, place: int) -> None:
        SequenceRows.__init__(self, places.groups, places.limit)
        self.capacity, self.place = places.limit, place
        self.data = [data[:, :, place : place + 1] for data in places.data]
        weakref.finalize(self, places.give_back, place).atexit = False
