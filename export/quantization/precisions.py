"""Precisions write linear maps, the embedding and the LM head as nodes: fp32, fp16, int8 (W8A8 per row), int4.

Every precision keeps rows independent: the result of a row never depends on its siblings, so a tree verifies exactly
what plain decoding would compute. (But for int4 in blocks of 128, which ONNX Runtime adds up otherwise for odd numbers
of rows: 1e-5.)

int8, node by node (x [1, n, K], one quantization per linear map since q/k/v and gate/up are fused):

    Abs, ReduceMax, Mul 1/127       row scale s [1, n, 1]
    QuantizeLinear                  block_size = K: one scale per row (opset 21), uint8 around 128
    MatMulIntegerToFloat            int8 weights [K, out], one scale per output channel
    Mul s

Before the MLP's output map and the head, whose inputs have outliers in single rows, three more nodes mix the inputs
(`mixed_rows`).

Six nodes. `Max(eps)` is left out: a row of zeros has s = 0, whatever its codes are the product is multiplied by 0. The
LM head is QGemm(transB = 1) because its initializer then has the embedding's layout [V, H] and both read one tensor:
the head packs its own copy, the embedding touches only the rows it gathers of the mapped file.

Activations are uint8 because x86 has no packed signed x signed kernel. On AVX2 and AVX-512 without VNNI, uint8 x int8
kernels add pairs in saturating 16 bits. ONNX Runtime's key `session.x64quantprecision` = 1 rewrites the int8 weights of
MatMulInteger, MatMulIntegerToFloat and QGemm (both operators used here; `Avx2WeightS8ToU8Transformer`) to uint8 with
zero point 128, whose kernels are exact. So weights keep all 8 bits; a runtime sets the key where the CPU has no VNNI,
and only there: it takes effect on every x86 CPU with AVX2 and gives up the VNNI kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from onnx import TensorProto

from streamspec.errors import ConfigError
from streamspec.export.ops.builder import CONTRIB, Array, Scope, WeightStore
from streamspec.export.quantization.arithmetic import (
    Simulation,
    dequantize_rows,
    hadamard,
    mixed_inputs,
    quantize_blocks,
    quantize_rows,
    round_blocks,
)
from streamspec.export.quantization.lora_inputs import LowRank
from streamspec.export.spec.weight_source import Blocks, StoredBlocks

if TYPE_CHECKING:
    from streamspec.export.spec.weight_source import Table

BLOCKS = 32, 128  # weights that share a scale in int4: the first is the default, and that of tables
OUTPUTS = 256  # of a map, where int4's scales are compared
SMOOTH_INT8, SMOOTH_INT4 = (0.5, 0.6, 0.7, 0.8), (0.3,)  # powers tried (`smooth`)
FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
ACCURACY_INT8 = 4  # MatMulNBits quantizes activations to int8, per row and block
P = TypeVar("P")


@dataclass(frozen=True)
class Weight:
    """A linear map's weight [out, in], made only when it is written. `sensitive`: int4 keeps 8 bits of it.
    `importance`: of its inputs [in] where 4 bits are chosen. `rounded`: its 4 bits where a text has decided them.
    `mix`: size of the blocks in which its inputs are mixed first, 0: they are not. `gated`: its outputs are those of a
    gate and of the map that it multiplies. `looked_up`: a table whose rows are read and never multiplied.
    `drafter`: one of a drafter's own, where errors cost drafts and never the answer. `stored`: its runs of rows as a
    GGUF file holds them, None where it is not in one. `parts`: of a stack, whose rows are those of several weights of
    one size, one after the other: these; its `load`, `rounded` and `stored` are those of the first.
    """

    name: str
    rows: int
    columns: int
    load: Callable[[], Array | Table]
    sensitive: bool = False
    importance: Callable[[], Array | None] = lambda: None
    rounded: Callable[[], Blocks | None] = lambda: None
    mix: int = 0
    gated: bool = False
    looked_up: bool = False
    drafter: bool = False
    stored: Callable[[], Sequence[StoredBlocks] | None] = lambda: None
    parts: Sequence[Weight] = ()


@dataclass
class Rows:
    """A group of rows within one scope. `count`: int64 [1] value holding their number."""

    count: str
    zero_points: dict[int, str] = field(default_factory=dict)


class Precision(Protocol):
    """Writes products and look-ups as nodes. `head` leaves the factor of each row apart: it is positive, so an argmax
    can ignore it."""

    name: str
    simulation: Simulation | None  # None: nothing is rounded, so nothing needs smoothing
    coded: bool  # whether rows are quantized before they are multiplied
    multiple: int  # of the hidden size

    def linear(self, g: Scope, x: str, rows: Rows, weight: Weight, updates: Sequence[LowRank] = ()) -> str:
        """Applies `weight` and low-rank `updates` to x [1, n, in]: [1, n, out]."""

    def grouped(self, g: Scope, x: str, rows: Rows, counts: str, stack: Weight) -> str:
        """Applies the parts of a `stack` to x [1, n, in], each to as many rows in turn as `counts` int64 [parts]
        says, which may be none: [1, n, out of a part]."""

    def head(self, g: Scope, x: str, rows: Rows, weight: Weight, out: str | None = None) -> tuple[str, str]:
        """Applies the LM head to x [r, H]: raw logits [r, V] and their factors [r, 1], '' for 1."""

    def embedding(self, g: Scope, ids: str, weight: Weight) -> str:
        """Looks up ids [1, n] in the table: [1, n, H]."""


class _Float:
    """Plain products of `dtype`; inputs and outputs are float32. The head shares the embedding's initializer
    through Gemm(transB = 1).
    """

    dtype: Any
    opset = 19  # of a static graph, as of `StaticPrecision`
    simulation: Simulation | None = None
    coded = False
    multiple = 1

    def linear(self, g: Scope, x: str, rows: Rows, weight: Weight, updates: Sequence[LowRank] = ()) -> str:
        """Multiplies by the transposed weight."""
        x = mixed_inputs_of(g, x, weight)
        return updated(
            g, self._float(g, g.op("MatMul", self._own(g, x), self._transposed(g.store, weight))), x, updates
        )

    def grouped(self, g: Scope, x: str, rows: Rows, counts: str, stack: Weight) -> str:
        """Multiplies by transposed weights."""
        x, weights = mixed_inputs_of(g, x, stack), (self._transposed(g.store, part) for part in stack.parts)
        products = [lambda x, of=of: g.op("MatMul", x, of) for of in weights]
        return self._float(g, in_groups(g, self._own(g, x), counts, products))

    def head(self, g: Scope, x: str, rows: Rows, weight: Weight, out: str | None = None) -> tuple[str, str]:
        """Multiplies by the embedding's own layout; logits need no factor."""
        half = self.dtype == np.float16
        product = g.op("Gemm", self._own(g, x), self._plain(g.store, weight), out=None if half else out, transB=1)
        return self._float(g, product, out), ""

    def embedding(self, g: Scope, ids: str, weight: Weight) -> str:
        """Gathers rows of the table."""
        return self._float(g, g.op("Gather", self._plain(g.store, weight), ids, axis=0))

    def _transposed(self, store: WeightStore, weight: Weight) -> str:
        return store.once(
            f"{weight.name}.transposed", lambda: np.asarray(weight.load()).T.astype(self.dtype, copy=False)
        )

    def _plain(self, store: WeightStore, weight: Weight) -> str:
        return store.once(weight.name, lambda: np.asarray(weight.load(), self.dtype))

    def _own(self, g: Scope, x: str) -> str:
        return g.op("Cast", x, to=HALF) if self.dtype == np.float16 else x

    def _float(self, g: Scope, x: str, out: str | None = None) -> str:
        return g.op("Cast", x, out=out, to=FLOAT) if self.dtype == np.float16 else x


