"""A model whose lower layers' states come from elsewhere computes what the whole model does, without their weights."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import PreTrainedModel

from streamspec import Session, load
from streamspec.adapters.base_models.hf_decoder import HFDecoder
from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.adapters.drafters.draft_layer.model import DraftLayerModel
from streamspec.adapters.drafters.drafting_model import TargetModel
from streamspec.adapters.prepare import served_states
from streamspec.adapters.train import train
from streamspec.adapters.training.served_layers import AnsweredStates, ServedLayers, read_states_alone
from streamspec.bundle.manifest import OWN_WEIGHTS
from streamspec.export import export_bundle
from streamspec.export.runners.lower_layers import LowerLayers
from streamspec.runtime.hardware import native_library
from tests.support.gguf_cases import quantized
from tests.support.recurrent_families import WHOLE
from tests.support.tiny_models import options, tiny_model, tiny_tokenizer

ALONE = "llama", "qwen2", "phi", "gpt2", "opt", "gemma2", "gemma3_text", "stablelm", "gpt_neox", "olmo2", "lfm2", *WHOLE
MORE = ("gemma4_text",)  # whose layers share keys, and mix what enters them
IDS = torch.tensor([[5, 9, 33, 8, 40, 41], [12, 60, 7, 2, 2, 2]])
MASK = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])


class OwnStates:
    """The states of another copy of the model, and of sessions that are texts."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self.model, self.layers, self.texts = deepcopy(model), tuple(layers), list[list[int]]()

    def __call__(self, ids: Sequence[int]) -> NDArray[np.float32]:
        decoder = HFDecoder(self.model)
        self.texts.append(list(ids))
        with torch.no_grad(), torch.device("cpu"):
            entered = TargetModel(self.model, tapped=self.layers)
            entry = entered.computed_pass(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.long)).entry[0]
        return np.stack([part.numpy() for part in entry.split(decoder.hidden_size, dim=-1)])

    def close(self) -> None: ...

    def keep_in(self, folder: Path) -> bool:
        return False

    def kept_by(self, session: list[int]) -> tuple[list[int], NDArray[np.float32]]:
        return session, self(session) + 3.0  # as no other states are


@pytest.mark.parametrize("family", ALONE)
def test_the_main_pass_is_that_of_the_whole_model(family: str) -> None:
    model = tiny_model(family)
    target = TargetModel(model, 2, tapped=(1, 2, 4))
    with torch.no_grad():
        whole = target.computed_pass(IDS, MASK)
        assert read_states_alone(target.decoder, 2)
        ServedLayers(model, OwnStates(model, [1, 2]), [1, 2])
        assert all(parameter.numel() == 0 for parameter in target.decoder.layers[:2].parameters())
        served = target.computed_pass(IDS, MASK)
    rows = MASK.bool()
    assert torch.allclose(served.entry[rows], whole.entry[rows], atol=1e-5)
    assert torch.allclose(served.final[rows], whole.final[rows], atol=1e-5)
    for mine, own in zip(served.keys + served.values, whole.keys + whole.values, strict=True):
        assert torch.allclose(mine.transpose(1, 2)[rows], own.transpose(1, 2)[rows], atol=1e-5)


def test_no_number_enters_a_layer_whose_states_nobody_gives() -> None:
    model = tiny_model("llama")
    target = TargetModel(model, 3, tapped=(1, 2, 3))
    ServedLayers(model, OwnStates(model, [1, 3]), [1, 3])
    with torch.no_grad():
        first, second, third = target.computed_pass(IDS, MASK).entry.chunk(3, dim=-1)
    assert first[MASK.bool()].isfinite().all() and third[MASK.bool()].isfinite().all() and second.isnan().all()


def test_states_of_answers_are_kept_until_they_are_closed(tmp_path: Path) -> None:
    model = tiny_model("llama")
    own = OwnStates(model, [1, 2])
    states = AnsweredStates(own, tmp_path / "entered", 2, model.config.hidden_size)
    text, other = IDS[0].tolist(), IDS[0, :5].tolist()
    states.add(text)
    states.texts.name()
    again = AnsweredStates(own, tmp_path / "entered", 2, model.config.hidden_size)  # of a run that goes on
    own.texts.clear()
    for kept in (states, again):
        assert np.allclose(kept(text), own(text) + 3, rtol=1e-3, atol=1e-3)
    assert np.array_equal(states(other), own(other)) and own.texts == [text, text, other, other]
    states.close()
    assert not (tmp_path / "entered").exists() and np.array_equal(states(text), own(text))


def test_states_that_16_bits_or_the_disk_cannot_hold_are_computed(tmp_path: Path) -> None:
    model = tiny_model("llama")
    own = OwnStates(model, [1])
    states = AnsweredStates(own, tmp_path / "entered", 1, model.config.hidden_size)
    text, huge, more = IDS[0].tolist(), IDS[0, :3].tolist(), IDS[1, :3].tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, "kept_by", lambda session: (session, own(session) * np.float32(1e9)))
        states.add(huge)
    states.add(text)
    states.room = 0
    states.add(more)
    assert np.array_equal(states(huge), own(huge)) and np.array_equal(states(more), own(more))
    assert not np.array_equal(states(text), own(text))


