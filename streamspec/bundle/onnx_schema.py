"""The part of ONNX's protobuf schema that bundles use: operators, element types, and the fields of each message.

Field numbers are those of onnx.proto; whatever is not listed here is refused by `onnx_check`.
"""

from __future__ import annotations

OPSETS = {"": range(18, 25), "com.microsoft": range(1, 2), "streamspec": range(1, 2)}
# By domain: the operators that the exporter writes.
OPERATORS = {
    "": frozenset(
        [
            "Abs",
            "Add",
            "And",
            "ArgMax",
            "BitShift",
            "BitwiseAnd",
            "BitwiseOr",
            "BitwiseXor",
            "Cast",
            "Compress",
            "Concat",
            "Constant",
            "Cos",
            "CumSum",
            "DequantizeLinear",
            "Div",
            "Equal",
            "Erf",
            "Exp",
            "Expand",
            "Gather",
            "GatherElements",
            "GatherND",
            "Gemm",
            "Greater",
            "GreaterOrEqual",
            "Identity",
            "If",
            "LayerNormalization",
            "Less",
            "LessOrEqual",
            "Log",
            "LogSoftmax",
            "MatMul",
            "Max",
            "Min",
            "Mul",
            "NonZero",
            "Not",
            "Or",
            "Pad",
            "QuantizeLinear",
            "Range",
            "ReduceLogSumExp",
            "ReduceMax",
            "ReduceMean",
            "ReduceSum",
            "Relu",
            "Reshape",
            "ScatterElements",
            "ScatterND",
            "Shape",
            "Sigmoid",
            "SimplifiedLayerNormalization",
            "Sin",
            "Size",
            "Slice",
            "Softmax",
            "Split",
            "Sqrt",
            "Squeeze",
            "Sub",
            "Tanh",
            "TensorScatter",
            "Tile",
            "TopK",
            "Transpose",
            "Trilu",
            "Unsqueeze",
            "Where",
        ]
    ),
    "com.microsoft": frozenset(
        [
            "FastGelu",
            "FusedMatMul",
            "GatherBlockQuantized",
            "Gelu",
            "GroupQueryAttention",
            "MatMulIntegerToFloat",
            "MatMulNBits",
            "QGemm",
            "QuickGelu",
            "RotaryEmbedding",
            "SkipLayerNormalization",
            "SkipSimplifiedLayerNormalization",
        ]
    ),
    "streamspec": frozenset(
        [
            "ArgMax",
            "Attention",
            "AttentionFloat16",
            "DraftAttention",
            "DraftAttentionFloat16",
            "EmbeddingBlocks",
            "EmbeddingInt6",
            "EmbeddingInt8",
            "ExpertsBlocks",
            "ExpertsInt4",
            "ExpertsInt6",
            "ExpertsInt8",
            "GatedDeltaRule",
            "LinearBlocks",
            "LinearInt4",
            "LinearInt6",
            "LinearInt8",
            "ShortConv",
            "SkipRmsNorm",
            "StateSpace",
        ]
    ),
}
# Bits of a tensor's elements, by TensorProto.DataType
BITS = {1: 32, 2: 8, 3: 8, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 16: 16, 21: 4, 22: 4}
ONE_BY_ONE = {4: 1, 7: 7}  # fields of a tensor with numbers one by one, and their type

VARINT, WIDE, BYTES, NARROW = 0, 1, 2, 5  # wire types

Fields = dict[int, tuple[int, bool]]  # of a message, by number: wire type, whether it may come more than once
ONCE, MANY = False, True
MODEL_FIELDS: Fields = {
    1: (VARINT, ONCE),
    2: (BYTES, ONCE),
    3: (BYTES, ONCE),
    4: (BYTES, ONCE),
    5: (VARINT, ONCE),
    6: (BYTES, ONCE),
    7: (BYTES, ONCE),
    8: (BYTES, MANY),
    14: (BYTES, MANY),
}
OPSET_FIELDS: Fields = {1: (BYTES, ONCE), 2: (VARINT, ONCE)}
GRAPH_FIELDS: Fields = {
    1: (BYTES, MANY),
    2: (BYTES, ONCE),
    5: (BYTES, MANY),
    10: (BYTES, ONCE),
    11: (BYTES, MANY),
    12: (BYTES, MANY),
    13: (BYTES, MANY),
}
NODE_FIELDS: Fields = {
    1: (BYTES, MANY),
    2: (BYTES, MANY),
    3: (BYTES, ONCE),
    4: (BYTES, ONCE),
    5: (BYTES, MANY),
    6: (BYTES, ONCE),
    7: (BYTES, ONCE),
}
ATTRIBUTE_FIELDS: Fields = {
    1: (BYTES, ONCE),
    2: (NARROW, ONCE),
    3: (VARINT, ONCE),
    4: (BYTES, ONCE),
    5: (BYTES, ONCE),
    6: (BYTES, ONCE),
    7: (NARROW, MANY),
    8: (VARINT, MANY),
    9: (BYTES, MANY),
    13: (BYTES, ONCE),
    20: (VARINT, ONCE),
}
TENSOR_FIELDS: Fields = {
    1: (VARINT, MANY),
    2: (VARINT, ONCE),
    4: (NARROW, MANY),
    7: (VARINT, MANY),
    8: (BYTES, ONCE),
    9: (BYTES, ONCE),
    12: (BYTES, ONCE),
    13: (BYTES, MANY),
    14: (VARINT, ONCE),
}
ENTRY_FIELDS: Fields = {1: (BYTES, ONCE), 2: (BYTES, ONCE)}
VALUE_FIELDS: Fields = {1: (BYTES, ONCE), 2: (BYTES, ONCE), 3: (BYTES, ONCE)}
TYPE_FIELDS: Fields = {1: (BYTES, ONCE), 6: (BYTES, ONCE)}
TENSOR_TYPE_FIELDS: Fields = {1: (VARINT, ONCE), 2: (BYTES, ONCE)}
SHAPE_FIELDS: Fields = {1: (BYTES, MANY)}
DIMENSION_FIELDS: Fields = {1: (VARINT, ONCE), 2: (BYTES, ONCE), 3: (BYTES, ONCE)}
