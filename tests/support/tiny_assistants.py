"""Assistants of Gemma 4, tiny and random, as transformers saves them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from streamspec.export import export_bundle
from tests.support.gguf_files import stored, write_gguf
from tests.support.tiny_exports import save_base, tiny_model

ASSISTANTS = find_spec("transformers.models.gemma4_assistant") is not None  # whether transformers has them

CLUSTERS, LOOKED_AT = 12, 3


def tiny_assistant(target: Any, ordered: bool = True, seed: int = 1, clusters: int = CLUSTERS, **changes: Any) -> Any:
    """An assistant of the tiny model `target`: three layers with a window and one without, in half its width, its head
    over all tokens or `ordered` in clusters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    base = target.config
    wide = base.per_layer_config[base.layer_types.index("full_attention")]
    text = base.to_dict() | {
        "hidden_size": base.hidden_size // 2,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "global_head_dim": wide.head_dim,
        "num_global_key_value_heads": wide.num_key_value_heads,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "per_layer_config": None,
        "tie_word_embeddings": True,
    }
    del text["per_layer_config"]
    fields = {"use_ordered_embeddings": ordered, "num_centroids": clusters, "centroid_intermediate_top_k": LOOKED_AT}
    config = AutoConfig.for_model(
        base.model_type.replace("_text", "_assistant"),
        text_config=text | changes,
        backbone_hidden_size=base.hidden_size,
        **(fields if ordered else {}),
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name or name.endswith("layer_scalar"):
                value.uniform_(0.5, 1.5)
            elif name.endswith("token_ordering"):
                value.copy_(torch.randperm(len(value)))
    return model.requires_grad_(False)


def saved_pair(folder: Path, ordered: bool = True, family: str = "gemma4_text", **changes: Any) -> tuple[Any, Any]:
    """A tiny target and an assistant of it, saved in `base` and `assistant` of `folder`."""
    target = tiny_model(family, max_position_embeddings=1024, **changes)
    assistant = tiny_assistant(target, ordered)
    save_base(folder / "base", target)
    assistant.save_pretrained(folder / "assistant")
    return target, assistant


def export_pair(folder: Path, out: Path, precision: str, **options: Any) -> Any:
    """The manifest of the bundle `out` of the pair saved in `folder`."""
    given = {"drafter": folder / "assistant", "progress": lambda line: None} | options
    return export_bundle(folder / "base", None, out, precision, **given)


def write_gguf_assistant(file: Path, assistant: Any, architecture: str = "gemma4-assistant", **changed: Any) -> Path:
    """The file that llama.cpp's converter makes of an assistant; `changed` keys."""
    config = assistant.config.text_config
    wide = config.per_layer_config[config.layer_types.index("full_attention")]
    near = config.per_layer_config[config.layer_types.index("sliding_attention")]
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "embedding_length_out": assistant.config.backbone_hidden_size,
        "embedding_length_per_layer_input": 0,
        "feed_forward_length": config.intermediate_size,
        "nextn_predict_layers": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [layer.num_key_value_heads for layer in config.per_layer_config],
        "attention.key_length": wide.head_dim,
        "attention.value_length": wide.head_dim,
        "attention.key_length_swa": near.head_dim,
        "attention.value_length_swa": near.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.shared_kv_layers": config.num_hidden_layers,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "rope.dimension_count": wide.head_dim,
        "rope.dimension_count_swa": near.head_dim,
        "rope.freq_base": config.rope_parameters["full_attention"]["rope_theta"],
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    state = {name: value for name, value in assistant.state_dict().items() if not name.startswith("masked_embedding")}
    inside: Any = SimpleNamespace(
        config=config, state_dict=lambda: {n: v for n, v in state.items() if "projection" not in n}
    )
    tensors = stored(inside, "gemma4")
    tensors |= {f"nextn.{name}": value.numpy() for name, value in state.items() if "projection" in name}
    vocabulary = {"model": "gpt2", "pre": "gpt-2", "merges": [], "tokens": [f"t{i}" for i in range(config.vocab_size)]}
    return write_gguf(file, architecture, keys | changed, tensors, vocabulary, {"eos_token_id": 1})
