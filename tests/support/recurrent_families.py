"""Tiny models whose layers keep a recurrent state. No bundles but those of any shapes for CPUs are made of them, so
that tests over all of these leave them out. What follows a `+` tells apart models of one family."""

from __future__ import annotations

from typing import Any

import torch

DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
FALCON_MULTIPLIERS: dict[str, Any] = {  # of the maps of Falcon-H1's layers, none of them 1
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 1.3,
    "key_multiplier": 0.6,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.9,
    "ssm_multipliers": [0.7, 1.4, 0.6, 1.5, 0.8],
    "mlp_multipliers": [1.6, 0.7],
}
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA
    | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96},
    "qwen3_next": DELTA
    | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
    | {"mlp_only_layers": [2], "linear_num_value_heads": 4},
    "olmo_hybrid": {name: value for name, value in DELTA.items() if name != "head_dim"}
    | {"linear_value_head_dim": 32, "linear_num_value_heads": 2, "rope_parameters": None},
    "granitemoehybrid+mamba": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.1,
        "logits_scaling": 3.0,
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "position_embedding_type": None,
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "time_step_limit": (0.01, 2.0),
    },
    "bamba": {
        "attn_layer_indices": [2],
        "attention_bias": True,
        "mlp_bias": True,
        "mamba_n_heads": 4,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
    },
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_rms_norm": False,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.7,
        **FALCON_MULTIPLIERS,
    },
    "falcon_h1+normed": {
        "mamba_d_ssm": 96,
        "mamba_n_heads": 6,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 144,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 1.5,
        "attention_in_multiplier": 1.4,
        "attention_out_multiplier": 0.8,
        "key_multiplier": 1.7,
        "ssm_in_multiplier": 0.7,
        "ssm_out_multiplier": 1.4,
        "ssm_multipliers": [1.3, 0.8, 1.2, 0.7, 1.1],
        "mlp_multipliers": [0.7, 1.4],
        "time_step_limit": (0.01, 2.0),
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", *["linear_attention"] * 2, "mlp"],
        "head_dim": 24,
        "attention_bias": True,
        "mlp_bias": True,
        "use_bias": True,
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "time_step_min": 0.1,
    },
}
GRANITE_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 64}
RECURRENT["granitemoehybrid+experts"] = RECURRENT["granitemoehybrid+mamba"] | GRANITE_EXPERTS
RECURRENT["nemotron_h+experts"] = {
    "layers_block_type": [
        "linear_attention",
        "moe",
        "linear_attention",
        "full_attention",
        "moe",
        "linear_attention",
        "mlp",
    ],
    "head_dim": 24,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 96,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
RECURRENT["nemotron_h+latent"] = RECURRENT["nemotron_h+experts"] | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", *["linear_attention"] * 2],
    "mlp_bias": True,
    "moe_latent_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
}
RECURRENT["falcon_h1+gated_last"] = RECURRENT["falcon_h1+normed"] | {"mamba_norm_before_gate": True}
# Whose layers have an MLP beside what mixes rows: draft layers are copies of such a layer.
WHOLE = [name for name, changes in RECURRENT.items() if "layers_block_type" not in changes]


def with_memory(model: Any) -> Any:
    """The model with states some of whose heads remember hundreds of tokens and others few, as trained ones do."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith(".A_log"):
                value.uniform_(-6, 1)
            elif name.endswith((".dt_bias", ".D")):
                value.normal_(0, 1)
    return model
