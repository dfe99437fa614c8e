"""Configs as vendors publish them (`tests/support/published_configs`, sizes shrunk): each base is exported as it is,
without a flag, and equals transformers after its window and after its original rope length.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamspec.export import export_bundle
from streamspec.export.runners.graph_runner import GraphRunner, open_session
from streamspec.model_families import FAMILIES
from tests.support.published_configs import CONFIGS
from tests.support.published_models import text_config, uncertainty, write_published
from tests.support.tiny_exports import write_tokenizer

ROWS, CHUNK = 80, 24


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_exported_and_equals_transformers(name: str, tmp_path: Path) -> None:
    published = CONFIGS[name]
    base, bundle = tmp_path / "base", tmp_path / "bundle"
    model = write_published(base, published)
    write_tokenizer(base, text_config(published)["vocab_size"])
    manifest = export_bundle(base, None, bundle, "fp32", progress=lambda line: None)

    rows = min(ROWS, manifest.model.context_length)
    for limit in limits(published):
        assert limit <= rows - CHUNK or limit > 10 * ROWS, "shrink it"
    tokens = np.random.default_rng(0).integers(0, text_config(published)["vocab_size"], rows)
    with torch.no_grad():
        theirs = model(torch.as_tensor(tokens)[None], use_cache=False).logits[0].numpy()
    steps = GraphRunner(open_session(bundle / "model.onnx", threads=1), rows)
    ours = np.concatenate([steps.prefill(tokens[at : at + CHUNK])["logits"] for at in range(0, rows, CHUNK)])
    apart = np.abs(ours - theirs).max()
    # Random weights can make a model of which no more is certain: Qwen3.5's, on some processors.
    assert apart < 2e-4 * theirs.std() or apart < 4 * uncertainty(model, tokens)


def test_every_family_has_a_published_config() -> None:
    assert {text_config(published)["model_type"] for published in CONFIGS.values()} >= set(FAMILIES)
    assert len(CONFIGS) >= 80


def limits(published: dict[str, Any]) -> list[int]:
    """Window and original rope length, where rows must reach past them."""
    published = text_config(published)
    rope = published.get("rope_scaling") or published.get("rope_parameters") or {}
    lengths = [published.get("sliding_window"), rope.get("original_max_position_embeddings")]
    return [length for length in lengths if length]
