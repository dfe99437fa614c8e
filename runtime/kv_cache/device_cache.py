"""Keeps the KV cache in a device's own memory.

Between steps nothing of it crosses the bus: the step graph writes new rows where they lie, and the bundle's
`compact.onnx` moves those of an accepted path. Only growing, which doubles the room, goes through the machine's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from streamspec import step_graph as sg
from streamspec.errors import BundleError
from streamspec.runtime.kv_cache.compaction import runs
from streamspec.runtime.kv_cache.host_cache import FIRST_CAPACITY
from streamspec.runtime.kv_cache.layout import CacheGroup, SequenceRows


class DeviceCache(SequenceRows):
    """See `streamspec.runtime.kv_cache.host_cache.Cache`. `data`: the parts of each layer, OrtValues [1, heads, slots,
    width] on `device`.

    `compactor`: a session of the compaction graph. `limit` bounds the capacity; growing makes a new list.
    """

    on_device = True

    def __init__(self, ort: Any, compactor: Any, device: str, groups: Sequence[CacheGroup], limit: int) -> None:
        super().__init__(groups, limit)
        self._value, self._device, self._compactor = ort.OrtValue.ortvalue_from_numpy, device, compactor
        self._pruned = any(value.name == sg.ROWS_ABOVE for value in compactor.get_inputs())
        self._group_of = {layer: group for group in groups for layer in group.layers}
        self.capacity = min(FIRST_CAPACITY, limit)
        self.data: list[Sequence[Any]] = [()] * (1 + max(self._group_of))  # () of a layer that keeps nothing
        for layer, group in self._group_of.items():
            empty = np.zeros(group.shape(self.slots(group))[2:], group.dtype)
            self.data[layer] = [self._on_device(empty) for _ in range(group.parts)]
        self._binding = self._bind()

    def _extend(self) -> None:
        data = list(self.data)
        for layer, group in self._group_of.items():
            if group.cache.window is None:  # a ring has all its slots from the beginning
                committed = [part.numpy()[:, :, : self.length] for part in data[layer]]
                data[layer] = [self._filled(part, self.capacity) for part in committed]
        self.data = data
        self._binding = self._bind()

    def compact(self, path: Sequence[int], above: tuple[int, Sequence[int]] | None = None) -> None:
        """See `Cache`. The compaction graph knows the layer itself."""
        moves = [(sg.ROWS, sg.START, runs(path, self.length))]
        if self._pruned:
            moves.append((sg.ROWS_ABOVE, sg.START_ABOVE, runs(above[1] if above else path, self.length)))
        if any(pieces for _, _, pieces in moves):
            held = []  # the binding does not keep them alive
            for rows, start, pieces in moves:
                # Once a node lies beyond its slot, all later ones do: the targets are one run, from the first on.
                pieces = pieces or [(self.length, self.length, 1)]
                sources = np.concatenate([np.arange(source, source + count) for source, _, count in pieces])
                for name, array in ((rows, sources), (start, np.array([pieces[0][1]], np.int64))):
                    held.append(self._value(array))
                    self._binding.bind_ortvalue_input(name, held[-1])
            try:
                self._compactor.run_with_iobinding(self._binding)
            except Exception as error:
                raise BundleError(
                    f"rows of the cache cannot be moved: {error}", "a graph that moves them", "export the bundle again"
                ) from error
        self.length += len(path)

    def taken(self, group: int, numbers: np.ndarray) -> np.ndarray:
        slots, layers = numbers % self.slots(self.groups[group]), self.groups[group].layers
        return np.stack([np.stack([part.numpy()[:, :, slots] for part in self.data[layer]]) for layer in layers])

    def put(self, group: int, numbers: np.ndarray, rows: np.ndarray) -> None:
        self.data = list(self.data)
        for layer, parts in zip(self.groups[group].layers, rows, strict=True):
            self.data[layer] = [self._with(*both, numbers) for both in zip(self.data[layer], parts, strict=True)]
        self._binding = self._bind()

    def fill(self, rows: Sequence[np.ndarray], length: int) -> None:
        self.restart(length, rows)
        self.data = list(self.data)
        for group, filled in zip(self.groups, rows, strict=True):
            for layer, parts in zip(group.layers, filled, strict=True):
                self.data[layer] = [self._filled(part, self.slots(group)) for part in parts]
        self._binding = self._bind()

    def views(self) -> list[Sequence[Any]]:
        return self.data

    def _filled(self, rows: np.ndarray, slots: int) -> Any:
        """Copies the last of `rows` [1, heads, count, width], those before the committed `length`, to their slots on
        the device."""
        count = min(rows.shape[2], slots)
        room = np.zeros((*rows.shape[:2], slots, rows.shape[3]), rows.dtype)
        room[:, :, np.arange(self.length - count, self.length) % slots] = rows[:, :, rows.shape[2] - count :]
        return self._on_device(room)

    def _with(self, part: Any, rows: np.ndarray, numbers: np.ndarray) -> Any:
        """Returns a ring on the device like `part`, with `rows` [1, heads, count, width] in the slots of `numbers`."""
        ring = part.numpy().copy()
        ring[:, :, numbers % ring.shape[2]] = rows
        return self._on_device(ring)

    def _on_device(self, array: np.ndarray) -> Any:
        """Returns a copy of `array` on the device."""
        return self._value(array.copy(), self._device, 0)

    def _bind(self) -> Any:
        binding = self._compactor.io_binding()
        for layer, parts in enumerate(self.data):
            for kind, value in zip(sg.CACHE_KINDS, parts, strict=False):
                binding.bind_ortvalue_input(sg.past(layer, kind), value)
                binding.bind_ortvalue_output(sg.present(layer, kind), value)
        return binding
