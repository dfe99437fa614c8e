"""Writes random models under configs as vendors publish them (`tests/support/published_configs`), with what their
files hold besides: experts in MXFP4, a layer for multi-token prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from streamspec.model_families.text_parts import TEXT_PARTS
from tests.support.mxfp4 import pack_experts


def text_config(published: dict[str, Any]) -> dict[str, Any]:
    """The config of the text part, where a model has others too."""
    part: dict[str, Any] = published.get("text_config", published)
    return part


def write_published(folder: Path, published: dict[str, Any], seed: int = 0, std: float = 0.15) -> Any:
    """Writes a random model with the published config beside it, word for word; returns it as transformers loads it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(published))
    torch.manual_seed(seed)
    whole = AutoModelForImageTextToText if published["model_type"] in TEXT_PARTS else AutoModelForCausalLM
    config = AutoConfig.from_pretrained(folder)
    model = whole.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.normal_(0, std)
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias", "e_score_correction_bias")):
                buffer.normal_(0, 0.3)
    model.save_pretrained(folder)
    if "quantization_config" in published:
        pack_experts(folder, model)
    (folder / "config.json").write_text(json.dumps(published))
    return model.eval()


def uncertainty(model: Any, tokens: np.ndarray) -> float:
    """How far transformers' own logits move when half a unit in the last place is added to each weight."""
    ids, moved, drawn = torch.as_tensor(tokens)[None], list[float](), torch.Generator().manual_seed(0)
    with torch.no_grad():
        before, weights = model(ids, use_cache=False).logits, [weight.clone() for weight in model.parameters()]
        for _ in range(3):
            for kept, weight in zip(weights, model.parameters(), strict=True):
                weight.copy_(kept * (1 + 2**-24 * torch.randn(kept.shape, generator=drawn)))
            moved.append(float((model(ids, use_cache=False).logits - before).abs().max()))
    return max(moved)
