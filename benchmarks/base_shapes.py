"""Shapes of published models: name -> (`model_type`, fields of the configuration that set sizes and flags)."""

from __future__ import annotations

from typing import Any

ROPE = {"rope_type": "default"}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DELTA = [*["linear_attention"] * 3, "full_attention"]  # of Qwen3.5

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)


def _shape(sizes: tuple[int | None, ...], **more: Any) -> dict[str, Any]:
    """`sizes`: of SIZES; None: as many as the configuration of the type has by default."""
    return {name: size for name, size in zip(SIZES, sizes, strict=True) if size is not None} | more


BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.2-1b": (
        "llama",
        _shape(
            (2048, 8192, 16, 32, 8, 128256, 131072),
            head_dim=64,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
            rope_parameters=LLAMA3,
        ),
    ),
    "llama-3.2-3b": (
        "llama",
        _shape(
            (3072, 8192, 28, 24, 8, 128256, 131072),
            head_dim=128,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
            rope_parameters=LLAMA3,
        ),
    ),
    "qwen3-0.6b": (
        "qwen3",
        _shape(
            (1024, 3072, 28, 16, 8, 151936, 40960),
            head_dim=128,
            tie_word_embeddings=True,
            rms_norm_eps=1e-6,
            rope_parameters=ROPE | {"rope_theta": 1e6},
        ),
    ),
    "smollm3-3b": (
        "smollm3",
        _shape(
            (2048, 11008, 36, 16, 4, 128256, 65536),
            tie_word_embeddings=True,
            rms_norm_eps=1e-6,
            no_rope_layer_interval=4,
            rope_parameters=ROPE | {"rope_theta": 5e6},
        ),
    ),
    "gemma-3-1b": (
        "gemma3_text",
        _shape((1152, 6912, 26, 4, 1, 262144, 32768), head_dim=256, sliding_window=512, query_pre_attn_scalar=256),
    ),
    "gemma-3-4b": (
        "gemma3_text",
        _shape(
            (2560, 10240, 34, 8, 4, 262208, 131072),
            head_dim=256,
            sliding_window=1024,
            query_pre_attn_scalar=256,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        ),
    ),
    "phi-1.5": (
        "phi",
        _shape(
            (2048, 8192, 24, 32, None, 51200, 2048),
            rope_parameters=ROPE | {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ),
    ),
    "pythia-1b": (
        "gpt_neox",
        _shape(
            (2048, 8192, 16, 8, None, 50304, 2048),
            rope_parameters=ROPE | {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        ),
    ),
    "stablelm-2-1.6b": (
        "stablelm",
        _shape(
            (2048, 5632, 24, 32, 32, 100352, 4096),
            use_qkv_bias=True,
            rope_parameters=ROPE | {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        ),
    ),
    "qwen3-1.7b": (
        "qwen3",
        _shape(
            (2048, 6144, 28, 16, 8, 151936, 40960),
            head_dim=128,
            tie_word_embeddings=True,
            rope_parameters=ROPE | {"rope_theta": 1e6},
        ),
    ),
    "qwen3-4b": (
        "qwen3",
        _shape(
            (2560, 9728, 36, 32, 8, 151936, 40960),
            head_dim=128,
            tie_word_embeddings=True,
            rope_parameters=ROPE | {"rope_theta": 1e6},
        ),
    ),
    "qwen3-8b": (
        "qwen3",
        _shape((4096, 12288, 36, 32, 8, 151936, 40960), head_dim=128, rope_parameters=ROPE | {"rope_theta": 1e6}),
    ),
    "danube-1.8b": (
        "mistral",
        _shape(
            (2560, 6912, 24, 32, 8, 32000, 16384),
            sliding_window=4096,
            rms_norm_eps=1e-5,
            rope_parameters=ROPE | {"rope_theta": 1e4},
        ),
    ),
    "qwen2.5-3b": (
        "qwen2",
        _shape(
            (2048, 11008, 36, 16, 2, 151936, 32768),
            tie_word_embeddings=True,
            rope_parameters=ROPE | {"rope_theta": 1e6},
        ),
    ),
    "qwen2.5-1.5b": (
        "qwen2",
        _shape(
            (1536, 8960, 28, 12, 2, 151936, 32768), tie_word_embeddings=True, rope_parameters=ROPE | {"rope_theta": 1e6}
        ),
    ),
    "phi-3.5-mini": (
        "phi3",
        _shape((3072, 8192, 32, 32, 32, 32064, 4096), sliding_window=2047, rope_parameters=ROPE | {"rope_theta": 1e4}),
    ),
    "gpt2-large": ("gpt2", {"n_embd": 1280, "n_layer": 36, "n_head": 20, "vocab_size": 50257, "n_positions": 1024}),
    "gemma-2-2b": (
        "gemma2",
        _shape((2304, 9216, 26, 8, 4, 256000, 8192), head_dim=256, sliding_window=4096, query_pre_attn_scalar=256),
    ),
    "opt-1.3b": (
        "opt",
        {
            "hidden_size": 2048,
            "ffn_dim": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "vocab_size": 50272,
            "word_embed_proj_dim": 2048,
            "max_position_embeddings": 2048,
        },
    ),
    "olmoe-1b-7b": ("olmoe", _shape((2048, 1024, 16, 16, 16, 50304, 4096), num_experts=64, num_experts_per_tok=8)),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
        },
    ),
    "qwen3.5-0.8b": (
        "qwen3_5_text",
        _shape(
            (1024, 3584, 24, 8, 2, 248320, 262144),
            layer_types=DELTA * 6,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=16,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3.5-4b": (
        "qwen3_5_text",
        _shape(
            (2560, 9216, 32, 16, 4, 248320, 262144),
            layer_types=DELTA * 8,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            tie_word_embeddings=True,
        ),
    ),
    "granite-4.0-h-1b": (
        "granitemoehybrid",
        _shape(
            (1536, 4096, 40, 12, 4, 100352, 131072),
            shared_intermediate_size=4096,
            layer_types=["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
            num_local_experts=0,
            num_experts_per_tok=0,
            mamba_n_heads=48,
            mamba_d_head=64,
            mamba_d_state=128,
            tie_word_embeddings=True,
        ),
    ),
    "falcon-h1-1.5b": (
        "falcon_h1",
        _shape(
            (2048, 4608, 24, 8, 2, 65537, 131072),
            head_dim=128,
            mamba_d_ssm=3072,
            mamba_n_heads=48,
            mamba_d_head=64,
            mamba_d_state=256,
        ),
    ),
    "lfm2-1.2b": (
        "lfm2",
        {
            "hidden_size": 2048,
            "block_ff_dim": 12288,
            "num_hidden_layers": 16,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 65536,
            "max_position_embeddings": 128000,
        },
    ),
    "gemma-4-e2b": (
        "gemma4_text",
        _shape(
            (1536, 6144, 35, 8, 1, 262144, 131072),
            layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7,
            sliding_window=512,
            head_dim=256,
            global_head_dim=512,
            num_kv_shared_layers=20,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=256,
        ),
    ),
    "gemma-4-26b-a4b": (
        "gemma4_text",
        _shape(
            (2816, 2112, 30, 16, 8, 262144, 262144),
            layer_types=[*["sliding_attention"] * 5, "full_attention"] * 5,
            sliding_window=1024,
            num_global_key_value_heads=2,
            attention_k_eq_v=True,
            head_dim=256,
            global_head_dim=512,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=128,
            top_k_experts=8,
            moe_intermediate_size=704,
        ),
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        _shape(
            (2880, 2880, 24, 64, 8, 201088, 131072),
            sliding_window=128,
            head_dim=64,
            num_local_experts=32,
            num_experts_per_tok=4,
        ),
    ),
    "lfm2-8b-a1b": (
        "lfm2_moe",
        _shape(
            (2048, 7168, 24, 32, 8, 65536, 128000),
            moe_intermediate_size=1792,
            layer_types=["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
            num_dense_layers=2,
            num_experts=32,
            num_experts_per_tok=4,
        ),
    ),
    "youtu-2b": (
        "youtu",
        _shape(
            (2048, 6144, 32, 16, 16, 128256, 131072),
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            tie_word_embeddings=True,
            rms_norm_eps=1e-6,
            rope_parameters=ROPE | {"rope_theta": 1.6e6},
        ),
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        _shape(
            (2048, 10944, 27, 16, 16, 102400, 163840),
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            moe_intermediate_size=1408,
            first_k_dense_replace=1,
            tie_word_embeddings=False,
            rms_norm_eps=1e-6,
            rope_parameters=ROPE
            | {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096}
            | {"beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
        ),
    ),
    "glm-4.7-flash": (
        "deepseek_v3",  # of which its layers are; llama.cpp's converter wants its own tokenizer under its own name
        _shape(
            (2048, 10240, 47, 20, 20, 154880, 202752),
            q_lora_rank=768,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=192,
            v_head_dim=256,
            n_routed_experts=64,
            n_shared_experts=1,
            num_experts_per_tok=4,
            moe_intermediate_size=1536,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=1.8,
            scoring_func="sigmoid",
            num_mtp_layers=0,
            tie_word_embeddings=False,
            rms_norm_eps=1e-5,
            rope_parameters=ROPE | {"rope_theta": 1e6},
        ),
    ),
}
