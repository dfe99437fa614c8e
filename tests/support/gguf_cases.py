"""Tiny models of every GGUF architecture: a transformers config and what a GGUF file says of the same model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedModel

from streamspec.adapters.base_models.gguf.converter import convert
from tests.support import gguf_files as files
from tests.support.gguf_near_cases import NEAR, VOCABULARY, Case
from tests.support.gguf_positions import (
    GEMMA3_ROPE,
    LENGTH,
    LLAMA3,
    LONG,
    LONG_ATTENTION,
    LONGROPE,
    ONE,
    SHORT,
    YARN,
    llama3_divisors,
)

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
# name: (architecture, model_type, config fields, further keys, further tensors)
CASES: dict[str, Case] = {
    "llama 3.2": (
        "llama",
        "llama",
        {"rope_parameters": LLAMA3, "head_dim": 32, "tie_word_embeddings": True},
        {"rope.freq_base": 5e5, "rope.dimension_count": 32, "attention.key_length": 32, "attention.value_length": 32},
        {"rope_freqs.weight": llama3_divisors(32, LLAMA3)},
    ),
    "llama with biases": (
        "llama",
        "llama",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": ONE},
        {"rope.dimension_count": 16, "vocab_size": VOCABULARY},
        {},
    ),
    "llama, linear": (
        "llama",
        "llama",
        {"rope_parameters": ONE | {"rope_type": "linear", "factor": 4.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.freq_base": 1e4},
        {},
    ),
    "mistral with a window": (
        "llama",
        "mistral",
        {"sliding_window": 8, "rope_parameters": ONE},
        {"attention.sliding_window": 8},
        {},
    ),
    "qwen2": ("qwen2", "qwen2", {"rope_parameters": ONE | {"rope_theta": 1e6}}, {"rope.freq_base": 1e6}, {}),
    "qwen2, yarn": (
        "qwen2",
        "qwen2",
        {"rope_parameters": YARN},
        {
            "rope.freq_base": 1e6,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": LENGTH,
        },
        {},
    ),
    "qwen3": (
        "qwen3",
        "qwen3",
        {"head_dim": 32, "rope_parameters": ONE, "tie_word_embeddings": True},
        {"attention.key_length": 32, "attention.value_length": 32},
        {},
    ),
    "phi2": (
        "phi2",
        "phi",
        {"num_key_value_heads": 4, "rope_parameters": ONE | {"partial_rotary_factor": 0.5}},
        {"rope.dimension_count": 8},
        {},
    ),
    "phi3, long": (
        "phi3",
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": LENGTH, "pad_token_id": 0},
        {
            "rope.dimension_count": 16,
            "rope.scaling.original_context_length": LENGTH,
            "rope.scaling.attn_factor": LONG_ATTENTION,
            "attention.sliding_window": 0,
        },
        {
            "rope_factors_short.weight": np.array(SHORT, np.float32),
            "rope_factors_long.weight": np.array(LONG, np.float32),
        },
    ),
    "phi3 with a window": (
        "phi3",
        "phi3",
        {"rope_parameters": ONE, "sliding_window": 8, "pad_token_id": 0},
        {"rope.dimension_count": 16, "attention.sliding_window": 8, "rope.scaling.original_context_length": 32768},
        {},
    ),
    "gpt2": (
        "gpt2",
        "gpt2",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": 512, "tie_word_embeddings": True},
        {"attention.head_count_kv": 4},
        {},
    ),
    "gptneox": (
        "gptneox",
        "gpt_neox",
        {"rope_parameters": ONE | {"partial_rotary_factor": 0.25}, "use_parallel_residual": True},
        {"rope.dimension_count": 4, "use_parallel_residual": True},
        {},
    ),
    "gptneox, whole heads": (
        "gptneox",
        "gpt_neox",
        {"rope_parameters": ONE | {"partial_rotary_factor": 1.0}, "use_parallel_residual": False},
        {"rope.dimension_count": 16, "use_parallel_residual": False},
        {},
    ),
    "stablelm": (
        "stablelm",
        "stablelm",
        {
            "rope_parameters": ONE | {"partial_rotary_factor": 0.25},
            "use_qkv_bias": True,
            "qk_layernorm": True,
            "use_parallel_residual": False,
        },
        {"rope.dimension_count": 4, "use_parallel_residual": False},
        {},
    ),
    "gemma": (
        "gemma",
        "gemma",
        {"head_dim": 32, "rope_parameters": ONE, "tie_word_embeddings": True},
        {"attention.key_length": 32, "attention.value_length": 32},
        {},
    ),
    "gemma2": (
        "gemma2",
        "gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 20.0,
            "rope_parameters": ONE,
            "tie_word_embeddings": True,
        },
        {
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 20.0,
        },
        {},
    ),
    "gemma3, scaled": (
        "gemma3",
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "rope_parameters": GEMMA3_ROPE,
            "tie_word_embeddings": True,
        },
        {
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.sliding_window": 8,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        {},
    ),
    "starcoder2": (
        "starcoder2",
        "starcoder2",
        {"use_bias": True, "rope_parameters": ONE | {"rope_theta": 1e5}, "tie_word_embeddings": True},
        {"rope.freq_base": 1e5},
        {},
    ),
    "granite": (
        "granite",
        "granite",
        {
            "rope_parameters": ONE,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
        },
        {
            "attention.scale": 0.2,
            "embedding_scale": 3.0,
            "residual_scale": 0.5,
            "logit_scale": 4.0,
            "rope.dimension_count": 16,
            "vocab_size": VOCABULARY,
        },
        {},
    ),
    "smollm3": (
        "smollm3",
        "smollm3",
        {"num_hidden_layers": 5, "rope_parameters": ONE, "no_rope_layers": [1, 1, 1, 0, 1], "pad_token_id": 0},
        {"rope.dimension_count": 16},
        {},
    ),
    "arcee": (
        "arcee",
        "arcee",
        {"rope_parameters": YARN, "head_dim": 16},
        {
            "rope.freq_base": 1e6,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": LENGTH,
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
        },
        {},
    ),
    "nemotron": (
        "nemotron",
        "nemotron",
        {"rope_parameters": ONE | {"partial_rotary_factor": 0.5}, "head_dim": 16},
        {"rope.dimension_count": 8, "rope.scaling.type": "none", "attention.layer_norm_epsilon": 1e-5},
        {},
    ),
    "seed_oss": (
        "seed_oss",
        "seed_oss",
        {"rope_parameters": ONE, "head_dim": 32, "attention_bias": True},
        {"attention.key_length": 32, "attention.value_length": 32},
        {},
    ),
    "ernie4_5": (
        "ernie4_5",
        "ernie4_5",
        {"rope_parameters": ONE, "head_dim": 32},
        {"attention.key_length": 32, "attention.value_length": 32},
        {},
    ),
    "glm4": (
        "glm4",
        "glm4",
        {"rope_parameters": ONE | {"partial_rotary_factor": 0.5}, "head_dim": 32, "pad_token_id": 0},
        {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 16},
        {},
    ),
    "hunyuan": (
        "hunyuan-dense",
        "hunyuan_v1_dense",
        {"rope_parameters": ONE, "head_dim": 32, "pad_token_id": 0},
        {
            "attention.key_length": 32,
            "attention.value_length": 32,
            "rope.scaling.type": "none",
            "rope.scaling.factor": 1.0,
        },
        {},
    ),
    "ministral": (
        "mistral3",
        "ministral3",
        {
            "head_dim": 32,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
        {
            "attention.key_length": 32,
            "attention.value_length": 32,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": LENGTH,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.1,
        },
        {},
    ),
    "olmo2": ("olmo2", "olmo2", {"rope_parameters": ONE, "pad_token_id": 0}, {}, {}),
    "olmo3": (
        "olmo2",
        "olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": ONE | {"rope_theta": 3e5}},
            "pad_token_id": 0,
        },
        {
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [True, True, True, False],
            "rope.freq_base_swa": 3e5,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": LENGTH,
        },
        {},
    ),
    "exaone4": (
        "exaone4",
        "exaone4",
        {"rope_parameters": LLAMA3 | {"factor": 16.0}, "sliding_window": None, "layer_types": ["full_attention"] * 2},
        {"rope.freq_base": 5e5},
        {"rope_freqs.weight": llama3_divisors(16, LLAMA3 | {"factor": 16.0})},
    ),
    "exaone4 with windows": (
        "exaone4",
        "exaone4",
        {"num_hidden_layers": 4, "rope_parameters": ONE, "sliding_window": 8, "sliding_window_pattern": 4},
        {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, True, True, False]},
        {},
    ),
    "cohere2": (
        "cohere2",
        "cohere2",
        {
            "num_hidden_layers": 4,
            "rope_parameters": ONE,
            "sliding_window": 8,
            "logit_scale": 0.25,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
        },
        {
            "attention.sliding_window": 8,
            "logit_scale": 0.25,
            "rope.dimension_count": 16,
            "rope.scaling.type": "none",
        },
        {},
    ),
    "lfm2": (
        "lfm2",
        "lfm2",
        {
            "layer_types": ["conv", "full_attention"],
            "rope_parameters": ONE,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
        {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
        {},
    ),
}

CASES |= NEAR


def made(case: str, **fields: Any) -> tuple[PreTrainedModel, str, dict[str, Any], dict[str, np.ndarray]]:
    """The model of a case with what its GGUF file holds: architecture, keys, tensors."""
    architecture, model_type, own, keys, tensors = CASES[case]
    shape = {"vocab_size": VOCABULARY} if model_type == "gpt2" else SHAPE
    model = files.tiny_model(model_type, **(shape | own | fields))
    return model, architecture, files.sizes(model, **keys), files.stored(model, architecture) | tensors


def as_folder(file: Path) -> Path:
    """The file as a Hugging Face folder beside it."""
    folder = file.with_suffix("")
    folder.mkdir()
    convert(file, folder)
    return folder


def in_blocks(path: Path, kind: str) -> tuple[Path, dict[str, np.ndarray]]:
    """A file whose linear maps and tables are random blocks of a kind, and their values as the `gguf` package decodes
    them, by the names of its tensors."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 16}
    model, architecture, keys, _ = made("llama with biases", **sizes)
    stored, number = files.stored(model, architecture), gguf.GGMLQuantizationType[kind]
    (block, size), random = gguf.GGML_QUANT_SIZES[number], np.random.default_rng(0)
    raw = {
        name: random.integers(0, 60, (values.shape[0], values.shape[1] // block * size), np.uint8)
        for name, values in stored.items()
        if values.ndim == 2
    }
    files.write_gguf(path, architecture, keys, stored | raw, kinds=dict.fromkeys(raw, number))
    return path, {name: gguf.dequantize(values, number) for name, values in raw.items()}


def quantized(path: Path, kind: str = "Q8_0", **fields: Any) -> Path:
    """A file of four layers whose linear maps and tables are rounded to a kind of blocks."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_hidden_layers": 4}
    return rounded(path, "llama with biases", kind, **(sizes | fields))


def rounded(path: Path, case: str = "llama 3.2", kind: str | None = None, **fields: Any) -> Path:
    """The file of a case, as `rounded_file`."""
    _, architecture, keys, tensors = made(case, **fields)
    return rounded_file(path, architecture, keys, tensors, kind)


def rounded_file(
    path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, np.ndarray], kind: str | None
) -> Path:
    """A file whose linear maps, tables and experts, no router or norm, are rounded to a kind of blocks."""
    if kind is None:
        return files.write_gguf(path, architecture, keys, tensors)
    number = gguf.GGMLQuantizationType[kind]
    block, _ = gguf.GGML_QUANT_SIZES[number]
    maps = {
        name: gguf.quantize(values, number)
        for name, values in tensors.items()
        if values.ndim > 1 and values.shape[-1] % block == 0 and not re.search("gate_inp|norm", name)
    }
    return files.write_gguf(path, architecture, keys, tensors | maps, kinds=dict.fromkeys(maps, number))
