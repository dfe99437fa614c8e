"""The architectures of GGUF files that can be converted: what llama.cpp calls a tensor or a key, and what transformers
calls the same.

A row of ARCHITECTURES states names and fields; `config.py` makes a config of a file by it. Facts: llama.cpp's
converters (`conversion/*.py`) and `src/models/*.cpp`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from streamspec.adapters.base_models.gguf.file import REQUIRED, Keys

Config = dict[str, Any]
RMS, MEAN = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"

# What a GGUF tensor is called in transformers, without `.weight` and `.bias`; {} is the layer.
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FUSED = dict.fromkeys(("attn_q", "attn_k", "attn_v", "ffn_gate"), "")  # maps that fused ones stand for
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def _names(outer: Mapping[str, str] | None = None, path: str = "model.layers.{}.", **layer: str) -> dict[str, str]:
    """The names of Llama, but for those given; an empty one is left out."""
    inner = {name: value for name, value in (_LAYER | layer).items() if value}
    return {**_OUTER, **(outer or {})} | {f"blk.{{}}.{name}": path + value for name, value in inner.items()}


@dataclass(frozen=True)
class Architecture:
    """One row of the table. Sizes, the norm's epsilon, positions and ties are read for all alike."""

    model_type: str  # of transformers
    names: Mapping[str, str] = field(default_factory=_names)
    epsilon: tuple[str, str] = (RMS, "rms_norm_eps")
    fields: Mapping[str, tuple[str, Any]] = field(default_factory=dict)  # config field: (key, default)
    sizes: Mapping[str, str] = field(default_factory=dict)  # config fields with other names than Llama's
    fixed: Mapping[str, Any] = field(default_factory=dict)  # config fields that the architecture implies
    biases: Mapping[str, str] = field(default_factory=dict)  # config switch: the tensor whose presence says it
    convolutions: bool = False  # in the layers that have no heads of keys
    permuted: bool = False  # rows of queries and keys are stored in llama.cpp's order of rotary pairs
    one_added: bool = False  # norm weights are stored with one added
    layout: str | None = None  # of some tensors, by name in tensors.LAYOUTS
    head_dim: bool = False  # the config states it always; else where the heads' widths do not add up to the model's
    rotary: bool = True
    partial: bool = False  # transformers can rotate a part of each head
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # keys and the values that are understood
    harmless: tuple[str, ...] = ()  # further keys that say nothing new
    more: Callable[[Keys, Config], None] | None = None  # completes the config


def _llama(keys: Keys, config: Config) -> None:
    window = keys.take("attention.sliding_window", 0)
    if window:  # Mistral's; llama.cpp calls both `llama`
        config |= {"model_type": "mistral", "sliding_window": window}
        config.pop("attention_bias", None)


def _phi3(keys: Keys, config: Config) -> None:
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
    given = keys.take("attention.sliding_window_pattern", pattern)
    if isinstance(given, list):
        if len(given) != len(layers):
            keys.refuse("attention.sliding_window_pattern", given, f"{len(layers)} values")
        sliding = [bool(one) for one in given]
    else:
        sliding = [given > 0 and (layer + 1) % given != 0 for layer in layers]
    if not window:
        sliding = [False for _ in layers]
    config["layer_types"] = ["sliding_attention" if one else "full_attention" for one in sliding]
    if window:
        config["sliding_window"] = window


def _gemma_scale(keys: Keys, config: Config, large: int) -> None:
    """Queries are scaled by the head's size, in the largest of the family by the width of a head's part instead."""
    width = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = width if config["num_hidden_layers"] == large else config["head_dim"]


def _gemma2(keys: Keys, config: Config) -> None:
    _windows(keys, config, 4096, 2)
    _gemma_scale(keys, config, large=46)
    config["attn_logit_softcapping"] = float(keys.take("attn_logit_softcapping", 50.0)) or None
    config["final_logit_softcapping"] = float(keys.take("final_logit_softcapping", 30.0)) or None


