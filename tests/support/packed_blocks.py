"""The float weights that packed blocks of codes stand for, to compare quantized products with."""

from __future__ import annotations

import numpy as np

from streamspec.export.ops.builder import Array
from streamspec.export.quantization.arithmetic import unpack


def dequantize_blocks(packed: Array, scales: Array, zeros: Array | None, columns: int) -> Array:
    """Float weights [out, columns] of `quantize_blocks`."""
    if zeros is None:
        levels = packed.astype(np.float32) - 128
    else:
        codes, zero = unpack(packed), unpack(zeros)[:, : packed.shape[1]]
        levels = codes.astype(np.float32) - zero[:, :, None]
    return (levels * scales[:, :, None]).reshape(len(packed), -1)[:, :columns]
