"""Tiny random models of every trainable family, made on the spot, and options that train them in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from streamspec.adapters.training.config import TrainConfig
from tests.support.latent_families import LATENT
from tests.support.mixture_families import MIXTURES
from tests.support.near_families import NEAR
from tests.support.recurrent_families import RECURRENT, with_memory

SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "phi": {"partial_rotary_factor": 0.5},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128},
    "phi3": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5, "head_dim": 16, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 5, "sliding_window_pattern": 2, "head_dim": 16},
    "gemma4_text": {
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
        "use_double_wide_mlp": True,
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "exaone4": {"sliding_window": 5, "sliding_window_pattern": 2},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"], "head_dim": 8}
    | {"sliding_window": 5, "conv_L_cache": 5},
    "stablelm": {},
    "gpt_neox": {},
    **NEAR,
}

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def tiny_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of 4 layers, hidden 32, vocabulary 64, fp32, eager attention."""
    torch.manual_seed(seed)
    common = SMALL | {"attn_implementation": "eager"}
    if family in ("phi", "opt", "gpt2", "gpt_neox"):
        common.pop("num_key_value_heads")
    if family == "helium":
        common["head_dim"] = 8
    if family == "gpt2":
        for key in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        ):
            common.pop(key)
    config = AutoConfig.for_model(
        family.partition("+")[0], **(common | (SIZES | RECURRENT | MIXTURES | LATENT)[family] | changes)
    )
    return with_memory(AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval())


def tiny_tokenizer(chat: bool = False) -> Any:
    """A byte-level tokenizer of 64 entries: end-of-text (2), bos (1), pad (0), newline, space and letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "\n abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:?!~^"
    alphabet = {
        pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(c)[0][0]: i + 3 for i, c in enumerate(letters)
    }
    tokenizer = Tokenizer(models.BPE(vocab={"<pad>": 0, "<s>": 1, "</s>": 2, **alphabet}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    if chat:
        fast.chat_template = (
            "{% for m in messages %}{{ '<s>' + m['role'][0] + ':' + m['content'] }}"
            "{% if m['role'] == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}{% if add_generation_prompt "
            "%}<s>a:{% endif %}"
        )
    return fast


def options(base: Path, data: Path, out: Path, **changes: object) -> TrainConfig:
    small = {
        "gamma": 2,
        "ns": 2 if changes.get("method", "streaming") == "streaming" else None,
        "rank": 4,
        "stream_rank": 4,
        "draft_vocab": 32,
        "bigram_rank": 0,
        "epochs": 2.0,
        "val_rows": 6,
        "regenerate_rows": 24,
        "regenerate_batch": 8,
        "max_new_tokens": 12,
        "max_length": 64,
        "save_steps": 3,
        "lr": 1e-2,
    }
    return TrainConfig(base=str(base), data=data, out=out, **(small | changes))  # type: ignore[arg-type]
