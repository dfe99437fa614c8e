"""Checkpoints that hold a layer for multi-token prediction beside their model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AROUND = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")  # of Qwen3.5; and of GLM-4.5
AFTER_LAST = dict(zip(AROUND, ("enorm", "hnorm", "eh_proj", "shared_head.norm"), strict=True))
AFTER = ("glm4_moe", "deepseek_v3")  # whose layer comes after the last
TABLES = ("embed_tokens", "shared_head.head")  # that GLM's files repeat


def mtp_tensors(model: Any, layers: int = 1, apart: bool = False, **changed: tuple[int, ...]) -> dict[str, Tensor]:
    """Random tensors like those of Qwen3.5, or of GLM-4.5 where the model is one: the last layer with attention, a map
    and norms. `apart`: experts one by one; `changed`: other shapes."""
    hidden, like = model.config.hidden_size, next(x for x in reversed(model.model.layers) if hasattr(x, "self_attn"))
    generator = torch.Generator().manual_seed(3)
    shapes = {name: tuple(value.shape) for name, value in like.state_dict().items()}
    around = {"fc": (hidden, 2 * hidden), **dict.fromkeys((name for name in AROUND if name != "fc"), (hidden,))}
    around |= changed
    begin, after_last = "mtp.layers.{}.", model.config.model_type in AFTER
    if after_last:
        begin, shapes = (
            "model.layers.{}.",
            shapes | dict.fromkeys((f"{name}.weight" for name in TABLES), (model.config.vocab_size, hidden)),
        )
    first, named = model.config.num_hidden_layers if after_last else 0, dict[str, tuple[int, ...]]()
    for number in range(layers):
        named |= {f"{begin.format(first + number)}{name}": shape for name, shape in shapes.items()}
        if after_last or not number:
            inside = begin.format(first + number) if after_last else "mtp."
            names = AFTER_LAST if after_last else {}
            named |= {f"{inside}{names.get(name, name)}.weight": shape for name, shape in around.items()}
    made = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in named.items()}
    return dict(one for name, value in made.items() for one in _apart(name, value)) if apart else made


def _apart(name: str, value: Tensor) -> list[tuple[str, Tensor]]:
    """The maps of experts in the layout of published files."""
    module, _, stack = name.rpartition(".")
    if not module.endswith(".experts"):
        return [(name, value)]
    parts = {"gate_up_proj": ("gate_proj", "up_proj")}.get(stack, (stack,))
    return [
        (f"{module}.{i}.{part}.weight", half.contiguous())
        for i, one in enumerate(value)
        for part, half in zip(parts, one.chunk(len(parts)), strict=True)
    ]


def add_mtp(base: Path, model: Any, **changed: Any) -> Path:
    """Adds them to the folder `base` of `model`, and what transformers reads of them to its configuration."""
    file, config = base / "model.safetensors", base / "config.json"
    save_file(load_file(file) | mtp_tensors(model, **changed), file, {"format": "pt"})
    kind = "sliding_attention" if model.config.model_type == "mellum" else "full_attention"
    fields = {"mtp_num_hidden_layers": 1, "num_mtp_layers": 1, "num_nextn_predict_layers": 1, "mtp_layer_types": [kind]}
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return base
