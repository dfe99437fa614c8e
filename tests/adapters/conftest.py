"""A tiny base on disk and data it can learn in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.adapters.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers that repeat the prompt's letter: learnable in seconds."""
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [{"prompt": f"{c}{d}", "completion": c * 5 + d * 4} for c in "abcdefgh" for d in "ijklmnop"]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path
