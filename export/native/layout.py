"""The layout of quantized weights in a bundle for CPUs: in tiles of 32 outputs, as the native operators read them.

They map the file and copy nothing. The graph of standard operators turns the tiles back: by nodes over constants, which
ONNX Runtime computes once, when it opens the graph.

    int8  [tiles, inputs / 4, 32, 4]   four neighbouring inputs of each output of a tile
    int6  [tiles, inputs / 16, 2, 3, 16, 4]   16 outputs in turn; of four groups of four inputs the low four bits of two
                                              groups, of the other two, and the two high bits of all four
    int4  [tiles, inputs / 8, 32, 4]   the same of eight, as MatMulNBits packs them: inputs 2 j and 2 j + 1 in byte j

A gated map, whose outputs are those of a gate and of the map that it multiplies, has 16 of each in a tile in turn.
Outputs and inputs that do not fill a tile are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from onnx import TensorProto

from streamspec.export.ops.builder import Array, Scope, WeightStore

TILE, HALF = 32, 16  # outputs
INT8_INPUTS, INT6_INPUTS = 4, 16  # in a group


def tiled(rows: Array, gated: bool) -> Array:
    """[outputs, ..] as [tiles, 32, ..], padded with zeros. `gated`: both halves of the outputs in turn, 16 of each."""
    outputs, *rest = rows.shape
    if gated:
        return rows.reshape(2, outputs // TILE, HALF, *rest).swapaxes(0, 1).reshape(-1, TILE, *rest)
    padded = np.pad(rows, [(0, -outputs % TILE), *[(0, 0)] * len(rest)])
    return padded.reshape(-1, TILE, *rest)


def pack_int8(codes: Array, gated: bool = False) -> Array:
    """int8 codes [outputs, inputs] in tiles."""
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % INT8_INPUTS)))
    return np.ascontiguousarray(tiled(padded.reshape(len(codes), -1, INT8_INPUTS), gated).swapaxes(1, 2))


def pack_int6(codes: Array, gated: bool = False) -> Array:
    """Codes -32..31 [outputs, inputs] in tiles, 32 added."""
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % INT6_INPUTS)))
    tiles = tiled(padded.reshape(len(codes), -1, 4, 4), gated)  # [tiles, 32, groups of 16, 4, 4]
    halves = (tiles.reshape(len(tiles), 2, HALF, -1, 4, 4).transpose(4, 0, 3, 1, 2, 5) + 32).astype(np.uint8)
    low, high = halves & 15, halves >> 4
    packed = low[0] | low[1] << 4, low[2] | low[3] << 4, high[0] | high[1] << 2 | high[2] << 4 | high[3] << 6
    return np.ascontiguousarray(np.stack(packed, axis=3))


def pack_int4(codes: Array, gated: bool = False) -> Array:
    """MatMulNBits' bytes [outputs, blocks, bytes] in tiles."""
    return np.ascontiguousarray(tiled(codes.reshape(len(codes), -1, 4), gated).swapaxes(1, 2))


def pack_blocks(values: Array, gated: bool = False) -> Array:
    """A value of each block [outputs, blocks] as [tiles, blocks, 32]."""
    return np.ascontiguousarray(tiled(values, gated).swapaxes(1, 2))


