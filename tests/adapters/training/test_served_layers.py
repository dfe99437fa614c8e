"""A model whose lower layers' states come from elsewhere computes what the whole model does, without their weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from streamspec import load
from streamspec.adapters.base_models.hf_decoder import HFDecoder
from streamspec.adapters.drafters.drafting_model import TargetModel
from streamspec.adapters.train import train
from streamspec.adapters.training.served_layers import ServedLayers, read_states_alone
from streamspec.bundle.manifest import OWN_WEIGHTS
from streamspec.export import export_bundle
from streamspec.export.runners.lower_layers import LowerLayers
from streamspec.runtime.hardware import native_library
from tests.support.gguf_cases import quantized
from tests.support.tiny_models import options, tiny_model

ALONE = "llama", "qwen2", "phi", "gpt2", "opt", "gemma2", "gemma3_text", "stablelm", "gpt_neox", "olmo2"
MORE = "lfm2", "gemma4_text"  # whose layers share keys, or mix what enters them
IDS = torch.tensor([[5, 9, 33, 8, 40, 41], [12, 60, 7, 2, 2, 2]])
MASK = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])


class OwnStates:
    """The states of another copy of the model."""

    def __init__(self, model: PreTrainedModel, count: int) -> None:
        self.model, self.count, self.closed = deepcopy(model), count, False

    def __call__(self, ids: Sequence[int]) -> NDArray[np.float32]:
        decoder = HFDecoder(self.model)
        with torch.no_grad(), torch.device("cpu"):
            entered = TargetModel(self.model, tapped=tuple(range(1, self.count + 1)))
            entry = entered.computed_pass(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.long)).entry[0]
        return np.stack([part.numpy() for part in entry.split(decoder.hidden_size, dim=-1)])

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("family", ALONE)
def test_the_main_pass_is_that_of_the_whole_model(family: str) -> None:
    model = tiny_model(family)
    target = TargetModel(model, 2, tapped=(1, 2, 4))
    with torch.no_grad():
        whole = target.computed_pass(IDS, MASK)
        assert read_states_alone(target.decoder, 2)
        ServedLayers(model, OwnStates(model, 2), 2)
        assert all(parameter.numel() == 0 for parameter in target.decoder.layers[:2].parameters())
        served = target.computed_pass(IDS, MASK)
    rows = MASK.bool()
    assert torch.allclose(served.entry[rows], whole.entry[rows], atol=1e-5)
    assert torch.allclose(served.final[rows], whole.final[rows], atol=1e-5)
    for mine, own in zip(served.keys + served.values, whole.keys + whole.values, strict=True):
        assert torch.allclose(mine.transpose(1, 2)[rows], own.transpose(1, 2)[rows], atol=1e-5)


@pytest.mark.parametrize("family", MORE)
def test_layers_that_read_more_than_states_stay(family: str) -> None:
    assert not read_states_alone(HFDecoder(tiny_model(family)), 2)


@pytest.mark.skipif(bool(native_library.why_not()), reason="no native operators")
@pytest.mark.parametrize(("method", "count"), [("streaming", 2), ("medusa", 3)])
def test_a_gguf_target_is_trained_and_exported_over_its_own_weights(
    method: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    file, bundle, data = quantized(tmp_path / "model.gguf"), tmp_path / "bundle", tmp_path / "data.jsonl"
    export_bundle(file, None, bundle, precision=OWN_WEIGHTS, progress=lambda _: None, measure=False)
    rows = [{"prompt": "abcdefgh"[i:] + "ij", "completion": " lmnop"[i:]} for i in range(5)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {"recipe": "staged", "target_adapter": "base", "method": method, "val": data, "format": "raw"}
    opened = list[int]()

    def lower_layers(folder: Path, layers: int, threads: int) -> LowerLayers:
        opened.append(layers)
        return LowerLayers(folder, layers, threads)

    result = train(
        options(file, data, tmp_path / "out", answers_from=str(bundle), **more), load=load, lower_layers=lower_layers
    )
    assert opened == [count] and "tau" in result
    assert f"the target's first {count} layers are computed by the bundle's operators" in capsys.readouterr().err
    drafting = tmp_path / "drafting"
    manifest = export_bundle(file, tmp_path / "out", drafting, OWN_WEIGHTS, progress=lambda _: None, measure=False)
    assert (manifest.precision, manifest.drafter) == (OWN_WEIGHTS, method)
    answers = [load(folder, threads=1).generate([5, 9, 33], max_new_tokens=12) for folder in (bundle, drafting)]
    assert answers[0].token_ids == answers[1].token_ids
