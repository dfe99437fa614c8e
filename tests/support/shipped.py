"""Checkpoints that hold a layer for multi-token prediction beside their model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def mtp_tensors(model: Any, layers: int = 1, **changed: tuple[int, ...]) -> dict[str, Tensor]:
    """Random tensors like those of Qwen3.5: its last layer with attention, a map and norms. `changed`: other shapes."""
    hidden, like = model.config.hidden_size, next(x for x in reversed(model.model.layers) if hasattr(x, "self_attn"))
    shapes = {name: tuple(value.shape) for name, value in like.state_dict().items()}
    named = {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in shapes.items()}
    named |= {"fc.weight": (hidden, 2 * hidden)}
    named |= {f"{name}.weight": (hidden,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    named |= {f"{name}.weight": shape for name, shape in changed.items()}
    generator = torch.Generator().manual_seed(3)
    return {f"mtp.{name}": 0.3 * torch.randn(shape, generator=generator) for name, shape in named.items()}


def add_mtp(base: Path, model: Any, **changed: Any) -> Path:
    """Adds them to the folder `base` of `model`, and what transformers reads of them to its configuration."""
    file, config = base / "model.safetensors", base / "config.json"
    save_file(load_file(file) | mtp_tensors(model, **changed), file, {"format": "pt"})
    fields = {"mtp_num_hidden_layers": 1, "num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return base
