"""Reads the blocks of a GGUF file: by the native library where it is there (native/stored_blocks/), else by numpy.
tests/native/test_stored_blocks.py compares the two."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from streamspec.export.ops.builder import Array
from streamspec.runtime.hardware import native_library

Sides = tuple[Array, Array | None, Array | None, Array | None]  # scales, multipliers, minima, their multipliers


class Bits(NamedTuple):
    """Bits of all codes of a block, in its part `name`: `step` codes side by side have theirs in as many bytes, 8 /
    `width` times, from the lowest bit on. `step` 0: of single bits, eight codes to a byte."""

    name: str
    width: int
    step: int


@dataclass(frozen=True)
class BlockKind:
    """A type of ggml's. `layout`: of a block in the file; `sides`: what weights have beside their codes, [outputs,
    blocks, ..] of blocks [outputs, blocks]; `low`, `high`: the bits of codes; `bits`: of codes in tiles."""

    layout: Any
    sides: Callable[[Array], Sides]
    low: Bits
    high: Bits | None = None
    bits: int = 4
    block: int = 32
    offset: int = 0
    table: tuple[int, ...] = ()

    @property
    def weights(self) -> int:
        """Of a block in the file."""
        return 256 if any(name in self.layout.names for name in ("scales", "scales_l")) else 32

    @property
    def bytes_in_tiles(self) -> float:
        """Of a weight as operators read it, with its part of scales and minima."""
        of_block = 8 / self.block if self.weights == 256 else 0
        return (self.bits + (2 if "m" in self.layout.names else 1) * (16 / self.weights + of_block)) / 8

    def codes(self, blocks: Array) -> Array:
        """uint8 [.., weights], one to a byte, of blocks [..]."""
        low = _read(blocks, self.low)
        return low if self.high is None else low | _read(blocks, self.high) << self.low.width

    def tile_codes(self, library: Path, blocks: Array, order: Array, out: Array) -> None:
        """Lays codes of blocks [outputs, blocks] out in tiles, by the native `library`: `out` uint8 [tiles, ..] as
        `export.native.layout` says. `order` int64 [tiles, 32]: the row of each output, below zero for none."""
        order = np.ascontiguousarray(order, np.int64)
        _opened(library).streamspec_tile_codes(
            blocks.ctypes, order.ctypes, len(order), blocks.shape[1], self._native(), self.bits, out.ctypes
        )

    def decode(self, blocks: Array, scales: Array, minima: Array | None, out: Array) -> None:
        """Writes the weights of blocks [outputs, blocks]: `out` float32 [outputs, inputs], contiguous; scale * code -
        minimum, of which float32 `scales` and `minima` [outputs, blocks, ..] have one for each part of a block."""
        values, part = self._values(), blocks.size * self.weights // scales.size
        path = native_library.library()
        if path is None:
            found = values[self.codes(blocks)].reshape(-1, part) * scales.reshape(-1, 1)
            out[:] = (found if minima is None else found - minima.reshape(-1, 1)).reshape(out.shape)
            return
        assert out.flags.c_contiguous and out.dtype == np.float32
        scales, least = np.ascontiguousarray(scales), None if minima is None else np.ascontiguousarray(minima)
        _opened(path).streamspec_block_values(
            blocks.ctypes,
            blocks.size,
            self._native(),
            part,
            scales.ctypes,
            None if least is None else least.ctypes,
            values.ctypes,
            out.ctypes,
        )

    def _values(self) -> Array:
        """float32 [256]: what each code stands for."""
        every = np.arange(256, dtype=np.uint8)
        if self.table:
            return np.array(self.table, np.float32)[every % len(self.table)]
        return (every.view(np.int8) if self.bits == 8 else every).astype(np.float32) - np.float32(self.offset)

    def _native(self) -> Any:
        fields, none = self.layout.fields, _Bits(0, 0, 0)
        low, high = (_Bits(fields[of.name][1], of.width, of.step) if of else none for of in (self.low, self.high))
        return ctypes.byref(_Kind(self.weights, self.layout.itemsize, low, high))


def _read(blocks: Array, bits: Bits) -> Array:
    name, width, step = bits
    if step == 0:
        return np.unpackbits(blocks[name], axis=-1, bitorder="little")
    groups = blocks[name].reshape(*blocks.shape, -1, 1, step)
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return np.asarray(groups >> shifts & np.uint8((1 << width) - 1)).reshape(*blocks.shape, -1)


class _Bits(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("at", "width", "step")]


class _Kind(ctypes.Structure):
    _fields_ = [("weights", ctypes.c_int64), ("bytes", ctypes.c_int64), ("low", _Bits), ("high", _Bits)]


@cache
def _opened(path: Path) -> ctypes.CDLL:
    library, whole, memory = ctypes.CDLL(str(path)), ctypes.c_int64, ctypes.c_void_p
    kind = ctypes.POINTER(_Kind)
    library.streamspec_tile_codes.argtypes = [memory, memory, whole, whole, kind, whole, memory]
    library.streamspec_block_values.argtypes = [memory, whole, kind, whole, memory, memory, memory, memory]
    for function in (library.streamspec_tile_codes, library.streamspec_block_values):
        function.restype = None
    return library
