"""The models of a run: the frozen target in bfloat16 and over a base in few bits (bitsandbytes), and the maps that a
task LoRA changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from streamspec.adapters import early_checks, training_run
from streamspec.adapters.models import load_target, task_maps
from streamspec.adapters.prepare import prepare
from streamspec.adapters.train import train
from streamspec.bundle.adapter_folder import check_task_lora
from streamspec.errors import ConfigError
from streamspec.model_families import FAMILIES
from tests.support.mixture_families import MIXTURES
from tests.support.tiny_models import options, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the shared one, in the width of a block: bitsandbytes scales blocks of 64 weights."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama", hidden_size=64, intermediate_size=128, initializer_range=0.05).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_few_bits_need_their_package(base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_checks, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="--base-bits 4 without the package bitsandbytes"):
        train(options(base, data, tmp_path / "out", method="lora", base_bits=4))
    with pytest.raises(ConfigError, match="base_bits = 3; expected 8 or 4"):
        options(base, data, tmp_path / "out", base_bits=3)


@pytest.mark.parametrize("task", [False, True])
def test_a_target_in_bfloat16_turns_queries_and_keys_as_transformers_does(
    task: bool, base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_run, "has_bf16", lambda: True)
    lora = None
    if task:
        lora = tmp_path / "task"
        get_peft_model(tiny_model("llama", hidden_size=64, intermediate_size=128), LoraConfig()).save_pretrained(lora)
    run = prepare(options(base, data, tmp_path / "out", method="streaming", recipe="staged", target_adapter="base"))
    target = load_target(run, lora)
    truth = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, attn_implementation="eager")
    ids = torch.arange(100)[None] % 60
    assert target.lm_head.weight.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(target(ids).logits, truth(ids).logits)  # the LoRA is nothing yet


def outputs_and_gradient(model: PreTrainedModel, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a frozen target, in eval mode: after a pass without gradients, as drafters call it."""
    with torch.no_grad():
        model(inputs_embeds=inputs)
    given = inputs.clone().requires_grad_()
    logits = model.eval()(inputs_embeds=given).logits.float()
    logits.square().sum().backward()
    return logits.detach(), given.grad.float()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_base_in_few_bits_is_small_and_near_the_base(base: Path, data: Path, tmp_path: Path, bits: int) -> None:
    pytest.importorskip("bitsandbytes")
    config = {"method": "streaming", "target_adapter": "base"}
    whole = load_target(prepare(options(base, data, tmp_path / "whole", **config)), None)
    few = load_target(prepare(options(base, data, tmp_path / "few", base_bits=bits, **config)), None)
    count = sum(m.weight.numel() for m in whole.base_model.layers.modules() if isinstance(m, nn.Linear))
    size = sum(m.weight.nbytes for m in few.base_model.layers.modules() if isinstance(m, nn.Linear))
    assert size == count * bits // 8
    inputs = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0)).to(few.dtype)
    found, expected = (outputs_and_gradient(model, inputs) for model in (few, whole))
    for one, other in zip(found, expected, strict=True):
        assert 0.001 < (one - other).norm() / other.norm() < {8: 0.25, 4: 0.8}[bits]


@pytest.mark.parametrize("method", ["streaming", "jakiro", "medusa"])
def test_drafters_learn_over_a_task_lora_and_a_base_in_few_bits(
    base: Path, data: Path, tmp_path: Path, method: str
) -> None:
    pytest.importorskip("bitsandbytes")
    summary = train(options(base, data, tmp_path / "out", method=method, recipe="staged", base_bits=4))
    assert 1 <= summary["tau"] <= 3
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    "family", [*MIXTURES, "deepseek_v2", "glm4_moe_lite", "granitemoehybrid+experts", "nemotron_h+experts"]
)
def test_a_task_lora_beside_experts_is_one_that_exports_take(family: str, tmp_path: Path) -> None:
    model, row = tiny_model(family), FAMILIES[family.partition("+")[0]]
    maps, beside = task_maps(row, model.config), list(row.untuned) or None
    lora = LoraConfig(r=2, target_modules=maps, exclude_modules=beside, task_type="CAUSAL_LM")
    tuned = get_peft_model(model, lora)
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in tuned.named_parameters() if "lora_" in name}
    keys = {"kv_a_proj_with_mqa", "kv_b_proj"} if row.latent_attention else {"q_proj", "k_proj", "v_proj"}
    assert keys < adapted and not adapted & {"gate", "experts", "router", "up_proj"}
    tuned.save_pretrained(tmp_path)
    check_task_lora(tmp_path)
