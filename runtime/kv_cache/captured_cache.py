"""Keeps the KV cache of a captured graph in buffers on a device; their addresses never change.

Rows of an accepted path are not moved when they are accepted: the next call moves them before it writes its own
(`streamspec.captured.packed_call`). Until then the cache knows where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from streamspec.captured.packed_call import CallSizes, unmoved
from streamspec.runtime.kv_cache.layout import CacheGroup, SequenceRows


class CapturedCache(SequenceRows):
    """See `streamspec.runtime.kv_cache.host_cache.Cache`. `data`: the parts of each layer, OrtValues [1, heads, slots,
    width], all slots at once; token t lies in slot `margin` + t."""

    on_device = True

    def __init__(
        self,
        data: list[Sequence[Any]],
        groups: Sequence[CacheGroup],
        sizes: CallSizes,
        calls: Mapping[int, Any],
        on_device: Callable[[Callable[[], Any]], Any] = lambda work: work(),
    ) -> None:
        """`groups`: with windows, of which less may be filled in; `calls`: by rows, what is bound to a call over these
        buffers; `on_device`: does work where the device copies."""
        super().__init__(groups, sizes.slots + sizes.margin)
        for window in self._windows:
            window.slots = self.limit
        self._rings = []
        self.data, self.sizes, self.calls, self.capacity = data, sizes, calls, self.limit
        self._there = on_device
        self._moves: dict[int, int] = {}  # slots that the next call fills, by the slot that each is copied from

    def reserve(self, rows: int, spare: int = 0) -> bool:
        """See `Cache`; nothing ever moves. The `spare` rows of a drafter lie nowhere."""
        if self.length + rows > self.limit:
            raise ValueError(f"{self.length + rows} cache rows, limit {self.limit}")  # the caller's arithmetic is wrong
        self.write(rows)
        return False

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self._moves = {slot: source for slot, source in self._moves.items() if slot < self.sizes.margin + length}

    def compact(self, path: Sequence[int], above: tuple[int, Sequence[int]] | None = None) -> None:
        """See `Cache`: the next call moves the rows."""
        first = self.sizes.margin + self.length
        self._moves |= {first + slot: first + node for slot, node in enumerate(path) if node != slot}
        self.length += len(path)

    def sources(self) -> np.ndarray:
        """Returns int64 [margin]: the slots that the next call fills the `margin` slots in front of its own rows
        from."""
        out = unmoved(self.sizes, self.length)
        for slot, source in self._moves.items():
            out[slot - self.length] = source
        return out

    def moved(self) -> None:
        """Notes that a call has made the moves."""
        self._moves = {}

    def failed(self) -> None:
        """Notes that a call which was to move rows failed and may have overwritten them: it drops the first of them and
        all rows after it."""
        self.length = min([self.length, *(slot - self.sizes.margin for slot in self._moves)])
        self._moves = {}

    def rows(self) -> list[np.ndarray]:
        slots = self.sizes.margin + np.arange(self.length)
        for slot, source in self._moves.items():
            slots[slot - self.sizes.margin] = source

        def copied() -> list[np.ndarray]:
            return [
                np.stack([np.stack([part.numpy()[:, :, slots] for part in self.data[layer]]) for layer in group.layers])
                for group in self.groups
            ]

        rows: list[np.ndarray] = self._there(copied)
        return rows

    def fill(self, rows: Sequence[np.ndarray], length: int) -> None:
        self.restart(length, rows)
        self._moves = {}
        end = self.sizes.margin + length

        def fill() -> None:
            for group, of_group in zip(self.groups, rows, strict=True):
                for layer, parts in zip(group.layers, of_group, strict=True):
                    for value, part in zip(self.data[layer], parts, strict=True):
                        whole = np.zeros(value.shape(), group.dtype)
                        whole[:, :, end - part.shape[2] : end] = part
                        value.update_inplace(whole)

        self._there(fill)

    def views(self) -> list[Sequence[Any]]:
        return self.data
