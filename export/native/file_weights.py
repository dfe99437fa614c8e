"""The precision `gguf`: linear maps and tables whose weights are those of the base's own file.

What has no blocks there (a drafter's own maps, maps into which a LoRA was merged) is as in an int8 bundle. The graph of
standard operators multiplies by the same weights: MatMulNBits over their codes in 8 bits, less the minima times the
sums of each block's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np
from onnx import TensorProto

from streamspec.errors import ConfigError
from streamspec.export.file_blocks.block_kind import BlockKind
from streamspec.export.file_blocks.kinds import KINDS
from streamspec.export.native.layout import TILE, Unpacked
from streamspec.export.native.precisions import TILED, TiledInt8, tiles_of
from streamspec.export.native.stored_blocks import SUPER, Tiles, in_parts
from streamspec.export.ops.builder import Array, Scope, WeightStore
from streamspec.export.quantization.arithmetic import Simulation
from streamspec.export.quantization.lora_inputs import LowRank
from streamspec.export.quantization.precisions import Precision, Rows, Weight, in_groups, mat_mul_n_bits, updated

FLOAT, INT32, UINT8 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.UINT8
PARTS = tuple(one.name for one in fields(Tiles))


class _Stored(NamedTuple):
    """Names of a weight's tensors, '' for what it has not, and their kind."""

    kind: BlockKind
    codes: str
    scales: str
    multipliers: str
    minima: str
    minimum_multipliers: str
    table: str


