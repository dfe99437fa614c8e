"""Configs as vendors publish them (`tests/support/published_configs`, sizes shrunk): each base is exported as it is,
without a flag, and equals transformers after its window and after its original rope length.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from streamspec.adapters.base_models.text_part import load_causal_lm
from streamspec.export import export_bundle
from streamspec.export.runners.graph_runner import GraphRunner, open_session
from streamspec.export.weights.model_spec import describe
from streamspec.model_families import FAMILIES
from streamspec.model_families.text_parts import TEXT_PARTS
from tests.support.mxfp4 import pack_experts
from tests.support.published_configs import CONFIGS
from tests.support.tiny_exports import write_tokenizer

ROWS, CHUNK = 80, 24


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_exported_and_equals_transformers(name: str, tmp_path: Path) -> None:
    published = CONFIGS[name]
    base, bundle = tmp_path / "base", tmp_path / "bundle"
    model = write_base(base, published)
    export_bundle(base, None, bundle, "fp32", progress=lambda line: None)

    rows = min(ROWS, describe(load_causal_lm(base)).context_length)
    for limit in limits(published):
        assert limit <= rows - CHUNK or limit > 10 * ROWS, "shrink it"
    tokens = np.random.default_rng(0).integers(0, text(published)["vocab_size"], rows)
    with torch.no_grad():
        theirs = model(torch.as_tensor(tokens)[None], use_cache=False).logits[0].numpy()
    steps = GraphRunner(open_session(bundle / "model.onnx", threads=1), rows)
    ours = np.concatenate([steps.prefill(tokens[at : at + CHUNK])["logits"] for at in range(0, rows, CHUNK)])
    apart = np.abs(ours - theirs).max()
    # Random weights can make a model of which no more is certain: Qwen3.5's, on some processors.
    assert apart < 2e-4 * theirs.std() or apart < 4 * uncertainty(model, tokens)


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


def test_every_family_has_a_published_config() -> None:
    assert {text(published)["model_type"] for published in CONFIGS.values()} >= set(FAMILIES)
    assert len(CONFIGS) >= 80


def limits(published: dict[str, Any]) -> list[int]:
    """Window and original rope length, where rows must reach past them."""
    published = text(published)
    rope = published.get("rope_scaling") or published.get("rope_parameters") or {}
    lengths = [published.get("sliding_window"), rope.get("original_max_position_embeddings")]
    return [length for length in lengths if length]


def text(published: dict[str, Any]) -> dict[str, Any]:
    """The config of the text part, where a model has others too."""
    part: dict[str, Any] = published.get("text_config", published)
    return part


def write_base(folder: Path, published: dict[str, Any]) -> Any:
    """Writes a random model with the published config beside it, word for word; returns it as transformers loads it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(published))
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText if published["model_type"] in TEXT_PARTS else AutoModelForCausalLM
    config = AutoConfig.from_pretrained(folder)
    model = whole.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.normal_(0, 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias", "e_score_correction_bias")):
                buffer.normal_(0, 0.3)
    model.save_pretrained(folder)
    if "quantization_config" in published:
        pack_experts(folder, model)
    (folder / "config.json").write_text(json.dumps(published))
    write_tokenizer(folder, text(published)["vocab_size"])
    return model.eval()
