"""Writes attention as nodes: of main rows in place, and of any rows over K/V in several parts (`attend`).

Main rows attend so that a row's result does not depend on how it was batched or where its keys lie. GroupQueryAttention
would be one node, but it takes another kernel for one row than for several, and its softmax sums in vector lanes: an
ancestor in a gapped slot of a draft tree changes the last bit. With int8 activations one such bit moves a rounding now
and then, the next layers carry it on, and two of five long answers differ from plain decoding. Here

- weights enter their products transposed: ONNX Runtime then adds slot after slot in blocks of 128, while the blocks of
  the plain product grow where few columns are left to a thread, and rows decide how many threads take part;
- so do queries of more than 128 values, whose products are added in blocks, too; shorter ones are added in one run;
- the softmax's denominator is a product with a block of ones: like the values' product it adds slot after slot, and a
  slot that is masked adds an exact zero, wherever it stands;
- no product has a row alone, an untransposed one and a factor of 1: such rows take another kernel.

Both products add in blocks of slots (the runtime keeps trees off their borders, see
`streamspec.runtime.decoding.acceptance`). New rows go into the cache in place (TensorScatter, past and present bound to
one buffer), into a ring's slots in a circle; a cache in float16 rounds them before anything reads them, the call's own
rows too, so that a row is the same number for its siblings as for later calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from streamspec.draft_tree import MASKED
from streamspec.export.ops.builder import Scope
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.layer_cache import DTYPES, SUM_BLOCK
from streamspec.step_graph import PAST_LENGTH, past, present

ONES_WIDTH = 16  # columns that a kernel computes at once


def capped(g: Scope, x: str, cap: float, out: str | None = None) -> str:
    """cap * tanh(x / cap)"""
    inner = g.op("Tanh", g.op("Mul", x, g.number(1 / cap)))
    return g.op("Mul", inner, g.number(cap), out=out)


class RowExactAttention:
    """Nodes of one graph. `visible`: int64 [1], slots in use after this call, L + n."""

    def __init__(self, g: Scope, spec: DecoderSpec, visible: str) -> None:
        self.g, self.spec, self.visible = g, spec, visible
        self._ones: dict[str, str] = {}
        self._tiled: dict[tuple[str, int], str] = {}

    def append(self, rows: str, layer: int, kind: str, own: DecoderSpec | None = None) -> str:
        """Writes K or V rows [1, n, Hkv*D] after the first `past_length` slots; returns the cache [1, Hkv, S, D].
        `own`: of the layer's sizes, where it is a drafter's."""
        return self.keep(by_head(self.g, own or self.spec.at(layer), rows), layer, kind)

    def keep(self, rows: str, layer: int, kind: str) -> str:
        """Writes rows [1, heads, n, width], as the cache holds them, after the first `past_length` slots."""
        g, mode = self.g, {} if self.spec.ring(layer, kind) is None else {"mode": "circular"}
        new = stored(g, self.spec.kept_in(layer, kind), rows)
        return g.op("TensorScatter", past(layer, kind), new, PAST_LENGTH, out=present(layer, kind), axis=2, **mode)

    def mix(
        self, q: str, key: str, value: str, bias: str, used: str = "", layer: int | None = None, sinks: str = ""
    ) -> str:
        """[1, n, Hq*D] of rotated q [1, n, Hq*D] over caches, under an additive bias [1, 1, n, used].
        `used`: int64 [1], slots of a ring; those of other caches are `visible`. `layer`: whose sizes the heads have;
        `sinks` [Hq]: scores of heads without values."""
        g, used = self.g, used or self.visible
        spec = self.spec if layer is None else self.spec.at(layer)
        kv, group, width = spec.kv_heads, spec.group, spec.head_dim
        keys, values = (loaded(g, spec, cache, used) for cache in (key, value))
        split = g.op("Reshape", q, g.ints(-1, kv, group, width))
        # Query heads that share a key head become further rows of it: [1, Hkv, group * n, D].
        if width > SUM_BLOCK or spec.attention_scale == 1.0:  # transposed: [1, Hkv, D, group * n]
            rows = g.op("Reshape", g.op("Transpose", split, perm=[1, 3, 2, 0]), g.ints(1, kv, width, -1))
            products = g.contrib("FusedMatMul", rows, keys, transA=1, transB=1, alpha=spec.attention_scale)
        else:
            rows = g.op("Reshape", g.op("Transpose", split, perm=[1, 2, 0, 3]), g.ints(1, kv, -1, width))
            products = g.contrib("FusedMatMul", rows, keys, transB=1, alpha=spec.attention_scale)
        products = capped(g, products, spec.attention_cap) if spec.attention_cap else products
        scores = g.op("Add", products, self._per_query_head(bias, group))
        most, sunk = g.op("ReduceMax", scores, g.ints(-1), keepdims=1), ""
        if sinks:  # [Hkv, group, 1] beside [Hkv, group, n]
            own = g.op("Reshape", sinks, g.ints(kv, group, 1))
            each = g.op("Max", g.op("Reshape", most, g.ints(kv, group, -1)), own)
            most = g.op("Reshape", each, g.ints(1, kv, -1, 1))
            sunk = g.op("Reshape", g.op("Exp", g.op("Sub", own, each)), g.ints(1, kv, -1, 1))
        below = g.op("Sub", scores, most)
        # Before the exponential: ONNX Runtime merges a transposition with the product after it, which would undo it.
        weights = g.op("Exp", g.op("Transpose", below, perm=[0, 1, 3, 2]))
        sums = g.contrib("FusedMatMul", weights, self._block_of_ones(used), transA=1)
        total = g.op("Slice", sums, g.ints(0), g.ints(1), g.ints(3))
        total = g.op("Add", total, sunk) if sunk else total
        mixed = g.op("Div", g.contrib("FusedMatMul", weights, values, transA=1), total)
        merged = g.op("Transpose", g.op("Reshape", mixed, g.ints(kv, group, -1, width)), perm=[2, 0, 1, 3])
        return g.op("Reshape", merged, g.ints(1, -1, kv * group * width))

    def _block_of_ones(self, slots: str) -> str:
        if slots not in self._ones:
            g = self.g
            shape = g.op("Concat", slots, g.ints(ONES_WIDTH), axis=0)
            self._ones[slots] = g.op("Expand", g.number(1), shape)
        return self._ones[slots]

    def _per_query_head(self, bias: str, group: int) -> str:
        """The bias for the rows of `mix`, made once per distinct bias."""
        if group == 1:
            return bias
        if (bias, group) not in self._tiled:
            g = self.g
            self._tiled[bias, group] = g.op("Tile", bias, g.ints(1, 1, group, 1))
        return self._tiled[bias, group]


def stored(g: Scope, dtype: str, rows: str, out: str | None = None) -> str:
    """Rows as a cache of this type stores them; in float16, what it cannot hold becomes its largest number."""
    if dtype == DTYPES[0]:
        return rows
    most = float(np.finfo(np.float16).max)
    below = g.op("Min", rows, g.number(most))
    return g.op("Cast", g.op("Max", below, g.number(-most)), out=out, to=TensorProto.FLOAT16)


def loaded(g: Scope, spec: DecoderSpec, cache: str, slots: str = "") -> str:
    """The first `slots` (int64 [1]; all) of a cache, as attention computes with them."""
    rows = g.op("Slice", cache, g.ints(0), slots, g.ints(2)) if slots else cache
    return rows if spec.cache_dtype == DTYPES[0] else g.op("Cast", rows, to=TensorProto.FLOAT)


def attend(g: Scope, spec: DecoderSpec, q: str, parts: Sequence[tuple[str, str]], mask: str, sinks: str = "") -> str:
    """[1, m, Hq*D] of q [1, m, Hq*D] over the K/V `parts` [1, Hkv, slots, D], under an additive mask [group * m, slots
    of all]. `sinks` [Hq]: scores of heads without values.
    """
    kv, group, width = spec.kv_heads, spec.group, spec.head_dim
    if sinks:  # a further slot of zeros, whose scores they are
        slot, count = g.store.constant(np.zeros((1, kv, 1, width)), np.float32), g.op("Shape", q, start=1, end=2)
        own = g.op(
            "Expand", g.op("Reshape", sinks, g.ints(kv, group, 1)), g.op("Concat", g.ints(kv, group), count, axis=0)
        )
        own = g.op("Reshape", own, g.ints(kv, -1, 1))
        parts = [*parts, (slot, slot)]
        mask = g.op("Concat", g.op("Expand", mask, g.ints(kv, 1, 1)), own, axis=-1)
    # Query heads that share a key head become further rows of it: [Hkv, group * m, D].
    folded = g.op("Transpose", g.op("Reshape", q, g.ints(-1, kv, group, width)), perm=[1, 2, 0, 3])
    folded = g.op("Reshape", folded, g.ints(1, kv, -1, width))
    scores = []
    for keys, _ in parts:
        products = g.contrib("FusedMatMul", folded, keys, transB=1, alpha=spec.attention_scale)
        scores.append(capped(g, products, spec.attention_cap) if spec.attention_cap else products)
    together = scores[0] if len(parts) == 1 else g.op("Concat", *scores, axis=-1)
    weights = g.op("Softmax", g.op("Add", together, mask), axis=-1)
    if len(parts) == 1:
        mixed = g.op("MatMul", weights, parts[0][1])
    else:
        shares = g.columns(weights, [keys for keys, _ in parts])
        mixed, *others = (g.op("MatMul", share, values) for share, (_, values) in zip(shares, parts, strict=True))
        for other in others:
            mixed = g.op("Add", mixed, other)
    unfolded = g.op("Transpose", g.op("Reshape", mixed, g.ints(kv, group, -1, width)), perm=[2, 0, 1, 3])
    return g.op("Reshape", unfolded, g.ints(1, -1, kv * group * width))


def by_head(g: Scope, spec: DecoderSpec, rows: str, out: str | None = None) -> str:
    """K or V rows [1, m, Hkv*D] as the cache holds them, [1, Hkv, m, D]."""
    return g.op(
        "Transpose", g.op("Reshape", rows, g.ints(1, -1, spec.kv_heads, spec.head_dim)), out=out, perm=[0, 2, 1, 3]
    )


def window_out(g: Scope, mask: str, positions: str, seen: str, window: int) -> str:
    """Masks what lies `window` or more positions back: `positions` int64 [rows], `seen` int64 [1, columns]."""
    distance = g.op("Sub", g.op("Unsqueeze", positions, g.ints(1)), seen)
    near = g.op("Less", distance, g.integer(window))
    return g.op("Where", near, mask, g.number(MASKED))
