"""The architectures of GGUF files that can be converted: what llama.cpp calls a tensor or a key, and what transformers
calls the same.

A row of ARCHITECTURES states names and fields; `config_of` computes a config from it, in which every key of the file
has been used or refused. Facts: llama.cpp's converters (`conversion/*.py`) and `src/models/*.cpp`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from streamspec.adapters.base_models.gguf.file import REQUIRED, GgufFile, Keys
from streamspec.adapters.base_models.gguf.rope import TENSORS, Factors, rope_parameters
from streamspec.errors import BaseModelError

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
    permuted: bool = False  # rows of queries and keys are stored in llama.cpp's order of rotary pairs
    one_added: bool = False  # norm weights are stored with one added
    layout: str | None = None  # of some tensors, by name in tensors.LAYOUTS
    rotary: bool = True
    partial: bool = False  # transformers can rotate a part of each head
    harmless: tuple[str, ...] = ()  # further keys that say nothing new
    more: Callable[[Keys, Config], None] | None = None  # completes the config


SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
# Keys of all architectures that must say what a plain decoder is, or be missing.
PLAIN = {
    "attention.causal": (True,),
    "pooling_type": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "nextn_predict_layers": (0,),
}
HARMLESS = ("vocab_size", "tensor_data_layout", "attention.group_norm_epsilon")


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


def _seed_oss(keys: Keys, config: Config) -> None:
    config["attention_out_bias"] = config.get("attention_out_bias", False)


def _kept_positions(keys: Keys, config: Config) -> None:
    """llama.cpp leaves rotary positions out of each fourth layer."""
    config["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]


_GPT2_NAMES = _names(
    {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f"},
    "transformer.h.{}.",
    attn_norm="ln_1",
    attn_qkv="attn.c_attn",
    attn_output="attn.c_proj",
    ffn_norm="ln_2",
    ffn_up="mlp.c_fc",
    ffn_down="mlp.c_proj",
    attn_q="",
    attn_k="",
    attn_v="",
    ffn_gate="",
)
_NEOX_NAMES = _names(
    {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
    "gpt_neox.layers.{}.",
    attn_qkv="attention.query_key_value",
    attn_output="attention.dense",
    ffn_up="mlp.dense_h_to_4h",
    ffn_down="mlp.dense_4h_to_h",
    attn_q="",
    attn_k="",
    attn_v="",
    ffn_gate="",
)
_GEMMA2_NAMES = _names(
    ffn_norm="pre_feedforward_layernorm",
    post_attention_norm="post_attention_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)
_EPSILON = (MEAN, "layer_norm_eps")
_HEAD_DIM = {"head_dim": ("attention.key_length", REQUIRED)}

ARCHITECTURES = {
    "llama": Architecture(
        "llama", biases={"attention_bias": "attn_output", "mlp_bias": "ffn_down"}, permuted=True, more=_llama
    ),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture(
        "qwen3", _names(None, **_HEAD_NORMS), fields=_HEAD_DIM, biases={"attention_bias": "attn_output"}
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
        _names(attn_qkv="self_attn.qkv_proj", ffn_up="mlp.gate_up_proj", attn_q="", attn_k="", attn_v="", ffn_gate=""),
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
    "gemma": Architecture("gemma", fields=_HEAD_DIM, one_added=True),
    "gemma2": Architecture("gemma2", _GEMMA2_NAMES, fields=_HEAD_DIM, one_added=True, more=_gemma2),
    "gemma3": Architecture(
        "gemma3_text",
        _GEMMA2_NAMES | {f"blk.{{}}.{name}": f"model.layers.{{}}.{value}" for name, value in _HEAD_NORMS.items()},
        fields=_HEAD_DIM,
        one_added=True,
        more=_gemma3,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        _names(ffn_up="mlp.c_fc", ffn_down="mlp.c_proj", ffn_gate=""),
        (MEAN, "norm_epsilon"),
        biases={"use_bias": "attn_output"},
    ),
}


def architecture_of(model: GgufFile) -> Architecture:
    """The row of the file's architecture. Raises BaseModelError where there is none or it is no language model."""
    kind = model.metadata.get("general.type", "model")
    if kind != "model":
        raise BaseModelError(f"{model.path.name} holds a {kind}", "a language model", "take the model's own GGUF file")
    if model.architecture not in ARCHITECTURES:
        raise BaseModelError(
            f"{model.path.name} is of the architecture {model.architecture}",
            f"one of {', '.join(ARCHITECTURES)}",
            "use the model's Hugging Face folder if its family is supported",
        )
    return ARCHITECTURES[model.architecture]


def config_of(model: GgufFile, row: Architecture) -> Config:
    """The fields of a transformers config, `model_type` first. Raises BaseModelError for keys that nobody understands
    and for values that contradict each other.
    """
    keys = Keys(model, model.architecture)
    heads = keys.number("attention.head_count")
    width = keys.number("embedding_length")
    length = keys.number("context_length")
    config: Config = {"model_type": row.model_type}
    for name, key in SIZES.items():
        config[row.sizes.get(name, name)] = keys.number(key)
    config[row.sizes.get("intermediate_size", "intermediate_size")] = keys.number("feed_forward_length")
    if row.rotary:
        config["num_key_value_heads"] = keys.number("attention.head_count_kv", heads)
    head_dim = keys.number("attention.key_length", width // heads)
    if keys.number("attention.value_length", head_dim) != head_dim:
        keys.refuse("attention.value_length", keys.take("attention.value_length"), f"{head_dim}, as of keys")
    if head_dim * heads != width or "head_dim" in row.fields or row.model_type == "llama":
        config["head_dim"] = head_dim
    config[row.epsilon[1]] = float(keys.take(row.epsilon[0], REQUIRED))
    keys.skip(*({RMS, MEAN} if row.model_type == "nemotron" else ()), *HARMLESS, *row.harmless)
    for name, (key, default) in row.fields.items():
        config[name] = keys.take(key, default)
    for key, allowed in PLAIN.items():
        keys.only(key, *allowed)
    for switch, tensor in row.biases.items():
        suffix = "weight" if tensor.endswith("norm") else "bias"
        config[switch] = f"blk.0.{tensor}.{suffix}" in model.tensors
    config["vocab_size"] = _vocabulary(model)
    config["tie_word_embeddings"] = "output.weight" not in model.tensors
    if row.rotary:
        factors: Factors = {name: model.tensors[name].values() for name in sorted(TENSORS & model.tensors.keys())}
        config["rope_parameters"] = rope_parameters(keys, head_dim, length, factors)
        if "partial_rotary_factor" in config["rope_parameters"] and not row.partial:
            keys.refuse("rope.dimension_count", keys.take("rope.dimension_count"), f"{head_dim}, the whole head")
    config |= row.fixed
    if row.more is not None:
        row.more(keys, config)
    keys.finish()
    return config


def _vocabulary(model: GgufFile) -> int:
    """Rows of the embedding, which the tokenizer must have, too."""
    embedding = model.tensors.get("token_embd.weight")
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    if embedding is None or not isinstance(tokens, list):
        missing = "tensor token_embd.weight" if embedding is None else "list tokenizer.ggml.tokens"
        raise BaseModelError(
            f"{model.path.name} has no {missing}", "a whole model with its tokenizer", "take another file"
        )
    if len(tokens) != embedding.shape[0]:
        raise BaseModelError(
            f"{model.path.name}: a tokenizer of {len(tokens)} tokens for an embedding of {embedding.shape[0]} rows",
            "as many tokens as rows",
            "take another conversion of this model",
        )
    return embedding.shape[0]
