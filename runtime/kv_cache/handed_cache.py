"""A KV cache for graphs that read all keys and values so far and write them again with the new ones after them, as
decoders that others exported do: the two memories take turns.

Each holds, of every layer and part, [1, heads, tokens, width] without gaps, so that a graph can be given as many tokens
as there are. Where not all rows of a call are accepted, the accepted ones are copied out of what it wrote.

Covered by tests/runtime/onnx_decoder/test_folder.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamspec.runtime.kv_cache.host_cache import KeyValueCache, views, zeros
from streamspec.runtime.kv_cache.layout import CacheGroup


class HandedCache(KeyValueCache):
    """`data`: an array for each group, of which the first numbers of every part are used; `written`: likewise, what
    the last call wrote."""

    def __init__(self, groups: Sequence[CacheGroup], limit: int) -> None:
        super().__init__(groups, limit)
        self.written, self._rows = self._room(), 0  # of the last call

    def _extend(self) -> None:
        old = [array.copy() for array in self._packed(self.data, self.length)]
        data, written = self._room(), self._room()
        for array, before in zip(self._packed(data, self.length), old, strict=True):
            array[...] = before
        self.data, self.written = data, written

    def compact(self, path: Sequence[int], above: tuple[int, Sequence[int]] | None = None) -> None:
        count = len(path)
        if list(path) != list(range(count)):
            raise ValueError(f"path {list(path)} in a chain")  # the caller's arithmetic is wrong
        length, self.length = self.length, 0  # until all is copied
        if count == self._rows:
            self.data, self.written = self.written, self.data
        else:
            self._copy(self.written, length + self._rows, self.data, length + count)
        self.length = length + count

    def rewind(self, length: int) -> None:
        before = self.length
        super().rewind(length)
        if 0 < length < before:
            self.length = 0  # until all is copied
            self._copy(self.data, before, self.written, length)
            self.data, self.written = self.written, self.data
            self.length = length

    def rows(self) -> list[np.ndarray]:
        return [array.copy() for array in self._packed(self.data, self.length)]

    def fill(self, rows: Sequence[np.ndarray], length: int) -> None:
        self.restart(length, rows)
        for array, filled in zip(self._packed(self.data, length), rows, strict=True):
            array[...] = filled

    def handed(self, rows: int) -> tuple[list[Sequence[np.ndarray]], list[Sequence[np.ndarray]]]:
        """Returns, per layer, the parts that the next call of `rows` rows reads and those that it writes."""
        self._rows = rows
        reads, writes = self._packed(self.data, self.length), self._packed(self.written, self.length + rows)
        return views(self.groups, reads), views(self.groups, writes)

    def _room(self) -> list[np.ndarray]:
        return [zeros(group, self.slots(group)) for group in self.groups]

    def _copy(self, source: list[np.ndarray], held: int, target: list[np.ndarray], wanted: int) -> None:
        """Copies the first `wanted` of `held` tokens."""
        for new, old in zip(self._packed(target, wanted), self._packed(source, held), strict=True):
            new[...] = old[..., :wanted, :]

    def _packed(self, arrays: Sequence[np.ndarray], tokens: int) -> list[np.ndarray]:
        """Returns views [layers, parts, 1, heads, tokens, width] of the first numbers of every part."""
        return [
            array.reshape(len(group.layers), group.parts, -1)[..., : group.heads * tokens * group.width].reshape(
                group.shape(tokens)
            )
            for group, array in zip(self.groups, arrays, strict=True)
        ]
