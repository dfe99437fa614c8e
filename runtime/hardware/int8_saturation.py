"""Finds out whether this machine's uint8 x int8 matrix products saturate, by computing one.

AVX2 and AVX-512 without VNNI add pairs of products in 16 bits. ONNX Runtime can avoid that
(`session.x64quantprecision`), but its way costs a third of the speed at 8 rows also where nothing saturates: so it is
asked for only where it is needed. Computing beats asking the processor: it works on every system and tests the kernel
that will run.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

# MatMulInteger(uint8 [1, 64], int8 [64, 16]) -> int32 [1, 16], opset 21, IR 10;
# tests/runtime/hardware/test_int8_saturation.py rebuilds it.
_GRAPH = bytes.fromhex(
    "080a3a5c0a180a01610a0162120163220d4d61744d756c496e74656765721201675a130a0161120e0a0c080212080a0208010a0208405a130a0162"
    "120e0a0c080312080a0208400a02081062130a0163120e0a0c080612080a0208010a02081042040a001015"
)
X64_PRECISION = "session.x64quantprecision"  # of ONNX Runtime's session configuration
_LARGEST, _WEIGHT, _DEPTH, _WIDTH = 255, 127, 64, 16


@lru_cache(maxsize=1)
def products_saturate() -> bool:
    """True where a sum of the largest products comes out wrong."""
    import onnxruntime

    options: Any = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(_GRAPH, options, providers=["CPUExecutionProvider"])
    rows = np.full((1, _DEPTH), _LARGEST, np.uint8)
    weights = np.full((_DEPTH, _WIDTH), _WEIGHT, np.int8)
    (sums,) = session.run(None, {"a": rows, "b": weights})
    return bool((sums != _LARGEST * _WEIGHT * _DEPTH).any())


def x64_precision() -> str:
    """Returns the value of `X64_PRECISION` that makes products exact on this machine."""
    return "1" if products_saturate() else "0"