def _gemma3(keys: Keys, config: Config) -> None:
    _windows(keys, config, None, 6)
    _gemma_scale(keys, config, large=62)
    config["final_logit_softcapping"] = float(keys.take("final_logit_softcapping", 0.0)) or None
    local = float(keys.take("rope.freq_base_swa", 10_000.0))
    config["rope_parameters"] = {
        "full_attention": config["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _gpt2(keys: Keys, config: Config) -> None:
    if keys.take("attention.head_count_kv", config["n_head"]) != config["n_head"]:
        keys.refuse("attention.head_count_kv", "smaller", "as many as heads")


def _parallel(keys: Keys, config: Config) -> None:
    config["use_parallel_residual"] = bool(
        keys.take("use_parallel_residual", config.get("use_parallel_residual", True))
    )


def _kept_positions(keys: Keys, config: Config) -> None:
    """llama.cpp leaves rotary positions out of each fourth layer."""
    config["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]


def _ministral(keys: Keys, config: Config) -> None:
    """YaRN whose attention factor cancels out, and queries that grow with their position."""
    multiplier = float(keys.take("rope.scaling.yarn_log_multiplier", 0.0))
    if multiplier:
        config["rope_parameters"] |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    config["rope_parameters"]["llama_4_scaling_beta"] = float(keys.take("attention.temperature_scale", 0.0))
    if config["rope_parameters"]["rope_type"] != "yarn":
        keys.refuse("rope.scaling.type", keys.take("rope.scaling.type", "missing"), "yarn")


def _olmo(keys: Keys, config: Config) -> None:
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


def _exaone(keys: Keys, config: Config) -> None:
    """The 32B has windows, and no positions in the layers without; llama.cpp knows it by its layers."""
    config["sliding_window"] = None
    _windows(keys, config, 4096 if config["num_hidden_layers"] == 64 else None, 4)


def _cohere(keys: Keys, config: Config) -> None:
    _windows(keys, config, None, 4)


def _lfm(keys: Keys, config: Config) -> None:
    """Layers without heads of keys are convolutions."""
    heads = keys.take("attention.head_count_kv")
    if not isinstance(heads, list) or len(heads) != config["num_hidden_layers"]:
        keys.refuse("attention.head_count_kv", heads, "one number for each layer")
    config["layer_types"] = ["full_attention" if one else "conv" for one in heads]


_GPT2_NAMES = _names(
    {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f"},
    "transformer.h.{}.",
    attn_norm="ln_1",
    attn_qkv="attn.c_attn",
    attn_output="attn.c_proj",
    ffn_norm="ln_2",
    ffn_up="mlp.c_fc",
    ffn_down="mlp.c_proj",
    **_FUSED,
)
_NEOX_NAMES = _names(
    {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
    "gpt_neox.layers.{}.",
    attn_qkv="attention.query_key_value",
    attn_output="attention.dense",
    ffn_up="mlp.dense_h_to_4h",
    ffn_down="mlp.dense_4h_to_h",
    **_FUSED,
)
_GEMMA2_NAMES = _names(
    ffn_norm="pre_feedforward_layernorm",
    post_attention_norm="post_attention_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)
_POST_NORMS = _names(
    None,
    **_HEAD_NORMS,
    attn_norm="",
    ffn_norm="",
    post_attention_norm="post_attention_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)
_LFM_NAMES = {name: value for name, value in _OUTER.items() if name != "output_norm"} | _names(
    {"token_embd_norm": "model.embedding_norm"},
    attn_norm="operator_norm",
    attn_output="self_attn.out_proj",
    attn_q_norm="self_attn.q_layernorm",
    attn_k_norm="self_attn.k_layernorm",
    ffn_norm="ffn_norm",
    ffn_gate="feed_forward.w1",
    ffn_up="feed_forward.w3",
    ffn_down="feed_forward.w2",
    **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
)
_EPSILON = (MEAN, "layer_norm_eps")
_BIASES = {"attention_bias": "attn_output", "mlp_bias": "ffn_down"}

ARCHITECTURES = {
    "llama": Architecture("llama", head_dim=True, biases=_BIASES, permuted=True, more=_llama),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture(
        "qwen3", _names(None, **_HEAD_NORMS), head_dim=True, biases={"attention_bias": "attn_output"}
    ),
    "phi2": Architecture(
        "phi",
        _names(
            {"output_norm": "model.final_layernorm"},
            attn_output="self_attn.dense",
            ffn_up="mlp.fc1",
            ffn_down="mlp.fc2",
            ffn_norm="",
            ffn_gate="",
        ),
        _EPSILON,
        partial=True,
    ),
    "phi3": Architecture(
        "phi3",
        _names(None, attn_qkv="self_attn.qkv_proj", ffn_up="mlp.gate_up_proj", **_FUSED),
        partial=True,
        more=_phi3,
    ),
    "gpt2": Architecture(
        "gpt2",
        _GPT2_NAMES,
        (MEAN, "layer_norm_epsilon"),
        sizes={
            "num_hidden_layers": "n_layer",
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
        },
        layout="gpt2",
        rotary=False,
        more=_gpt2,
    ),
    "gptneox": Architecture(
        "gpt_neox",
        _NEOX_NAMES,
        _EPSILON,
        biases={"attention_bias": "attn_qkv"},
        layout="gptneox",
        partial=True,
        more=_parallel,
    ),
    "stablelm": Architecture(
        "stablelm",
        _names(attn_q_norm="self_attn.q_layernorm.norms", attn_k_norm="self_attn.k_layernorm.norms"),
        _EPSILON,
        biases={"use_qkv_bias": "attn_q", "qk_layernorm": "attn_q_norm"},
        layout="stablelm",
        partial=True,
        more=_parallel,
    ),
    "gemma": Architecture("gemma", head_dim=True, one_added=True),
    "gemma2": Architecture("gemma2", _GEMMA2_NAMES, head_dim=True, one_added=True, more=_gemma2),
    "gemma3": Architecture(
        "gemma3_text",
        _GEMMA2_NAMES | {f"blk.{{}}.{name}": f"model.layers.{{}}.{value}" for name, value in _HEAD_NORMS.items()},
        head_dim=True,
        one_added=True,
        more=_gemma3,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        _names(ffn_up="mlp.c_fc", ffn_down="mlp.c_proj", ffn_gate=""),
        (MEAN, "norm_epsilon"),
        biases={"use_bias": "attn_output"},
    ),
    "granite": Architecture(
        "granite",
        fields={
            "attention_multiplier": ("attention.scale", REQUIRED),
            "logits_scaling": ("logit_scale", REQUIRED),
            "embedding_multiplier": ("embedding_scale", 1.0),
            "residual_multiplier": ("residual_scale", 1.0),
        },
        biases=_BIASES,
        permuted=True,
        only={"rope.scaling.finetuned": (True,)},  # here: whether there are positions at all
    ),
    "smollm3": Architecture("smollm3", biases=_BIASES, permuted=True, more=_kept_positions),
    "arcee": Architecture("arcee", _names(ffn_gate=""), head_dim=True, biases=_BIASES, permuted=True),
    "nemotron": Architecture(
        "nemotron",
        _names(ffn_gate=""),
        (MEAN, "norm_eps"),
        head_dim=True,
        biases=_BIASES,
        one_added=True,
        partial=True,
        harmless=(RMS,),
    ),
    "seed_oss": Architecture(
        "seed_oss",
        _names(ffn_norm="", post_attention_norm="post_attention_layernorm"),
        head_dim=True,
        biases={"attention_bias": "attn_q", "attention_out_bias": "attn_output", "mlp_bias": "ffn_down"},
    ),
    "ernie4_5": Architecture("ernie4_5", head_dim=True, biases={"use_bias": "attn_output"}),
    "glm4": Architecture(
        "glm4",
        _names(
            post_attention_norm="post_self_attn_layernorm",
            post_ffw_norm="post_mlp_layernorm",
            ffn_up="mlp.gate_up_proj",
            ffn_gate="",
        ),
        head_dim=True,
        biases={"attention_bias": "attn_q"},
        partial=True,
    ),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        _names(attn_q_norm="self_attn.query_layernorm", attn_k_norm="self_attn.key_layernorm"),
        head_dim=True,
        biases={"attention_bias": "attn_output"},
    ),
    "mistral3": Architecture("ministral3", head_dim=True, permuted=True, more=_ministral),
    "olmo2": Architecture("olmo2", _POST_NORMS, biases={"attention_bias": "attn_output"}, more=_olmo),
    "exaone4": Architecture("exaone4", _POST_NORMS, more=_exaone),
    "cohere2": Architecture(
        "cohere2",
        _names(ffn_norm=""),
        _EPSILON,
        fields={"logit_scale": ("logit_scale", REQUIRED)},
        head_dim=True,
        more=_cohere,
    ),
    "lfm2": Architecture(
        "lfm2",
        _LFM_NAMES,
        (RMS, "norm_eps"),
        fields={"conv_L_cache": ("shortconv.l_cache", REQUIRED)},
        fixed={"block_auto_adjust_ff_dim": False},
        biases={"conv_bias": "shortconv.in_proj"},
        convolutions=True,
        layout="lfm2",
        more=_lfm,
    ),
}
