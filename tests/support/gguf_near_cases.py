"""More tiny models for `gguf_cases.CASES`: of architectures that stand for two families, or have keys of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support import gguf_files as files
from tests.support.gguf_positions import LENGTH, LLAMA3, ONE, YARN, llama3_divisors
from tests.support.recurrent_families import FALCON_MULTIPLIERS

VOCABULARY = len(files.bpe_vocabulary()["tokens"])
_FALCON: dict[str, Any] = {
    "head_dim": 24,
    "rope_parameters": ONE | {"rope_theta": 1e11},
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_norm_before_gate": False,
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.3,
    **FALCON_MULTIPLIERS,
}
_FALCON_KEYS = {
    "attention.key_length": 24,
    "attention.value_length": 24,
    "rope.freq_base": 1e11,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 96,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 6,
    "ssm.group_count": 2,
    "vocab_size": VOCABULARY,
}
_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 8,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCABULARY,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
_GEMMA4_KEYS = {
    "feed_forward_length": [96] * 4 + [192] * 2,
    "embedding_length_per_layer_input": 32,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.key_length_swa": 32,
    "attention.value_length_swa": 32,
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, False] * 3,
    "attention.shared_kv_layers": 2,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
    "rope.dimension_count": 64,
    "rope.dimension_count_swa": 32,
    "final_logit_softcapping": 30.0,
}
_GRANITE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 96,
    "position_embedding_type": None,
    "max_position_embeddings": 1 << 20,
    "mamba_n_heads": 12,
    "mamba_d_head": 16,
    "mamba_expand": 3,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_d_conv": 3,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}
_GRANITE_KEYS = {
    "attention.head_count_kv": [0, 2, 0, 2],
    "attention.scale": 0.2,
    "embedding_scale": 3.0,
    "residual_scale": 0.5,
    "logit_scale": 4.0,
    "rope.dimension_count": 16,
    "rope.freq_base": 1e4,
    "rope.scaling.finetuned": False,
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_shared_feed_forward_length": 96,
    "ssm.conv_kernel": 3,
    "ssm.state_size": 24,
    "ssm.group_count": 2,
    "ssm.inner_size": 192,
    "ssm.time_step_rank": 12,
    "vocab_size": VOCABULARY,
}
_BAMBA: dict[str, Any] = {
    "rope_parameters": ONE | {"partial_rotary_factor": 0.5},
    "num_hidden_layers": 4,
    "attn_layer_indices": [1, 3],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 24,
}
_BAMBA_KEYS = {
    "attention.head_count_kv": [0, 2, 0, 2],
    "rope.dimension_count": 8,
    "rope.freq_base": 1e4,
    "rope.scaling.finetuned": True,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 24,
    "ssm.group_count": 1,
    "ssm.inner_size": 128,
    "ssm.time_step_rank": 8,
    "vocab_size": VOCABULARY,
}
_NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
    "head_dim": 24,
    "max_position_embeddings": 1 << 20,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
    "conv_kernel": 3,
    "layer_norm_epsilon": 2e-5,
}
_NEMOTRON_KEYS = {
    "attention.head_count_kv": [0, 0, 2, 0, 0],
    "feed_forward_length": [0, 96, 0, 0, 96],
    "attention.key_length": 24,
    "attention.value_length": 24,
    "attention.layer_norm_epsilon": 2e-5,
    "attention.layer_norm_rms_epsilon": 2e-5,
    "rope.dimension_count": 24,
    "rope.scaling.finetuned": False,
    "ssm.conv_kernel": 3,
    "ssm.state_size": 24,
    "ssm.group_count": 2,
    "ssm.inner_size": 96,
    "ssm.time_step_rank": 6,
    "vocab_size": VOCABULARY,
}
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
_QWEN35: dict[str, Any] = {
    "rope_parameters": ONE | {"partial_rotary_factor": 0.5, "rope_theta": 1e6},
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "tie_word_embeddings": True,
}
_QWEN35_KEYS = {
    "full_attention_interval": 2,
    "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 1, 1, 0],
    "rope.freq_base": 1e6,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 96,
}
_MIXTURE = {"num_experts_per_tok": 2, "rope_parameters": ONE}
_EXPERTS = {"expert_count": 6, "expert_used_count": 2}
_QWEN_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
_QWEN_EXPERT_KEYS = _EXPERTS | {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 64}
_NEMOTRON_EXPERTS = _NEMOTRON | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
}
_NEMOTRON_EXPERT_KEYS = (
    _NEMOTRON_KEYS
    | _EXPERTS
    | {
        "feed_forward_length": [0, 32, 0, 0, 32],
        "expert_feed_forward_length": 32,
        "expert_shared_feed_forward_length": 64,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "expert_group_count": 1,
        "attention.layer_norm_rms_epsilon": None,  # which the configs of these do not have
    }
)
_HEADS = {"attention.key_length": 32, "attention.value_length": 32}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
    "rope_parameters": ONE,
}
_LATENT_KEYS = {
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 96,
    "attention.kv_lora_rank": 64,
    "attention.key_length": 80,
    "attention.value_length": 64,
    "attention.key_length_mla": 48,
    "attention.value_length_mla": 64,
    "rope.dimension_count": 16,
    "vocab_size": VOCABULARY,
}
_ROUTED = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
_ROUTED_KEYS = _EXPERTS | {
    "leading_dense_block_count": 1,
    "expert_feed_forward_length": 32,
    "expert_shared_count": 2,
    "expert_weights_scale": 1.5,
}
NEAR |= {
    "youtu": (
        "deepseek2",
        "youtu",
        _LATENT | {"tie_word_embeddings": True, "pad_token_id": 0},
        _LATENT_KEYS | {"leading_dense_block_count": 2, "expert_feed_forward_length": 96, "expert_shared_count": 0},
        {},
    ),
    "glm 4.5": (
        "glm4moe",
        "glm4_moe",
        _ROUTED
        | {"head_dim": 32, "rope_parameters": ONE | {"partial_rotary_factor": 0.5}, "pad_token_id": 0}
        | {"attention_bias": True, "use_qk_norm": True, "norm_topk_prob": True, "n_group": 1, "topk_group": 1},
        _ROUTED_KEYS
        | _HEADS
        | {"rope.dimension_count": 16, "expert_gating_func": 2, "expert_weights_norm": True}
        | {"expert_group_count": 1, "expert_group_used_count": 1},
        {},
    ),
    "glm 4.5, whole heads": (
        "glm4moe",
        "glm4_moe",
        _ROUTED
        | {"head_dim": 32, "rope_parameters": ONE | {"partial_rotary_factor": 1.0}, "pad_token_id": 0}
        | {"use_qk_norm": False, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
        _ROUTED_KEYS | _HEADS | {"rope.dimension_count": 32, "expert_gating_func": 2},
        {},
    ),
    "dots1": (
        "dots1",
        "dots1",
        _ROUTED
        | {"head_dim": 32, "rope_parameters": ONE, "norm_topk_prob": True, "n_group": 1, "topk_group": 1}
        | {"sliding_window": None},
        _ROUTED_KEYS | _HEADS | {"expert_gating_func": 2, "expert_weights_norm": True},
        {},
    ),
    "qwen3 next": (
        "qwen3next",
        "qwen3_next",
        _QWEN35 | _QWEN_EXPERTS | {"norm_topk_prob": True},
        {
            key: value
            for key, value in (_QWEN35_KEYS | _QWEN_EXPERT_KEYS).items()
            if key not in ("feed_forward_length", "rope.dimension_sections")
        },
        {},
    ),
    "deepseek 2": (
        "deepseek2",
        "deepseek_v2",
        _LATENT
        | _ROUTED
        | {"q_lora_rank": None, "rope_parameters": YARN | dict.fromkeys(("mscale", "mscale_all_dim"), 0.7)},
        _LATENT_KEYS
        | _ROUTED_KEYS
        | {"attention.q_lora_rank": None, "rope.freq_base": 1e6, "rope.scaling.type": "yarn"}
        | {"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": LENGTH}
        | {"rope.scaling.yarn_log_multiplier": 0.07},
        {},
    ),
    "deepseek 3": (
        "deepseek2",
        "deepseek_v3",
        _LATENT | _ROUTED | {"n_group": 3, "topk_group": 2, "norm_topk_prob": True},
        _LATENT_KEYS
        | _ROUTED_KEYS
        | {"expert_group_count": 3, "expert_group_used_count": 2, "expert_weights_norm": True}
        | {"expert_gating_func": 2},
        {},
    ),
    "qwen3 with experts": (
        "qwen3moe",
        "qwen3_moe",
        _MIXTURE | {"head_dim": 32, "num_experts": 6, "moe_intermediate_size": 32, "norm_topk_prob": True},
        _EXPERTS | _HEADS | {"expert_feed_forward_length": 32, "expert_weights_scale": 1.0},
        {},
    ),
    "mixtral": (
        "llama",
        "mixtral",
        _MIXTURE | {"num_local_experts": 6},
        _EXPERTS | {"rope.dimension_count": 16, "vocab_size": VOCABULARY},
        {},
    ),
    "mixtral with a window": (
        "llama",
        "mixtral",
        _MIXTURE | {"num_local_experts": 6, "sliding_window": 8},
        _EXPERTS | {"attention.sliding_window": 8},
        {},
    ),
    "olmoe": (
        "olmoe",
        "olmoe",
        _MIXTURE | {"num_experts": 6, "pad_token_id": 0, "eos_token_id": 1},
        _EXPERTS | {"expert_feed_forward_length": 96},
        {},
    ),
    "granite with experts": (
        "granitemoe",
        "granitemoe",
        _MIXTURE
        | {"num_local_experts": 6, "attention_multiplier": 0.2, "embedding_multiplier": 3.0}
        | {"residual_multiplier": 0.5, "logits_scaling": 4.0, "tie_word_embeddings": True},
        _EXPERTS
        | {"attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 4.0}
        | {"rope.dimension_count": 16, "vocab_size": VOCABULARY, "rope.scaling.finetuned": True},
        {},
    ),
    "lfm2 with experts": (
        "lfm2moe",
        "lfm2_moe",
        _MIXTURE
        | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}
        | {"num_experts": 6, "moe_intermediate_size": 32, "routed_scaling_factor": 1.5, "tie_word_embeddings": True},
        _EXPERTS
        | {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3, "leading_dense_block_count": 1}
        | {"expert_feed_forward_length": 32, "expert_gating_func": 2, "expert_weights_scale": 1.5},
        {},
    ),
    "ernie with experts": (
        "ernie4_5-moe",
        "ernie4_5_moe",
        {"rope_parameters": ONE, "num_hidden_layers": 4, "moe_k": 2, "moe_num_experts": 6}
        | {"moe_intermediate_size": 32, "moe_num_shared_experts": 2, "moe_layer_interval": 2},
        _EXPERTS
        | {"expert_feed_forward_length": 32, "expert_shared_count": 2, "expert_shared_feed_forward_length": 48}
        | {"leading_dense_block_count": 1, "interleave_moe_layer_step": 2},
        {},
    ),
    "gpt-oss": (
        "gpt-oss",
        "gpt_oss",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 8, "pad_token_id": 0}
        | {"rope_parameters": YARN | {"truncate": False}},
        _EXPERTS
        | _HEADS
        | {"expert_feed_forward_length": 96, "attention.sliding_window": 8, "rope.freq_base": 1e6}
        | {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": LENGTH},
        {},
    ),
    "granite 4, hybrid": ("granitehybrid", "granitemoehybrid", _GRANITE, _GRANITE_KEYS, {}),
    "granite 4, hybrid with biases": (
        "granitehybrid",
        "granitemoehybrid",
        _GRANITE
        | {"attention_bias": True, "mamba_conv_bias": False, "mamba_proj_bias": True}
        | {"tie_word_embeddings": True},
        _GRANITE_KEYS,
        {},
    ),
    "granite 4, hybrid with experts": (
        "granitehybrid",
        "granitemoehybrid",
        _GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
        _GRANITE_KEYS | _EXPERTS | {"expert_shared_feed_forward_length": 32},
        {},
    ),
    "granite with shared experts": (
        "granitemoe",
        "granitemoeshared",
        _MIXTURE
        | {"num_local_experts": 6, "shared_intermediate_size": 32, "attention_multiplier": 0.2, "logits_scaling": 4.0},
        _EXPERTS | {"attention.scale": 0.2, "logit_scale": 4.0, "expert_shared_feed_forward_length": 32},
        {},
    ),
    "bamba": ("granitehybrid", "bamba", _BAMBA, _BAMBA_KEYS, {}),
    "bamba with biases": (
        "granitehybrid",
        "bamba",
        _BAMBA
        | {"attention_bias": True, "mlp_bias": True, "mamba_conv_bias": False, "mamba_proj_bias": True}
        | {"rope_parameters": ONE | {"partial_rotary_factor": 1.0}, "tie_word_embeddings": True},
        _BAMBA_KEYS | {"rope.dimension_count": 16},
        {},
    ),
    "falcon-h1": ("falcon-h1", "falcon_h1", _FALCON, _FALCON_KEYS, {}),
    "falcon-h1 with norms": (
        "falcon-h1",
        "falcon_h1",
        _FALCON | {"mamba_rms_norm": True, "mamba_conv_bias": False, "mlp_bias": True},
        _FALCON_KEYS,
        {},
    ),
    "nemotron-h": ("nemotron_h", "nemotron_h", _NEMOTRON, _NEMOTRON_KEYS, {}),
    "nemotron-h with biases": (
        "nemotron_h",
        "nemotron_h",
        _NEMOTRON | {"use_conv_bias": False, "use_bias": True, "mlp_bias": True},
        _NEMOTRON_KEYS,
        {},
    ),
    "nemotron-h with experts": (
        "nemotron_h_moe",
        "nemotron_h",
        _NEMOTRON_EXPERTS | {"moe_latent_size": None},
        _NEMOTRON_EXPERT_KEYS,
        {},
    ),
    "nemotron-h with experts of latents": (
        "nemotron_h_moe",
        "nemotron_h",
        _NEMOTRON_EXPERTS | {"moe_latent_size": 96, "n_group": 3, "topk_group": 2},
        _NEMOTRON_EXPERT_KEYS | {"moe_latent_size": 96, "expert_group_count": 3, "expert_group_used_count": 2},
        {},
    ),
    "qwen3.5": ("qwen35", "qwen3_5_text", _QWEN35, _QWEN35_KEYS, {}),
    "qwen3.5 with experts": (
        "qwen35moe",
        "qwen3_5_moe_text",
        _QWEN35 | _QWEN_EXPERTS,
        {key: value for key, value in (_QWEN35_KEYS | _QWEN_EXPERT_KEYS).items() if key != "feed_forward_length"},
        {},
    ),
    "gemma 4": ("gemma4", "gemma4_text", _GEMMA4, _GEMMA4_KEYS, {}),
    "gemma 4, keys as values": (
        "gemma4",
        "gemma4_text",
        _GEMMA4
        | {"num_kv_shared_layers": 0, "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        _GEMMA4_KEYS
        | {"feed_forward_length": 96, "embedding_length_per_layer_input": 0, "attention.shared_kv_layers": 0}
        | {"attention.head_count_kv": [2, 1] * 3},
        {},
    ),
    "gemma 4 with experts": (
        "gemma4",
        "gemma4_text",
        _GEMMA4
        | {"num_kv_shared_layers": 0, "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True}
        | {"num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 64},
        _GEMMA4_KEYS
        | {"feed_forward_length": 96, "embedding_length_per_layer_input": 0, "attention.shared_kv_layers": 0}
        | {"attention.head_count_kv": [2, 1] * 3, "expert_count": 8, "expert_used_count": 3}
        | {"expert_feed_forward_length": 64},
        {},
    ),
    "qwen2 with experts": (
        "qwen2moe",
        "qwen2_moe",
        _MIXTURE | _QWEN_EXPERTS | {"norm_topk_prob": False},
        _QWEN_EXPERT_KEYS,
        {},
    ),
}
