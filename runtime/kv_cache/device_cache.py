"""The KV cache in a device's own memory.

Between steps nothing of it crosses the bus: the step graph writes new rows where they lie, and the bundle's
`compact.onnx` moves those of an accepted path. Only growing, which doubles the room, goes through the machine's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from streamspec import step_graph as sg
from streamspec.errors import BundleError
from streamspec.runtime.kv_cache.compaction import compaction
from streamspec.runtime.kv_cache.host_cache import FIRST_CAPACITY, enough

Pair = tuple[Any, Any]


class DeviceCache:
    """See `streamspec.runtime.kv_cache.host_cache.Cache`. `data`: key and value of each layer, OrtValues [1, kv_heads,
    capacity, head_dim] float32 on `device`.

    `compactor`: a session of the compaction graph. `limit` bounds the capacity; growing makes a new list.
    """

    on_device = True

    def __init__(
        self, ort: Any, compactor: Any, device: str, layers: int, kv_heads: int, head_dim: int, limit: int
    ) -> None:
        self._value, self._device = ort.OrtValue.ortvalue_from_numpy, device
        self._compactor, self._limit = compactor, limit
        self._pruned = any(value.name == sg.ROWS_ABOVE for value in compactor.get_inputs())
        self.length, self.capacity = 0, min(FIRST_CAPACITY, limit)
        empty = np.zeros((1, kv_heads, self.capacity, head_dim), np.float32)
        self.data: list[Pair] = [(self._on_device(empty), self._on_device(empty)) for _ in range(layers)]
        self._binding = self._bind()

    def reserve(self, rows: int) -> bool:
        """See `Cache`; true if `data` is a new list."""
        capacity = enough(self.capacity, self.length + rows, self._limit)
        if capacity == self.capacity:
            return False
        self.capacity = capacity
        self.data = [(self._grown(key), self._grown(value)) for key, value in self.data]
        self._binding = self._bind()
        return True

    def compact(self, path: Sequence[int], above: tuple[int, Sequence[int]] | None = None) -> None:
        """See `Cache`. The compaction graph knows the layer itself."""
        moves = [(sg.ROWS, sg.START, compaction(path, self.length))]
        if self._pruned:
            moves.append((sg.ROWS_ABOVE, sg.START_ABOVE, compaction(above[1] if above else path, self.length)))
        if any(move is not None for _, _, move in moves):
            here = np.array([self.length])
            held = []  # the binding does not keep them alive
            for rows, start, move in moves:
                # Once a node lies beyond its slot, all later ones do: the targets are a run.
                sources, targets = move or (here, here)
                for name, array in ((rows, sources), (start, targets[:1])):
                    held.append(self._value(np.ascontiguousarray(array)))
                    self._binding.bind_ortvalue_input(name, held[-1])
            try:
                self._compactor.run_with_iobinding(self._binding)
            except Exception as error:
                raise BundleError(
                    f"rows of the cache cannot be moved: {error}", "a graph that moves them", "export the bundle again"
                ) from error
        self.length += len(path)

    def rows(self) -> np.ndarray:
        return np.stack([np.stack([value.numpy()[:, :, : self.length] for value in pair]) for pair in self.data])

    def fill(self, rows: np.ndarray) -> None:
        self.length = rows.shape[4]
        self.data = [(self._filled(key), self._filled(value)) for key, value in rows]
        self._binding = self._bind()

    def views(self) -> list[Pair]:
        return self.data

    def _grown(self, old: Any) -> Any:
        return self._filled(old.numpy()[:, :, : self.length])

    def _filled(self, rows: np.ndarray) -> Any:
        """`rows` [1, kv_heads, length, head_dim] with room after them, on the device."""
        room = np.zeros((*rows.shape[:2], self.capacity, rows.shape[3]), np.float32)
        room[:, :, : rows.shape[2]] = rows
        return self._on_device(room)

    def _on_device(self, array: np.ndarray) -> Any:
        """A copy on the device."""
        return self._value(array.copy(), self._device, 0)

    def _bind(self) -> Any:
        binding = self._compactor.io_binding()
        for layer, pair in enumerate(self.data):
            for kind, value in zip(sg.CACHE_KINDS, pair, strict=True):
                binding.bind_ortvalue_input(sg.past(layer, kind), value)
                binding.bind_ortvalue_output(sg.present(layer, kind), value)
        return binding
