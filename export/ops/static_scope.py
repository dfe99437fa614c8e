"""A scope in which every shape is known: it lowers operators that few providers have to primitive ones, and folds
everything that depends on shapes alone to constants.

The decoder and the drafters are written once, with fused operators and with rows counted at run time. Here each node is
looked up in `LOWERED`; then, where all its inputs are constants, computed on the spot (`Shape` always is); then added.
So the static graph holds standard operators of fixed shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, TypeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from streamspec.export.ops.builder import Array, Scope, WeightStore

Lowering = Callable[..., tuple[str, ...]]


class StaticScope(Scope):
    """Nodes of a graph whose inputs have fixed shapes, in opset `opset`."""

    def __init__(self, store: WeightStore, inputs: Iterable[onnx.ValueInfoProto], opset: int) -> None:
        super().__init__(store)
        self.opset, self.lowered = helper.make_opsetid("", opset), frozenset(LOWERED)
        self._types: dict[str, TypeProto] = {value.name: value.type for value in inputs}

    def shape(self, value: str) -> tuple[int, ...]:
        """The shape of any value of this graph."""
        return tuple(size.dim_value for size in self._type(value).tensor_type.shape.dim)

    def ops(
        self, kind: str, *inputs: str, out: tuple[str | None, ...], domain: str = "", **attributes: Any
    ) -> tuple[str, ...]:
        """Adds a node as `Scope.ops` does, lowered to standard operators or computed where all its inputs are known,
        and infers its shapes."""
        assert not any(out) or kind not in {*self.lowered, "Shape"}, f"{kind} is replaced: it cannot give names"
        if kind in self.lowered:
            return LOWERED[kind](self, *inputs, **attributes)
        if kind == "Shape":
            sizes = self.shape(inputs[0])[attributes.get("start", 0) : attributes.get("end")]
            assert all(sizes), f"{inputs[0]} has {sizes} rows: their number is not known before the call"
            return (self.ints(*sizes),)
        if not domain and not any(out) and (known := self._computed(kind, inputs, attributes)):
            return known
        names = super().ops(kind, *inputs, out=out, domain=domain, **attributes)
        self.shaped(self.nodes[-1], attributes)
        return names

    def shaped(self, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
        """Infers the shapes of what a node gives."""
        self._infer(node)
        if node.op_type == "Reshape":  # its shape is known now
            node.input[1] = self.ints(*self.shape(node.output[0]))

    def drop_unused(self, outputs: Iterable[str]) -> None:
        """Removes the nodes that no output of the graph depends on."""
        needed, kept = set(outputs), []
        for node in reversed(self.nodes):
            if needed.intersection(node.output):
                kept.append(node)
                needed.update(node.input)
        self.nodes = kept[::-1]

    def _computed(self, kind: str, inputs: tuple[str, ...], attributes: dict[str, Any]) -> tuple[str, ...]:
        """The constant that a node over small constants gives; nothing where an input is none."""
        values = [self._value(name) for name in inputs]
        if any(value is None for value in values):
            return ()
        node = helper.make_node(kind, list(inputs), ["out"], **attributes)
        feed = {name: value for name, value in zip(inputs, values, strict=True) if name}
        result = np.asarray(ReferenceEvaluator(node).run(None, feed)[0])
        return (self.store.constant(result, result.dtype),)

    def _value(self, name: str) -> Array | None:
        proto = self.store.protos.get(name)
        if proto is None or name in self._types or proto.data_location == TensorProto.EXTERNAL:
            return None
        return np.asarray(numpy_helper.to_array(proto))

    def _infer(self, node: onnx.NodeProto) -> None:
        names = [name for name in node.input if name]
        schema = onnx.defs.get_schema(node.op_type, self.opset.version, node.domain)
        data = {name: self.store.protos[name] for name in names if self._value(name) is not None}
        types = {name: self._type(name) for name in names}
        self._types |= onnx.shape_inference.infer_node_outputs(schema, node, types, data, opset_imports=[self.opset])

    def _type(self, name: str) -> TypeProto:
        if name in self._types:
            return self._types[name]
        proto = self.store.protos[name]
        return helper.make_tensor_type_proto(proto.data_type, list(proto.dims))


# ---- one function for each operator that is not primitive: its inputs and attributes in, its outputs out


def _rms_norm(g: StaticScope, x: str, weight: str, *, epsilon: float, **_: Any) -> tuple[str]:
    return (g.op("Mul", _over_root_mean_square(g, x, epsilon), weight),)


def _layer_norm(g: StaticScope, x: str, weight: str, bias: str = "", *, epsilon: float, **_: Any) -> tuple[str]:
    centred = g.op("Sub", x, g.op("ReduceMean", x, g.ints(-1), keepdims=1))
    scaled = g.op("Mul", _over_root_mean_square(g, centred, epsilon), weight)
    return (g.op("Add", scaled, bias) if bias else scaled,)


def _over_root_mean_square(g: StaticScope, x: str, epsilon: float) -> str:
    mean = g.op("ReduceMean", g.op("Mul", x, x), g.ints(-1), keepdims=1)
    return g.op("Div", x, g.op("Sqrt", g.op("Add", mean, g.number(epsilon))))


def after_sum(norm: Lowering) -> Lowering:
    """Lowers a norm that adds an update first, to a sum and `norm`."""

    def skip(g: StaticScope, x: str, update: str, *weights: str, **attributes: Any) -> tuple[str, ...]:
        total = g.op("Add", x, update)
        return *norm(g, total, *weights, **attributes), "", "", total

    return skip


def _rotary(
    g: StaticScope,
    x: str,
    _first: str,
    cos: str,
    sin: str,
    *,
    rotary_embedding_dim: int = 0,
    num_heads: int = 0,
    interleaved: int = 0,
) -> tuple[str]:
    """x [1, n, heads * D]; cos, sin [n, rotated / 2]: the first half of the rotated numbers of each head turns with the
    second; `interleaved`: the even numbers turn with the odd ones. n need not be known.
    """
    width, half = g.shape(x)[2], g.shape(cos)[1]
    size = width // num_heads if num_heads else 2 * half
    heads = g.op("Reshape", x, g.ints(-1, width // size, size))
    rest = [size - 2 * half] if size > 2 * half else []
    if interleaved:
        turning, *kept = g.ops("Split", heads, g.ints(2 * half, *rest), out=(None,) * (1 + len(rest)), axis=-1)
        turning = g.op("Reshape", turning, g.ints(-1, width // size, half, 2))
        first, second = (
            g.op("Squeeze", half_turn, g.ints(-1))
            for half_turn in g.ops("Split", turning, g.ints(1, 1), out=(None, None), axis=-1)
        )
    else:
        first, second, *kept = g.ops("Split", heads, g.ints(half, half, *rest), out=(None,) * (2 + len(rest)), axis=-1)
    cos, sin = (g.op("Reshape", table, g.ints(-1, 1, half)) for table in (cos, sin))
    turned = [
        g.op("Sub", g.op("Mul", first, cos), g.op("Mul", second, sin)),
        g.op("Add", g.op("Mul", second, cos), g.op("Mul", first, sin)),
    ]
    if interleaved:
        pairs = g.op("Concat", *(g.op("Unsqueeze", side, g.ints(-1)) for side in turned), axis=-1)
        turned = [g.op("Reshape", pairs, g.ints(-1, width // size, 2 * half))]
    return (g.op("Reshape", g.op("Concat", *turned, *kept, axis=-1), g.ints(1, -1, width)),)


def _product(g: StaticScope, a: str, b: str, *, transB: int = 0, alpha: float = 1.0) -> tuple[str]:
    if alpha != 1.0:
        a = g.op("Mul", a, g.number(alpha))
    if transB:
        rank = len(g.shape(b))
        b = g.op("Transpose", b, perm=[*range(rank - 2), rank - 1, rank - 2])
    return (g.op("MatMul", a, b),)


def _expand(g: StaticScope, x: str, shape: str) -> tuple[str]:
    """Lowers to `Tile`, which one provider more has; to a constant where x is one."""
    sizes = numpy_helper.to_array(g.store.protos[shape])
    have = (1,) * (len(sizes) - len(g.shape(x))) + g.shape(x)
    repeats = [int(want) if size == 1 else 1 for want, size in zip(sizes, have, strict=True)]
    if len(have) > len(g.shape(x)):
        x = g.op("Reshape", x, g.ints(*have))
    return (x if all(n == 1 for n in repeats) else g.op("Tile", x, g.ints(*repeats)),)


def _silu(g: StaticScope, x: str, *, alpha: float) -> tuple[str]:
    return (g.op("Mul", x, g.op("Sigmoid", x if alpha == 1.0 else g.op("Mul", x, g.number(alpha)))),)


def _gelu(g: StaticScope, x: str) -> tuple[str]:
    inner = g.op("Erf", g.op("Mul", x, g.number(0.5**0.5)))
    return (g.op("Mul", g.op("Mul", x, g.number(0.5)), g.op("Add", inner, g.number(1))),)


def _gelu_tanh(g: StaticScope, x: str) -> tuple[str]:
    cubed = g.op("Mul", g.op("Mul", g.op("Mul", x, x), x), g.number(0.044715))
    inner = g.op("Tanh", g.op("Mul", g.op("Add", x, cubed), g.number((2 / np.pi) ** 0.5)))
    return (g.op("Mul", g.op("Mul", x, g.number(0.5)), g.op("Add", inner, g.number(1))),)


def _log_softmax(g: StaticScope, x: str, *, axis: int) -> tuple[str]:
    return (g.op("Sub", x, _log_sum_exp(g, x, g.ints(axis))[0]),)


def _log_sum_exp(g: StaticScope, x: str, axes: str, *, keepdims: int = 1) -> tuple[str]:
    largest = g.op("ReduceMax", x, axes, keepdims=1)
    summed = g.op("ReduceSum", g.op("Exp", g.op("Sub", x, largest)), axes, keepdims=1)
    total = g.op("Add", g.op("Log", summed), largest)
    return (total if keepdims else g.op("Squeeze", total, axes),)


def _gather_elements(g: StaticScope, x: str, numbers: str, *, axis: int) -> tuple[str]:
    """x [m, D] at `numbers` [m, k] of each row."""
    rows, width = g.shape(x)
    assert axis in (-1, 1)
    starts = g.store.constant(np.arange(rows)[:, None] * width, np.int64)
    return (g.op("Gather", g.op("Reshape", x, g.ints(-1)), g.op("Add", numbers, starts), axis=0),)


def _scatter_elements(g: StaticScope, x: str, numbers: str, updates: str, *, axis: int) -> tuple[str]:
    """`updates` [.., k] at different `numbers` [.., k] of x [.., N], which is zeros."""
    zeros = g._value(x)
    assert axis == -1 and zeros is not None and not zeros.any()
    each = g.store.constant(np.arange(zeros.shape[-1]), np.int64)
    here = g.op("Cast", g.op("Equal", g.op("Unsqueeze", numbers, g.ints(-1)), each), to=TensorProto.FLOAT)
    return (g.op("ReduceSum", g.op("Mul", here, g.op("Unsqueeze", updates, g.ints(-1))), g.ints(-2), keepdims=0),)


def _smaller(g: StaticScope, x: str, other: str) -> tuple[str]:
    minus = g.store.constant(-1, helper.tensor_dtype_to_np_dtype(g._type(x).tensor_type.elem_type))
    return (g.op("Mul", g.op("Max", g.op("Mul", x, minus), g.op("Mul", other, minus)), minus),)


LOWERED: dict[str, Lowering] = {
    "SimplifiedLayerNormalization": _rms_norm,
    "LayerNormalization": _layer_norm,
    "SkipSimplifiedLayerNormalization": after_sum(_rms_norm),
    "SkipLayerNormalization": after_sum(_layer_norm),
    "RotaryEmbedding": _rotary,
    "FusedMatMul": _product,
    "Expand": _expand,
    "QuickGelu": _silu,
    "Gelu": _gelu,
    "FastGelu": _gelu_tanh,
    "LogSoftmax": _log_softmax,
    "ReduceLogSumExp": _log_sum_exp,
    "GatherElements": _gather_elements,
    "ScatterElements": _scatter_elements,
    "Min": _smaller,
}
