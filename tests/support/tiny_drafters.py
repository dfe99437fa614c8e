"""Drafters of every kind for tiny bases: random ones, and those trained for a moment on the base's own answers, of
whose drafts some come true.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from streamspec.acceptance_stats import Acceptance
from streamspec.adapters.base_models.resolve import Base
from streamspec.adapters.drafters.dflash.config import BlockConfig
from streamspec.adapters.drafters.dflash.model import BlockDraftModel
from streamspec.adapters.drafters.draft_layer.config import DraftLayerConfig
from streamspec.adapters.drafters.draft_layer.model import DraftLayerModel
from streamspec.adapters.drafters.drafting_model import DraftingModel
from streamspec.adapters.drafters.medusa.model import MedusaModel
from streamspec.adapters.drafters.streams.config import StreamConfig
from streamspec.adapters.drafters.streams.model import StreamingModel
from streamspec.adapters.train import train
from tests.support.tiny_models import options

# By the name of the drafter: the options of its training, and of its export.
DRAFTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "streams": ({"method": "streaming"}, {}),
    "eager": ({"method": "streaming", "root_token": False}, {"streams": "eager"}),
    "medusa": ({"method": "medusa"}, {}),
    "hydra": ({"method": "hydra"}, {}),
    "jakiro": ({"method": "jakiro"}, {}),
    "eagle": ({"method": "eagle"}, {}),
    "eagle-lora": ({"method": "eagle-lora"}, {}),
    "eagle3": ({"method": "eagle3", "taps": "1,3"}, {}),
    "mtp": ({"method": "mtp"}, {}),
    "dflash": ({"method": "dflash"}, {}),
}
GAMMA = 3


def letters(path: Path) -> Path:
    """Prompts of two letters in the file `path`."""
    rows = [{"prompt": f"{a}{b}", "completion": a * 5 + b * 4} for a in "abcdefgh" for b in "ijklmnop"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tiny_drafter(folder: Path, base: Path, data: Path, name: str, epochs: float, answers: Path | None = None) -> Path:
    """Trains a drafter of `DRAFTERS` for `base` into `folder`, whose target is the base itself. `answers`: where those
    of the base are kept for the next drafter."""
    given: dict[str, Any] = {
        "recipe": "staged",
        "target_adapter": "base",
        "gamma": GAMMA,
        "max_new_tokens": 24,
        "save_steps": 1000,
    }
    given |= {"draft_vocab": 0, "epochs": epochs, "answers": answers}
    train(options(base, data, folder, **given | DRAFTERS[name][0]))
    return folder


def fresh_drafter(model: Any, method: str) -> DraftingModel:
    """An untrained drafter of a method over a tiny model, which it freezes."""
    torch.manual_seed(0)
    model.requires_grad_(False)
    one: dict[str, Any] = {"experts": 1, "active": 1, "contrast": False, "parallel": False}
    if method == "medusa":
        return MedusaModel(model, GAMMA, True, None, own_heads=False)
    if method == "streaming":
        return StreamingModel(model, StreamConfig(GAMMA, 2, 1.3), True)
    if method == "dflash":
        return BlockDraftModel(model, BlockConfig(GAMMA, 1, 1.3, taps=(1, 3)))
    layer = {"jakiro": {}, "eagle": one | {"taps": (0,)}, "mtp": one | {"taps": (1,), "depth": 2}}
    layer["hydra"] = one | {"prefix_attention": True, "own_heads": True}
    return DraftLayerModel(model, DraftLayerConfig(GAMMA, **layer[method]))


def save_random(folder: Path, base: Base, drafter: DraftingModel, method: str) -> Path:
    """Writes an adapter folder with a drafter, all its tensors shaken."""
    tensors = drafter.eval().drafter_tensors()
    with torch.no_grad():
        for value in tensors.values():
            value.add_(torch.randn_like(value) * 0.05)
    described = {
        "format_version": 1,
        "method": method,
        "recipe": "staged",
        "base": {"id": base.id, "sha256": base.sha256, "model_type": base.model_type},
        "prompt_format": {"kind": "raw", "separator": ""},
        "streams": drafter.described() | {"draft_vocab": None},
    }
    folder.mkdir()
    (folder / "streamspec_config.json").write_text(json.dumps(described))
    save_file({name: value.detach().contiguous() for name, value in tensors.items()}, folder / "streamspec.safetensors")
    ranks = np.random.default_rng(0).integers(-1, 3, (4, 12, drafter.gamma)).tolist()
    Acceptance(drafter.gamma, 10, ranks).save(folder / "acceptance.json")
    return folder