class Fp32(_Float):
    """Float32 throughout: exact up to the order of sums."""

    name, dtype = "fp32", np.float32


class Fp16(_Float):
    """Float16 products for GPUs; the residual stream, norms, attention and the cache stay float32."""

    name, dtype = "fp16", np.float16


class Int8:
    """Per-row W8A8; see the module's header."""

    name = "int8"
    multiple = 1
    bits = 8
    simulation: Simulation | None = Simulation(
        weight=lambda weight: dequantize_rows(*quantize_rows(weight)),
        rows=lambda x: dequantize_rows(*quantize_rows(x)),
        powers=SMOOTH_INT8,
        peaks=True,
        mixes=True,
    )
    coded = True

    def linear(self, g: Scope, x: str, rows: Rows, weight: Weight, updates: Sequence[LowRank] = ()) -> str:
        """Multiplies int8 weights and uint8 rows; scales the sums."""
        quantized, scales = self._columns(g.store, weight)
        x = mixed_inputs_of(g, x, weight)
        activations, row_scale = self._quantize(g, x, rows, rank=3, width=weight.columns)
        one, middle = g.number(1), g.store.constant(128, np.uint8)
        product = g.contrib("MatMulIntegerToFloat", activations, quantized, one, scales, middle)
        for update in updates:
            product = update.added(g, product, update.of_codes(g, activations))
        return g.op("Mul", product, row_scale)

    def grouped(self, g: Scope, x: str, rows: Rows, counts: str, stack: Weight) -> str:
        """As `linear`: rows are quantized together, and multiplied by the weights of each part."""
        x = mixed_inputs_of(g, x, stack)
        activations, row_scale = self._quantize(g, x, rows, rank=3, width=stack.columns)
        one, middle = g.number(1), g.store.constant(128, np.uint8)
        products = [
            lambda x, codes=codes, scales=scales: g.contrib("MatMulIntegerToFloat", x, codes, one, scales, middle)
            for codes, scales in self._columns_of_parts(g.store, stack)
        ]
        return g.op("Mul", in_groups(g, activations, counts, products), row_scale)

    def head(self, g: Scope, x: str, rows: Rows, weight: Weight, out: str | None = None) -> tuple[str, str]:
        """Multiplies without the rows' scale, which is the factor."""
        quantized, scales = self._table(g.store, weight)
        x = mixed_rows(g, x, self.table_block(weight), -1, weight.columns)
        activations, row_scale = self._quantize(g, x, rows, rank=2, width=weight.columns)
        one, middle = g.number(1), g.store.constant(128, np.uint8)
        zeros = g.store.once(f"{weight.name}.zero", lambda: np.zeros(weight.rows, np.int8))
        return g.contrib("QGemm", activations, one, middle, quantized, scales, zeros, out=out, transB=1), row_scale

    def embedding(self, g: Scope, ids: str, weight: Weight) -> str:
        """Gathers int8 rows of the table and dequantizes them."""
        quantized, scales = self._table(g.store, weight)
        codes = g.op("Cast", g.op("Gather", quantized, ids, axis=0), to=FLOAT)
        scale = g.op("Unsqueeze", g.op("Gather", scales, ids, axis=0), g.ints(-1))
        return mixed_rows(g, g.op("Mul", codes, scale), self.table_block(weight), 1, -1, weight.columns)

    def table_block(self, weight: Weight) -> int:
        """Blocks in which a table's columns are mixed: final states have outliers, and so have columns."""
        return mixed_inputs(weight.columns) if self.simulation and self.simulation.mixes else 0

    def _table(self, store: WeightStore, weight: Weight) -> tuple[str, str]:
        """int8 [out, in] and scales [out], columns mixed."""
        return self._stored(store, weight, by_input=False, block=self.table_block(weight))

    def _columns(self, store: WeightStore, weight: Weight) -> tuple[str, str]:
        """int8 [in, out] and scales [out]."""
        return self._stored(store, weight, by_input=True)

    def _columns_of_parts(self, store: WeightStore, stack: Weight) -> Sequence[tuple[str, str]]:
        """As `_columns`, of each part of a stack."""
        return [self._columns(store, part) for part in stack.parts]

    def _stored(self, store: WeightStore, weight: Weight, by_input: bool, block: int = 0) -> tuple[str, str]:
        """Names of the codes and of their scales [out]."""
        quantized, scales = f"{weight.name}.int{self.bits}", f"{weight.name}.scale"
        if quantized not in store:
            codes, scale = quantize_rows(weight.load(), 2 ** (self.bits - 1) - 1, block)
            store.add(quantized, codes.T if by_input else codes)
            store.add(scales, scale)
        return quantized, scales

    def _quantize(self, g: Scope, x: str, rows: Rows, rank: int, width: int) -> tuple[str, str]:
        largest = g.op("ReduceMax", g.op("Abs", x), g.ints(-1), keepdims=1)
        scale = g.op("Mul", largest, g.number(1 / 127))
        if rank not in rows.zero_points:
            shape = [rows.count, g.ints(1)] if rank == 2 else [g.ints(1), rows.count, g.ints(1)]
            middle = g.store.constant(128, np.uint8)
            rows.zero_points[rank] = g.op("Expand", middle, g.op("Concat", *shape, axis=0))
        codes = g.op("QuantizeLinear", x, scale, rows.zero_points[rank], axis=rank - 1, block_size=width)
        return codes, scale


