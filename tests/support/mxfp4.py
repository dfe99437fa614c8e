"""Experts' weights in MXFP4, as gpt-oss is published: two codes to a byte, blocks of 32 inputs with an exponent each
(OCP Microscaling Formats 1.0)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # of codes, whose highest bit is the sign
SETTINGS = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}


def pack_experts(folder: Path, model: Any, seed: int = 0) -> None:
    """Draws the experts' weights of a saved base anew, in its file as codes and in its `model` as numbers."""
    rng, file, known = np.random.default_rng(seed), folder / "model.safetensors", dict(model.named_parameters())
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        codes = rng.integers(0, 16, (count, outputs, inputs // 32, 32), np.uint8)
        exponents = rng.integers(122, 126, codes.shape[:-1], np.uint8)
        tensors[f"{name}_blocks"] = torch.from_numpy(codes[..., 0::2] | codes[..., 1::2] << 4)
        tensors[f"{name}_scales"] = torch.from_numpy(exponents)
        numbers = np.where(codes & 8, -1, 1) * VALUES[codes & 7] * 2.0 ** (exponents[..., None].astype(int) - 127)
        with torch.no_grad():
            known[name].copy_(torch.from_numpy(numbers.reshape(count, outputs, inputs)).transpose(1, 2))
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS}))
