"""Tiny models with mixtures of experts. No bundles but those of any shapes for CPUs are made of them, so that tests
over all kinds of bundles leave them out."""

from __future__ import annotations

from typing import Any

EXPERTS = {"num_experts_per_tok": 3}
ROUTED = {**EXPERTS, "n_routed_experts": 8, "moe_intermediate_size": 64, "n_shared_experts": 1}
ROUTED |= {"first_k_dense_replace": 1}
GRANITE = {**EXPERTS, "num_local_experts": 8, "intermediate_size": 64}
GRANITE |= {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1, "logits_scaling": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
YARN |= {"original_max_position_embeddings": 32}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 32, **EXPERTS, "num_experts": 8, "moe_intermediate_size": 64, "norm_topk_prob": True}
    | {"mlp_only_layers": [1], "decoder_sparse_step": 1},
    "qwen2_moe": {**EXPERTS, "num_experts": 8, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
    | {"mlp_only_layers": [1], "use_sliding_window": False},
    "olmoe": {**EXPERTS, "num_experts": 8, "intermediate_size": 64},
    "mixtral": {**EXPERTS, "num_local_experts": 8, "sliding_window": 6},
    "minimax_m2": {**EXPERTS, "num_local_experts": 8, "intermediate_size": 64, "head_dim": 32, "rotary_dim": 16},
    "mellum": {**EXPERTS, "num_experts": 8, "moe_intermediate_size": 64, "head_dim": 32, "sliding_window": 6}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "mlp_layer_types": ["sparse", "dense"] * 2}
    | {"use_sliding_window": False}  # which its code does not read
    | {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}},
    "exaone_moe": {**EXPERTS, "num_experts": 8, "moe_intermediate_size": 64, "num_shared_experts": 2, "head_dim": 32}
    | {"sliding_window": 6, "sliding_window_pattern": 2, "routed_scaling_factor": 1.5},
    "hunyuan_v1_moe": {"moe_topk": [3] * 4, "num_experts": 8, "intermediate_size": 64, "head_dim": 24},
    "flex_olmo": {**EXPERTS, "num_experts": 8, "intermediate_size": 64},
    "dots1": {**ROUTED, "routed_scaling_factor": 1.5, "sliding_window": 6, "norm_topk_prob": True, "head_dim": 32}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "n_group": 4, "topk_group": 2},
    "glm4_moe": {**ROUTED, "head_dim": 32, "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5},
    "granitemoe": GRANITE,
    "granitemoeshared": {**GRANITE, "shared_intermediate_size": 96},
    "granitemoe_swa": {**GRANITE, "shared_intermediate_size": 96, "sliding_window": 6}
    | {"layer_rope_theta": [0, 1e4, 500.0, 1e4], "layer_types": ["full_attention", *["sliding_attention"] * 3]},
    "gpt_oss": {**EXPERTS, "num_local_experts": 8, "intermediate_size": 64, "head_dim": 32, "sliding_window": 6}
    | {"swiglu_limit": 0.7, "swiglu_alpha": 1.702, "rope_parameters": YARN},
    "gemma4_text+experts": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 64}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6, "head_dim": 24}
    | {"global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    | {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 5.0},
    "lfm2_moe": {**EXPERTS, "num_experts": 8, "moe_intermediate_size": 64, "num_dense_layers": 2}
    | {"layer_types": ["conv", "full_attention"] * 2, "routed_scaling_factor": 1.5},
    "ernie4_5_moe": {"moe_k": 3, "moe_num_experts": 8, "moe_intermediate_size": 64, "moe_num_shared_experts": 2},
}
