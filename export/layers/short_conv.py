"""Writes short convolutions as nodes: layers that mix a row's input with those of the rows before it.

    y = C sum_k w_k u_k        u = B x        (LFM2, arXiv 2511.23404; `token_mixers/short_conv.py`)

The rows before a row of a draft tree are its ancestors and then the newest committed rows. The inputs u lie in the
KV cache as the keys of one head as wide as the model, so rollback, shared prefixes and compaction are those of keys.
All sums are elementwise: a row's result does not depend on how it was batched. tests/export/graphs compares them
with PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from onnx import TensorProto

from streamspec.export.layers.decoder import Decoder, Linear
from streamspec.export.native.operators import NativeOps
from streamspec.export.ops.builder import Scope
from streamspec.export.quantization.precisions import Rows
from streamspec.step_graph import PAST_LENGTH

Read = Callable[[Scope, str], str]  # inputs [1, x, H] of the rows with the int64 numbers [x]; zero below 0


class RowsBefore:
    """The rows before each row of a call, shared by all convolutions. Rows are numbered along the sequence: the
    committed ones, then those of the call. `numbers` int64 [n]: of the row itself, of the row before it, ..."""

    def __init__(self, g: Scope, tree_mask: str, rows: str, conv_width: int) -> None:
        """`tree_mask` [n, n]; `rows` int64 [n]: 0, 1, ..; `conv_width`: how many rows a convolution mixes."""
        with g.named("rows_before"):
            zero, none = g.integer(0), g.integer(-1)
            column, row = g.op("Unsqueeze", rows, g.ints(0)), g.op("Unsqueeze", rows, g.ints(1))
            seen = g.op("Equal", tree_mask, g.number(0))
            ancestors = g.op("And", seen, g.op("Less", column, row))
            depth = g.op("ReduceSum", g.op("Cast", ancestors, to=TensorProto.INT64), g.ints(1), keepdims=0)
            parent = g.op("ReduceMax", g.op("Where", ancestors, column, none), g.ints(1), keepdims=0)
            self.numbers, at = [g.op("Add", PAST_LENGTH, rows)], rows
            for back in range(1, conv_width):
                above = g.op("Gather", parent, g.op("Max", at, zero), axis=0)
                at = g.op("Where", g.op("GreaterOrEqual", at, zero), above, none)
                committed = g.op("Add", PAST_LENGTH, g.op("Sub", depth, g.ints(back)))
                inside = g.op("GreaterOrEqual", at, zero)
                self.numbers.append(g.op("Where", inside, g.op("Add", PAST_LENGTH, at), committed))

    def of(self, g: Scope, node: str, count: int) -> str:
        """int64 [count]: the numbers of row `node` int64 [1] and those before it, oldest first."""
        columns = [g.op("Gather", numbers, node, axis=0) for numbers in self.numbers[:count]]
        return g.op("Concat", *columns[::-1], axis=0) if count > 1 else columns[0]


def from_cache(present: str) -> Read:
    """Reads inputs from a cache [1, 1, S, H] that holds the call's rows too."""

    def read(g: Scope, numbers: str) -> str:
        return _or_zero(g, numbers, g.op("Gather", present, _slots(g, numbers, present), axis=2))

    return read


def beside_cache(past: str, new: str) -> Read:
    """Reads inputs from a cache [1, 1, S, H] as float32 and from the call's rows [1, 1, n, H] apart from it."""

    def read(g: Scope, numbers: str) -> str:
        fresh = g.op("Sub", numbers, PAST_LENGTH)
        picked = g.op("Gather", new, g.op("Max", fresh, g.integer(0)), axis=2)
        inside = g.op("Unsqueeze", g.op("GreaterOrEqual", fresh, g.integer(0)), g.ints(1))
        return _or_zero(
            g, numbers, g.op("Where", inside, picked, g.op("Gather", past, _slots(g, numbers, past), axis=2))
        )

    return read


def _slots(g: Scope, numbers: str, cache: str) -> str:
    """int64 [x]: where a cache has the rows `numbers`, their remainder by its slots; 0 for those below 0."""
    size, numbers = g.op("Shape", cache, start=2, end=3), g.op("Max", numbers, g.integer(0))
    return g.remainder(numbers, size)


def _or_zero(g: Scope, numbers: str, inputs: str) -> str:
    """[1, x, H] of inputs [1, 1, x, H]."""
    known = g.op("Unsqueeze", g.op("GreaterOrEqual", numbers, g.integer(0)), g.ints(1))
    return g.op("Where", known, g.op("Squeeze", inputs, g.ints(1)), g.number(0))


def gated_inputs(decoder: Decoder, g: Scope, x: str, rows: Rows, layer: int, linear: Linear) -> tuple[str, str]:
    """C and u [1, rows, H] of normed rows x."""
    sizes = g.ints(*[decoder.spec.hidden] * 3)
    mapped = linear(g, x, rows, layer, decoder.spec.family.conv_in)
    first, gate, last = g.ops("Split", mapped, sizes, out=(None, None, None), axis=-1)
    return gate, g.op("Mul", first, last)


def native_conv(
    native: NativeOps, decoder: Decoder, g: Scope, normed: str, rows: Rows, tree_mask: str, layer: int
) -> tuple[str, str]:
    """What the output map reads [1, n, H], by a native operator, and the cache, which it writes."""
    mapped = decoder.linear(g, normed, rows, layer, decoder.spec.family.conv_in)
    ring = decoder.spec.ring(layer) is not None
    return native.short_conv(g, mapped, tree_mask, layer, tap_weights(decoder, g, layer), ring)


def mixed_rows(decoder: Decoder, g: Scope, own: str, before: RowsBefore, read: Read, layer: int) -> str:
    """sum_k w_k u_k [1, n, H] of the rows with inputs `own` [1, n, H]."""
    weights = tap_weights(decoder, g, layer)
    return _weighted(g, [own, *(read(g, numbers) for numbers in before.numbers[1 : len(weights)])], weights)


def mixed_streams(decoder: Decoder, g: Scope, own: str, rows: Rows, main: str, layer: int) -> str:
    """sum_k w_k u_k of streams, one after another, after the main rows' inputs `main` [1, width - 1, H], oldest
    first; '' for none."""
    weights = tap_weights(decoder, g, layer)
    every = g.op("Concat", main, own, axis=1) if main else own
    starts = range(len(weights) - 1, -1, -1)
    return _weighted(
        g, [g.op("Slice", every, g.ints(at), g.op("Add", rows.count, g.ints(at)), g.ints(1)) for at in starts], weights
    )


def tap_weights(decoder: Decoder, g: Scope, layer: int) -> list[str]:
    """[H] each: the weights of the row itself, of the row before it, ..."""
    family = decoder.spec.family
    taps = family.recurrent.taps if family.recurrent else "conv"
    name = decoder.spec.weight_name(layer, f"{family.conv}.{taps}.weight")
    labels = [f"{name}.{back}" for back in range(decoder.spec.conv_widths[layer])]
    if labels[0] not in g.store:
        weight = decoder.source.weight(name)  # [H, 1, width], the row itself last
        for back, label in enumerate(labels):
            g.store.add(label, np.ascontiguousarray(weight[:, 0, -1 - back]))
    return labels


def _weighted(g: Scope, inputs: Sequence[str], weights: Sequence[str]) -> str:
    products = [g.op("Mul", rows, weight) for rows, weight in zip(inputs, weights, strict=True)]
    total = products[0]
    for product in products[1:]:
        total = g.op("Add", total, product)
    return total
