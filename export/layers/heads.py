"""Writes queries, keys and values as nodes: projections, norms of heads, rotary embedding; in place of the last two a
native operator takes them side by side.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from streamspec.export.layers.per_layer_input import value_norm
from streamspec.export.native.operators import PackedHeads
from streamspec.export.ops.builder import Scope
from streamspec.export.quantization.precisions import Rows
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.weight_source import Source

LANES = 4  # numbers of which a kernel takes one sine or cosine each in the same way; what is left over, in another

Tables = tuple[tuple[str, str], ...]  # cos and sin [rows, rotated / 2] for each kind of rotary embedding


class Linear(Protocol):
    """Applies the linear maps `modules` of a layer, fused to one, to x [1, rows, in]. `activated`: and then the MLP's
    activation, times the second half of the outputs where the family has a gate."""

    def __call__(
        self, g: Scope, x: str, rows: Rows, layer: int, modules: tuple[str, ...], activated: bool = False
    ) -> str: ...


class GatedHeads:
    """Applies the maps of a layer, and keeps the gate of what attention returns where queries come with one, of each
    number or of each head."""

    def __init__(self, spec: DecoderSpec, linear: Linear) -> None:
        self.linear, self.heads, self.queries = linear, spec.heads, spec.heads * spec.head_dim
        self.each = spec.family.head_gate in spec.widths
        self.gates = self.heads if self.each else self.queries * spec.family.gated_queries
        self.others = 2 * spec.kv_heads * spec.head_dim
        self.gate = ""

    def __call__(
        self, g: Scope, x: str, rows: Rows, layer: int, modules: tuple[str, ...], activated: bool = False
    ) -> str:
        mapped = self.linear(g, x, rows, layer, modules, activated)
        if not self.gates:
            return mapped
        widths = g.ints(self.queries, self.gates, self.others)
        q, self.gate, others = g.ops("Split", mapped, widths, out=(None,) * 3, axis=-1)
        return g.op("Concat", q, others, axis=-1)

    def applied(self, g: Scope, mixed: str) -> str:
        """`mixed` [1, n, Hq*D] times the gate, if any."""
        if not self.gate:
            return mixed
        gate = g.op("Sigmoid", self.gate)
        if not self.each:
            return g.op("Mul", mixed, gate)
        by_head = g.op("Reshape", mixed, g.ints(0, 0, self.heads, -1))
        gated = g.op("Mul", by_head, g.op("Unsqueeze", gate, g.ints(-1)))
        return g.op("Reshape", gated, g.ints(0, 0, self.queries))


class AttentionHeads:
    """The part of a decoder between a layer's norm and its attention."""

    spec: DecoderSpec
    source: Source
    rotary_prefix = ""  # of the names of its frequencies, where they are not those of the graph's decoder

    def norm_weights(self, g: Scope, name: str) -> list[str]:
        """Weight of the norm `name`, and its bias where it has one."""
        weight, bias = f"{name}.weight", f"{name}.bias"
        g.store.once(weight, lambda: self.source.weight(weight))
        if bias not in g.store and (values := self.source.bias(bias)) is not None:
            g.store.add(bias, values)
        return [weight, bias] if bias in g.store else [weight]

    def queries_keys_values(
        self, g: Scope, x: str, rows: Rows, layer: int, rotary: Tables, linear: Linear
    ) -> tuple[str, str, str]:
        """Rotated q [1, rows, Hq*D], rotated k and v [1, rows, Hkv*D] of normed rows x; no k and v ('') of a layer that
        attends to another's."""
        spec, maps = self.spec.at(layer), self.spec.mixers(layer)[0].before
        if self.spec.source(layer) != layer:
            q, k, v = linear(g, x, rows, layer, maps), "", ""
        else:
            apart = 3 if self._apart(maps) else 2  # keys may be the values, too
            mapped = linear(g, x, rows, layer, maps)
            mapped = mapped if spec.clip is None else self._clipped(g, mapped, spec.clip)
            q, k, *others = self._split(g, mapped, spec, apart)
            v = others[0] if others else k
            v = value_norm(self.spec, g, v, layer) if spec.family.value_norm else v
        if spec.family.head_norms_last:
            return *self._head_norms(g, *self._turned(g, q, k, layer, rotary), layer), v
        return *self._turned(g, *self._head_norms(g, q, k, layer), layer, rotary), v

    def packed_heads(self, g: Scope, x: str, rows: Rows, layer: int, rotary: Tables, linear: Linear) -> PackedHeads:
        """Queries, keys and values side by side, for a native operator, which normalises and turns heads where it
        can."""
        spec, family, maps = self.spec.at(layer), self.spec.family, self.spec.mixers(layer)[0].before
        borrows = self.spec.source(layer) != layer
        kinds = self.spec.turns(layer)
        alone = borrows or (self._apart(maps) and not family.value_norm and spec.clip is None)
        turns = kinds is None or kinds[0] == kinds[1]
        each = not (spec.joint_head_norms or family.layernorm)  # RMS norms of heads of their own, if any
        if not (alone and turns and (each or not (borrows or family.head_norms_last))):
            q, *sides = self.queries_keys_values(g, x, rows, layer, rotary, linear)
            return PackedHeads(q if borrows else g.op("Concat", q, *sides, axis=-1), sinks=self.sinks(g, layer))
        packed, normed = linear(g, x, rows, layer, maps), spec.head_norms[: 1 if borrows else 2]  # queries, keys
        if normed and not each:
            packed, normed = self._normed_apart(g, packed, layer), ()
        return PackedHeads(
            packed,
            () if kinds is None else rotary[kinds[0]],
            [self.norm_weights(g, self.spec.weight_name(layer, module))[0] for module in normed],
            self.sinks(g, layer),
            {"interleaved": int(family.rotary_pairs), "norm_last": int(family.head_norms_last)},
        )

    def _normed_apart(self, g: Scope, packed: str, layer: int) -> str:
        """Queries, keys and values side by side, the first two normed."""
        q, k, v = self._split(g, packed, self.spec.at(layer))
        return g.op("Concat", *self._head_norms(g, q, k, layer), v, axis=-1)

    def _split(self, g: Scope, packed: str, spec: DecoderSpec, parts: int = 3) -> tuple[str, ...]:
        """Queries, keys and, of three parts, values of what a layer's maps give."""
        widths = g.ints(*(heads * spec.head_dim for heads in (spec.heads, spec.kv_heads, spec.kv_heads)[:parts]))
        return g.ops("Split", packed, widths, out=(None,) * parts, axis=-1)

    def _apart(self, maps: tuple[str, ...]) -> bool:
        """Whether a layer's maps give queries, keys and values."""
        return self.spec.latent is not None or self.spec.family.qkv[-1] in maps

    def sinks(self, g: Scope, layer: int) -> str:
        """Logits of a layer's heads [Hq] that join the softmax of scores and have no values; '' for none."""
        if self.spec.family.sinks is None:
            return ""
        name = self.spec.weight_name(layer, self.spec.family.sinks)
        return g.store.once(name, lambda: self.source.weight(name))

    def _clipped(self, g: Scope, x: str, limit: float) -> str:
        """x within -limit and limit, by operators that all providers take."""
        minus, low = (g.number(number) for number in (-1.0, -limit))
        return g.op("Max", g.op("Mul", g.op("Max", g.op("Mul", x, minus), low), minus), low)

    def _head_norms(self, g: Scope, q: str, k: str, layer: int) -> tuple[str, str]:
        """Norms of queries and keys, where the family has them."""
        if not self.spec.head_norms:
            return q, k
        of_queries, of_keys = self.spec.head_norms
        return (
            self._head_norm(g, q, self.spec.heads, layer, of_queries),
            k and self._head_norm(g, k, self.spec.at(layer).kv_heads, layer, of_keys),
        )

    def _turned(self, g: Scope, q: str, k: str, layer: int, rotary: Tables) -> tuple[str, str]:
        """Rotated queries and keys, where the layer rotates them."""
        kinds = self.spec.turns(layer)
        if kinds is None:
            return q, k
        spec = self.spec.at(layer)
        q = self._rotate(g, q, spec.heads, spec, kinds[0], rotary)
        return q, k and self._rotate(g, k, spec.kv_heads, spec, kinds[1], rotary)

    def _head_norm(self, g: Scope, x: str, heads: int, layer: int, module: str) -> str:
        name, spec = self.spec.weight_name(layer, module), self.spec.at(layer)
        split = x if spec.joint_head_norms else g.op("Reshape", x, g.ints(0, 0, heads, spec.head_dim))
        if not spec.family.layernorm:
            normed = g.norm(split, *self.norm_weights(g, name), eps=spec.eps)
        elif self.source.bias(f"{name}.bias") is not None:
            normed = g.op("LayerNormalization", split, *self.norm_weights(g, name), axis=-1, epsilon=spec.eps)
        else:  # weights of its own for every head: Cohere's a table, StableLM's a module each
            ones = g.store.once("head_norm.ones", lambda: np.ones(spec.head_dim, np.float32))
            if name not in g.store:
                table, parts = f"{name}.weight", [f"{name}.norms.{head}.weight" for head in range(heads)]
                each = self.source.bias(table)
                g.store.add(name, np.stack([self.source.weight(part) for part in parts]) if each is None else each)
            normed = g.op("Mul", g.op("LayerNormalization", split, ones, axis=-1, epsilon=spec.eps), name)
        return normed if spec.joint_head_norms else g.op("Reshape", normed, g.ints(0, 0, heads * spec.head_dim))

    def _rotate(self, g: Scope, x: str, heads: int, spec: DecoderSpec, kind: int, rotary: Tables) -> str:
        # The tables hold one row per row of x, so the position of the first row is 0.
        rotated = spec.rotated(kind)
        partial: dict[str, Any] = (
            {} if rotated == spec.head_dim else {"num_heads": heads, "rotary_embedding_dim": rotated}
        )
        if spec.family.rotary_pairs:
            partial["interleaved"] = 1
        return g.contrib("RotaryEmbedding", x, g.ints(0), *rotary[kind], **partial)

    def rotary(self, g: Scope, positions: str) -> Tables:
        """Computes cosines and sines at int64 positions [rows] as HF does, without a table as long as the context."""
        if not self.spec.rotaries:
            return ()
        column = g.op("Unsqueeze", g.op("Cast", positions, to=1), g.ints(1))
        tables = []
        for number, kind in enumerate(self.spec.rotaries):
            count = len(kind.inv_freq)
            spare = -count % LANES
            frequencies = f"{self.rotary_prefix}rotary.{number}.inv_freq"
            if frequencies not in g.store:
                g.store.add(frequencies, np.pad(kind.inv_freq, (0, spare)).reshape(1, -1))
            angles = g.op("Mul", column, frequencies)
            cos, sin = g.op("Cos", angles), g.op("Sin", angles)
            if spare:  # else how a row's last numbers are computed depends on how many rows follow
                cos, sin = (g.op("Slice", side, g.ints(0), g.ints(count), g.ints(1)) for side in (cos, sin))
            if kind.scale != 1.0:
                scale = g.number(kind.scale)
                cos, sin = g.op("Mul", cos, scale), g.op("Mul", sin, scale)
            if kind.growth is not None:
                scale = self._growth(g, positions, *kind.growth)
                cos, sin = g.op("Mul", cos, scale), g.op("Mul", sin, scale)
            tables.append((cos, sin))
        return tuple(tables)

    def _growth(self, g: Scope, positions: str, beta: float, length: int) -> str:
        """1 + beta * log(1 + floor(position / length)) [rows, 1] of int64 positions [rows]"""
        one, factor = (g.number(number) for number in (1.0, beta))
        times = g.op("Cast", g.op("Div", g.op("Unsqueeze", positions, g.ints(1)), g.ints(length)), to=1)
        return g.op("Add", one, g.op("Mul", g.op("Log", g.op("Add", one, times)), factor))
