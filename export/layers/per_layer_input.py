"""Writes what Gemma 4's layers have beyond attention and an MLP as nodes: an input of a layer's own for every token, a
factor of the residual stream, and values over their root mean square.

    i_l = (norm(W e) + t_l) / sqrt 2             e: a token's embedding, t: its row in a second table; a part of both
    h + norm(U (gelu(G h) * i_l))                for each layer l, after its MLP

Rows without a token, such as streams, go without it: their i_l is zero, and so is what the layer then adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from streamspec.export.file_blocks.kinds import KINDS
from streamspec.export.layers.activations import activate
from streamspec.export.ops.builder import Scope
from streamspec.export.quantization.precisions import Rows, Weight
from streamspec.export.spec.weight_source import StoredBlocks

if TYPE_CHECKING:
    from streamspec.export.layers.decoder import Decoder, Residual
    from streamspec.export.layers.heads import Linear
    from streamspec.export.spec.decoder_spec import DecoderSpec


def layer_inputs(decoder: Decoder, g: Scope, ids: str, start: Residual, rows: Rows) -> str:
    """i [1, n, layers * width] of ids [1, n] that enter the first layer as `start`; '' where layers have
    none.
    """
    spec, names, source = decoder.spec, decoder.spec.family.per_layer_input, decoder.source
    if names is None or not spec.per_layer_width:
        return ""
    layers, width, (of_table, of_map, of_sum) = spec.layers, spec.per_layer_width, spec.per_layer_scales
    parts = g.ints(1, -1, layers, width)
    name = f"{spec.stacked(names.table)}.weight"
    # A row of its own for each token and layer: in few bits each has its scale.
    table = Weight(
        name,
        spec.vocab * layers,
        width,
        lambda: source.rows_of(name),
        looked_up=True,
        stored=lambda: _apart(source.stored_table(name), width),
    )
    at = g.op("Mul", g.op("Unsqueeze", ids, g.ints(2)), g.ints(layers))
    numbers = g.op("Add", at, g.store.constant(np.arange(layers), np.int64))
    known = decoder.look_up(g, g.op("Reshape", numbers, g.ints(1, -1)), table)
    known = g.op("Mul", g.op("Reshape", known, parts), g.number(of_table))
    context = f"{spec.stacked(names.context)}"
    weight = Weight(context, layers * width, spec.hidden, lambda: source.weight(f"{context}.weight"))
    mapped = decoder.linear_map(g, start.stream, rows, weight)
    scaled = g.op("Reshape", g.op("Mul", mapped, g.number(of_map)), parts)
    normed, _ = decoder.norm(g, type(start)(scaled), spec.stacked(names.context_norm))
    total = g.op("Mul", g.op("Add", normed, known), g.number(of_sum))
    return g.op("Reshape", total, g.ints(1, -1, layers * width))


def _apart(table: StoredBlocks | None, width: int) -> Sequence[StoredBlocks] | None:
    """A token's numbers for each layer, `width` of them, as rows; None where these are not whole blocks."""
    if table is None or table.kind not in KINDS or width % KINDS[table.kind].weights:
        return None
    parts = table.columns // width
    return [StoredBlocks(table.kind, table.data.reshape(len(table.data) * parts, -1), width)]


def layer_end(
    decoder: Decoder, g: Scope, residual: Residual, rows: Rows, layer: int, linear: Linear, per_layer_inputs: str
) -> Residual:
    """The residual stream after a layer whose MLP's update is pending: with the layer's part of `per_layer_inputs`
    (`layer_inputs`, '' for none) and times its factor, each where the family has it.
    """
    spec, names, factor = decoder.spec, decoder.spec.family.per_layer_input, decoder.spec.family.layer_scale
    if not per_layer_inputs and factor is None:
        return residual
    stream = g.op("Add", residual.stream, residual.update)
    if per_layer_inputs and names is not None:
        first, last = (g.ints(number * spec.per_layer_width) for number in (layer, layer + 1))
        own = g.op("Slice", per_layer_inputs, first, last, g.ints(2))
        gated = g.op("Mul", activate(decoder, g, linear(g, stream, rows, layer, (names.gate,)), layer), own)
        mapped = type(residual)(linear(g, gated, rows, layer, (names.up,)))
        added, _ = decoder.norm(g, mapped, spec.weight_name(layer, names.out_norm))
        stream = g.op("Add", stream, added)
    if factor is None:
        return type(residual)(stream)
    name = spec.weight_name(layer, factor)
    return type(residual)(g.op("Mul", stream, g.store.once(name, lambda: decoder.source.weight(name))))


def value_norm(decoder: DecoderSpec, g: Scope, values: str, layer: int) -> str:
    """Values [1, n, Hkv*D], each head over its root mean square."""
    spec = decoder.at(layer)
    ones = g.store.once(f"value_norm.{spec.head_dim}", lambda: np.ones(spec.head_dim, np.float32))
    split = g.op("Reshape", values, g.ints(0, 0, spec.kv_heads, spec.head_dim))
    normed = g.norm(split, ones, eps=spec.eps)
    return g.op("Reshape", normed, g.ints(0, 0, spec.kv_heads * spec.head_dim))
