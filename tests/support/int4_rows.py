"""Compares logits of a row alone with those of the same row among others, as far as this processor's kernels go.

ONNX Runtime's products with 4-bit weights add up a single row in another order than several, on processors without
AVX-512 VNNI (docs/explain/exactness.md). The native operators do not.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

DEPTH, WIDTH, BLOCK = 576, 64, 32
CODE = 0.1  # what rounding a few inputs of later layers to the other side may do, over the logits' deviation


@lru_cache(maxsize=1)
def rows_are_exact() -> bool:
    """Whether a row times 4-bit weights is the same alone and among fifteen others, by computing both."""
    rng = np.random.default_rng(0)
    weights = rng.integers(0, 256, (WIDTH, DEPTH // BLOCK, BLOCK // 2), dtype=np.uint8)
    scales = rng.random((WIDTH, DEPTH // BLOCK), dtype=np.float32)
    sizes = {"K": DEPTH, "N": WIDTH, "bits": 4, "block_size": BLOCK, "accuracy_level": 4}
    graph = helper.make_graph(
        [helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **sizes)],
        "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", DEPTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", WIDTH])],
        [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(scales, "s")],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    rows = rng.standard_normal((16, DEPTH), dtype=np.float32)
    (together,) = session.run(None, {"x": rows})
    alone = [session.run(None, {"x": row[None]})[0][0] for row in rows]
    return np.array_equal(together, alone)


def need_exact_rows() -> None:
    """Skips a test of single rows where they are not exact."""
    if not rows_are_exact():
        pytest.skip("here ONNX Runtime adds up a single row of 4 bits in another order than several")


def same_rows(kind: str, found: np.ndarray, expected: np.ndarray) -> bool:
    """Whether logits in the precision `kind` are the same to the last bit; in int4 as far as this processor goes."""
    if kind == "int4" and not rows_are_exact():
        return np.allclose(found, expected, rtol=0, atol=CODE * expected.std())
    return np.array_equal(found, expected)