class Unpacked:
    """Nodes at the head of the main graph that turn tiles back; one value of each, whatever reads it. Codes of 6 bits
    become four times as large, for want of nodes that subtract, and their scales a fourth (`fourth`). `maps`: of a
    stack, so many weights one after the other, outputs of all of which are counted; whole tiles of each."""

    def __init__(self, store: WeightStore, maps: int = 1) -> None:
        self.store, self.g, self.maps = store, Scope(store), maps

    def columns(self, name: str, outputs: int, inputs: int, gated: bool) -> str:
        """int8 [inputs, outputs] of `name`, tiles of int8 or int6."""
        return self._made(f"{name}.columns", lambda out: self._int8(name, outputs, inputs, gated, False, out))

    def table(self, name: str, outputs: int, inputs: int, gated: bool = False) -> str:
        """int8 [outputs, inputs] of `name`, tiles of int8 or int6."""
        return self._made(f"{name}.table", lambda out: self._int8(name, outputs, inputs, gated, True, out))

    def nibbles(self, name: str, outputs: int, block: int, inputs: int, gated: bool) -> str:
        """uint8 [outputs, blocks, bytes] of `name`, tiles of int4."""
        shape = outputs, inputs // block, block // 2
        return self._made(f"{name}.nibbles", lambda out: self._by_output(name, shape, gated, out))

    def scales(self, name: str, outputs: int, blocks: int, gated: bool) -> str:
        """float32 [outputs, blocks] of `name`, tiles of float16."""

        def make(out: str) -> None:
            self._by_output(self.g.op("Cast", name, to=TensorProto.FLOAT), (outputs, blocks), gated, out)

        return self._made(f"{name}.blocks", make)

    def zeros(self, name: str, outputs: int, blocks: int, gated: bool) -> str:
        """Two to a byte, uint8 [outputs, blocks / 2], of `name`, tiles of uint8."""

        def make(out: str) -> None:
            g = self.g
            flat = self._by_output(name, (outputs, blocks), gated, None)
            if blocks % 2:
                flat = g.op("Pad", flat, g.ints(0, 0, 0, 1), g.store.constant(0, np.uint8))
            pairs = g.op("Reshape", flat, g.ints(outputs, -1, 2))
            low, high = g.ops("Split", pairs, g.ints(1, 1), out=(None, None), axis=2)
            upper = g.op("BitShift", high, g.store.constant(4, np.uint8), direction="LEFT")
            g.op("Reshape", g.op("BitwiseOr", low, upper), g.ints(outputs, -1), out=out)

        return self._made(f"{name}.pairs", make)

    def fourth(self, scales: str) -> str:
        """A fourth of float32 `scales`."""
        return self._made(f"{scales}.fourth", lambda out: self.g.op("Mul", scales, self.g.number(0.25), out=out))

    def parts(self, value: str, length: int, turned: bool = False) -> Sequence[str]:
        """Values [length, ..] of the maps of a stack, out of a value [maps * length, ..]; `turned`: matrices
        transposed."""
        names = [f"{value}.{i}" for i in range(self.maps)]
        if names[0] not in self.store.made:
            self.store.made.update(names)
            self.g = Scope(self.store, f"unpacked/{value}.parts")
            self.g.ops("Split", value, self.g.ints(*[length] * self.maps), out=tuple(names), axis=0)
            self.store.prelude += self.g.nodes
        return [self._turned(name) for name in names] if turned else names

    def _turned(self, matrix: str) -> str:
        return self._made(f"{matrix}.turned", lambda out: self.g.op("Transpose", matrix, out=out))

    def _made(self, value: str, make: Callable[[str], object]) -> str:
        if value not in self.store.made:
            self.store.made.add(value)
            self.g = Scope(self.store, f"unpacked/{value}")
            make(value)
            self.store.prelude += self.g.nodes
        return value

    def _int8(self, name: str, outputs: int, inputs: int, gated: bool, by_output: bool, out: str) -> None:
        """`by_output`: [outputs, inputs], else [inputs, outputs]."""
        g, align = self.g, INT8_INPUTS
        if len(self.store.protos[name].dims) == 6:  # [tiles, groups, 2, 2, 2, 16, 4]
            tiles, align = self._four_times(name), INT6_INPUTS
            of_inputs, of_outputs = [1, 3, 4, 6], [2, 0, 5] if gated else [0, 2, 5]
            if gated and self.maps > 1:
                tiles = g.op("Reshape", tiles, g.ints(self.maps, -1, inputs // align, 2, 2, 2, HALF, INT8_INPUTS))
                of_inputs, of_outputs = [2, 4, 5, 7], [0, 3, 1, 6]
        elif gated and self.maps > 1:
            tiles = g.op("Reshape", name, g.ints(self.maps, -1, inputs // align, 2, HALF, INT8_INPUTS))
            of_inputs, of_outputs = [2, 5], [0, 3, 1, 4]
        elif gated:  # [tiles, groups, 2, 16, 4]
            tiles = g.op("Reshape", name, g.ints(0, 0, 2, HALF, INT8_INPUTS))
            of_inputs, of_outputs = [1, 4], [2, 0, 3]
        else:
            tiles, of_inputs, of_outputs = name, [1, 3], [0, 2]
        turned = g.op("Transpose", tiles, perm=of_outputs + of_inputs if by_output else of_inputs + of_outputs)
        width, padded = inputs + -inputs % align, outputs + -outputs % TILE
        sides = (padded, width) if by_output else (width, padded)
        expected = (outputs, inputs) if by_output else (inputs, outputs)
        whole = g.op("Reshape", turned, g.ints(*sides), out=out if sides == expected else None)
        if sides != expected:
            g.op("Slice", whole, g.ints(0, 0), g.ints(*expected), g.ints(0, 1), out=out)

    def _four_times(self, name: str) -> str:
        """int8 [tiles, inputs / 16, 2, 2, 2, 16, 4], four times the codes of `name`, tiles of int6; groups of four
        inputs on both axes before the last two."""
        g = self.g

        def bytes_of(*numbers: int) -> str:
            return g.store.constant(np.reshape(numbers, (-1, min(2, len(numbers)), 1, 1)), np.uint8)

        low, top = g.ops("Split", name, g.ints(2, 1), out=(None, None), axis=3)
        low, top = (g.op("Unsqueeze", side, g.ints(4)) for side in (low, top))
        four = g.op("BitwiseAnd", g.op("BitShift", low, bytes_of(4, 0), direction="LEFT"), bytes_of(0xF0))
        four = g.op("BitShift", four, bytes_of(2), direction="RIGHT")
        two = g.op("BitwiseAnd", g.op("BitShift", top, bytes_of(6, 4, 2, 0), direction="LEFT"), bytes_of(0xC0))
        return g.op("Cast", g.op("BitwiseXor", g.op("BitwiseOr", four, two), bytes_of(0x80)), to=TensorProto.INT8)

    def _by_output(self, name: str, shape: tuple[int, ...], gated: bool, out: str | None) -> str:
        """[tiles, groups, 32, ..] as `shape`, outputs first."""
        g, outputs = self.g, shape[0]
        if gated:
            last = len(shape) - 2  # nibbles have four bytes at the end
            if self.maps > 1:
                groups = shape[1] * (shape[2] // 4 if last else 1)
                split = g.op("Reshape", name, g.ints(self.maps, -1, groups, 2, HALF, *[4] * last))
                turned = g.op("Transpose", split, perm=[0, 3, 1, 4, 2, *[5] * last])
                return g.op("Reshape", turned, g.ints(*shape), out=out)
            split = g.op("Reshape", name, g.ints(0, 0, 2, HALF, *[4] * last))
            turned = g.op("Transpose", split, perm=[2, 0, 3, 1, *[4] * last])
        else:
            turned = g.op("Transpose", name, perm=[0, 2, 1, *[3] * (len(shape) - 2)])
        sides = outputs + -outputs % TILE, *shape[1:]
        whole = g.op("Reshape", turned, g.ints(*sides), out=out if sides == shape else None)
        return whole if sides == shape else g.op("Slice", whole, g.ints(0), g.ints(outputs), g.ints(0), out=out)
