"""Settings of tiny models whose families differ little from others: of any size, with 4 layers and 4 heads."""

from __future__ import annotations

from typing import Any

NEAR: dict[str, dict[str, Any]] = {
    "gemma4_unified_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6}
    | {"head_dim": 16, "global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    | {"final_logit_softcapping": 5.0},
    "apertus": {"attention_bias": True},
    "arcee": {"mlp_bias": True, "head_dim": 24},
    "cohere": {"use_qk_norm": True, "logit_scale": 1.5, "attention_bias": True},
    "cohere2": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2, "logit_scale": 1.5},
    "cwm": {"head_dim": 24, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "ernie4_5": {"head_dim": 24, "use_bias": True},
    "gemma": {"head_dim": 24, "initializer_range": 0.1},
    "glm": {"head_dim": 32},
    "glm4": {"head_dim": 32},
    "granite": {
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.1,
        "logits_scaling": 3.0,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "granitemoehybrid": {
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.1,
        "logits_scaling": 3.0,
        "attention_bias": True,
        "num_local_experts": 0,
        "mamba_n_heads": 4,
        "shared_intermediate_size": 96,
        "position_embedding_type": "rope",
        "layer_types": ["attention"] * 4,
    },
    "helium": {},
    "hunyuan_v1_dense": {"head_dim": 24, "attention_bias": True},
    "hyperclovax": {
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.1,
        "logits_scaling": 0.4,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "iquestcoder": {"head_dim": 24},
    "jais2": {},
    "exaone": {"head_dim": 24, "mlp_bias": True},
    "internlm3": {"head_dim": 24, "bias": True, "qkv_bias": True},
    "ministral": {"head_dim": 24, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "ministral3": {
        "head_dim": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "olmo": {"attention_bias": True, "clip_qkv": 0.6},
    "nemotron": {
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "vaultgemma": {
        "head_dim": 24,
        "sliding_window": 6,
        "query_pre_attn_scalar": 30,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 5.0,
        "initializer_range": 0.1,
    },
    "seed_oss": {"head_dim": 24, "attention_out_bias": True},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "sliding_window": 6},
    "starcoder2": {"sliding_window": 6},
}
# Families that between them have every way in which layers are put together: positions from a table, rotated in
# halves or in pairs, in part of a head or in part of the layers; norms with and without a mean, before and after a
# half of the layer, of heads, and shared; halves beside each other; MLPs with and without a gate; weights of queries,
# keys and values in one, two orders, or apart; windows, caps and multipliers; shared K/V, inputs of each layer, and
# convolutions. Every family's graph is compared with PyTorch (test_dynamic_step_graph.py) and so
# is every published config (test_published_configs.py). What is done with a graph, a target, a precision or a drafter
# meets a family only through such a way: it is tested for these.
VARIED = (
    "llama",
    "gpt2",
    "phi",
    "gpt_neox",
    "gemma2",
    "gemma4_text",
    "exaone4",
    "cohere2",
    "granite",
    "smollm3",
    "lfm2",
)
