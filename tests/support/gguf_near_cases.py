"""More tiny models for `gguf_cases.CASES`: of architectures that stand for two families, or have keys of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support import gguf_files as files
from tests.support.gguf_positions import LLAMA3, ONE, llama3_divisors

VOCABULARY = len(files.bpe_vocabulary()["tokens"])
# architecture, model_type, config fields, further keys, further tensors
Case = tuple[str, str, dict[str, Any], dict[str, Any], dict[str, np.ndarray]]
NEAR: dict[str, Case] = {
    "granite 4, dense": (
        "granite",
        "granite",
        {"rope_parameters": ONE, "attention_multiplier": 0.2, "logits_scaling": 4.0},
        {
            "attention.head_count_kv": [2, 2],
            "attention.scale": 0.2,
            "logit_scale": 4.0,
            "rope.scaling.finetuned": True,
            "expert_count": 0,
            "expert_used_count": 0,
            "expert_shared_feed_forward_length": 96,
            **{f"ssm.{name}": 4 for name in ("conv_kernel", "state_size", "group_count", "inner_size")},
            "ssm.time_step_rank": 4,
        },
        {},
    ),
    "mistral small": (
        "mistral3",
        "mistral",
        {"head_dim": 32, "sliding_window": None, "rope_parameters": ONE | {"rope_theta": 1e9}},
        {"attention.key_length": 32, "attention.value_length": 32, "rope.freq_base": 1e9},
        {},
    ),
    "apertus": (
        "apertus",
        "apertus",
        {"rope_parameters": LLAMA3, "pad_token_id": 0},
        {"rope.freq_base": 5e5, "rope.dimension_count": 16, "vocab_size": VOCABULARY},
        {"rope_freqs.weight": llama3_divisors(16, LLAMA3)},
    ),
    "command-r": (
        "command-r",
        "cohere",
        {"rope_parameters": ONE, "logit_scale": 0.25, "tie_word_embeddings": True},
        {"logit_scale": 0.25, "rope.scaling.type": "none"},
        {},
    ),
    "command-r with norms of heads": (
        "command-r",
        "cohere",
        {"rope_parameters": ONE, "logit_scale": 0.25, "tie_word_embeddings": True, "use_qk_norm": True},
        {"logit_scale": 0.25, "rope.scaling.type": "none"},
        {},
    ),
    "olmo": (
        "olmo",
        "olmo",
        {"rope_parameters": ONE, "clip_qkv": 0.5, "pad_token_id": 0},
        {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": 0.5},
        {},
    ),
    "olmo without a clip": (
        "olmo",
        "olmo",
        {"rope_parameters": ONE, "pad_token_id": 0},
        {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": 0.0},
        {},
    ),
}
