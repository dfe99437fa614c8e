"""Random blocks of every kind that GGUF files hold: any bytes are codes; float16 scales have their places."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np

from streamspec.export.spec.weight_source import StoredBlocks

Array = np.ndarray[Any, np.dtype[Any]]
# Where the float16 of a block lie (ggml-common.h)
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}


def ggml_type(kind: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[kind]


def random_blocks(rng: np.random.Generator, kind: str, outputs: int, inputs: int, size: float = 0.02) -> StoredBlocks:
    """Rows [outputs, inputs] of random blocks; scales around `size`, of either sign, some subnormal or zero."""
    weights, length = gguf.GGML_QUANT_SIZES[ggml_type(kind)]
    blocks = rng.integers(0, 256, (outputs, inputs // weights, length)).astype(np.uint8)
    for at in HALVES[kind]:
        scales = rng.standard_normal(blocks.shape[:2]) * size / (32 if weights == 256 else 1)
        scales *= rng.choice([1.0, 1.0, 1.0, 1.0, 1.0, 1e-4, 0.0], scales.shape)
        blocks[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = rng.integers(116, 124, blocks.shape[:2])
    return StoredBlocks(kind, blocks.reshape(outputs, -1), inputs)


def values(stored: StoredBlocks) -> Array:
    """float32 [outputs, inputs], as the `gguf` package decodes them."""
    return np.asarray(gguf.dequantize(stored.data, ggml_type(stored.kind)))
