"""Moves the rows of an accepted path inside a KV cache that lies on a device: a small graph beside the step graph.

The caller binds each part of the cache as past and present, so that rows move where they lie; they are read before any
is written. See docs/explain/how-it-works.md, "The KV cache".
"""

from __future__ import annotations

import onnx

from streamspec.export.ops.builder import Scope, WeightStore, declared, finish
from streamspec.step_graph import (
    COMPACTION,
    ROWS,
    ROWS_ABOVE,
    START,
    START_ABOVE,
    GraphFeatures,
    inputs,
    outputs,
    past,
    present,
)


def compact_graph(features: GraphFeatures) -> onnx.ModelProto:
    """Copies the slots `rows` int64 [k] to those from `start` int64 [1] on, in the cache [1, Hkv, S, D] of each layer;
    from `exit_layer` on, where rows may have been pruned, `rows_above` to those from `start_above` on."""
    g = Scope(WeightStore())
    for layer in range(features.cache_layers):
        above = features.exit_layer is not None and layer >= features.exit_layer
        rows, start = (ROWS_ABOVE, START_ABOVE) if above else (ROWS, START)
        for kind in features.cache(layer).named_parts:
            cache, ring = past(layer, kind), features.cache(layer).of(kind)[0].window is not None
            slots = _in_circle(g, rows, cache) if ring else rows
            moved, mode = g.op("Gather", cache, slots, axis=2), {"mode": "circular"} if ring else {}
            g.op("TensorScatter", cache, moved, start, out=present(layer, kind), axis=2, **mode)
    graph_inputs, graph_outputs = inputs(COMPACTION, features), outputs(COMPACTION, features)
    return finish(g, declared(graph_inputs), declared(graph_outputs))


def _in_circle(g: Scope, rows: str, cache: str) -> str:
    """int64 [k]: the slots of `rows` in a ring, their remainder by its slots."""
    size = g.op("Shape", cache, start=2, end=3)
    return g.remainder(rows, size)
