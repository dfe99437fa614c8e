"""Tiny multimodal models, whose text parts are models of supported families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from tests.support.recurrent_families import RECURRENT
from tests.support.tiny_models import SMALL

TEXT = SMALL | {"intermediate_size": 48, "pad_token_id": 0, "head_dim": 16}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0}
PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the text config, of the vision config
    "gemma3": ({"model_type": "gemma3_text", "sliding_window": 8}, {"model_type": "siglip_vision_model"}),
    "gemma4": (
        {
            "model_type": "gemma4_text",
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 64,
            "global_head_dim": 24,
            "use_double_wide_mlp": True,
        },
        {"model_type": "gemma4_vision", "head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 8},
    ),
    "gemma4_unified": (
        {
            "model_type": "gemma4_unified_text",
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 24,
        },
        {"model_type": "gemma4_unified_vision", "mm_embed_dim": 32, "mm_posemb_size": 8},
    ),
    "exaone4_5": (
        {"model_type": "exaone4", "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
        {"depth": 1, "out_hidden_size": 32, "num_heads": 2, "fullatt_block_indexes": [0]},
    ),
    "idefics3": ({"model_type": "llama"}, {"model_type": "idefics3_vision"}),
    "internvl": (
        {"model_type": "qwen2"},
        {"model_type": "internvl_vision", "image_size": [16] * 2, "patch_size": [8] * 2},
    ),
    "lfm2_vl": (
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2},
        {"model_type": "siglip2_vision_model", "num_patches": 4},
    ),
    "llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model"}),
    "mistral3": ({"model_type": "ministral3"}, {"model_type": "pixtral", "head_dim": 16}),
    "qwen2_5_vl": (
        {"rope_parameters": MROPE | {"mrope_section": [2, 3, 3]}},
        {"depth": 1, "out_hidden_size": 32, "num_heads": 2, "fullatt_block_indexes": [0]},
    ),
    "qwen2_vl": (
        {"rope_parameters": MROPE | {"mrope_section": [2, 3, 3]}},
        {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 1},
    ),
    "qwen3_5": (
        RECURRENT["qwen3_5_text"]
        | {"model_type": "qwen3_5_text", "rope_parameters": MROPE | {"mrope_section": [1, 1, 0]}},
        {"depth": 1, "out_hidden_size": 32, "num_heads": 2},
    ),
    "qwen3_5_moe": (
        RECURRENT["qwen3_5_moe_text"]
        | {"model_type": "qwen3_5_moe_text", "rope_parameters": MROPE | {"mrope_section": [1, 1, 0]}},
        {"depth": 1, "out_hidden_size": 32, "num_heads": 2},
    ),
    "qwen3_vl": (
        {"rope_parameters": MROPE | {"mrope_section": [2, 3, 3], "mrope_interleaved": True}},
        {"depth": 1, "out_hidden_size": 32, "num_heads": 2, "deepstack_visual_indexes": [0]},
    ),
    "smolvlm": ({"model_type": "llama"}, {"model_type": "smolvlm_vision"}),
}


def tiny_multimodal(model_type: str, tied: bool = True) -> Any:
    """A random float32 model with a vision tower of one layer."""
    text, vision = PARTS[model_type]
    own = {"pad_token_id": 0} if model_type in ("idefics3", "smolvlm") else {}
    if model_type in ("qwen2_5_vl", "qwen2_vl"):
        text = {"hidden_size": 64} | text  # heads of 16 without a field for it
        vision = vision | {"out_hidden_size": 64} if "out_hidden_size" in vision else vision | {"hidden_size": 64}
    config = CONFIG_MAPPING[model_type](
        text_config=TEXT | text | {"tie_word_embeddings": tied},
        vision_config=VISION | vision,
        tie_word_embeddings=tied,
        **own,
    )
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()


def rename(folder: Path, change: Any) -> None:
    """Writes the tensors of a folder again, each under the name that `change` gives it, without those it gives none."""
    file = folder / "model.safetensors"
    tensors = {change(name): tensor for name, tensor in load_file(file).items()}
    tensors.pop(None, None)
    save_file(tensors, file, {"format": "pt"})
