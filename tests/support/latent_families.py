"""Tiny models whose layers attend to narrow states, and a dense one with attention sinks. No bundles but those of any
shapes for CPUs are made of them, so that tests over all kinds of bundles leave them out."""

from __future__ import annotations

from typing import Any

from tests.support.mixture_families import ROUTED, YARN

SIZES = {"num_key_value_heads": 4, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 64}
NARROW = {**SIZES, "q_lora_rank": 48}
LATENT: dict[str, dict[str, Any]] = {
    "granite_swa": {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1}
    | {"logits_scaling": 3.0, "sliding_window": 6, "layer_rope_theta": [0, 1e4, 500.0, 1e4]}
    | {"layer_types": ["full_attention", *["sliding_attention"] * 3]},
    "youtu": {**NARROW, "attention_bias": True},
    "youtu+wide": {**SIZES, "q_lora_rank": None, "v_head_dim": 64, "rope_parameters": {**YARN, "mscale_all_dim": 0.7}},
    "deepseek_v2": {**SIZES, **ROUTED, "q_lora_rank": None, "routed_scaling_factor": 1.5},
    "deepseek_v3": {**NARROW, **ROUTED, "n_group": 4, "topk_group": 2, "norm_topk_prob": True},
    "minicpm3": {**NARROW, "scale_emb": 5, "dim_model_base": 32},
    "glm4_moe_lite": {**NARROW, **ROUTED, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5},
}
