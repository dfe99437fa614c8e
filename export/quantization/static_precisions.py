"""Precisions of the static graph: weights at rest in 8 or 4 bits, dequantized by standard operators, rows in float32.

Providers fold `DequantizeLinear` in front of a product into kernels of their own, some of which round each row to 8
bits again. int8 has one scale per output channel; int4 has blocks with zero points, and keeps 8 bits for sensitive
weights, the LM head and the embedding, which share one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from streamspec.errors import ConfigError
from streamspec.export.ops.builder import Scope, WeightStore
from streamspec.export.quantization.arithmetic import Simulation, unpack
from streamspec.export.quantization.lora_inputs import LowRank
from streamspec.export.quantization.precisions import (
    BLOCKS,
    Fp16,
    Fp32,
    Int4,
    Int8,
    Precision,
    Rows,
    Weight,
    blocks_of,
    make_precision,
    mixed_inputs_of,
    mixed_rows,
    updated,
)


class StaticPrecision(Precision, Protocol):
    """A precision of standard operators. `opset`: the oldest that has them, as providers lag."""

    opset: int


class StaticInt8(Int8):
    """Weights alone are rounded, per output channel: nothing to gain by smoothing."""

    opset = 19
    simulation: Simulation | None = None
    coded = False

    def linear(self, g: Scope, x: str, rows: Rows, weight: Weight, updates: Sequence[LowRank] = ()) -> str:
        """Multiplies by int8 columns, dequantized in front of the product."""
        x = mixed_inputs_of(g, x, weight)
        return updated(
            g, g.op("MatMul", x, g.op("DequantizeLinear", *self._columns(g.store, weight), axis=1)), x, updates
        )

    def head(self, g: Scope, x: str, rows: Rows, weight: Weight, out: str | None = None) -> tuple[str, str]:
        """Multiplies by int8 rows of the table, dequantized; logits need no factor."""
        x = mixed_rows(g, x, self.table_block(weight), -1, weight.columns)
        return g.op("Gemm", x, g.op("DequantizeLinear", *self._table(g.store, weight), axis=0), out=out, transB=1), ""


class StaticInt4(StaticInt8):
    """Blocks of 4 bits; sensitive weights, the LM head and the embedding in 8."""

    name = "int4"
    opset = 21  # the first with 4-bit types and blocks

    def __init__(self, block: int = BLOCKS[0]) -> None:
        self.block = self.multiple = block
        self.simulation = Int4(block).simulation

    def linear(self, g: Scope, x: str, rows: Rows, weight: Weight, updates: Sequence[LowRank] = ()) -> str:
        """Multiplies by blocks of 4 bits, dequantized in front of the product."""
        if weight.sensitive:
            return super().linear(g, x, rows, weight, updates)
        x = mixed_inputs_of(g, x, weight)
        return updated(
            g,
            g.op("MatMul", x, g.op("DequantizeLinear", *self._blocked(g.store, weight), axis=0, block_size=self.block)),
            x,
            updates,
        )

    def _blocked(self, store: WeightStore, weight: Weight) -> tuple[str, str, str]:
        """uint4 [in, out], scales and uint4 zero points [in / block, out]."""
        if weight.columns % self.block:
            raise ConfigError(
                f"{weight.name} with {weight.columns} inputs",
                f"a multiple of {self.block} for int4 in such blocks",
                f"use --block-size {BLOCKS[0]}" if self.block > BLOCKS[0] else "use --precision int8",
            )
        names = (f"{weight.name}.uint4", f"{weight.name}.scale", f"{weight.name}.zero")
        if names[0] not in store:
            packed, scale, zeros = blocks_of(weight, 4, self.block)
            assert zeros is not None
            store.add_uint4(names[0], unpack(packed).reshape(weight.rows, -1).T)
            store.add(names[1], scale.T)
            store.add_uint4(names[2], unpack(zeros)[:, : packed.shape[1]].T)
        return names


STATIC_PRECISIONS: dict[str, Callable[..., StaticPrecision]] = {
    "fp32": Fp32,
    "fp16": Fp16,
    "int8": StaticInt8,
    "int4": StaticInt4,
}


def static_precision(name: str, block: int | None = None) -> StaticPrecision:
    """Makes the static graph's precision `name`; `block` as for `precision`. Raises ConfigError for any other."""
    return make_precision(STATIC_PRECISIONS, name, block)
