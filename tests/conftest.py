"""Shared by all tests: which marked tests run here; a tiny base on disk and data it can learn in seconds."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("STREAMSPEC_TEST_BASE") == "1" or not any(item.get_closest_marker("base") for item in items):
        return
    from streamspec.adapters.base_models.resolve import cached_reference

    if cached_reference() is not None:
        return
    skip = pytest.mark.skip(reason="the reference base is not cached (a download of 93 MB); set STREAMSPEC_TEST_BASE=1")
    for item in items:
        if item.get_closest_marker("base"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny_models import tiny_model, tiny_tokenizer

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
