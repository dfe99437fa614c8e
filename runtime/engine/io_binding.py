"""Binds what a session's calls read and write: one IOBinding, and numpy buffers that are bound again only where their
shape changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streamspec import step_graph as sg
from streamspec.runtime.kv_cache.host_cache import CacheMemory

SMALL = 64  # input buffers of up to this many rows are kept for reuse
TYPES: dict[str, Any] = {
    "tensor(int64)": np.int64,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(bool)": np.bool_,
}


class IoBinding:
    """One IOBinding and its numpy buffers. `adapter`: further inputs, which stay as they are. `in_place`: the
    provider reads them where they lie; others get a copy at the moment of binding, so what is written later has to be
    bound again."""

    def __init__(self, ort: Any, session: Any, cache: CacheMemory, adapter: Mapping[str, Any], in_place: bool) -> None:
        self.io, self._in_place = session.io_binding(), in_place
        self._value = ort.OrtValue.ortvalue_from_numpy
        every = session.get_inputs() + session.get_overridable_initializers()
        self._types = {i.name: TYPES[i.type] for i in [*every, *session.get_outputs()] if i.type in TYPES}
        self._names = {i.name for i in every}
        self._bound: dict[str, tuple[int, ...]] = {}
        self._buffers: dict[tuple[str, tuple[int, ...]], tuple[np.ndarray, Any]] = {}
        self._large: dict[str, tuple[np.ndarray, Any]] = {}  # keeps what is bound alive
        self._constant: dict[str, np.ndarray | None] = {}  # the read-only arrays that inputs hold
        self._cache: Any = None
        self.settings: tuple[object, ...] = ()  # the caller's key of what the inputs that seldom change are bound to
        self._adapter = adapter  # the binding does not keep it alive
        for name, value in adapter.items():
            self.io.bind_ortvalue_input(name, value)
        self.follow(cache)

    def follow(self, cache: CacheMemory) -> None:
        """Binds the cache as past, and as present in graphs that write it, where it is not bound yet."""
        if self._cache is cache.data and (self._in_place or cache.on_device):
            return
        for i, parts in enumerate(cache.views()):
            kinds = (kind for kind in sg.CACHE_PARTS if self.has(sg.past(i, kind)))
            for kind, view in zip(kinds, parts, strict=True):
                value = self._value(view) if isinstance(view, np.ndarray) else view
                self.io.bind_ortvalue_input(sg.past(i, kind), value)
                if sg.present(i, kind) in self._types:
                    self.io.bind_ortvalue_output(sg.present(i, kind), value)
        self._cache = cache.data

    def has(self, name: str) -> bool:
        """Tells whether the graph has an input of this name."""
        return name in self._names

    def input(self, name: str, value: np.ndarray) -> None:
        """Sets an input the graph has; other names are ignored (plain graphs have no `parents`).

        `value` is copied; if it is read-only and the input holds it already, nothing is done: it must never change.
        """
        if self._constant.get(name) is value or name not in self._names:
            return
        self.numbers(name, value.shape, value)
        self._constant[name] = None if value.flags.writeable else value

    def numbers(self, name: str, shape: tuple[int, ...], values: Sequence[int] | np.ndarray) -> None:
        """Sets an input that every graph has to a copy of `values`; to make arrays of few numbers takes longer."""
        buffer, bound = self._buffer(name, shape, self.io.bind_ortvalue_input)
        buffer[...] = values
        if not self._in_place:
            self.io.bind_ortvalue_input(name, bound)

    def output(self, name: str, target: tuple[int, ...] | np.ndarray) -> np.ndarray:
        """Binds an output to a reused buffer of this shape, or to the given array; returns the array."""
        if isinstance(target, np.ndarray):
            value = self._value(target)
            self.io.bind_ortvalue_output(name, value)
            self._large[name] = (target, value)
            return target
        return self._buffer(name, target, self.io.bind_ortvalue_output)[0]

    def _buffer(self, name: str, shape: tuple[int, ...], bind: Any) -> tuple[np.ndarray, Any]:
        held = self._buffers.get((name, shape))
        if held is None and self._bound.get(name) == shape:
            held = self._large[name]
        if held is None:
            array = np.zeros(shape, dtype=self._types[name])
            held = (array, self._value(array))
            if max(shape, default=0) <= SMALL:
                self._buffers[name, shape] = held
            else:
                self._large[name] = held
            self._bound.pop(name, None)
        if self._bound.get(name) != shape:
            bind(name, held[1])
            self._bound[name] = shape
        return held
