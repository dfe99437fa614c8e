"""A scope for graphs that a device captures: rows are counted nowhere at run time, fused operators stay.

As in `static_scope`, what depends on known shapes alone is computed here. The number of rows is not known: a node that
would look it up is a mistake of this package and fails at export, never on the device, where it would run on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, TypeProto, helper

from streamspec.export.ops.builder import WeightStore
from streamspec.export.ops.static_scope import StaticScope

# A CUDA kernel without an end version takes its operator's own version alone (onnxruntime, kernel_registry.cc). Of
# `Equal`, `ReduceMax` and `TopK` it has none newer than 13, 18 and 11: no newer opset has a kernel for every node.
OPSET = 18


class CapturedScope(StaticScope):
    """Nodes of a graph whose inputs have known shapes but for their rows. `lacks`: fused operators that are lowered, as
    the device has no kernel for them."""

    def __init__(self, store: WeightStore, inputs: Iterable[onnx.ValueInfoProto], lacks: Collection[str] = ()) -> None:
        super().__init__(store, inputs, OPSET)
        self.lowered = frozenset(lacks)

    def shaped(self, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
        """See `StaticScope`; shapes that a call has are not known."""
        if node.op_type in _SHAPES:
            kind = _SHAPES[node.op_type]([self._type(name) for name in node.input if name], attributes)
            self._types |= {name: kind for name in node.output if name}
        else:
            self._infer(node)

    def columns(self, x: str, parts: Sequence[str]) -> tuple[str, ...]:
        """See `Scope`; how many columns the last part has may be unknown."""
        counts = [self.shape(part)[2] for part in parts[:-1]]
        edges = [sum(counts[:number]) for number in range(len(parts))]
        return tuple(
            self.op("Slice", x, self.ints(start), self.ints(end), self.ints(-1))
            for start, end in pairwise([*edges, np.iinfo(np.int64).max])
        )


def _same(types: list[TypeProto], attributes: Mapping[str, Any]) -> TypeProto:
    return types[0]


def _floats(*dims: TensorProto.DataType | onnx.TensorShapeProto.Dimension) -> TypeProto:
    kind = helper.make_tensor_type_proto(TensorProto.FLOAT, [None] * len(dims))
    for own, dim in zip(kind.tensor_type.shape.dim, dims, strict=True):
        own.CopyFrom(dim)
    return kind


def _product(types: list[TypeProto], attributes: Mapping[str, Any]) -> TypeProto:
    a, b = (list(kind.tensor_type.shape.dim) for kind in types)
    rows = a[-1] if attributes.get("transA") else a[-2]
    return _floats(*a[:-2], rows, b[-2] if attributes.get("transB") else b[-1])


def _blocks(types: list[TypeProto], attributes: Mapping[str, Any]) -> TypeProto:
    out = onnx.TensorShapeProto.Dimension(dim_value=attributes["N"])
    return _floats(*list(types[0].tensor_type.shape.dim)[:-1], out)


def _rows_of_blocks(types: list[TypeProto], attributes: Mapping[str, Any]) -> TypeProto:
    table, ids = (list(kind.tensor_type.shape.dim) for kind in types[:2])
    return _floats(*ids, *table[1:])


# by kind, operators of ONNX Runtime's own: the type of all their outputs
_SHAPES: dict[str, Callable[[list[TypeProto], Mapping[str, Any]], TypeProto]] = {
    **dict.fromkeys(
        (
            "SimplifiedLayerNormalization",
            "SkipSimplifiedLayerNormalization",
            "SkipLayerNormalization",
            "RotaryEmbedding",
            "QuickGelu",
            "FastGelu",
            "Gelu",
        ),
        _same,
    ),
    "FusedMatMul": _product,
    "MatMulNBits": _blocks,
    "GatherBlockQuantized": _rows_of_blocks,
}
