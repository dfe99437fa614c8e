"""The key/value cache in a device's own memory, with the interface of `kv.KeyValueCache`.

Between steps nothing of it crosses the bus: the step graph writes new rows where they lie, and the bundle's
`compact.onnx` moves those of an accepted path. Only growing, which doubles the room, goes through the machine's memory.
Knows nothing about trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from streamspec.errors import BundleError
from streamspec.runtime.engine.kv_cache import FIRST_CAPACITY, enough, keep_rows

Pair = tuple[Any, Any]


class DeviceCache:
    """`data`: key and value of each layer, OrtValues [1, kv_heads, capacity, head_dim] float32 on `device`; rows `[0,
    length)` are committed.

    `mover`: a session of the compacting graph. `limit` bounds the capacity; growing makes a new list.
    """

    def __init__(
        self, ort: Any, mover: Any, device: str, layers: int, kv_heads: int, head_dim: int, limit: int
    ) -> None:
        self._value, self._mover, self._device, self._limit = ort.OrtValue.ortvalue_from_numpy, mover, device, limit
        self._pruned = any(value.name == "rows_above" for value in mover.get_inputs())
        self.length, self.capacity = 0, min(FIRST_CAPACITY, limit)
        empty = np.zeros((1, kv_heads, self.capacity, head_dim), np.float32)
        self.data: list[Pair] = [(self._place(empty), self._place(empty)) for _ in range(layers)]
        self._binding = self._bind()

    def reserve(self, rows: int) -> bool:
        """Makes room for `rows` rows behind the committed ones; true if `data` is a new list."""
        capacity = enough(self.capacity, self.length + rows, self._limit)
        if capacity == self.capacity:
            return False
        self.capacity = capacity
        self.data = [(self._grown(key), self._grown(value)) for key, value in self.data]
        self._binding = self._bind()
        return True

    def keep(self, path: Sequence[int], above: tuple[int, Sequence[int]] | None = None) -> None:
        """Commits the rows of an accepted path (nodes of the last call, root first) and forgets its other rows.

        `above`: the first layer that saw fewer rows, which the compacting graph knows, and the path among those.
        """
        paths = {"": path} | ({"_above": above[1] if above else path} if self._pruned else {})
        moves = {suffix: keep_rows(nodes, self.length) for suffix, nodes in paths.items()}
        if any(move is not None for move in moves.values()):
            here = np.array([self.length])
            held = []  # the binding does not keep them alive
            for suffix, move in moves.items():
                # Once a node lies behind its slot, all later ones do: the targets are a run.
                sources, targets = move or (here, here)
                for name, array in ((f"rows{suffix}", sources), (f"start{suffix}", targets[:1])):
                    held.append(self._value(np.ascontiguousarray(array)))
                    self._binding.bind_ortvalue_input(name, held[-1])
            try:
                self._mover.run_with_iobinding(self._binding)
            except Exception as error:
                raise BundleError(
                    f"rows of the cache cannot be moved: {error}", "a graph that moves them", "export the bundle again"
                ) from error
        self.length += len(path)

    def rows(self) -> np.ndarray:
        """See `KeyValueCache.rows`."""
        return np.stack([np.stack([value.numpy()[:, :, : self.length] for value in pair]) for pair in self.data])

    def fill(self, rows: np.ndarray) -> None:
        """See `KeyValueCache.fill`."""
        self.length = rows.shape[4]
        self.data = [(self._filled(key), self._filled(value)) for key, value in rows]
        self._binding = self._bind()

    def views(self) -> list[Pair]:
        """Per layer: key and value."""
        return self.data

    def _grown(self, old: Any) -> Any:
        return self._filled(old.numpy()[:, :, : self.length])

    def _filled(self, rows: np.ndarray) -> Any:
        """`rows` [1, kv_heads, length, head_dim] with room behind them, on the device."""
        room = np.zeros((*rows.shape[:2], self.capacity, rows.shape[3]), np.float32)
        room[:, :, : rows.shape[2]] = rows
        return self._place(room)

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
