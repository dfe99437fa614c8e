"""Writes attention to narrow states as nodes (multi-head latent attention, DeepSeek V2).

A row keeps one state c of `rank` numbers and one turned key r for all heads; keys and values of head h are made of c:

    q_h . k_h = q_h^r . r + q_h^c . (K_h c) = q_h^r . r + (K_h^T q_h^c) . c
    sum_j p_j V_h c_j = V_h (sum_j p_j c_j)

So K_h is applied to the query and V_h after attention, which then is one over a single key head: keys (r, c), and
values of the same width, of which heads return the last `rank` numbers. Nothing as wide as all heads' keys is kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from streamspec.adapters.base_models.gguf.tensors import LATENT_SIDES
from streamspec.export.layers.heads import GatedHeads, Linear
from streamspec.export.ops.builder import Scope
from streamspec.export.quantization.precisions import Rows, Weight
from streamspec.export.spec.weight_source import StoredBlocks

if TYPE_CHECKING:
    from streamspec.export.layers.decoder import Decoder

KEYS, VALUES = LATENT_SIDES  # the two maps of each head, as llama.cpp calls them


def attention_maps(decoder: Decoder, layer: int, linear: Linear | None = None) -> GatedHeads | LatentHeads:
    """What applies the maps around the attention of a layer, each by `linear`, or else by the decoder's own."""
    if decoder.spec.latent is not None:
        return LatentHeads(decoder, layer, linear or decoder.linear)
    return GatedHeads(decoder.spec.at(layer), linear or decoder.linear)


class LatentHeads:
    """Applies the maps of a layer of `decoder`: queries of all heads beside a row's key, which is its value, too."""

    def __init__(self, decoder: Decoder, layer: int, linear: Linear) -> None:
        sizes, names = decoder.spec.latent, decoder.spec.family.latent_attention
        assert sizes is not None and names is not None
        self.decoder, self.layer, self.linear, self.sizes, self.names = decoder, layer, linear, sizes, names

    def __call__(
        self, g: Scope, x: str, rows: Rows, layer: int, modules: tuple[str, ...], activated: bool = False
    ) -> str:
        """[1, n, (Hq + 2) * width] of x [1, n, H]; turned numbers of a head are its first."""
        spec, sizes, (mixer,) = self.decoder.spec, self.sizes, self.decoder.spec.mixers(layer)
        mapped = self.linear(g, x, rows, layer, modules, activated)
        widths = g.ints(spec.out_width(modules[0]), sizes.rank, sizes.turned)
        queries, state, turned = g.ops("Split", mapped, widths, out=(None,) * 3, axis=-1)
        if mixer.between:
            queries = self.linear(g, self._normed(g, queries, self.names.query_norm), rows, layer, mixer.between)
        key = g.op("Concat", turned, self._normed(g, state, self.names.norm), axis=-1)
        own = g.ints(spec.heads * sizes.turned, spec.heads * sizes.still)
        first, still = g.ops("Split", queries, own, out=(None, None), axis=-1)
        by_head = g.op("Reshape", first, g.ints(0, 0, spec.heads, sizes.turned))
        made = self._by_head(g, g.op("Reshape", still, g.ints(0, 0, spec.heads, sizes.still)), KEYS)
        heads = g.op("Reshape", g.op("Concat", by_head, made, axis=-1), g.ints(0, 0, spec.heads * sizes.width))
        return g.op("Concat", heads, key, key, axis=-1)

    def applied(self, g: Scope, mixed: str) -> str:
        """[1, n, Hq * values] of what attention returns [1, n, Hq * width]."""
        heads, sizes = self.decoder.spec.heads, self.sizes
        each = g.op("Reshape", mixed, g.ints(0, 0, heads, sizes.width))
        states = g.op("Slice", each, g.ints(sizes.turned), g.ints(sizes.width), g.ints(3))
        return g.op("Reshape", self._by_head(g, states, VALUES), g.ints(0, 0, heads * sizes.values))

    def _normed(self, g: Scope, x: str, module: str) -> str:
        (weight,), eps = self.decoder.norm_weights(g, self._name(module)), self.sizes.eps
        return g.norm(x, weight, eps=eps)

    def _by_head(self, g: Scope, x: str, part: str) -> str:
        """[1, n, Hq, out] of x [1, n, Hq, in], each head by a map of its own."""
        heads, stack = self.decoder.spec.heads, self._stack(part)
        count = g.op("Shape", x, start=1, end=2)
        out = stack.parts[0].rows
        if self.decoder.native is not None:
            numbers = g.store.constant(np.arange(heads).reshape(1, 1, -1), np.int64)
            chosen = g.op("Expand", numbers, g.op("Concat", g.ints(1), count, g.ints(heads), axis=0))
            return self.decoder.native.experts(g, x, chosen, stack)
        by_head = g.op("Reshape", g.op("Transpose", x, perm=[0, 2, 1, 3]), g.ints(1, -1, stack.columns))
        counts, rows = g.op("Expand", count, g.ints(heads)), Rows(g.op("Shape", by_head, start=1, end=2))
        made = self.decoder.precision.grouped(g, by_head, rows, counts, stack)
        return g.op("Transpose", g.op("Reshape", made, g.ints(1, heads, -1, out)), perm=[0, 2, 1, 3])

    def _stack(self, part: str) -> Weight:
        """The maps of all heads, one after the other."""
        source, sizes, heads = self.decoder.source, self.sizes, self.decoder.spec.heads
        both, name = f"{self._name(self.names.heads)}.weight", self._name(f"{self.names.heads}.{part}")
        out, into = (sizes.rank, sizes.still) if part == KEYS else (sizes.values, sizes.rank)

        def of(head: int) -> Weight:
            return Weight(
                f"{name}.{head}",
                out,
                into,
                lambda: sizes.parts(source.weight(both), heads)[part == VALUES][head],
                drafter=self.decoder.drafter,
                stored=lambda: stored(head),
            )

        def stored(head: int) -> list[StoredBlocks] | None:
            blocks = source.stored(f"{name}.weight")
            return None if blocks is None else [replace(blocks, data=blocks.data[head * out : (head + 1) * out])]

        every = tuple(of(head) for head in range(heads))
        return replace(every[0], name=name, rows=heads * out, parts=every)

    def _name(self, module: str) -> str:
        return self.decoder.spec.weight_name(self.layer, module)
