"""The rules of single architectures beyond their row of the table: each function completes a config.

`tests/adapters/base_models/gguf/test_converter.py` covers it. Facts: llama.cpp's `conversion/*.py` and
`src/models/*.cpp`.
"""

from __future__ import annotations

from typing import Any

from streamspec.adapters.base_models.gguf.file import Keys

Config = dict[str, Any]
CLOSE = 1e-9  # of 1e-5, read from fp32


def llama(keys: Keys, config: Config) -> None:
    window = keys.take("attention.sliding_window", 0)
    if window:  # Mistral's; llama.cpp calls both `llama`
        config |= {"model_type": "mistral", "sliding_window": window}
        config.pop("attention_bias", None)


def phi3(keys: Keys, config: Config) -> None:
    rope = config["rope_parameters"]
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    config |= {
        "original_max_position_embeddings": original,
        "sliding_window": keys.take("attention.sliding_window", 0) or None,
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
    }


def _windows(keys: Keys, config: Config, length: int | None, pattern: int) -> None:
    """Windows in all layers but each `pattern`-th one, unless the file says it for each layer."""
    window = keys.take("attention.sliding_window", length)
    layers = range(config["num_hidden_layers"])
    stored = keys.take("attention.sliding_window_pattern", pattern)
    if isinstance(stored, list):
        if len(stored) != len(layers):
            keys.refuse("attention.sliding_window_pattern", stored, f"{len(layers)} values")
        sliding = [bool(value) for value in stored]
    else:
        sliding = [stored > 0 and (layer + 1) % stored != 0 for layer in layers]
    config["layer_types"] = ["sliding_attention" if window and slides else "full_attention" for slides in sliding]
    if window:
        config["sliding_window"] = window


def _gemma_scale(keys: Keys, config: Config, large: int) -> None:
    """Queries are scaled by the head's size, in the largest of the family by the width of a head's part instead."""
    width = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = width if config["num_hidden_layers"] == large else config["head_dim"]


def gemma2(keys: Keys, config: Config) -> None:
    _windows(keys, config, 4096, 2)
    _gemma_scale(keys, config, large=46)
    config["attn_logit_softcapping"] = float(keys.take("attn_logit_softcapping", 50.0)) or None
    config["final_logit_softcapping"] = float(keys.take("final_logit_softcapping", 30.0)) or None


def gemma3(keys: Keys, config: Config) -> None:
    _windows(keys, config, None, 6)
    _gemma_scale(keys, config, large=62)
    config["final_logit_softcapping"] = float(keys.take("final_logit_softcapping", 0.0)) or None
    local = float(keys.take("rope.freq_base_swa", 10_000.0))
    config["rope_parameters"] = {
        "full_attention": config["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def gpt2(keys: Keys, config: Config) -> None:
    if keys.take("attention.head_count_kv", config["n_head"]) != config["n_head"]:
        keys.refuse("attention.head_count_kv", "smaller", "as many as heads")


def parallel(keys: Keys, config: Config) -> None:
    config["use_parallel_residual"] = bool(
        keys.take("use_parallel_residual", config.get("use_parallel_residual", True))
    )


def kept_positions(keys: Keys, config: Config) -> None:
    """llama.cpp leaves rotary positions out of each fourth layer."""
    config["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]


def ministral(keys: Keys, config: Config) -> None:
    """YaRN whose attention factor cancels out, and queries that grow with their position; without both it is the text
    part of Mistral Small 3.1 and later.
    """
    multiplier = float(keys.take("rope.scaling.yarn_log_multiplier", 0.0))
    if config["rope_parameters"]["rope_type"] == "default" and not multiplier:
        keys.only("attention.temperature_scale", 0.0)
        config |= {"model_type": "mistral", "sliding_window": None}
        return
    if multiplier:
        config["rope_parameters"] |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    config["rope_parameters"]["llama_4_scaling_beta"] = float(keys.take("attention.temperature_scale", 0.0))
    if config["rope_parameters"]["rope_type"] != "yarn":
        keys.refuse("rope.scaling.type", keys.take("rope.scaling.type", "missing"), "yarn")


def olmo(keys: Keys, config: Config) -> None:
    """OLMo 3 has windows; positions within them are never scaled."""
    if not keys.has("attention.sliding_window"):
        return
    _windows(keys, config, None, 4)
    theta = float(keys.take("rope.freq_base_swa", config["rope_parameters"]["rope_theta"]))
    config |= {
        "model_type": "olmo3",
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
    }


def bare_norms(keys: Keys, config: Config) -> None:
    """OLMo 1: norms without weights, whose epsilon transformers writes in its code."""
    epsilon = config.pop("bare_norm_eps")
    if abs(epsilon - 1e-5) > CLOSE:
        keys.refuse("attention.layer_norm_epsilon", epsilon, "1e-05")
    config["clip_qkv"] = float(config["clip_qkv"] or 0.0) or None  # llama.cpp's 0: none


def exaone(keys: Keys, config: Config) -> None:
    """The 32B has windows, and no positions in the layers without; llama.cpp knows it by its layers."""
    config["sliding_window"] = None
    _windows(keys, config, 4096 if config["num_hidden_layers"] == 64 else None, 4)


def cohere(keys: Keys, config: Config) -> None:
    _windows(keys, config, None, 4)


def lfm(keys: Keys, config: Config) -> None:
    """Layers without heads of keys are convolutions."""
    heads = keys.take("attention.head_count_kv")
    if not isinstance(heads, list) or len(heads) != config["num_hidden_layers"]:
        keys.refuse("attention.head_count_kv", heads, "one number for each layer")
    config["layer_types"] = ["full_attention" if count else "conv" for count in heads]