def test_after_a_full_disk_texts_are_read_at_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    own = OwnStates(model, [1])
    texts, opened, times = [IDS[0].tolist(), IDS[0, :5].tolist(), IDS[1, :4].tolist()], Path.open, iter([1, 0, 0, 0, 0])
    states = AnsweredStates(own, tmp_path / "entered", 1, model.config.hidden_size)

    def full(path: Path, mode: str) -> Any:
        if next(times):
            with opened(path, mode) as file:
                file.write(b"a part of it")
            raise OSError(errno.ENOSPC, "full")
        return opened(path, mode)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        for text in texts:
            states.add(text)
        states.texts.name()
    for kept in (states, AnsweredStates(own, tmp_path / "entered", 1, model.config.hidden_size)):
        assert len(kept.texts.kept) == 2 and np.array_equal(kept(texts[0]), own(texts[0]))
        for text in texts[1:]:
            assert np.allclose(kept(text), own(text) + 3, rtol=1e-3, atol=1e-3)


def test_what_enters_the_first_layer_is_no_state_of_a_bundle() -> None:
    options = {"taps": "4,1,final", "gamma": 3, "experts": 2, "active": 2, "contrast": True, "parallel": True}
    options |= {"two_lists": False, "prefix_attention": False, "own_heads": False, "depth": 1}
    run: Any = SimpleNamespace(options=options)
    assert DraftLayerModel.read_states(run, HFDecoder(tiny_model("llama"))) == [3]
    options["taps"] = "3,2"
    assert DraftLayerModel.read_states(run, HFDecoder(tiny_model("llama"))) == [1, 2, 3]


@pytest.mark.parametrize("family", MORE)
def test_layers_that_read_more_than_states_stay(family: str) -> None:
    assert not read_states_alone(HFDecoder(tiny_model(family)), 2)


@pytest.mark.skipif(bool(native_library.why_not()), reason="no native operators")
@pytest.mark.parametrize(
    ("method", "shape", "layers"),
    [
        ("streaming", {}, [2]),
        ("streaming", {"exit_layer": "1", "prune_rank": 2}, [1, 2]),
        ("medusa", {}, [3]),
        ("eagle", {"taps": "2,1,final"}, [2, 3]),
    ],
)
def test_a_gguf_target_is_trained_and_exported_over_its_own_weights(
    method: str,
    shape: dict[str, Any],
    layers: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    file, bundle, data = quantized(tmp_path / "model.gguf"), tmp_path / "bundle", tmp_path / "data.jsonl"
    export_bundle(file, None, bundle, precision=OWN_WEIGHTS, progress=lambda _: None, measure=False)
    rows = [{"prompt": "abcdefgh"[i:] + "ij", "completion": " lmnop"[i:]} for i in range(5)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {"recipe": "staged", "target_adapter": "base", "method": method, "val": data, "format": "raw"} | shape
    opened, computed, kept = list[int](), list[list[int]](), list[list[int]]()

    class Lower(LowerLayers):
        def __init__(self, folder: Path, layers: Sequence[int], threads: int) -> None:
            super().__init__(folder, layers, threads)
            opened.extend(layers)

        def __call__(self, ids: Sequence[int]) -> NDArray[np.float32]:
            computed.append(list(ids))
            return super().__call__(ids)

        def kept_by(self, session: Session) -> tuple[list[int], NDArray[np.float32]]:
            tokens, states = super().kept_by(session)
            kept.append(tokens)
            return tokens, states

    result = train(
        options(file, data, tmp_path / "out", answers_from=str(bundle), **more), load=load, lower_layers=Lower
    )
    assert opened == layers and "tau" in result
    assert all(tensor.isfinite().all() for tensor in load_file(tmp_path / "out" / "streamspec.safetensors").values())
    assert len(kept) >= len(rows) and not [text for text in computed if text in kept]
    assert f"the target's first {layers[-1]} layers are computed by the bundle's operators" in capsys.readouterr().err
    drafting = tmp_path / "drafting"
    manifest = export_bundle(file, tmp_path / "out", drafting, OWN_WEIGHTS, progress=lambda _: None, measure=False)
    assert (manifest.precision, manifest.drafter) == (OWN_WEIGHTS, method)
    answers = [load(folder, threads=1).generate([5, 9, 33], max_new_tokens=12) for folder in (bundle, drafting)]
    assert answers[0].token_ids == answers[1].token_ids


@pytest.mark.skipif(bool(native_library.why_not()), reason="no native operators")
@pytest.mark.parametrize("merged", [False, True])
def test_a_bundle_of_a_folders_own_weights_serves_its_layers(merged: bool, tmp_path: Path) -> None:
    base = tmp_path / "base"
    model, lora = tiny_model("llama", num_attention_heads=2, num_key_value_heads=1), tmp_path / "lora"
    model.save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).save_pretrained(lora)
    export_bundle(base, lora if merged else None, tmp_path / "bundle", "int8", progress=lambda _: None, measure=False)
    config = options(base, base, tmp_path / "out", answers_from=str(tmp_path / "bundle"), target_adapter="base")
    served = served_states(config, resolve_base(str(base)), LowerLayers)
    assert (served is None) == merged
    if served is not None:
        assert served([2])([5, 9, 33]).shape[:2] == (1, 3)
