"""Precisions whose weights lie in tiles, for bundles of a graph of native operators beside that of standard ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from streamspec.errors import ConfigError
from streamspec.export.native.layout import TILE, Unpacked, pack_blocks, pack_int4, pack_int6, pack_int8
from streamspec.export.ops.builder import Array, Scope, WeightStore
from streamspec.export.quantization.arithmetic import CHUNK, quantize_rows, unpack
from streamspec.export.quantization.lora_inputs import LowRank
from streamspec.export.quantization.precisions import (
    BLOCKS,
    Int4,
    Int8,
    Precision,
    Rows,
    Weight,
    blocks_of,
    in_groups,
    mat_mul_n_bits,
    mixed_inputs_of,
    updated,
)


def tiles_of(weight: Weight) -> int:
    """Counts the tiles of a weight. Raises ConfigError for a stack of experts with a tile that two of them share."""
    if weight.parts and (rows := weight.parts[0].rows) % TILE:
        raise ConfigError(f"experts of {rows} outputs ({weight.name})", f"a multiple of {TILE}", "use --precision fp32")
    return -(-weight.rows // TILE)


class TiledInt8(Int8):
    """W8A8 over tiles; a drafter's own weights as in int4 (docs/lab/decisions/2026-11-23-drafters-in-4-bits.md)."""

    def of(self, weight: Weight) -> TiledInt8:
        """See `streamspec.export.native.operators.TiledPrecision`."""
        return TiledInt4() if weight.drafter else self

    def linear(self, g: Scope, x: str, rows: Rows, weight: Weight, updates: Sequence[LowRank] = ()) -> str:
        """As `Int8`, by the precision of the weight."""
        own = self.of(weight)
        return super().linear(g, x, rows, weight, updates) if own is self else own.linear(g, x, rows, weight, updates)

    def head(self, g: Scope, x: str, rows: Rows, weight: Weight, out: str | None = None) -> tuple[str, str]:
        """As `Int8`, by the precision of the weight."""
        own = self.of(weight)
        return super().head(g, x, rows, weight, out) if own is self else own.head(g, x, rows, weight, out)

    def operator(self, store: WeightStore, weight: Weight) -> tuple[str, tuple[str, ...], dict[str, int]]:
        """See `streamspec.export.native.operators.TiledPrecision`."""
        return f"LinearInt{self.bits}", self._stored(store, weight, by_input=True), {}

    def runs(self, weight: Weight) -> Sequence[Weight]:
        """See `streamspec.export.native.operators.TiledPrecision`."""
        return [weight]

    def table(self, store: WeightStore, weight: Weight) -> tuple[str, tuple[str, ...], dict[str, int]]:
        """See `streamspec.export.native.operators.TiledPrecision`."""
        own = self.of(weight)
        if own is not self:
            return own.table(store, weight)
        block = self.table_block(weight)
        return f"Int{self.bits}", self._stored(store, weight, by_input=False, block=block), {"mix": block}

    def _table(self, store: WeightStore, weight: Weight) -> tuple[str, str]:
        if weight.looked_up:  # as it lies in the file: turned back, all of it would be in memory
            return Int8()._table(store, weight)
        _, (codes, scales), _ = self.table(store, weight)
        return Unpacked(store).table(codes, weight.rows, weight.columns), scales

    def _columns(self, store: WeightStore, weight: Weight) -> tuple[str, str]:
        codes, scales = self._stored(store, weight, by_input=True)
        return Unpacked(store).columns(codes, weight.rows, weight.columns, weight.gated), scales

    def _columns_of_parts(self, store: WeightStore, stack: Weight) -> Sequence[tuple[str, str]]:
        codes, scales = self._stored(store, stack, by_input=True)
        unpacked, rows = Unpacked(store, len(stack.parts)), stack.parts[0].rows
        whole = unpacked.table(codes, stack.rows, stack.columns, stack.gated)
        columns = unpacked.parts(whole, rows, turned=True)
        return list(zip(columns, unpacked.parts(self._scales_of_columns(store, scales), rows), strict=True))

    def _scales_of_columns(self, store: WeightStore, scales: str) -> str:
        return scales

    def _stored(self, store: WeightStore, weight: Weight, by_input: bool, block: int = 0) -> tuple[str, str]:
        """Names of the codes, in tiles, and of their scales [out]; some tiles are in memory at a time."""
        quantized, scales = f"{weight.name}.int{self.bits}", f"{weight.name}.scale"
        if quantized not in store:
            found = list[Array]()
            rows = (weight.parts or [weight])[0].rows
            step = rows if weight.gated else TILE * max(1, CHUNK // (TILE * weight.columns))

            def parts() -> Iterator[Array]:
                for part in weight.parts or [weight]:
                    table = part.load()
                    for at in range(0, rows, step):
                        codes, scale = quantize_rows(table[at : at + step], 2 ** (self.bits - 1) - 1, block)
                        found.append(scale)
                        yield self._packed(codes, weight.gated)

            store.add_parts(quantized, tiles_of(weight), parts())
            store.add(scales, np.concatenate(found))
        return quantized, scales

    def _packed(self, codes: Array, gated: bool) -> Array:
        """Codes [out, in] in tiles."""
        return pack_int8(codes, gated)


class TiledInt6(TiledInt8):
    """Weights of 6 bits times activations of 8, over tiles."""

    bits = 6

    def of(self, weight: Weight) -> TiledInt8:
        """See `streamspec.export.native.operators.TiledPrecision`."""
        return self

    def _table(self, store: WeightStore, weight: Weight) -> tuple[str, str]:
        codes, scales = super()._table(store, weight)
        return codes, scales if weight.looked_up else Unpacked(store).fourth(scales)

    def _columns(self, store: WeightStore, weight: Weight) -> tuple[str, str]:
        codes, scales = super()._columns(store, weight)
        return codes, self._scales_of_columns(store, scales)

    def _scales_of_columns(self, store: WeightStore, scales: str) -> str:
        return Unpacked(store).fourth(scales)

    def _packed(self, codes: Array, gated: bool) -> Array:
        return pack_int6(codes, gated)


class TiledInt4(TiledInt6):
    """4 bits in blocks; 6 bits for the LM head, the embedding and sensitive weights."""

    name = "int4"
    coded = False

    def __init__(self, block: int = BLOCKS[0]) -> None:
        self.block = self.multiple = block
        self.simulation = Int4(block).simulation

    def operator(self, store: WeightStore, weight: Weight) -> tuple[str, tuple[str, ...], dict[str, int]]:
        """See `streamspec.export.native.operators.TiledPrecision`."""
        if self._in_6_bits(weight):
            return super().operator(store, weight)
        return "LinearInt4", self._blocks(store, weight), {"block_size": self.block}

    def linear(self, g: Scope, x: str, rows: Rows, weight: Weight, updates: Sequence[LowRank] = ()) -> str:
        """Multiplies by blocks of 4 bits, turned back to what MatMulNBits reads."""
        if self._in_6_bits(weight):
            return super().linear(g, x, rows, weight, updates)
        x, inputs = mixed_inputs_of(g, x, weight), self._unpacked(Unpacked(g.store), weight)
        return updated(g, mat_mul_n_bits(g, x, inputs, weight, 4, self.block), x, updates)

    def grouped(self, g: Scope, x: str, rows: Rows, counts: str, stack: Weight) -> str:
        """Multiplies by blocks of 4 bits, as `linear`."""
        if self._in_6_bits(stack):
            return super().grouped(g, x, rows, counts, stack)
        unpacked, part = Unpacked(g.store, len(stack.parts)), stack.parts[0]
        inputs = zip(*(unpacked.parts(whole, part.rows) for whole in self._unpacked(unpacked, stack)), strict=True)
        products = [lambda x, own=own: mat_mul_n_bits(g, x, own, part, 4, self.block) for own in inputs]
        return in_groups(g, mixed_inputs_of(g, x, stack), counts, products)

    def _unpacked(self, unpacked: Unpacked, weight: Weight) -> list[str]:
        """What MatMulNBits reads."""
        (codes, scales, zeros), count = self._blocks(unpacked.store, weight), weight.columns // self.block
        return [
            unpacked.nibbles(codes, weight.rows, self.block, weight.columns, weight.gated),
            unpacked.scales(scales, weight.rows, count, weight.gated),
            unpacked.zeros(zeros, weight.rows, count, weight.gated),
        ]

    def _in_6_bits(self, weight: Weight) -> bool:
        return weight.sensitive or weight.columns % self.block != 0

    def _blocks(self, store: WeightStore, weight: Weight) -> tuple[str, str, str]:
        """Codes, scales and zero points, in tiles."""
        names = f"{weight.name}.int4", f"{weight.name}.block_scale", f"{weight.name}.zero"
        if names[0] not in store:
            others: tuple[list[Array], list[Array]] = [], []

            def codes() -> Iterator[Array]:
                for part in weight.parts or [weight]:
                    packed, scale, zeros = blocks_of(part, 4, self.block)
                    assert zeros is not None
                    points = unpack(zeros)[:, : scale.shape[1]]
                    for side, values in zip(others, (scale.astype(np.float16), points), strict=True):
                        side.append(pack_blocks(values, weight.gated))
                    yield pack_int4(packed.reshape(part.rows, -1), weight.gated)

            store.add_parts(names[0], tiles_of(weight), codes())
            for name, side in zip(names[1:], others, strict=True):
                store.add(name, np.concatenate(side))
        return names


TILED: dict[str, Callable[..., Precision]] = {"int8": TiledInt8, "int4": TiledInt4}
