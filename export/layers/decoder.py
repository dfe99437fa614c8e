"""Writes the decoder's rows as nodes: norms, projections, rotary embedding, MLP; one template for all families,
shared by main and stream rows.

A row group runs a layer as `enter` -> `queries_keys_values` -> attention of the caller's choice -> `leave`. Residual
sums and norms are fused (SkipLayerNormalization and its simplified form): between parts travel the residual stream and
the pending update.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

import numpy as np

from streamspec.export.layers.activations import activate, clamped_swiglu
from streamspec.export.layers.attention import capped
from streamspec.export.layers.heads import AttentionHeads, Linear
from streamspec.export.layers.mlp.experts import experts
from streamspec.export.layers.per_layer_input import layer_end
from streamspec.export.native.layout import TILE
from streamspec.export.native.operators import ACTIVATIONS, NativeOps
from streamspec.export.ops.builder import Array, Scope
from streamspec.export.quantization.lora_inputs import LowRank
from streamspec.export.quantization.precisions import Precision, Rows, Weight
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.weight_source import Source, StoredBlocks, stored_runs
from streamspec.step_graph import DRAFT_HEAD_BIAS

UNIT_RMS_EPS = 1e-12


@dataclass
class Residual:
    """The residual stream [1, rows, H] and the update to be added before the next norm ('' before the first layer)."""

    stream: str
    update: str = ""


class Decoder(AttentionHeads):
    """Nodes of one decoder in one precision. `linear` may be replaced for row groups with other weights."""

    def __init__(
        self,
        spec: DecoderSpec,
        source: Source,
        precision: Precision,
        native: NativeOps | None = None,
    ) -> None:
        """`native`: writes native operators in place of the precision's nodes, where there are such."""
        self.spec, self.source, self.precision, self.native = spec, source, precision, native
        self.drafter = False  # whether its layers are a drafter's own

    def drafting(self, spec: DecoderSpec, source: Source) -> Self:
        """A copy that writes a drafter's own layers, of `spec` and `source`."""
        own = copy(self)
        own.spec, own.source, own.drafter = spec, source, True
        return own

    # ---- tables

    def table(self) -> Weight:
        """The token embedding [V, H]."""
        return self._of_tokens(f"{self.spec.stacked(self.spec.family.embedding)}.weight", not self.spec.tied)

    def head_weight(self) -> Weight:
        """The LM head [V, H]; the embedding itself where they are tied."""
        return self.table() if self.spec.tied else self._of_tokens("lm_head.weight")

    def _of_tokens(self, name: str, looked_up: bool = False) -> Weight:
        spec, source = self.spec, self.source

        def stored() -> Sequence[StoredBlocks] | None:
            table = source.stored_table(name)
            return None if table is None else [table]

        return Weight(name, spec.vocab, spec.hidden, lambda: source.rows_of(name), looked_up=looked_up, stored=stored)

    @property
    def writer(self) -> Precision | NativeOps:
        """Writes heads and look-ups."""
        return self.precision if self.native is None else self.native

    def embed(self, g: Scope, ids: str) -> str:
        """[1, n] -> [1, n, H], as in the table."""
        return self.look_up(g, ids, self.table())

    def look_up(self, g: Scope, ids: str, table: Weight) -> str:
        """Rows [1, n, in] of `table` [out, in] for ids [1, n]."""
        return self.writer.embedding(g, ids, table)

    def linear_map(self, g: Scope, x: str, rows: Rows, weight: Weight) -> str:
        """`weight` [out, in] applied to x [1, n, in]: [1, n, out]."""
        return self.precision.linear(g, x, rows, weight) if self.native is None else self.native.linear(g, x, weight)

    def begin(self, g: Scope, ids: str, positions: str) -> Residual:
        """The input of the first layer for ids [1, n] at int64 positions [n]."""
        embedded, family = self.embed(g, ids), self.spec.family
        if self.spec.embedding_scale != 1.0:
            embedded = g.op("Mul", embedded, g.number(self.spec.embedding_scale))
        if family.position_table is not None:
            name = f"{self.spec.stacked(family.position_table)}.weight"
            table = g.store.once(name, lambda: self.source.weight(name)[family.position_offset :])
            embedded = g.op("Add", embedded, g.op("Unsqueeze", g.op("Gather", table, positions, axis=0), g.ints(0)))
        return Residual(embedded)

    def logits(
        self, g: Scope, flat: str, rows: Rows, head: Weight, chosen: Array | None = None, out: str | None = None
    ) -> tuple[str, str]:
        """Logits of finished states [r, H] by a `head` [D, H], the LM head or its rows `chosen`: [r, D] and the factor
        of each row [r, 1], '' for 1. Those of tokens that the tokenizer has not are minus infinity.
        """
        bias = self.head_bias(g) if chosen is None else self.head_bias(g, DRAFT_HEAD_BIAS, chosen)
        absent, plain = self.absent(g, chosen), self.spec.logit_cap is None and self.spec.logit_scale == 1.0
        if absent and plain and not bias and self.native is not None:
            return self.native.head(g, flat, rows, head, out, absent)
        last = None if absent else out
        if plain and not bias:
            logits, scale = self.writer.head(g, flat, rows, head, out=last)
        else:
            raw, scale = self.writer.head(g, flat, rows, head)
            logits, scale = self.finish_logits(g, g.op("Mul", raw, scale) if scale else raw, bias, last), ""
        return (g.op("Add", logits, absent, out=out) if absent else logits), scale

    def absent(self, g: Scope, chosen: Array | None) -> str:
        """[V], or the part `chosen` of it: minus infinity for rows that are no token, else 0; '' where all are."""
        rows = np.isin(np.arange(self.spec.vocab) if chosen is None else chosen, self.spec.absent)
        if not rows.any():
            return ""
        label = "absent" if chosen is None else "draft_absent"
        return g.store.once(f"lm_head.{label}", lambda: np.where(rows, -np.inf, 0).astype(np.float32))

    def head_bias(self, g: Scope, label: str = "lm_head.bias", chosen: Array | None = None) -> str:
        """The LM head's bias [V], or the part `chosen` of it; '' where there is none."""
        bias = self.source.bias("lm_head.bias")
        if bias is None:
            return ""
        return g.store.once(label, lambda: bias if chosen is None else bias[chosen])

    def finish_logits(self, g: Scope, products: str, bias: str, out: str | None = None) -> str:
        """Logits of the head's products: with its bias, the multiplier and under the cap, each if any."""
        cap, scale = self.spec.logit_cap, self.spec.logit_scale
        last = None if cap else out
        logits = g.op("Add", products, bias, out=last if scale == 1.0 else None) if bias else products
        if scale != 1.0:
            logits = g.op("Mul", logits, g.number(scale), out=last)
        return capped(g, logits, cap, out) if cap else logits

    # ---- rows

    def linear(
        self, g: Scope, x: str, rows: Rows, layer: int, modules: tuple[str, ...], activated: bool = False
    ) -> str:
        """Applies the base's own maps."""
        return self.mapped(g, x, rows, self.fused(layer, modules), layer, modules, activated)

    def mapped(
        self,
        g: Scope,
        x: str,
        rows: Rows,
        weight: Weight,
        layer: int,
        modules: tuple[str, ...],
        activated: bool = False,
        updates: Sequence[LowRank] = (),
    ) -> str:
        """Applies `weight`, of the maps `modules`, with low-rank `updates`, their biases and, where `activated`, the
        MLP's activation."""
        bias = self.bias(g, layer, modules)
        if self.native is not None and not updates:
            name, gated = self.spec.activation, self.spec.family.gated
            fused = name if activated and self.native.activates(name, weight, gated) else ""
            out = self.native.linear(g, x, weight, bias, fused)
            return self.activated(g, out, layer, weight.rows // 2) if activated and not fused else out
        out = self.precision.linear(g, x, rows, weight, updates)
        out = g.op("Add", out, bias) if bias else out
        return self.activated(g, out, layer, weight.rows // 2) if activated else out

    def fused(self, layer: int, modules: tuple[str, ...], source: Source | None = None, suffix: str = "") -> Weight:
        """Weight of `modules` stacked along the output."""
        chosen = source or self.source
        names = [self.spec.weight_name(layer, module) for module in modules]
        weights = [f"{name}.weight" for name in names]
        spec = self.spec.at(layer)
        out = sum(spec.out_width(module) for module in modules)
        return Weight(
            self.spec.fused_name(layer, modules) + suffix,
            out,
            spec.in_width(modules[0]),
            lambda: np.concatenate([chosen.weight(name) for name in weights]),
            sensitive=self.spec.sensitive(modules),
            importance=lambda: self.source.importance(names[0]),
            rounded=lambda: chosen.rounded(names),
            mix=self.source.mixed(names[0]),
            gated=self.spec.activates(modules) and self.gates(out),
            drafter=self.drafter,
            stored=lambda: stored_runs(chosen, weights),
        )

    def gates(self, outputs: int) -> bool:
        """Whether native operators apply activation and gate of the MLP to so many outputs of its first map."""
        return self.spec.family.gated and self.spec.activation in ACTIVATIONS and outputs % TILE == 0

    def bias(self, g: Scope, layer: int, modules: tuple[str, ...]) -> str:
        """The stacked biases of `modules`; '' where none of them has one."""
        names = [self.spec.weight_name(layer, module) for module in modules]
        biases = [self.source.bias(f"{name}.bias") for name in names]
        if all(bias is None for bias in biases):
            return ""
        spec = self.spec.at(layer)
        parts = (
            np.zeros(spec.out_width(module), np.float32) if bias is None else bias
            for bias, module in zip(biases, modules, strict=True)
        )
        return g.store.once("+".join(names) + ".bias", lambda: np.concatenate(list(parts)))

    def norm(self, g: Scope, residual: Residual, name: str) -> tuple[str, Residual]:
        """Adds the pending update and normalises: (normed rows, residual with nothing pending)."""
        weights, plain = self.norm_weights(g, name), "" if self.spec.family.layernorm else "Simplified"
        if self.native is not None and plain and self.native.normalises(self.spec.hidden):
            normed, total = self.native.norm(g, residual.stream, residual.update, weights[0], self.spec.eps)
            return normed, Residual(total)
        if not residual.update:
            return g.norm(residual.stream, *weights, eps=self.spec.eps, centred=not plain), residual
        normed, _, _, total = g.ops(
            f"Skip{plain}LayerNormalization",
            residual.stream,
            residual.update,
            *weights,
            out=(None, "", "", None),
            domain="com.microsoft",
            epsilon=self.spec.eps,
        )
        return normed, Residual(total)

    def finish(self, g: Scope, residual: Residual) -> str:
        """Applies the last norm, after which comes the head."""
        return self.norm(g, residual, self.spec.stacked(self.spec.family.final_norm))[0]

    def enter(self, g: Scope, residual: Residual, layer: int) -> tuple[str, Residual]:
        """The rows that attention reads, and the residual stream with nothing pending."""
        return self._half(g, residual, layer, self.spec.norms(layer).attention)

    def leave(
        self,
        g: Scope,
        mixed: Sequence[str],
        normed: str,
        residual: Residual,
        rows: Rows,
        layer: int,
        linear: Linear,
        per_layer_inputs: str = "",
    ) -> Residual:
        """The layer after the mixing of values, `mixed` [1, rows, Hq*D] of each of its mixers; `normed` and `residual`
        are the results of `enter`. `per_layer_inputs`: the rows', of all layers (`layer_inputs`), '' for none.
        """
        update = ""
        for values, mixer in zip(mixed, self.spec.mixers(layer), strict=True):
            added = self.attention_update(g, linear(g, values, rows, layer, mixer.after), layer)
            update = g.op("Add", update, added) if update else added
        if layer in self.spec.no_mlp:
            return Residual(residual.stream, update)
        normed, residual = self.before_mlp(g, update, normed, residual, layer)
        update = self.mlp_update(g, self.mlp(g, normed, rows, layer, linear, residual), layer)
        update = g.op("Add", residual.update, update) if residual.update else update
        return layer_end(self, g, Residual(residual.stream, update), rows, layer, linear, per_layer_inputs)

    def attention_update(self, g: Scope, output: str, layer: int) -> str:
        """The update of the residual stream by attention, from its output [1, rows, H]."""
        return self._update(g, output, layer, self.spec.norms(layer).attention_out)

    def mlp_update(self, g: Scope, output: str, layer: int) -> str:
        """The update of the residual stream by the MLP, from its output [1, rows, H]."""
        return self._update(g, output, layer, self.spec.norms(layer).mlp_out)

    def before_mlp(self, g: Scope, update: str, normed: str, residual: Residual, layer: int) -> tuple[str, Residual]:
        """The rows that the MLP reads, and the residual stream with attention's `update` ('' for none): in parallel
        layers pending, else added. `normed` and `residual` are the results of `enter`.
        """
        if not self.spec.parallel:
            return self._half(g, Residual(residual.stream, update), layer, self.spec.norms(layer).mlp)
        if self.spec.mlp_norm:
            normed, _ = self.norm(g, residual, self.spec.weight_name(layer, self.spec.mlp_norm))
        return normed, Residual(residual.stream, update)

    def _half(self, g: Scope, residual: Residual, layer: int, name: str | None) -> tuple[str, Residual]:
        """The rows that attention or the MLP reads: through the norm `name`, or without one as they are."""
        if name:
            return self.norm(g, residual, self.spec.weight_name(layer, name))
        total = g.op("Add", residual.stream, residual.update) if residual.update else residual.stream
        return total, Residual(total)

    def _update(self, g: Scope, output: str, layer: int, name: str | None) -> str:
        """The update by a half of a layer: its output under the norm `name`, times the multiplier, each if any."""
        update = self.norm(g, Residual(output), self.spec.weight_name(layer, name))[0] if name else output
        scale = self.spec.residual_scale
        return update if scale == 1.0 else g.op("Mul", update, g.number(scale))

    def unit_rms(self, g: Scope, x: str) -> str:
        """x [.., H] over its root mean square."""
        ones = g.store.once("unit_rms.ones", lambda: np.ones(self.spec.hidden, np.float32))
        return g.norm(x, ones, eps=UNIT_RMS_EPS)

    def mlp(self, g: Scope, normed: str, rows: Rows, layer: int, linear: Linear, residual: Residual) -> str:
        """The update that the MLP adds to rows, which are `normed` and `residual` as of `before_mlp`."""
        if self.spec.mlp_kind(layer) == "experts":
            return experts(self, g, normed, rows, layer, linear, residual)
        family = self.spec.family
        return linear(g, linear(g, normed, rows, layer, family.up, activated=True), rows, layer, family.down)

    def activated(self, g: Scope, inner: str, layer: int, half: int, clamp: tuple[float, float] | None = None) -> str:
        """The MLP's activation of its first map's outputs, times the second `half` of them where there is a gate.
        `clamp`: as of `MixtureSpec`."""
        if not self.spec.family.gated:
            return activate(self, g, inner, layer)
        gate, up = g.ops("Split", inner, g.ints(half, half), out=(None, None), axis=-1)
        if clamp is not None:
            return clamped_swiglu(g, gate, up, *clamp)
        return g.op("Mul", activate(self, g, gate, layer), up)
