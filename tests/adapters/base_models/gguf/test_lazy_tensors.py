"""A GGUF file's model, its layers read when they are used, is the model of the folder that the file becomes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from streamspec.adapters.base_models.gguf.lazy_tensors import fill, is_hollow, load_lazily, read_when_called
from streamspec.adapters.base_models.hf_decoder import HFDecoder
from streamspec.adapters.base_models.resolve import Base, resolve_base
from streamspec.adapters.base_models.weight_files import weights_hash
from tests.support import gguf_files
from tests.support.gguf_cases import CASES, VOCABULARY, as_folder, made, quantized

IDS = torch.arange(5, 25)[None] % VOCABULARY


@pytest.fixture(scope="module", params=CASES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Base, Path]]:
    """A GGUF file as a base, and a folder of its weights."""
    folder = tmp_path_factory.mktemp("lazy")
    _, architecture, keys, tensors = made(request.param)
    file = gguf_files.write_gguf(folder / "m.gguf", architecture, keys, tensors)
    whole = as_folder(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STREAMSPEC_CACHE", str(folder / "cache"))
        yield resolve_base(file, lambda _: None), whole


def test_the_model_is_that_of_the_folder(base: tuple[Base, Path]) -> None:
    found, folder = base
    assert found.sha256 == weights_hash(folder) and not list(found.path.glob("*.safetensors"))
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    truth = AutoModelForCausalLM.from_pretrained(folder, **eager).eval()
    model = load_lazily(found, torch.float32).eval()
    layers = HFDecoder(model).layers
    hollow = [parameter for parameter in layers.parameters() if is_hollow(parameter)]
    assert hollow and all(parameter.untyped_storage().nbytes() == 4 for parameter in hollow)
    assert model.generation_config == truth.generation_config
    read_when_called(layers)
    with torch.no_grad():
        given = [each(IDS, use_cache=False).logits for each in (model, truth)]  # old caches know no layer of an MLP
        torch.testing.assert_close(*given, atol=1e-5, rtol=0)  # memory lies otherwise
    assert all(parameter.untyped_storage().nbytes() == 4 for parameter in hollow)
    fill(model.parameters())
    found_state, true_state = model.state_dict(), truth.state_dict()
    assert found_state.keys() == true_state.keys()
    assert all(torch.equal(found_state[name], values) for name, values in true_state.items())


def test_a_layer_that_was_given_up_is_not_read(base: tuple[Base, Path]) -> None:
    model = load_lazily(base[0], torch.bfloat16)
    first, second, *_ = HFDecoder(model).layers
    for parameter in first.parameters():
        parameter.data = parameter.data.new_empty(0)
    fill(model.parameters())
    assert not any(parameter.numel() for parameter in first.parameters())
    truth = AutoModelForCausalLM.from_pretrained(base[1], dtype=torch.bfloat16)
    assert all(
        torch.equal(ours, own)
        for ours, own in zip(second.parameters(), HFDecoder(truth).layers[1].parameters(), strict=True)
    )


def test_a_base_in_few_bits_is_that_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    file = quantized(tmp_path / "m.gguf")
    four = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True), "device_map": {"": "cpu"}}
    found = load_lazily(resolve_base(file, lambda _: None), torch.bfloat16, hollow=False, **four)
    truth = AutoModelForCausalLM.from_pretrained(as_folder(file), dtype=torch.bfloat16, **four)
    state = found.state_dict()
    assert all(torch.equal(state[name], values) for name, values in truth.state_dict().items())
    assert found.model.layers[1].mlp.down_proj.weight.dtype == torch.uint8
