"""Drafters of every kind for tiny bases, trained for a moment on the base's own answers: some of their drafts come
true.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def tiny_drafter(folder: Path, base: Path, data: Path, name: str, epochs: float) -> Path:
    """Trains a drafter of `DRAFTERS` for `base` into `folder`, whose target is the base itself."""
    given = {"recipe": "staged", "target_adapter": "base", "gamma": GAMMA, "max_new_tokens": 24, "save_steps": 1000}
    train(options(base, data, folder, **given | {"draft_vocab": 0, "epochs": epochs} | DRAFTERS[name][0]))
    return folder
