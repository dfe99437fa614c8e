"""The decoder's rows as nodes: norms, projections, rotary embedding, gated MLP; shared by main and stream rows.

A row group runs a layer as `start` -> attention of the caller's choice -> `finish_attention` -> `mlp`. Residual sums and
norms are fused (SkipSimplifiedLayerNormalization): between parts travel the residual stream and the pending update.
Knows nothing about masks, caches or acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from streamspec.export.arrays import Array
from streamspec.export.builder import Scope
from streamspec.export.families import DecoderSpec
from streamspec.export.quantise import Precision, Rows, Weight

UNIT_RMS_EPS = 1e-12

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
OUT, DOWN = ("self_attn.o_proj",), ("mlp.down_proj",)


class Source(Protocol):
    """Where weights come from: arrays float32 under Hugging Face names, None for a bias that does not exist."""

    def weight(self, name: str) -> Array: ...
    def bias(self, name: str) -> Array | None: ...


class Linear(Protocol):
    """Applies the linear maps `modules` of a layer, fused to one, to x [1, rows, in]."""

    def __call__(self, g: Scope, x: str, rows: Rows, layer: int, modules: tuple[str, ...]) -> str: ...


@dataclass
class Residual:
    """The residual stream [1, rows, H] and the update to be added before the next norm ('' before the first layer)."""

    stream: str
    update: str = ""


class Decoder:
    """Nodes of one decoder in one precision. `linear` may be replaced for row groups with other weights."""

    def __init__(self, spec: DecoderSpec, source: Source, precision: Precision) -> None:
        self.spec, self.source, self.precision = spec, source, precision

    # ---- tables

    def table(self) -> Weight:
        """The token embedding [V, H]."""
        name = "model.embed_tokens.weight"
        return Weight(name, self.spec.vocab, self.spec.hidden, lambda: self.source.weight(name))

    def head_weight(self) -> Weight:
        """The LM head [V, H]; the embedding itself where they are tied."""
        if self.spec.tied:
            return self.table()
        return Weight("lm_head.weight", self.spec.vocab, self.spec.hidden, lambda: self.source.weight("lm_head.weight"))

    def embed(self, g: Scope, ids: str) -> str:
        """[1, n] -> [1, n, H]"""
        return self.precision.embedding(g, ids, self.table())

    # ---- rows

    def linear(self, g: Scope, x: str, rows: Rows, layer: int, modules: tuple[str, ...]) -> str:
        """The base's own maps."""
        names = [self.spec.weight_name(layer, module) for module in modules]
        return self.add_bias(g, self.precision.linear(g, x, rows, self.fused(layer, modules)), names)

    def fused(self, layer: int, modules: tuple[str, ...], source: Source | None = None, suffix: str = "") -> Weight:
        """Weight of `modules` stacked along the output."""
        chosen = source or self.source
        names = [self.spec.weight_name(layer, module) for module in modules]
        label = self.spec.weight_name(layer, "+".join(m.split(".")[-1] for m in modules)) + suffix
        out = sum(self.spec.out_width(module) for module in modules)
        return Weight(
            label, out, self.spec.in_width(modules[0]), lambda: np.concatenate([chosen.weight(f"{n}.weight") for n in names])
        )

    def add_bias(self, g: Scope, x: str, names: list[str]) -> str:
        """Adds the stacked biases of `names`, if any of them has one."""
        biases = [self.source.bias(f"{name}.bias") for name in names]
        if all(b is None for b in biases):
            return x
        label = "+".join(names) + ".bias"
        if label not in g.store:
            widths = [self.spec.out_width(name) for name in names]
            parts = [np.zeros(w, np.float32) if b is None else b for b, w in zip(biases, widths, strict=True)]
            g.store.add(label, np.concatenate(parts))
        return g.op("Add", x, label)

    def norm(self, g: Scope, residual: Residual, name: str) -> tuple[str, Residual]:
        """Adds the pending update and normalises: (normed rows, residual with nothing pending)."""
        weight = self.norm_weight(g, name)
        if not residual.update:
            normed = g.op("SimplifiedLayerNormalization", residual.stream, weight, axis=-1, epsilon=self.spec.eps, stash_type=1)
            return normed, residual
        normed, _, _, total = g.ops(
            "SkipSimplifiedLayerNormalization", residual.stream, residual.update, weight, out=(None, "", "", None),
            domain="com.microsoft", epsilon=self.spec.eps,
        )
        return normed, Residual(total)

    def unit_rms(self, g: Scope, x: str) -> str:
        """x [.., H] over its root mean square."""
        ones = "unit_rms.ones" if "unit_rms.ones" in g.store else g.store.add("unit_rms.ones", np.ones(self.spec.hidden, np.float32))
        return g.op("SimplifiedLayerNormalization", x, ones, axis=-1, epsilon=UNIT_RMS_EPS, stash_type=1)

    def norm_weight(self, g: Scope, name: str) -> str:
        label = f"{name}.weight"
        return label if label in g.store else g.store.add(label, self.source.weight(label))

    def queries_keys_values(
        self, g: Scope, x: str, rows: Rows, layer: int, rotary: tuple[str, str], linear: Linear
    ) -> tuple[str, str, str]:
        """Rotated q [1, rows, Hq*D], rotated k and v [1, rows, Hkv*D] of normed rows x."""
        spec = self.spec
        fused = linear(g, x, rows, layer, QKV)
        widths = g.ints(*(self.spec.out_width(m) for m in QKV))
        q, k, v = g.ops("Split", fused, widths, out=(None, None, None), axis=-1)
        if spec.qk_norm:
            q = self._head_norm(g, q, spec.heads, spec.weight_name(layer, "self_attn.q_norm"))
            k = self._head_norm(g, k, spec.kv_heads, spec.weight_name(layer, "self_attn.k_norm"))
        return self._rotate(g, q, rotary), self._rotate(g, k, rotary), v

    def _head_norm(self, g: Scope, x: str, heads: int, name: str) -> str:
        split = g.op("Reshape", x, g.ints(0, 0, heads, self.spec.head_dim))
        weight = self.norm_weight(g, name)
        normed = g.op("SimplifiedLayerNormalization", split, weight, axis=-1, epsilon=self.spec.eps, stash_type=1)
        return g.op("Reshape", normed, g.ints(0, 0, heads * self.spec.head_dim))

    def _rotate(self, g: Scope, x: str, rotary: tuple[str, str]) -> str:
        # The tables hold one row per row of x, so the position of the first row is 0.
        return g.contrib("RotaryEmbedding", x, g.ints(0), *rotary)

    def rotary(self, g: Scope, positions: str) -> tuple[str, str]:
        """cos and sin [rows, D/2] for int64 positions [rows], computed as HF does: no table as long as the context."""
        frequencies = "rotary.inv_freq"
        if frequencies not in g.store:
            g.store.add(frequencies, self.spec.inv_freq.reshape(1, -1))
        column = g.op("Unsqueeze", g.op("Cast", positions, to=1), g.ints(1))
        angles = g.op("Mul", column, frequencies)
        tables = (g.op("Cos", angles), g.op("Sin", angles))
        if self.spec.rope_scale == 1.0:
            return tables
        scale = g.store.constant(self.spec.rope_scale, np.float32)
        return g.op("Mul", tables[0], scale), g.op("Mul", tables[1], scale)

    def mlp(self, g: Scope, residual: Residual, rows: Rows, layer: int, linear: Linear) -> Residual:
        """The second half of a layer; `residual.update` is the attention's output."""
        name = self.spec.weight_name(layer, "post_attention_layernorm")
        normed, residual = self.norm(g, residual, name)
        half = self.spec.intermediate
        gate, up = g.ops("Split", linear(g, normed, rows, layer, GATE_UP), g.ints(half, half), out=(None, None), axis=-1)
        product = g.op("Mul", self._activate(g, gate), up)
        return Residual(residual.stream, linear(g, product, rows, layer, DOWN))

    def _activate(self, g: Scope, x: str) -> str:
        if self.spec.activation == "silu":
            return g.contrib("QuickGelu", x, alpha=1.0)
        if self.spec.activation == "gelu":
            return g.contrib("Gelu", x)
        return g.contrib("FastGelu", x)
