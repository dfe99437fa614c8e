"""Draft layers of every kind through the whole path: an adapter folder, an export that compares the drafts with
PyTorch inside trees, and answers that are those of transformers.
"""

from __future__ import annotations

import json
from copy import deepcopy
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamspec import load
from streamspec.adapters.base_models.hf_decoder import HFDecoder
from streamspec.adapters.base_models.resolve import Base
from streamspec.adapters.drafters.draft_layer.config import DraftLayerConfig
from streamspec.adapters.drafters.draft_layer.model import DraftLayerModel
from streamspec.adapters.drafters.draft_layer.start import fit_start
from streamspec.adapters.drafters.registry import DRAFTERS
from streamspec.adapters.drafters.shared_layer.model import SharedLayerModel, add_lora
from streamspec.errors import AdapterError
from streamspec.export import export_bundle
from tests.support.tiny_drafters import save_random
from tests.support.tiny_exports import VOCAB, save_base, tiny_model

GAMMA = 3
METHODS = ("jakiro", "eagle", "mtp", "hydra", "eagle-lora")
KINDS = [  # one family for each way to put a layer together
    *("llama", "phi", "phi3", "opt", "gpt_neox", "gemma3_text"),
    *("granite", "glm4", "olmo2", "cohere2", "nemotron", "gpt2"),
]
PROMPT = "a prompt that is longer than the windows of these tiny models are, with words of the passage in it"


PAPERS = {  # a drafter as its paper has it: method and options
    "EAGLE": ("eagle", {"taps": "final"}),
    "DeepSeek-V3": ("mtp", {"taps": "final", "depth": 3}),
    "DeepSeek-V3 of one module": ("mtp", {"taps": "final"}),
    "Hydra": ("hydra", {"prefix_attention": False}),
    "Jakiro's tree": ("jakiro", {"two_lists": True, "experts": 4}),
    "Jakiro of eight experts": ("jakiro", {"experts": 8}),
}


def options(method: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The options of a run that leaves all but `changes` at their defaults."""
    row = DRAFTERS[method]
    usual = {"experts": 2, "active": 2, "contrast": True, "parallel": True, "two_lists": False, "own_heads": False}
    return usual | {"depth": 1, "gamma": GAMMA} | dict(row.defaults) | changes | dict(row.fixed)


def save_drafter(folder: Path, base: Base, model: Any, method: str, **changes: Any) -> Path:
    """Writes an adapter folder with a draft layer that was fitted to random text and then shaken."""
    torch.manual_seed(0)
    config, decoder = DraftLayerConfig.of(options(method, changes)), HFDecoder(model)
    config.window = decoder.window(decoder.last_attention)
    if method == "eagle-lora":
        model = deepcopy(model)  # which the LoRA is put into
        add_lora(model, 4)
    layer = (SharedLayerModel if method == "eagle-lora" else DraftLayerModel)(model, config).eval()
    ids = torch.randint(3, VOCAB, (8, 24))
    fit_start(layer, [(ids, torch.ones_like(ids))])
    return save_random(folder, base, layer, method)


@pytest.mark.parametrize(("family", "method"), [*zip(KINDS, cycle(METHODS), strict=False)])
def test_every_kind_of_layer_drafts_and_writes_what_transformers_writes(
    family: str, method: str, tmp_path: Path
) -> None:
    model = tiny_model(family)
    adapter = save_drafter(tmp_path / "adapter", save_base(tmp_path / "base", model), model, method)
    manifest = export_bundle(tmp_path / "base", adapter, tmp_path / "bundle", "fp32", progress=lambda line: None)
    assert manifest.parity["streams"]["relative"] < 1e-4
    session = load(tmp_path / "bundle", threads=1, tree=8, cache_dir=tmp_path)
    ids = torch.tensor([session.encode(PROMPT)])
    assert ids.shape[1] > 7  # the windows
    with torch.no_grad():
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    for speculate in (True, False):
        answer = session.generate(PROMPT, max_new_tokens=24, speculate=speculate)
        assert answer.token_ids == theirs[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("family", "method"), [("gemma3_text", "jakiro"), ("phi", "eagle"), ("gpt2", "mtp"), ("gpt_neox", "hydra")]
)
def test_rounded_weights_draft_what_the_reference_drafts(family: str, method: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    adapter = save_drafter(tmp_path / "adapter", save_base(tmp_path / "base", model), model, method)
    manifest = export_bundle(tmp_path / "base", adapter, tmp_path / "bundle", "int8", progress=lambda line: None)
    assert manifest.parity["streams"]["relative"] < 0.4  # drafters lie in 4 bits, and these weights are random
    session = load(tmp_path / "bundle", threads=1, tree=8, cache_dir=tmp_path)
    plain, drafted = (session.generate(PROMPT, max_new_tokens=24, speculate=speculate) for speculate in (False, True))
    assert drafted.token_ids == plain.token_ids and drafted.stats.step_tokens > drafted.stats.steps


@pytest.mark.parametrize(("paper", "precision"), [*zip(PAPERS, cycle(("int8", "int4", "fp32")), strict=False)])
def test_drafters_as_their_papers_have_them_draft_what_was_trained(paper: str, precision: str, tmp_path: Path) -> None:
    method, changes = PAPERS[paper]
    model = tiny_model("llama")
    adapter = save_drafter(tmp_path / "adapter", save_base(tmp_path / "base", model), model, method, **changes)
    manifest = export_bundle(tmp_path / "base", adapter, tmp_path / "bundle", precision, progress=lambda line: None)
    assert manifest.parity["streams"]["relative"] < {"fp32": 1e-4, "int8": 0.4, "int4": 0.6}[precision]
    session = load(tmp_path / "bundle", threads=1, tree=8, cache_dir=tmp_path)
    plain, drafted = (session.generate(PROMPT, max_new_tokens=24, speculate=speculate) for speculate in (False, True))
    assert drafted.token_ids == plain.token_ids and drafted.stats.step_tokens > drafted.stats.steps


def test_more_modules_than_passes_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    adapter = save_drafter(tmp_path / "adapter", save_base(tmp_path / "base", model), model, "mtp", depth=2)
    file = adapter / "streamspec_config.json"
    file.write_text(file.read_text().replace('"depth": 2', '"depth": 4'))
    with pytest.raises(AdapterError, match=r"streams\.depth is 4; expected a whole number 1\.\.3"):
        export_bundle(tmp_path / "base", adapter, tmp_path / "bundle", "fp32", progress=lambda line: None)


def test_a_window_that_cannot_be_and_tensors_of_another_family_are_refused(tmp_path: Path) -> None:
    model = tiny_model("gemma2")
    base = save_base(tmp_path / "base", model)
    adapter = save_drafter(tmp_path / "adapter", base, model, "eagle")
    config = json.loads((adapter / "streamspec_config.json").read_text())

    def exported(section: dict[str, Any]) -> None:
        (adapter / "streamspec_config.json").write_text(json.dumps(config | {"streams": config["streams"] | section}))
        export_bundle(tmp_path / "base", adapter, tmp_path / "bundle", "fp32", progress=lambda line: None)

    for window in (0, -3, 2.5, "6", True):
        with pytest.raises(AdapterError, match=r"streams\.window is .*; expected a whole number 1\.\."):
            exported({"window": window})
    tensors = load_file(adapter / "streamspec.safetensors")
    del tensors["norm_mlp.weight"]
    save_file(tensors | {"attention.q_norm.weight": torch.ones(24)}, adapter / "streamspec.safetensors")
    with pytest.raises(AdapterError, match=r"missing: norm_mlp\.weight; unknown: attention\.q_norm\.weight"):
        exported({})
