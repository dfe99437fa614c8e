"""Writes the operators of the domain `streamspec` in place of groups of standard nodes.

Their inputs and attributes: docs/reference/native-operators.md.

Weights are the same tensors of the data file that the graph of standard operators reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from streamspec.export.ops.builder import NATIVE, Scope, WeightStore
from streamspec.export.quantization.precisions import Weight
from streamspec.export.spec.decoder_spec import DecoderSpec, StateSizes
from streamspec.layer_cache import DTYPES, KEY, RECURRENT, STATE_SPACE
from streamspec.step_graph import CACHE_KINDS, PAST_LENGTH, SEQUENCE_ROWS, TREE_MASK, past, present

if TYPE_CHECKING:
    from streamspec.export.spec.draft_spec import DraftSpec

ACTIVATIONS = {"": 0, "silu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}  # by `DecoderSpec.activation`
LANES, WIDEST = 16, 1024  # a head's width is a multiple of the one, up to the other
TAPS = 8  # of a short convolution, at most
RULES = {RECURRENT: "GatedDeltaRule", STATE_SPACE: "StateSpace"}  # of layers with a recurrent state


@runtime_checkable
class TiledPrecision(Protocol):
    """A precision whose weights lie in tiles."""

    def of(self, weight: Weight) -> TiledPrecision:
        """The precision that the weight is written in."""

    def runs(self, weight: Weight) -> Sequence[Weight]:
        """The weights whose outputs side by side are those of `weight`: itself, where one operator applies it."""

    def operator(self, store: WeightStore, weight: Weight) -> tuple[str, tuple[str, ...], dict[str, int]]:
        """The operator that applies `weight` [out, in], its inputs after the rows but for a bias, and attributes of its
        own."""

    def embedding(self, g: Scope, ids: str, weight: Weight) -> str:
        """As of `Precision`."""

    def table(self, store: WeightStore, weight: Weight) -> tuple[str, tuple[str, ...], dict[str, int]]:
        """An embedding or LM head: how the names of its operators end, its inputs but for rows and a bias, and
        attributes of its own."""


def native_ops(precision: object) -> NativeOps | None:
    """Native operators for a precision whose weights lie in tiles; None for others."""
    return NativeOps(precision) if isinstance(precision, TiledPrecision) else None


@dataclass(frozen=True)
class PackedHeads:
    """Queries, keys and values of rows side by side [1, n, (Hq + 2 Hkv) * D]; queries alone of a layer that attends to
    another's. `rotary`: cos and sin [n, rotated / 2] where they are still to be turned; `norms`: weights of the heads'
    norms, where they are still to be applied; `sinks` [Hq]: as of `AttentionHeads.sinks`."""

    packed: str
    rotary: Sequence[str] = ()
    norms: Sequence[str] = ()
    sinks: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)


class NativeOps:
    """Nodes of native operators for one precision."""

    def __init__(self, precision: TiledPrecision) -> None:
        self.precision = precision

    def activates(self, activation: str, weight: Weight, gated: bool) -> bool:
        """Whether `linear` can apply this activation, and the gate where there is one."""
        return activation in ACTIVATIONS and weight.gated == gated and len(self.precision.runs(weight)) == 1

    def linear(self, g: Scope, x: str, weight: Weight, bias: str = "", activation: str = "") -> str:
        """`weight` applied to x [.., in], a bias [out] added, and an activation, times the second half of the outputs
        where the weight is gated: [.., out or out / 2]."""
        parts = self.precision.runs(weight)
        if len(parts) > 1:
            whole = g.op("Concat", *(self.linear(g, x, part) for part in parts), axis=-1)
            return g.op("Add", whole, bias) if bias else whole
        kind, inputs, own = self.precision.of(weight).operator(g.store, weight)
        return self._map(g, kind, x, inputs, weight, bias, activation, None, **{"mix": weight.mix} | own)

    def experts(
        self,
        g: Scope,
        x: str,
        chosen: str,
        stack: Weight,
        shares: str = "",
        bias: str = "",
        activation: str = "",
        clamp: tuple[float, float] | None = None,
    ) -> str:
        """The parts of a `stack` that rows chose, int64 [1, n, active], applied to x [1, n, in], or [1, n, active, in]
        with a row for each choice: [1, n, active, out], or with `shares` [1, n, active] the sum [1, n, out] of these
        times what they give. `bias`: of all parts [parts * out]; `clamp`: of the activation (`MixtureSpec`)."""
        runs = self.precision.runs(stack)
        if len(runs) > 1:
            assert not shares and not activation
            whole = g.op("Concat", *(self.experts(g, x, chosen, run) for run in runs), axis=-1)
            biases = g.op("Reshape", bias, g.ints(len(stack.parts), -1)) if bias else ""
            return g.op("Add", whole, g.op("Gather", biases, chosen, axis=0)) if bias else whole
        kind, inputs, own = self.precision.of(stack).operator(g.store, stack)
        attributes: dict[str, Any] = {"mix": stack.mix} | own | {"maps": len(stack.parts)}
        attributes |= dict(zip(("alpha", "limit"), clamp, strict=True)) if clamp and activation else {}
        kind = kind.replace("Linear", "Experts")
        return self._map(g, kind, x, (chosen, shares, *inputs), stack.parts[0], bias, activation, None, **attributes)

    def head(
        self, g: Scope, x: str, rows: object, weight: Weight, out: str | None = None, bias: str = ""
    ) -> tuple[str, str]:
        """The LM head over x [r, H], a bias [V] added: logits [r, V], and '' for their factor."""
        suffix, inputs, own = self.precision.table(g.store, weight)
        return self._map(g, f"Linear{suffix}", x, inputs, weight, bias, "", out, **own), ""

    def embedding(self, g: Scope, ids: str, weight: Weight) -> str:
        """Rows [1, n, H] of the table for ids [1, n]; by standard nodes where it lies in no tiles."""
        if weight.looked_up:
            return self.precision.embedding(g, ids, weight)
        suffix, inputs, own = self.precision.table(g.store, weight)
        attributes: dict[str, Any] = {**own, "in_features": weight.columns, "out_features": weight.rows}
        return g.op(f"Embedding{suffix}", ids, *_given(inputs), domain=NATIVE, **attributes)

    def normalises(self, width: int) -> bool:
        """Whether the norm of rows of this width is one operator."""
        return width % LANES == 0

    def norm(self, g: Scope, x: str, update: str, weight: str, eps: float) -> tuple[str, str]:
        """The root mean square norm of x + `update` ('' for none) [.., width], and x + `update`."""
        if not update:
            return g.op("SkipRmsNorm", x, weight, domain=NATIVE, eps=float(eps)), x
        normed, total = g.ops("SkipRmsNorm", x, weight, update, out=(None, None), domain=NATIVE, eps=float(eps))
        return normed, total

    def argmax(self, g: Scope, x: str) -> str:
        """The place of the largest of each row of x [.., n]: int64 [..]."""
        return g.op("ArgMax", x, domain=NATIVE)

    def attends(self, spec: DecoderSpec) -> bool:
        """Whether attention over heads of this width is one operator."""
        return spec.head_dim % LANES == 0 and spec.head_dim <= WIDEST

    def takes_several(self, spec: DecoderSpec, drafter: DraftSpec | None) -> bool:
        """Whether the rows of a call may be of several sequences: no layer keeps them but these operators, and all of
        them."""
        layers, own = range(spec.layers), drafter is not None and (drafter.own_layers or drafter.levels)
        keep_all = all(spec.ring(i) is None and spec.source(i) == i and not spec.conv_widths[i] for i in layers)
        return keep_all and not own and all(self.attends(spec.at(i)) for i in layers)

    def attention(
        self, g: Scope, spec: DecoderSpec, heads: PackedHeads, bias: str, layer: int, several: bool = False
    ) -> tuple[str, tuple[str, ...]]:
        """Attention of rows [1, n, Hq*D] that are written to the cache of `layer`, under an additive bias [1, 1, n,
        slots in use], and the cache after it. `spec`: of the layer; `several`: rows may be of several
        sequences, as an input says whose default is one."""
        if several and SEQUENCE_ROWS not in g.store:
            g.store.add_inline(SEQUENCE_ROWS, np.array([-1]))
        ring = int(spec.ring(layer) is not None)
        caches = [past(layer, kind) for kind in CACHE_KINDS]
        mixed, *written = self._attend(
            g,
            "Attention",
            spec,
            heads,
            (bias, PAST_LENGTH, *caches),
            out=(None, *(present(layer, kind) for kind in CACHE_KINDS)),
            counts=(SEQUENCE_ROWS if several else "",),
            ring=ring,
        )
        return mixed, tuple(written)

    def draft_attention(
        self, g: Scope, spec: DecoderSpec, heads: PackedHeads, bias: str, caches: Sequence[str], own: bool
    ) -> str:
        """Attention of rows [1, m, Hq*D] over `caches` and, where `own`, over the rows' own keys, under an additive
        bias [m, slots in use, then the rows]. Nothing is written."""
        return self._attend(g, "DraftAttention", spec, heads, (bias, *caches), out=(None,), own=int(own))[0]

    def convolves(self, taps: int) -> bool:
        """Whether a short convolution of `taps` rows is one operator."""
        return taps <= TAPS

    def short_conv(
        self, g: Scope, mapped: str, tree_mask: str, layer: int, taps: Sequence[str], ring: bool
    ) -> tuple[str, str]:
        """What the output map of a short convolution reads [1, n, H], of rows `mapped` [1, n, 3 H] under a mask
        [n, n], and the cache of `layer` after them. `taps`: as of `tap_weights`."""
        mixed, written = g.ops(
            "ShortConv",
            mapped,
            tree_mask,
            PAST_LENGTH,
            past(layer, KEY),
            *taps,
            out=(None, present(layer, KEY)),
            domain=NATIVE,
            ring=int(ring),
        )
        return mixed, written

    def remembers(self, kind: str, sizes: StateSizes, taps: int) -> bool:
        """Whether layers with recurrent states of this `kind` of `LAYER_KINDS` and these sizes, after a convolution of
        `taps` rows, are one operator."""
        return (
            kind in RULES
            and taps <= TAPS
            and all(width % LANES == 0 and width <= WIDEST for width in (sizes.key_width, sizes.width))
        )

    def recurrent(
        self,
        g: Scope,
        kind: str,
        mapped: str,
        caches: tuple[Sequence[str], Sequence[str]],
        sizes: StateSizes,
        eps: float,
        weights: Sequence[str],
        **attributes: float,
    ) -> str:
        """What the output map of a layer with a recurrent state of this `kind` reads [1, n, values], of the call's rows
        `mapped` by the input maps; writes its cache, whose parts have the names `caches` before and after. `weights`:
        bias and rate of decays; of a state space the skip; of the norm or ''; of a state space the convolution's bias
        or ''; and its weights of the row itself, of that before it, .."""
        outputs = g.ops(
            RULES[kind],
            mapped,
            TREE_MASK,
            PAST_LENGTH,
            *caches[0],
            *weights,
            out=(None, *caches[1]),
            domain=NATIVE,
            eps=float(eps),
            **sizes._asdict(),
            **attributes,
        )
        return outputs[0]

    def _attend(
        self,
        g: Scope,
        kind: str,
        spec: DecoderSpec,
        heads: PackedHeads,
        inputs: Sequence[str],
        out: tuple[str | None, ...],
        counts: Sequence[str] = (),
        **attributes: int,
    ) -> tuple[str, ...]:
        half = "" if spec.cache_dtype == DTYPES[0] else "Float16"
        norms = (*heads.norms, *[""] * (2 - len(heads.norms)))
        optional = *(heads.rotary or ("", "")), *norms, *counts, heads.sinks
        return g.ops(
            f"{kind}{half}",
            *_given((heads.packed, *inputs, *optional)),
            out=out,
            domain=NATIVE,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            width=spec.head_dim,
            scale=float(spec.attention_scale),
            cap=float(spec.attention_cap or 0.0),
            eps=float(spec.eps),
            **heads.attributes,
            **attributes,
        )

    def _map(
        self,
        g: Scope,
        kind: str,
        x: str,
        inputs: Sequence[str],
        weight: Weight,
        bias: str = "",
        activation: str = "",
        out: str | None = None,
        **own: Any,
    ) -> str:
        biases = (*[""] * (kind == "LinearInt4" and len(inputs) == 2), bias) if bias else ()
        return g.op(
            kind,
            x,
            *(inputs if bias else _given(inputs)),
            *biases,
            out=out,
            domain=NATIVE,
            in_features=weight.columns,
            out_features=weight.rows,
            gated=int(weight.gated),
            activation=ACTIVATIONS[activation],
            **own,
        )


def _given(inputs: Sequence[str]) -> Sequence[str]:
    """Without those at the end that are left out."""
    return inputs[: max(i + 1 for i, name in enumerate(inputs) if name)]
