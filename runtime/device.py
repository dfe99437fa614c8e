"""The key/value cache in a device's own memory, with the interface of `kv.KeyValueCache`.

Nothing of it crosses the bus between steps: the step graph writes new rows where they lie, and the bundle's second graph (`export/compact.py`)
moves those of an accepted path. Only growing, which doubles the room, goes through the machine's memory. Knows nothing about trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from streamspec.runtime.kv import FIRST_CAPACITY, keep_rows

Pair = tuple[Any, Any]


class DeviceCache:
    """`data`: key and value of each layer as OrtValues [1, kv_heads, capacity, head_dim] float32 on `device`; rows `[0, length)` are committed.

    `mover`: a session of the compacting graph. `limit` bounds the capacity; growing makes a new list.
    """

    def __init__(self, ort: Any, mover: Any, device: str, layers: int, kv_heads: int, head_dim: int, limit: int) -> None:
        self._value, self._mover, self._device, self._limit = ort.OrtValue.ortvalue_from_numpy, mover, device, limit
        self.length, self.capacity = 0, min(FIRST_CAPACITY, limit)
        empty = np.zeros((1, kv_heads, self.capacity, head_dim), np.float32)
        self.data: list[Pair] = [(self._place(empty), self._place(empty)) for _ in range(layers)]
        self._binding = self._bind()

    def reserve(self, rows: int) -> bool:
        """Makes room for `rows` rows behind the committed ones; true if `data` is a new list."""
        needed = self.length + rows
        if needed <= self.capacity:
            return False
        if needed > self._limit:
            raise ValueError(f"{needed} cache rows, limit {self._limit}")  # the caller's arithmetic is wrong
        self.capacity = min(max(2 * self.capacity, needed), self._limit)
        self.data = [(self._grown(key), self._grown(value)) for key, value in self.data]
        self._binding = self._bind()
        return True

    def keep(self, path: Sequence[int], above: tuple[int, Sequence[int]] | None = None) -> None:
        """Commits the rows of an accepted path (nodes of the last call, root first) and forgets its other rows."""
        if above is not None:
            raise ValueError("an early exit on a device")  # refused at export
        moves = keep_rows(path, self.length)
        if moves is not None:
            sources, targets = moves
            # Once a node lies behind its slot, all later ones do: the targets are a run.
            rows, start = self._value(sources), self._value(targets[:1].copy())
            self._binding.bind_ortvalue_input("rows", rows)
            self._binding.bind_ortvalue_input("start", start)
            self._mover.run_with_iobinding(self._binding)
        self.length += len(path)

    def views(self) -> list[Pair]:
        """Per layer: key and value."""
        return self.data

    def _grown(self, old: Any) -> Any:
        rows = old.numpy()
        grown = np.zeros((*rows.shape[:2], self.capacity, rows.shape[3]), np.float32)
        grown[:, :, : self.length] = rows[:, :, : self.length]
        return self._place(grown)

    def _place(self, array: np.ndarray) -> Any:
        """A copy on the device."""
        return self._value(array.copy(), self._device, 0)

    def _bind(self) -> Any:
        binding = self._mover.io_binding()
        for layer, pair in enumerate(self.data):
            for kind, value in zip(("key", "value"), pair, strict=True):
                binding.bind_ortvalue_input(f"past_key_values.{layer}.{kind}", value)
                binding.bind_ortvalue_output(f"present.{layer}.{kind}", value)
        return binding