class FileWeights(TiledInt8):
    """Weights as a GGUF file has them, over tiles; rows of 8 bits with a scale for each 32 inputs."""

    name = "gguf"
    coded = False
    simulation: Simulation | None = None  # what the file holds is neither smoothed nor mixed

    def of(self, weight: Weight) -> TiledInt8:
        """See `streamspec.export.native.operators.TiledPrecision`."""
        return self if weight.stored() is not None else TiledInt8().of(weight)

    def runs(self, weight: Weight) -> Sequence[Weight]:
        """See `streamspec.export.native.operators.TiledPrecision`: a map for each kind of blocks, in order."""
        runs = weight.stored()
        if runs is None or len({run.kind for run in runs}) == 1:
            return [weight]

        return [_run(weight, i) for i in range(len(runs))]

    def operator(self, store: WeightStore, weight: Weight) -> tuple[str, tuple[str, ...], dict[str, int]]:
        """See `streamspec.export.native.operators.TiledPrecision`."""
        kind, *inputs = self._tiles(store, weight)
        attributes = {"bits": kind.bits, "block_size": kind.block, "offset": kind.offset}
        return "LinearBlocks", tuple(inputs), attributes

    def table(self, store: WeightStore, weight: Weight) -> tuple[str, tuple[str, ...], dict[str, int]]:
        """See `streamspec.export.native.operators.TiledPrecision`."""
        own = self.of(self._checked(weight))
        if own is not self:
            return own.table(store, weight)
        _, inputs, attributes = self.operator(store, weight)
        return "Blocks", inputs, attributes

    def linear(self, g: Scope, x: str, rows: Rows, weight: Weight, updates: Sequence[LowRank] = ()) -> str:
        """Multiplies each run of rows by its blocks."""
        own = self.of(weight)
        if own is not self:
            return updated(g, own.linear(g, x, rows, weight), x, updates)
        products = [self._product(g, x, part) for part in self.runs(weight)]
        return updated(g, _side_by_side(g, products), x, updates)

    def grouped(self, g: Scope, x: str, rows: Rows, counts: str, stack: Weight) -> str:
        """Multiplies by the blocks of each part, as `linear`."""
        own = self.of(stack)
        if own is not self:
            return own.grouped(g, x, rows, counts, stack)
        return _side_by_side(g, [self._products_of_parts(g, x, counts, run) for run in self.runs(stack)])

    def head(self, g: Scope, x: str, rows: Rows, weight: Weight, out: str | None = None) -> tuple[str, str]:
        """Multiplies by the head's blocks; logits need no factor."""
        own = self.of(self._checked(weight))
        return own.head(g, x, rows, weight, out) if own is not self else (self._product(g, x, weight, out), "")

    def embedding(self, g: Scope, ids: str, weight: Weight) -> str:
        """Gathers the tiles of rows and turns these rows back."""
        if self.of(self._checked(weight)) is not self:
            return TiledInt8().embedding(g, ids, weight)
        stored, flat = self._tiles(g.store, weight), g.op("Reshape", ids, g.ints(-1))
        tile = g.op("Div", flat, g.integer(TILE))
        lane = g.op("Unsqueeze", g.op("Sub", flat, g.op("Mul", tile, g.integer(TILE))), g.ints(-1))

        def rows(name: str, *perm: int, sides: Sequence[int] = ()) -> str:
            tiles = g.op("Transpose", g.op("Gather", name, tile, axis=0), perm=perm)
            tiles = g.op("Reshape", tiles, g.ints(-1, TILE, *sides)) if sides else tiles
            return g.op("GatherND", tiles, lane, batch_dims=1)

        kind, blocks = stored.kind, weight.columns // stored.kind.block

        def factor(scales: str, multipliers: str) -> str:
            scale = g.op("Cast", rows(scales, 0, 2, 1), to=FLOAT)
            if multipliers:
                own = g.op("Cast", rows(multipliers, 0, 2, 1), to=FLOAT)
                by_super = g.op("Reshape", own, g.ints(-1, weight.columns // SUPER, SUPER // kind.block))
                scale = g.op("Mul", by_super, g.op("Unsqueeze", scale, g.ints(-1)))
            return g.op("Reshape", scale, g.ints(-1, blocks, 1))

        if kind.bits == 6:
            codes = _sixes(g, rows(stored.codes, 0, 2, 4, 1, 3, 5, sides=(weight.columns // 16, 3, 4)))
        else:
            codes = rows(stored.codes, 0, 2, 1, 3)
        codes = _values(g, kind, codes if kind.bits == 6 else _bytes(g, kind, codes))
        values = g.op("Mul", g.op("Reshape", codes, g.ints(-1, blocks, kind.block)), factor(*stored[2:4]))
        if stored.minima:
            values = g.op("Sub", values, factor(*stored[4:6]))
        return g.op("Reshape", values, g.ints(1, -1, weight.columns))

    def _checked(self, weight: Weight) -> Weight:
        """Raises ConfigError for the head or the embedding of a base that is in no GGUF file."""
        if weight.stored() is None and not (weight.drafter or weight.looked_up):
            found = f"{weight.name} that is not as in a GGUF file"
            expected = "a GGUF file for gguf, and no LoRA that replaces it whole"
            raise ConfigError(found, expected, "give one with --base, or use --precision int8")
        return weight

    def _tiles(self, store: WeightStore, weight: Weight) -> _Stored:
        runs = weight.stored()
        assert runs is not None
        if runs[0].kind not in KINDS:
            found, expected = f"{weight.name} of type {runs[0].kind}", f"one of {', '.join(KINDS)}"
            raise ConfigError(found, expected, "use --precision int8")
        kind, codes = KINDS[runs[0].kind], f"{weight.name}.{runs[0].kind.lower()}"
        names = {name: f"{codes}.{name}" for name in PARTS}
        if names["codes"] not in store:
            sides = list[Sequence[Array | None]]()
            store.add_parts(names["codes"], tiles_of(weight), _codes(weight.parts or [weight], sides))
            for name, arrays in zip(PARTS[1:], zip(*sides, strict=True), strict=True):
                if arrays[0] is not None:
                    store.add(names[name], np.concatenate(arrays))
        table = store.constant(kind.table, np.int8) if kind.table else ""
        there = {part: name if name in store else "" for part, name in names.items()}
        return _Stored(kind, **there, table=table)

    def _product(self, g: Scope, x: str, weight: Weight, out: str | None = None) -> str:
        """x [.., in] times one kind of blocks: [.., out]."""
        stored, unpacked = self._tiles(g.store, weight), UnpackedBlocks(g.store)
        inputs = unpacked.operands(stored, weight)
        product = mat_mul_n_bits(g, x, inputs, weight, 8, stored.kind.block, None if stored.minima else out)
        if not stored.minima:
            return product
        sums = _sums(g, x, weight, stored.kind.block)
        return g.op("Sub", product, g.op("MatMul", sums, unpacked.minima(stored, weight)), out=out)

    def _products_of_parts(self, g: Scope, x: str, counts: str, stack: Weight) -> str:
        """As `_product`, by the parts of a stack as `grouped` says."""
        stored, unpacked, part = self._tiles(g.store, stack), UnpackedBlocks(g.store, len(stack.parts)), stack.parts[0]
        block, inputs = stored.kind.block, (unpacked.parts(one, part.rows) for one in unpacked.operands(stored, stack))
        products = [lambda x, own=own: mat_mul_n_bits(g, x, own, part, 8, block) for own in zip(*inputs, strict=True)]
        product = in_groups(g, x, counts, products)
        if not stored.minima:
            return product
        minima = [lambda x, of=of: g.op("MatMul", x, of) for of in unpacked.minima_of_parts(stored, stack)]
        sums = g.op("Unsqueeze", _sums(g, x, part, block), g.ints(0))  # ReduceSum over no rows has a wrong shape
        return g.op("Sub", product, in_groups(g, sums, counts, minima))


class UnpackedBlocks(Unpacked):
    """Nodes at the head of the main graph that turn tiles of blocks into what MatMulNBits reads in 8 bits."""

    def operands(self, stored: _Stored, weight: Weight) -> tuple[str, str, str]:
        """Codes uint8 [out, blocks, block], scales float32 and zero points uint8 [out, blocks]."""
        kind, outputs, blocks = stored.kind, weight.rows, weight.columns // stored.kind.block
        fourfold = kind.bits == 6  # as `Unpacked._int8` turns them back
        zero = 128 if kind.table or kind.bits == 8 else kind.offset * (4 if fourfold else 1)

        def codes(out: str) -> None:
            if fourfold:
                whole = f"{out}.int8"
                self._int8(stored.codes, outputs, weight.columns, weight.gated, True, whole)
                shifted = self.g.op("BitwiseXor", whole, self.store.constant(-128, np.int8))
                found = self.g.op("Cast", shifted, to=UINT8)
            else:
                shape = outputs, weight.columns * kind.bits // 32, 4
                found = _bytes(self.g, kind, self._by_output(stored.codes, shape, weight.gated, None))
                if kind.table:
                    table = self.store.constant(np.add(kind.table, 128), np.uint8)
                    found = self.g.op("Gather", table, self.g.op("Cast", found, to=INT32))
            self.g.op("Reshape", found, self.g.ints(outputs, blocks, kind.block), out=out)

        def scales(out: str) -> None:
            factor = self._factor(stored.scales, stored.multipliers, weight, blocks)
            self.g.op("Mul", factor, self.g.number(0.25 if fourfold else 1.0), out=out)

        def zeros(out: str) -> None:
            self.g.op("Expand", self.store.constant(zero, np.uint8), self.g.ints(outputs, blocks), out=out)

        made = {"bytes": codes, "factors": scales, "zeros": zeros}
        first, second, third = (self._made(f"{stored.codes}.{name}", make) for name, make in made.items())
        return first, second, third

    def minima(self, stored: _Stored, weight: Weight) -> str:
        """float32 [blocks, out]."""
        return self._turned(self._minima(stored, weight))

    def minima_of_parts(self, stored: _Stored, stack: Weight) -> Sequence[str]:
        """float32 [blocks, out] of each part of a stack."""
        return self.parts(self._minima(stored, stack), stack.parts[0].rows, turned=True)

    def _minima(self, stored: _Stored, weight: Weight) -> str:
        """float32 [out, blocks]."""
        least, multipliers, blocks = stored.minima, stored.minimum_multipliers, weight.columns // stored.kind.block
        return self._made(f"{stored.codes}.least", lambda out: self._factor(least, multipliers, weight, blocks, out))

    def _factor(self, scales: str, multipliers: str, weight: Weight, blocks: int, out: str | None = None) -> str:
        """float32 [out, blocks]."""
        g, supers = self.g, weight.columns // (SUPER if multipliers else TILE)

        def whole(name: str, count: int) -> str:
            cast = g.op("Cast", name, to=FLOAT)
            return self._by_output(cast, (weight.rows, count), weight.gated, None)

        factor = whole(scales, supers)
        if multipliers:
            own = g.op("Reshape", whole(multipliers, blocks), g.ints(weight.rows, supers, -1))
            factor = g.op("Mul", own, g.op("Unsqueeze", factor, g.ints(-1)))
        return g.op("Reshape", factor, g.ints(weight.rows, blocks), out=out)


def _run(weight: Weight, number: int) -> Weight:
    """One of the runs of rows of a weight, or of all parts of a stack."""
    runs = weight.stored()
    assert runs is not None
    own = replace(weight, name=f"{weight.name}.{number}", gated=False, stored=lambda: runs[number : number + 1])
    parts = tuple(_run(part, number) for part in weight.parts)
    return replace(own, rows=len(runs[number].data) * max(1, len(parts)), parts=parts)


def _codes(parts: Sequence[Weight], sides: list[Sequence[Array | None]]) -> Iterator[Array]:
    """Yields the codes of one part after the other in tiles; adds the other sides of each."""
    for part in parts:
        runs = part.stored()
        assert runs is not None
        data = runs[0].data if len(runs) == 1 else np.concatenate([run.data for run in runs])
        codes, own = in_parts(replace(runs[0], data=data), part.gated)
        sides.append(own)
        yield from codes


def _sums(g: Scope, x: str, weight: Weight, block: int) -> str:
    """The sums [n, blocks] of each block's inputs, of rows x [.., in]."""
    parts = g.op("Reshape", x, g.ints(-1, weight.columns // block, block))
    return g.op("ReduceSum", parts, g.ints(-1), keepdims=0)


def _side_by_side(g: Scope, products: Sequence[str]) -> str:
    return products[0] if len(products) == 1 else g.op("Concat", *products, axis=-1)


def _bytes(g: Scope, kind: BlockKind, codes: str) -> str:
    """Codes of 4 bits one to a byte, in [.., 2] at the end; of 8 bits with 128 added."""
    if kind.bits == 8:
        return g.op("BitwiseXor", codes, g.store.constant(128, np.uint8))
    return _halves(g, codes, -1)


def _halves(g: Scope, codes: str, axis: int) -> str:
    low = g.op("BitwiseAnd", codes, g.store.constant(15, np.uint8))
    high = g.op("BitShift", codes, g.store.constant(4, np.uint8), direction="RIGHT")
    return g.op("Concat", *(g.op("Unsqueeze", side, g.ints(axis)) for side in (low, high)), axis=axis)


def _sixes(g: Scope, codes: str) -> str:
    """Codes [n, inputs / 16, 2, 2, 4] of rows [n, inputs / 16, 3, 4] in 6 bits."""
    low, top = g.ops("Split", codes, g.ints(2, 1), out=(None, None), axis=2)
    shifts = g.store.constant(np.reshape([0, 2, 4, 6], (2, 2, 1)), np.uint8)
    shifted = g.op("BitShift", g.op("Unsqueeze", top, g.ints(3)), shifts, direction="RIGHT")
    two = g.op("BitwiseAnd", shifted, g.store.constant(3, np.uint8))
    upper = g.op("BitShift", two, g.store.constant(4, np.uint8), direction="LEFT")
    return g.op("BitwiseOr", _halves(g, low, 3), upper)


def _values(g: Scope, kind: BlockKind, codes: str) -> str:
    """What codes stand for before their scale: float32."""
    if kind.table:
        table = g.store.constant(kind.table, np.float32)
        return g.op("Gather", table, g.op("Cast", codes, to=INT32))
    offset = 128 if kind.bits == 8 else kind.offset
    return g.op("Sub", g.op("Cast", codes, to=FLOAT), g.number(offset))


CPU_PRECISIONS: dict[str, Callable[..., Precision]] = {**TILED, FileWeights.name: FileWeights}
