"""Folders for onnxruntime-genai: every family gives the tokens that PyTorch gives."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from streamspec.errors import BaseModelError, BundleError
from tests.support.near_families import VARIED
from tests.support.tiny_exports import FAMILIES, VOCAB, save_base, tiny_model

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from genai_folder import all_attention, export_genai

sys.path.pop(0)

TOKENS = np.random.default_rng(0).integers(3, VOCAB, 13)


def answer(folder: Path, length: int) -> list[int]:
    genai = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    model = genai.Model(str(folder))
    settings = genai.GeneratorParams(model)
    settings.set_search_options(max_length=length, min_length=length)
    generator = genai.Generator(model, settings)
    generator.append_tokens(TOKENS.astype(np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)]


@pytest.mark.parametrize(
    "family",
    [f for f in FAMILIES if all_attention(f) and f in {*VARIED, "hunyuan_v1_dense", "ministral3"}],
)
def test_an_ordinary_runtime_gives_the_tokens_that_pytorch_gives(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    base = save_base(tmp_path / "base", model)
    report = export_genai(base.path, None, tmp_path / "out", "fp32", progress=lambda line: None)
    assert report["plain"]["relative"] < 1e-4
    tokens = answer(tmp_path / "out", 33)
    logits = model(torch.as_tensor(tokens)[None]).logits[0].numpy()
    logits[:, 2] = -np.inf  # the end token, held back until then
    assert tokens[13:] == logits[12:-1].argmax(1).tolist()


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantized_folders_run_too(precision: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    lines: list[str] = []
    report = export_genai(base.path, None, tmp_path / "out", precision, progress=lines.append)
    assert 0 < report["plain"]["relative"] < 1 and report["text"]["bundle"] > 0
    assert any(line.startswith(f"{precision}: perplexity ") for line in lines)
    assert len(answer(tmp_path / "out", 20)) == 20


def test_only_a_folder_of_this_kind_is_replaced(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not lose me")
    for force in (False, True):
        with pytest.raises(BundleError, match="is there already"):
            export_genai(base.path, None, tmp_path / "mine", "fp32", force, progress=lambda line: None)
    assert (tmp_path / "mine" / "thesis.txt").is_file()
    export_genai(base.path, None, tmp_path / "out", "fp32", progress=lambda line: None)
    with pytest.raises(BundleError, match="with --force one that holds genai_config.json"):
        export_genai(base.path, None, tmp_path / "out", "fp32", progress=lambda line: None)
    export_genai(base.path, None, tmp_path / "out", "int8", force=True, progress=lambda line: None)
    config = json.loads((tmp_path / "out" / "genai_config.json").read_text())
    assert config["model"]["vocab_size"] == VOCAB and config["model"]["eos_token_id"] == [2]


def test_a_model_whose_layers_keep_different_things_is_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", tiny_model("lfm2"))
    with pytest.raises(BaseModelError, match="`lfm2`.*layers differ in what they keep.*export it as a bundle"):
        export_genai(base.path, None, tmp_path / "out", "fp32", progress=lambda line: None)
    assert not (tmp_path / "out").exists()
