"""EAGLE-3 heads as public code writes them, tiny and random: `config.json` and tensors in the formats of speculators
0.9.0 and of EAGLE, SpecForge and SGLang.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB, HIDDEN, DRAFTED, GAMMA = 96, 64, 40, 4
LAYER: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16, "mlp_bias": False, "pretraining_tp": 1, "bos_token_id": 1, "eos_token_id": 2},
    "qwen3": {
        "head_dim": 32,
        "layer_types": ["full_attention"],
        "max_window_layers": 28,
        "sliding_window": None,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": None,
    },
}


def layer_config(family: str, **changes: Any) -> dict[str, Any]:
    """The section `transformer_layer_config`."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "model_type": family,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "transformers_version": "5.23.0",
        "use_cache": True,
        "vocab_size": VOCAB,
        **LAYER[family],
    } | changes


def speculators_config(family: str, layer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """`config.json` of speculators."""
    proposal = {"accept_tolerance": 0.0, "proposal_type": "greedy", "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": DRAFTED,
        "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": None,
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"speculative_tokens": GAMMA}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "maker/model"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer_config(family, **(layer or {})),
        "transformers_version": "5.23.0",
    } | changes


def flat_config(**changes: Any) -> dict[str, Any]:
    """`config.json` of EAGLE, SpecForge and SGLang, with a rotary embedding in the words of older transformers."""
    layer = layer_config("llama")
    del layer["rope_parameters"]
    return {
        **layer,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFTED,
        "rope_theta": 500.0,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.53.0",
    } | changes


def tensors(config: dict[str, Any], target_hidden: int = HIDDEN, taps: int = 3, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors under speculators' names, without an embedding."""
    layer = config.get("transformer_layer_config", config)
    torch.manual_seed(seed)

    def matrix(out: int, into: int) -> Tensor:
        return torch.randn(out, into) / into**0.5

    def norm(width: int) -> Tensor:
        return 1 + torch.randn(width) * 0.2

    hidden, inner, width = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    queries, keys = layer["num_attention_heads"] * width, layer["num_key_value_heads"] * width
    own = {
        "fc.weight": matrix(hidden, taps * target_hidden),
        "layers.0.input_layernorm.weight": norm(hidden),
        "layers.0.hidden_norm.weight": norm(hidden),
        "layers.0.post_attention_layernorm.weight": norm(hidden),
        "layers.0.self_attn.q_proj.weight": matrix(queries, 2 * hidden),
        "layers.0.self_attn.k_proj.weight": matrix(keys, 2 * hidden),
        "layers.0.self_attn.v_proj.weight": matrix(keys, 2 * hidden),
        "layers.0.self_attn.o_proj.weight": matrix(hidden, queries),
        "layers.0.mlp.gate_proj.weight": matrix(inner, hidden),
        "layers.0.mlp.up_proj.weight": matrix(inner, hidden),
        "layers.0.mlp.down_proj.weight": matrix(hidden, inner),
        "norm.weight": norm(hidden),
        "lm_head.weight": matrix(config["draft_vocab_size"], hidden) * 4,
    }
    if layer["model_type"] == "qwen3":
        own |= {f"layers.0.self_attn.{side}_norm.weight": norm(width) for side in "qk"}
    if config.get("norm_before_fc"):
        own["input_norm.weight"] = norm(taps * target_hidden)
    if config.get("fc_norm"):
        own |= {f"fc_norm.{tap}.weight": norm(target_hidden) for tap in range(taps)}
    if layer["attention_bias"]:
        sizes = {"q": queries, "k": keys, "v": keys}
        own |= {f"layers.0.self_attn.{side}_proj.bias": torch.randn(size) for side, size in sizes.items()}
    ids = torch.randperm(layer["vocab_size"])[: config["draft_vocab_size"]].sort().values
    known = torch.zeros(layer["vocab_size"], dtype=torch.bool)
    known[ids] = True
    return own | {"d2t": ids - torch.arange(len(ids)), "t2d": known}


def save_head(folder: Path, config: dict[str, Any], values: dict[str, Tensor], flat: bool = False) -> Path:
    """Writes a head; `flat`: under the names of EAGLE, in bfloat16."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if flat:
        values = {
            name.replace("layers.0.", "midlayer."): value.bfloat16() if value.is_floating_point() else value
            for name, value in values.items()
        }
    save_file({name: value.contiguous() for name, value in values.items()}, folder / "model.safetensors")
    return folder
