"""A base at rest in bfloat16, with a LoRA beside it, is computed as if it had been loaded in float32 and merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Mxfp4Config

from streamspec.adapters.base_models.gguf.lazy_tensors import LazyTensor
from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.bundle.adapter_folder import read_adapter
from streamspec.export.reference.pytorch_reference import ReferenceModel
from streamspec.export.spec.mixture_spec import DOWN, GATE, UP
from streamspec.export.weights.lazy_weights import Float32Decoder, LazyMatrix
from streamspec.export.weights.load_weights import ModelSource, load_model
from streamspec.export.weights.model_spec import describe
from tests.support.gguf_blocks import values
from tests.support.gguf_cases import as_folder, made, rounded
from tests.support.gguf_files import stored, write_gguf
from tests.support.mxfp4 import pack_experts
from tests.support.tiny_exports import FAMILIES, VOCAB, tiny_model

TOKENS = np.random.default_rng(5).integers(3, VOCAB, 9)


def loaded(folder: Path, adapter: Path | None, dtype: Any, merge: bool) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    if adapter is not None:
        tuned = PeftModel.from_pretrained(model, adapter)
        model = tuned.merge_and_unload() if merge else tuned.base_model.model
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize(
    "lora", [None, {}, {"use_rslora": True}, {"use_dora": True}, {"target_modules": "all-linear"}], ids=str
)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_layer_by_layer_is_as_the_whole_in_float32(family: str, lora: dict[str, Any] | None, tmp_path: Path) -> None:
    tiny_model(family, tied=False).bfloat16().save_pretrained(tmp_path / "base")
    adapter = None
    if lora is not None:
        targets = {
            "target_modules": ["c_attn"] if family == "gpt2" else ["q_proj", "down_proj"],
            "fan_in_fan_out": family == "gpt2",
        }
        config = LoraConfig(r=4, init_lora_weights=False, **(targets | lora))
        adapter = tmp_path / "adapter"
        get_peft_model(tiny_model(family, tied=False), config).save_pretrained(adapter)
    whole, resting = (
        loaded(tmp_path / "base", adapter, torch.float32, True),
        loaded(tmp_path / "base", adapter, "auto", False),
    )
    expected = whole(torch.as_tensor(TOKENS)[None]).logits[0].numpy()
    reference = ReferenceModel(resting)
    ours = reference.logits(reference.states(TOKENS, np.arange(9), np.tri(9, dtype=bool)))
    assert np.abs(ours - expected).max() < 1e-5 * np.abs(expected).max()
    spec, merged = describe(whole), ModelSource(whole, describe(whole))
    parts = ModelSource(resting, describe(resting))
    for module in spec.modules(1):
        name = spec.weight_name(1, module)
        np.testing.assert_allclose(parts.weight(f"{name}.weight"), merged.weight(f"{name}.weight"), atol=1e-6)
        assert (parts.bias(f"{name}.bias") is None) == (merged.bias(f"{name}.bias") is None)
    np.testing.assert_array_equal(parts.rows_of("lm_head.weight")[3:7], merged.rows_of("lm_head.weight")[3:7])
    assert next(resting.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_with_its_lora_merged_leaves_the_model_alone_and_serves_every_reader(dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype)
    lora = LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"])
    tuned = get_peft_model(model, lora, autocast_adapter_dtype=False).base_model.model
    before = {name: tensor.clone() for name, tensor in tuned.state_dict().items()}
    decoder = ReferenceModel(tuned).decoder
    read, at_rest = decoder.layer(0), decoder.layers[0].self_attn.q_proj
    assert read is ModelSource(tuned, describe(tuned)).decoder.layer(0)
    handle = read.self_attn.register_forward_hook(lambda *_: None)
    assert not decoder.layers[0].self_attn._forward_hooks
    handle.remove()
    assert decoder.layer(1) is not read and decoder.layer(0) is not read
    assert not at_rest.merged and all(torch.equal(tensor, before[name]) for name, tensor in tuned.state_dict().items())
    parts = (at_rest.base_layer, at_rest.lora_B["default"], at_rest.lora_A["default"])
    base, b, a = (part.weight.float() for part in parts)
    assert torch.equal(read.self_attn.q_proj.weight, base + b @ a * at_rest.scaling["default"])


def test_which_layers_attend_is_asked_of_the_model_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Float32Decoder(tiny_model("lfm2").bfloat16())
    monkeypatch.setattr(Float32Decoder, "layer", lambda *_: pytest.fail("a copy of a layer"))
    attend = [kind == "full_attention" for kind in decoder.model.config.layer_types]
    assert [decoder.rotates(layer) for layer in range(len(attend))] == attend and len({*attend}) == 2
    assert decoder.last_attention == max(layer for layer, attends in enumerate(attend) if attends)


def test_rows_of_a_table_come_out_in_float32() -> None:
    table = torch.randn(20, 6).bfloat16()
    rows = LazyMatrix(table)
    assert rows.shape == (20, 6) and rows[2:5].dtype == np.float32
    np.testing.assert_array_equal(np.asarray(rows), table.float().numpy())
    np.testing.assert_array_equal(rows[np.array([7, 0])], table[[7, 0]].float().numpy())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_float32_is_not_copied(family: str) -> None:
    model = tiny_model(family)
    decoder = ReferenceModel(model).decoder
    assert decoder.layer(0) is decoder.layers[0]


MIXTURES = [
    "qwen3 with experts",
    "mixtral",
    "granite with experts",
    "lfm2 with experts",
    "ernie with experts",
    "gpt-oss",
]


@pytest.mark.parametrize("case", MIXTURES)
def test_experts_of_a_gguf_file_are_read_one_by_one(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    file = rounded(tmp_path / "m.gguf", case, "Q8_0")
    read = load_model(resolve_base(file, lambda line: None), None, whole=False)
    folder = loaded(as_folder(file), None, torch.float32, False)
    ours, theirs = (ModelSource(model, describe(model)) for model in (read, folder))
    mixture = theirs.spec.mixture
    assert mixture is not None
    for number in (0, mixture.count - 1):
        for part in (GATE, UP, DOWN):
            name = f"{theirs.spec.weight_name(mixture.layers[0], mixture.expert(number, part))}.weight"
            np.testing.assert_array_equal(ours.weight(name), theirs.weight(name))
            blocks = ours.stored(name)
            assert blocks is not None and blocks.kind == "Q8_0" and theirs.stored(name) is None
            np.testing.assert_array_equal(values(blocks), theirs.weight(name))
    query = f"{ours.spec.weight_name(mixture.layers[0], ours.spec.family.qkv[0])}.weight"
    embedding = f"{ours.spec.stacked(ours.spec.family.embedding)}.weight"
    for name, truth in ((query, theirs.weight(query)), (embedding, np.asarray(theirs.rows_of(embedding)))):
        blocks = ours.stored(name)
        assert blocks is not None
        np.testing.assert_array_equal(values(blocks), truth)
    read_whole = LazyTensor.read

    def no_stack(lazy: LazyTensor, dtype: torch.dtype) -> torch.Tensor:
        assert not lazy.stored.stacked
        return read_whole(lazy, dtype)

    monkeypatch.setattr(LazyTensor, "read", no_stack)
    found, expected = (
        reference.logits(reference.states(TOKENS, np.arange(9), np.tri(9, dtype=bool)))
        for reference in (ReferenceModel(model) for model in (read, folder))
    )
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_experts_in_mxfp4_are_what_transformers_makes_of_published_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    model, architecture, keys, _ = made("gpt-oss")
    model.save_pretrained(tmp_path / "published")
    pack_experts(tmp_path / "published", model)
    settings = Mxfp4Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "published", quantization_config=settings).float()
    tensors, kind = stored(model, architecture), gguf.GGMLQuantizationType.MXFP4
    blocks = {name: gguf.quantize(x, kind) for name, x in tensors.items() if name.endswith("exps.weight")}
    file = write_gguf(tmp_path / "m.gguf", architecture, keys, tensors | blocks, kinds=dict.fromkeys(blocks, kind))
    read = load_model(resolve_base(file, lambda line: None), None, whole=False)
    ours, experts = ModelSource(read, describe(read)), theirs.model.layers[1].mlp.experts
    truth = {GATE: experts.gate_up_proj[5][:, ::2], UP: experts.gate_up_proj[5][:, 1::2], DOWN: experts.down_proj[5]}
    for part, expected in truth.items():
        name = f"model.layers.1.mlp.experts.5.{part}"
        found = ours.stored(f"{name}.weight")
        assert found is not None and found.kind == "MXFP4"
        np.testing.assert_array_equal(values(found), expected.detach().numpy().T)
    np.testing.assert_array_equal(
        ours.bias("model.layers.1.mlp.experts.5.up_proj.bias"), experts.gate_up_proj_bias[5][1::2].detach()
    )


@pytest.mark.parametrize("lora", [None, {}, {"use_dora": True}], ids=str)
def test_a_gguf_file_under_a_lora_is_as_the_whole(
    lora: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    model, architecture, keys, tensors = made("llama 3.2")
    file = write_gguf(tmp_path / "m.gguf", architecture, keys, tensors)
    if lora is not None:
        config = LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "down_proj"], **lora)
        get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    adapter = None if lora is None else read_adapter(tmp_path / "adapter")
    base = resolve_base(file, lambda line: None)
    expected = loaded(as_folder(file), adapter and adapter.path, torch.float32, True)
    logits = expected(torch.as_tensor(TOKENS)[None]).logits[0].numpy()
    for whole in (True, False):
        read = load_model(base, adapter, whole)
        tables = ModelSource(read, describe(read)).rows_of("lm_head.weight")
        np.testing.assert_array_equal(tables[np.array([7, 3])], expected.lm_head.weight.numpy()[[7, 3]])
        reference = ReferenceModel(read)
        ours = reference.logits(reference.states(TOKENS, np.arange(9), np.tri(9, dtype=bool)))
        called = read(torch.as_tensor(TOKENS)[None]).logits[0].numpy()
        for found in (ours, called):
            assert np.abs(found - logits).max() < 1e-5 * np.abs(logits).max()
