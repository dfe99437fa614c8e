"""Plain decoders against transformers: of several texts with padding on the left, in one call and token for token; and
run by this package as decoders of others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch

from streamspec.errors import ConfigError
from streamspec.export.forms.registry import write_form
from streamspec.export.options import ExportOptions
from streamspec.runtime import load
from tests.support.tiny_exports import save_base, tiny_model

QUIET = ExportOptions(precision="fp32", progress=lambda line: None)
SIZES = {"llama", "mistral", "qwen2", "qwen3", "phi", "opt", "gpt2", "gemma2", "gemma3_text", "olmo2", "stablelm"}
MASK = np.array([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 10])
IDS = np.random.default_rng(0).integers(3, 90, MASK.shape)
NEW = 8


def feeds(session: ort.InferenceSession, ids: np.ndarray, mask: np.ndarray, caches: list[np.ndarray]) -> dict[str, Any]:
    positions = np.where(mask == 0, 1, mask.cumsum(1) - 1)[:, -ids.shape[1] :]
    known = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    past = [value for value in session.get_inputs() if value.name.startswith("past")]
    if not caches:
        caches = [np.zeros((len(ids), value.shape[1], 0, value.shape[3]), np.float32) for value in past]
    known |= {value.name: cache for value, cache in zip(past, caches, strict=True)}
    return {value.name: known[value.name] for value in session.get_inputs()}


@pytest.mark.parametrize("family", sorted(SIZES))
@torch.no_grad()
def test_padded_texts_get_the_logits_and_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, num_hidden_layers=2) if family not in ("gpt2", "gemma3_text") else tiny_model(family)
    base = save_base(tmp_path / "base", model)
    write_form("optimum", str(base.path), None, tmp_path / "out", QUIET)
    session = ort.InferenceSession(tmp_path / "out" / "model.onnx")
    ids, mask, caches, read = IDS, MASK, list[np.ndarray](), IDS
    for _ in range(NEW):
        logits, *caches = session.run(None, feeds(session, read, mask, caches))
        positions = np.where(mask == 0, 1, mask.cumsum(1) - 1)
        whole = {"position_ids": torch.tensor(positions)} if family != "opt" else {}
        expected = model(torch.tensor(ids), attention_mask=torch.tensor(mask), **whole, use_cache=False).logits.numpy()
        shown = mask[:, -logits.shape[1] :] == 1
        error = np.abs(logits - expected[:, -logits.shape[1] :])[shown].max()
        assert error < 1e-4
        read = expected[:, -1].argmax(-1)[:, None]
        assert (logits[:, -1].argmax(-1) == read[:, 0]).all()
        ids, mask = np.concatenate([ids, read], 1), np.pad(mask, ((0, 0), (0, 1)), constant_values=1)


@torch.no_grad()
def test_this_runtime_runs_it_as_a_decoder_of_others(tmp_path: Path) -> None:
    model = tiny_model("mistral", num_hidden_layers=2)
    base = save_base(tmp_path / "base", model)
    config = base.path / "config.json"  # infinities as transformers 4 wrote them for Granite
    config.write_text(config.read_text().replace("{", '{"time_step_limit": [0.0, Infinity],', 1))
    prompt = IDS[1].tolist()
    expected = list(prompt)
    for _ in range(12):
        expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
    for precision in ("fp32", "fp16"):
        out = tmp_path / precision
        write_form("optimum", str(base.path), None, out, replace(QUIET, precision=precision))
        session = load(out, threads=1, cache_dir=tmp_path, tree=4)
        assert session.manifest.precision == precision
        answer = session.generate(prompt, max_new_tokens=12).token_ids
        assert answer == expected[len(prompt) :][: len(answer)] and answer


def test_what_is_no_plain_decoder_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    refused = {
        "lfm2": "are without attention",
        "gemma4_text": "attend to the keys of others",
        "mixtral": "have mixtures of experts",
        "qwen3_5_text": "keep a recurrent state",
    }
    for family, found in refused.items():
        base = save_base(tmp_path / family, tiny_model(family))
        said = list[str]()
        with pytest.raises(ConfigError, match=f"{family}, whose layers {found}"):
            write_form("optimum", str(base.path), None, tmp_path / "out", replace(QUIET, progress=said.append))
        assert "loading the base" not in said
    with pytest.raises(ConfigError, match=r"int4 --as optimum; expected fp32 or fp16; add --precision fp32"):
        write_form("optimum", str(base.path), None, tmp_path / "out", replace(QUIET, precision="int4"))
    with pytest.raises(ConfigError, match=r"--as gguf; expected speculators, optimum"):
        write_form("gguf", str(base.path), None, tmp_path / "out", QUIET)
