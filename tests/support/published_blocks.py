"""Block drafters as public code writes them, tiny and random: `config.json` and tensors in the formats of z-lab
(DFlash) and of speculators 0.9.0 (DFlash, DSpark).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.published_heads import DRAFTED, HIDDEN, VOCAB, layer_config

LAYERS, BLOCK, MASK, WINDOW = 2, 5, 7, 6
BLOCK_LAYER = {"num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS, "num_attention_heads": 6}
BLOCK_LAYER |= {"head_dim": 16}

SLIDING = ["sliding_attention", "full_attention"]
WINDOWED = {"layer_types": SLIDING, "use_sliding_window": True, "sliding_window": WINDOW}


def zlab_config(layer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """`config.json` of z-lab for a target of six layers."""
    return {
        **layer_config("qwen3", **BLOCK_LAYER | (layer or {})),
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3, 4]},
        "num_target_layers": 6,
    } | changes


def speculators_block_config(kind: str, layer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """`config.json` of speculators."""
    proposal = {"accept_tolerance": 0.0, "proposal_type": "greedy", "verifier_accept_k": 1}
    own = {"markov_rank": 4, "markov_head_type": "vanilla", "enable_confidence_head": True}
    own |= {"confidence_head_with_markov": True}
    return {
        "architectures": ["DFlashDraftModel" if kind == "dflash" else "DSparkDraftModel"],
        "auto_map": {"": "config.DFlashSpeculatorConfig"},
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "block_size": BLOCK,
        "draft_vocab_size": DRAFTED if kind == "dflash" else VOCAB,
        "dtype": "float32",
        "mask_token_id": MASK,
        "sample_from_anchor": kind == "dspark",
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"speculative_tokens": BLOCK - 1}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "maker/model"},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer_config("qwen3", **BLOCK_LAYER | (layer or {})),
        "transformers_version": "5.23.0",
        **(own if kind == "dspark" else {}),
    } | changes


def block_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """Random tensors, without an embedding; with a head where not all tokens are drafted."""
    layer = config.get("transformer_layer_config", config)
    torch.manual_seed(0)

    def matrix(out: int, into: int) -> Tensor:
        return torch.randn(out, into) / into**0.5

    def norm(width: int) -> Tensor:
        return 1 + torch.randn(width) * 0.2

    inner, width = layer["intermediate_size"], layer["head_dim"]
    queries, keys = layer["num_attention_heads"] * width, layer["num_key_value_heads"] * width
    own = {"fc.weight": matrix(HIDDEN, 3 * HIDDEN), "hidden_norm.weight": norm(HIDDEN), "norm.weight": norm(HIDDEN)}
    for number in range(layer["num_hidden_layers"]):
        one = {
            "input_layernorm.weight": norm(HIDDEN),
            "post_attention_layernorm.weight": norm(HIDDEN),
            "self_attn.q_proj.weight": matrix(queries, HIDDEN),
            "self_attn.k_proj.weight": matrix(keys, HIDDEN),
            "self_attn.v_proj.weight": matrix(keys, HIDDEN),
            "self_attn.o_proj.weight": matrix(HIDDEN, queries),
            "self_attn.q_norm.weight": norm(width),
            "self_attn.k_norm.weight": norm(width),
            "mlp.gate_proj.weight": matrix(inner, HIDDEN),
            "mlp.up_proj.weight": matrix(inner, HIDDEN),
            "mlp.down_proj.weight": matrix(HIDDEN, inner),
        }
        if layer["attention_bias"]:
            sizes = {"q": queries, "k": keys, "v": keys, "o": HIDDEN}
            one |= {f"self_attn.{side}_proj.bias": torch.randn(size) for side, size in sizes.items()}
        own |= {f"layers.{number}.{name}": value for name, value in one.items()}
    if rank := config.get("markov_rank"):
        own["markov_head.markov_w1.weight"] = torch.randn(VOCAB, rank)
        own["markov_head.markov_w2.weight"] = torch.randn(config["draft_vocab_size"], rank)
        own |= {"confidence_head.proj.weight": matrix(1, HIDDEN + rank), "confidence_head.proj.bias": torch.zeros(1)}
    drafted = config.get("draft_vocab_size", VOCAB)
    if drafted < VOCAB:
        ids = torch.randperm(VOCAB)[:drafted].sort().values
        known = torch.zeros(VOCAB, dtype=torch.bool)
        known[ids] = True
        own |= {"lm_head.weight": matrix(drafted, HIDDEN) * 4, "d2t": ids - torch.arange(drafted), "t2d": known}
    return own
