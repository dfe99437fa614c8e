"""Kernels of the providers that capture graphs, and the check that a graph has one for every node."""

from __future__ import annotations

import onnx

from streamspec.export.ops.captured_scope import OPSET

Kernels = dict[tuple[str, str], tuple[int, int, set[str]]]
BOOL, INT64, FLOAT, HALF, UINT8 = "bool", "int64", "float", "float16", "uint8"
ANY = {BOOL, INT64, FLOAT, HALF}
REAL, NUMBERS = {FLOAT, HALF}, {FLOAT, HALF, INT64}
# Domain and operator: first and last opset version of the kernel, and types of its first input. From "Operators
# implemented by CUDAExecutionProvider" in OperatorKernels.md of microsoft/onnxruntime; a kernel without an end there
# takes its first version alone (core/framework/kernel_registry.cc).
CUDA: Kernels = {
    ("", "Add"): (14, 14, NUMBERS),
    ("", "And"): (7, 7, {BOOL}),
    ("", "ArgMax"): (13, 13, REAL),
    ("", "Cast"): (13, 18, ANY),
    ("", "Concat"): (13, 13, ANY),
    ("", "CumSum"): (14, 14, NUMBERS),
    ("", "Div"): (14, 14, NUMBERS),
    ("", "Equal"): (13, 13, ANY),
    ("", "Exp"): (13, 13, REAL),
    ("", "Expand"): (13, 13, ANY),
    ("", "Gather"): (13, 13, ANY),
    ("", "GatherElements"): (13, 13, ANY),
    ("", "Gemm"): (13, 13, REAL),
    ("", "Greater"): (13, 13, NUMBERS),
    ("", "GreaterOrEqual"): (16, 16, NUMBERS),
    ("", "LayerNormalization"): (17, 17, REAL),
    ("", "Less"): (13, 13, NUMBERS),
    ("", "Log"): (13, 13, REAL),
    ("", "LogSoftmax"): (13, 13, REAL),
    ("", "MatMul"): (13, 13, REAL),
    ("", "Max"): (13, 13, NUMBERS),
    ("", "Min"): (13, 13, NUMBERS),
    ("", "Mul"): (14, 14, NUMBERS),
    ("", "Not"): (1, 1, {BOOL}),
    ("", "Or"): (7, 7, {BOOL}),
    ("", "Pad"): (18, 18, REAL),
    ("", "ReduceLogSumExp"): (18, 18, REAL),
    ("", "ReduceMax"): (18, 18, NUMBERS),
    ("", "ReduceSum"): (13, 13, NUMBERS),
    ("", "Relu"): (14, 14, REAL),
    ("", "Reshape"): (14, 18, ANY),
    ("", "ScatterElements"): (18, 18, ANY),
    ("", "Sigmoid"): (13, 13, REAL),
    ("", "SimplifiedLayerNormalization"): (1, 1, REAL),
    ("", "Slice"): (13, 13, ANY),
    ("", "Softmax"): (13, 13, REAL),
    ("", "Split"): (18, 18, ANY),
    ("", "Squeeze"): (13, 20, ANY),
    ("", "Sub"): (14, 14, NUMBERS),
    ("", "Tanh"): (13, 13, REAL),
    ("", "Tile"): (13, 13, NUMBERS),
    ("", "TopK"): (11, 11, NUMBERS),
    ("", "Transpose"): (13, 20, ANY),
    ("", "Unsqueeze"): (13, 20, ANY),
    ("", "Where"): (16, 16, {BOOL}),
    ("com.microsoft", "FastGelu"): (1, 1, REAL),
    ("com.microsoft", "FusedMatMul"): (1, 1, REAL),
    ("com.microsoft", "GatherBlockQuantized"): (1, 1, {UINT8}),
    ("com.microsoft", "Gelu"): (1, 1, REAL),
    ("com.microsoft", "MatMulNBits"): (1, 1, REAL),
    ("com.microsoft", "QuickGelu"): (1, 1, REAL),
    ("com.microsoft", "RotaryEmbedding"): (1, 1, REAL),
    ("com.microsoft", "SkipLayerNormalization"): (1, 1, REAL),
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): (1, 1, REAL),
}
# The same of ROCm's provider, from the registrations that the library of onnxruntime-rocm 1.22.2 names (`nm`): at opset
# 18 the kernels of CUDA, of the same versions and types, but for two.
ROCM = {key: row for key, row in CUDA.items() if key[1] not in ("RotaryEmbedding", "GatherBlockQuantized")}
# What both read on the host, one's source being the other's made HIP: allowed as constants alone, which lie there from
# the beginning.
ON_HOST = {"Reshape": 1, "Expand": 1, "Tile": 1, "Slice": 1, "Split": 1, "Squeeze": 1, "Unsqueeze": 1, "TopK": 1}
ON_HOST |= {"CumSum": 1, "Pad": 1, "ReduceLogSumExp": 1, "ReduceMax": 1, "ReduceSum": 1}


def check_kernels(model: onnx.ModelProto, kernels: Kernels = CUDA) -> set[tuple[str, str]]:
    """Fails for a node that the provider would leave to the CPU; returns the kinds of operators."""
    constants = {proto.name for proto in model.graph.initializer}
    types = dtypes(model)
    for node in model.graph.node:
        first, last, allowed = kernels[node.domain, node.op_type]
        version = 1
        if not node.domain and node.op_type != "SimplifiedLayerNormalization":
            version = onnx.defs.get_schema(node.op_type, OPSET).since_version
        assert first <= version <= last, f"{node.op_type} {version}"
        assert types[node.input[0]] in allowed, f"{node.op_type} of {types[node.input[0]]}"
        if node.op_type in ON_HOST:
            for name in node.input[ON_HOST[node.op_type] :]:
                assert name in constants, f"{node.name} reads {name} on the host"
    return {(node.domain, node.op_type) for node in model.graph.node}


def dtypes(model: onnx.ModelProto) -> dict[str, str]:
    """The type of every value, as a session knows it that gives them all out."""
    named = {proto.name: onnx.TensorProto.DataType.Name(proto.data_type).lower() for proto in model.graph.initializer}
    named |= {
        value.name: onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()
        for value in model.graph.input
    }
    changed = {
        "Cast",
        "ArgMax",
        "Equal",
        "Greater",
        "GreaterOrEqual",
        "Less",
        "And",
        "Or",
        "Not",
        "TopK",
        "Where",
        "GatherBlockQuantized",
    }
    for node in model.graph.node:
        kind = named[node.input[0]]
        if node.op_type == "Cast":
            kind = onnx.TensorProto.DataType.Name(node.attribute[0].i).lower()
        elif node.op_type in ("ArgMax",):
            kind = INT64
        elif node.op_type == "Where":
            kind = named[node.input[1]]
        elif node.op_type == "GatherBlockQuantized":
            kind = named[node.input[2]]
        elif node.op_type in changed and node.op_type != "TopK":
            kind = BOOL
        named |= dict.fromkeys(node.output, kind)
        if node.op_type == "TopK":
            named[node.output[1]] = INT64
    return named
