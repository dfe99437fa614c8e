"""Moving the rows of an accepted path inside a cache that lies on a device: a small graph beside the step graph.

The caller binds each part of the cache as past and present, so that rows move where they lie. Sources may overlap targets: they are read first.
Source: docs/architecture.md, "The cache". Knows nothing about decoders.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto

from streamspec.export.builder import Scope, WeightStore, finish, tensor

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def compact_graph(layers: int, kv_heads: int, head_dim: int) -> onnx.ModelProto:
    """Inputs `rows` int64 [k], ascending slots, `start` int64 [1] and the cache [1, Hkv, S, D] of each layer; outputs the cache with
    those rows copied to the slots from `start` on."""
    g = Scope(WeightStore())
    cache: list[int | str] = [1, kv_heads, "S", head_dim]
    inputs, outputs = [tensor("rows", INT64, ["k"]), tensor("start", INT64, [1])], []
    for layer in range(layers):
        for kind in ("key", "value"):
            past, present = f"past_key_values.{layer}.{kind}", f"present.{layer}.{kind}"
            g.op("TensorScatter", past, g.op("Gather", past, "rows", axis=2), "start", out=present, axis=2)
            inputs.append(tensor(past, FLOAT, cache))
            outputs.append(tensor(present, FLOAT, cache))
    return finish(g, inputs, outputs, "streamspec")