class Int4:
    """MatMulNBits in blocks of `block` weights; 8 bits for sensitive weights (docs/lab/decisions), for the LM head
    and for the embedding, which may be tied to it.
    """

    name = "int4"
    coded = False
    multiple = BLOCKS[0]

    def __init__(self, block: int = BLOCKS[0]) -> None:
        self.block = block
        self.simulation: Simulation | None = Simulation(
            weight=lambda weight: round_blocks(weight, block),
            rows=lambda x: dequantize_rows(*quantize_rows(x)),
            powers=SMOOTH_INT4,
            peaks=True,
            mixes=True,
            everything=True,
            block=block,
            outputs=OUTPUTS,
        )

    def linear(self, g: Scope, x: str, rows: Rows, weight: Weight, updates: Sequence[LowRank] = ()) -> str:
        """Multiplies by packed blocks of 4 bits, or of 8 where the weight is sensitive."""
        x = mixed_inputs_of(g, x, weight)
        return updated(g, self._product(g, x, weight, 8 if weight.sensitive else 4, self.block), x, updates)

    def grouped(self, g: Scope, x: str, rows: Rows, counts: str, stack: Weight) -> str:
        """Multiplies by packed blocks, as `linear`."""
        products = [
            lambda x, part=part: self._product(g, x, part, 8 if part.sensitive else 4, self.block)
            for part in stack.parts
        ]
        return in_groups(g, mixed_inputs_of(g, x, stack), counts, products)

    def head(self, g: Scope, x: str, rows: Rows, weight: Weight, out: str | None = None) -> tuple[str, str]:
        """Multiplies by packed blocks of 8 bits; logits need no factor."""
        return self._product(g, x, weight, 8, BLOCKS[0], out), ""

    def embedding(self, g: Scope, ids: str, weight: Weight) -> str:
        """Gathers packed rows and dequantizes them."""
        block = BLOCKS[0]
        codes, scales, _ = _blocks(g.store, weight, 8, block)
        # The packed table is [V, blocks, block]; gathered as it is, so that no reshaped copy of it is ever made.
        column = g.op("Reshape", scales, g.ints(weight.rows, weight.columns // block, 1))
        rows = g.contrib(
            "GatherBlockQuantized", codes, ids, column, gather_axis=0, quantize_axis=2, block_size=block, bits=8
        )
        return g.op("Reshape", rows, g.ints(1, -1, weight.columns))

    def _product(self, g: Scope, x: str, weight: Weight, bits: int, block: int, out: str | None = None) -> str:
        inputs = [name for name in _blocks(g.store, weight, bits, block) if name]
        return mat_mul_n_bits(g, x, inputs, weight, bits, block, out)


class Int8Blocks(Int4):
    """8 bits in MatMulNBits throughout: for devices, whose MatMulInteger has no uint8 rows. Nothing to gain by
    smoothing.
    """

    name = "int8"

    def __init__(self) -> None:
        super().__init__()
        self.simulation = None

    def linear(self, g: Scope, x: str, rows: Rows, weight: Weight, updates: Sequence[LowRank] = ()) -> str:
        """Multiplies by packed blocks of 8 bits."""
        return super().linear(g, x, rows, replace(weight, sensitive=True), updates)

    def grouped(self, g: Scope, x: str, rows: Rows, counts: str, stack: Weight) -> str:
        """Multiplies by packed blocks of 8 bits."""
        parts = [replace(part, sensitive=True) for part in stack.parts]
        return super().grouped(g, x, rows, counts, replace(stack, parts=parts))


def check_hidden_size(precision: Precision, hidden: int) -> None:
    """Raises ConfigError unless the precision's blocks divide the hidden size."""
    if hidden % precision.multiple:
        other = "--precision fp32" if precision.name == "int8" else "--precision int8"
        if hidden % BLOCKS[0] == 0 and precision.name == "int4":
            other = f"--block-size {BLOCKS[0]}"
        found, expected = f"hidden size {hidden}", f"a multiple of {precision.multiple} for {precision.name}"
        raise ConfigError(found, expected, f"use {other}")


PRECISIONS: dict[str, Callable[..., Precision]] = {"fp32": Fp32, "fp16": Fp16, "int8": Int8, "int4": Int4}
DEVICE_PRECISIONS: dict[str, Callable[..., Precision]] = PRECISIONS | {"int8": Int8Blocks}


def precision(name: str, block: int | None = None) -> Precision:
    """Makes the precision `name` for CPUs; `block`: weights that share a scale in int4. Raises ConfigError where there
    is none of that name."""
    return make_precision(PRECISIONS, name, block)


def make_precision(precisions: Mapping[str, Callable[..., P]], name: str, block: int | None) -> P:
    """Makes the precision `name` of a table. Raises ConfigError where it has none."""
    if name not in precisions:
        raise ConfigError(f"precision `{name}`", ", ".join(precisions), "choose one of these with --precision")
    if block is None:
        return precisions[name]()
    if name != "int4" or block not in BLOCKS:
        raise ConfigError(
            f"blocks of {block} in {name}", f"{' or '.join(map(str, BLOCKS))}, in int4", "correct --block-size"
        )
    return precisions[name](block)


def mixed_rows(g: Scope, x: str, block: int, *shape: int) -> str:
    """Mixes the columns of rows in blocks (`arithmetic.hadamard`), none for 0; of `shape` [.., columns]. Sums of 32
    numbers have one order, however many rows there are.
    """
    if not block:
        return x
    matrix = g.store.constant(hadamard(np.eye(block, dtype=np.float32), block), np.float32)
    return g.op("Reshape", g.op("MatMul", g.op("Reshape", x, g.ints(-1, block)), matrix), g.ints(*shape))


def mixed_inputs_of(g: Scope, x: str, weight: Weight) -> str:
    """Rows [1, n, in] as the linear map `weight` reads them."""
    return mixed_rows(g, x, weight.mix, 1, -1, weight.columns)


def in_groups(g: Scope, x: str, counts: str, products: Sequence[Callable[[str], str]]) -> str:
    """Applies each of `products` to as many rows in turn of x [1, n, in] as `counts` int64 [products] says."""
    groups = g.ops("Split", x, counts, out=(None,) * len(products), axis=1)
    return g.op("Concat", *(product(group) for product, group in zip(products, groups, strict=True)), axis=1)


def updated(g: Scope, product: str, x: str, updates: Sequence[LowRank]) -> str:
    """Adds the low-rank `updates` of rows x to their `product`."""
    for update in updates:
        product = update.added(g, product, update.of_rows(g, x))
    return product


def blocks_of(weight: Weight, bits: int, block: int) -> tuple[Array, Array, Array | None]:
    """Quantizes a weight as `quantize_blocks` does; takes 4 bits that a text has decided, if one has."""
    if bits == 4 and (rounded := weight.rounded()) is not None:
        return rounded
    return quantize_blocks(weight.load(), bits, block, weight.importance())


def mat_mul_n_bits(
    g: Scope, x: str, inputs: Sequence[str], weight: Weight, bits: int, block: int, out: str | None = None
) -> str:
    """x times packed blocks; `inputs`: codes, scales and, if not the operator's own, zero points."""
    sizes = {"K": weight.columns, "N": weight.rows, "bits": bits, "block_size": block}
    return g.op("MatMulNBits", x, *inputs, out=out, domain=CONTRIB, accuracy_level=ACCURACY_INT8, **sizes)


def _blocks(store: WeightStore, weight: Weight, bits: int, block: int) -> tuple[str, str, str]:
    """Codes, scales and zero points ('' where they are the operator's own) as MatMulNBits reads them."""
    codes, scales, zeros = (f"{weight.name}.int{bits}", f"{weight.name}.scale", f"{weight.name}.zero")
    if codes not in store:
        packed, scale, zero = blocks_of(weight, bits, block)
        store.add(codes, packed)
        store.add(scales, scale)
        if zero is not None:
            store.add(zeros, zero)
    return codes, scales, zeros if zeros in store else ""
