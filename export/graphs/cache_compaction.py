"""Moving the rows of an accepted path inside a cache that lies on a device: a small graph beside the step graph.

The caller binds each part of the cache as past and present, so that rows move where they lie; they are read before any
is written. See docs/architecture.md, "The cache". Knows nothing about decoders.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto

from streamspec.export.ops.builder import Scope, WeightStore, finish, tensor

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def compact_graph(layers: int, kv_heads: int, head_dim: int, exit_layer: int | None = None) -> onnx.ModelProto:
    """Copies the slots `rows` int64 [k] to those from `start` int64 [1] on, in the cache [1, Hkv, S, D] of each layer;
    from `exit_layer` on, where rows may have been pruned, `rows_above` to those from `start_above` on."""
    g = Scope(WeightStore())
    cache: list[int | str] = [1, kv_heads, "S", head_dim]
    suffixes = [""] if exit_layer is None else ["", "_above"]
    inputs = [
        value
        for suffix in suffixes
        for value in (tensor(f"rows{suffix}", INT64, [f"k{suffix}"]), tensor(f"start{suffix}", INT64, [1]))
    ]
    outputs = []
    for layer in range(layers):
        suffix = "_above" if exit_layer is not None and layer >= exit_layer else ""
        for kind in ("key", "value"):
            past, present = f"past_key_values.{layer}.{kind}", f"present.{layer}.{kind}"
            g.op(
                "TensorScatter",
                past,
                g.op("Gather", past, f"rows{suffix}", axis=2),
                f"start{suffix}",
                out=present,
                axis=2,
            )
            inputs.append(tensor(past, FLOAT, cache))
            outputs.append(tensor(present, FLOAT, cache))
    return finish(g, inputs, outputs, "streamspec")
