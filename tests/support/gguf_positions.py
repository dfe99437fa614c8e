"""Rotary positions of the tiny models in GGUF files: `rope_parameters`, and the tensors that stand for them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

LENGTH = 8192  # of pre-training, where positions are scaled
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": LENGTH,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": LENGTH}
SHORT = [1.0 + 0.05 * i for i in range(8)]
LONG = [1.5 + 2.0 * i for i in range(8)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": LENGTH,
}
LONG_ATTENTION = math.sqrt(1 + math.log(32768 / LENGTH) / math.log(LENGTH))
ONE = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA3_ROPE = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, "sliding_attention": ONE}


def llama3_divisors(head_dim: int, rope: dict[str, Any]) -> np.ndarray:
    """What llama.cpp's converter stores: base frequency over scaled frequency, one number for each pair."""
    found = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        if turns > rope["high_freq_factor"]:
            found.append(1.0)
        elif turns < rope["low_freq_factor"]:
            found.append(rope["factor"])
        else:
            smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(found, np.float32)
