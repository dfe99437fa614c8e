"""LoRAs trained on a multimodal checkpoint: over the text part they compute what PEFT computes over the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from streamspec.adapters.base_models.resolve import Base, resolve_base
from streamspec.adapters.models import load_target
from streamspec.adapters.shrink import shrink
from streamspec.adapters.task_lora import check_adapter
from streamspec.bundle.adapter_folder import read_adapter
from streamspec.cli import app
from streamspec.errors import AdapterError
from streamspec.export.weights.load_weights import load_model
from streamspec.model_families.text_parts import TEXT_PARTS
from tests.support.multimodal import tiny_multimodal
from tests.support.tiny_exports import write_tokenizer

IDS = torch.arange(3, 40)[None]
UNSLOTH = (  # its pattern for the layers of the language model alone
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:q_proj|k_proj|v_proj|"
    r"o_proj|gate_proj|up_proj|down_proj|in_proj|w1).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj)))"
)


def saved(folder: Path, model_type: str, **changes: Any) -> tuple[Base, Path, torch.Tensor]:
    """A multimodal base, a LoRA with large numbers over it as PEFT saves it, and PEFT's logits of IDS."""
    whole = tiny_multimodal(model_type)
    whole.save_pretrained(folder / "base")
    write_tokenizer(folder / "base", 64)
    stack = TEXT_PARTS[model_type].stack
    settings: dict[str, Any] = {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": "all-linear",
        "exclude_modules": ["lm_head"],
        "rank_pattern": {f"{stack}.layers.1.*q_proj": 2},
        "alpha_pattern": {f"model.{stack}.layers.1.*_proj": 11},
    } | changes
    tuned = get_peft_model(whole, LoraConfig(**settings, init_lora_weights=False, task_type="CAUSAL_LM"))
    tuned.peft_config["default"].base_model_name_or_path = str(folder / "base")
    tuned.save_pretrained(folder / "lora")
    with torch.no_grad():
        logits = tuned.eval()(input_ids=IDS).logits
    return resolve_base(str(folder / "base"), lambda line: None), folder / "lora", logits


def older(lora: Path) -> None:
    """Names the modules as transformers before 4.52 did."""
    file = lora / "adapter_model.safetensors"
    old = {
        name.replace("model.language_model.", "language_model.model."): value for name, value in load_file(file).items()
    }
    save_file({name.replace("model.model.vision", "model.vision"): value for name, value in old.items()}, file)
    config = lora / "adapter_config.json"
    config.write_text(config.read_text().replace("language_model.layers", "language_model.model.layers"))
    settings = json.loads(config.read_text())
    patterns = {name.removeprefix("model."): alpha for name, alpha in settings["alpha_pattern"].items()}
    config.write_text(json.dumps(settings | {"alpha_pattern": patterns}))


def same(model: Any, logits: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS).logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", TEXT_PARTS)
def test_the_text_part_with_the_lora_computes_what_peft_computes(model_type: str, tmp_path: Path) -> None:
    base, lora, logits = saved(tmp_path, model_type)
    lines: list[str] = []
    check_adapter(read_adapter(lora), base, False, lines.append)
    assert len(lines) == 1 and "no text passes" in lines[0] and "vis" in lines[0]
    same(load_model(base, read_adapter(lora)), logits)
    swappable = load_model(base, read_adapter(lora), whole=False)
    same(swappable, logits)


def test_the_layout_before_transformers_4_52_is_the_same_lora(tmp_path: Path) -> None:
    base, lora, logits = saved(tmp_path, "gemma3")
    older(lora)
    check_adapter(read_adapter(lora), base, False, lambda line: None)
    same(load_model(base, read_adapter(lora)), logits)


@pytest.mark.parametrize("more", ["", "|".join(f"in_proj_{name}" for name in "abcdefghijklmnopqrstuvwxyz0123456789")])
def test_unsloths_pattern_names_the_modules_of_the_whole_model(more: str, tmp_path: Path) -> None:
    """`more`: names as of Qwen3.5's layers, with which the pattern has more than 500 characters."""
    pattern = UNSLOTH.replace("q_proj|k_proj", f"q_proj|{more}|k_proj") if more else UNSLOTH
    assert (len(pattern) > 500) == bool(more)
    base, lora, logits = saved(tmp_path, "lfm2_vl", target_modules=pattern, exclude_modules=None)
    lines: list[str] = []
    check_adapter(read_adapter(lora), base, False, lines.append)
    assert not lines
    same(load_model(base, read_adapter(lora)), logits)


def test_modules_to_save_are_those_of_the_text(tmp_path: Path) -> None:
    base, lora, _ = saved(
        tmp_path, "gemma3", target_modules=["q_proj"], modules_to_save=["lm_head", "multi_modal_projector"]
    )
    file = lora / "adapter_model.safetensors"
    tensors = load_file(file)
    (head,) = (name for name in tensors if "lm_head" in name)
    save_file(tensors | {head: tensors[head] + 1}, file)
    tuned = PeftModel.from_pretrained(tiny_multimodal("gemma3"), lora)
    with torch.no_grad():
        logits = tuned.eval()(input_ids=IDS).logits
    check_adapter(read_adapter(lora), base, False, lambda line: None)
    same(load_model(base, read_adapter(lora)), logits)


def test_training_over_it_and_cutting_it_keep_the_function(tmp_path: Path) -> None:
    base, lora, logits = saved(tmp_path, "gemma3")
    config = SimpleNamespace(base_bits=None)
    run: Any = SimpleNamespace(config=config, base=base, dtype=torch.float32, device=torch.device("cpu"), served=None)
    same(load_target(run, lora), logits)
    shrink(lora, tmp_path / "cut", 2)
    tuned = PeftModel.from_pretrained(tiny_multimodal("gemma3"), tmp_path / "cut")
    with torch.no_grad():
        same(load_model(base, read_adapter(tmp_path / "cut")), tuned.eval()(input_ids=IDS).logits)


def test_a_text_model_takes_it_too(tmp_path: Path) -> None:
    base, lora, logits = saved(tmp_path, "gemma3")
    part = load_model(base, None)
    alone = type(part)(part.config)
    alone.load_state_dict(part.state_dict())
    alone.save_pretrained(tmp_path / "text")
    write_tokenizer(tmp_path / "text", 64)
    text = resolve_base(str(tmp_path / "text"), lambda line: None)
    check_adapter(read_adapter(lora), text, True, lambda line: None)
    same(load_model(text, read_adapter(lora)), logits)


@pytest.mark.parametrize(
    "odd",
    ["base_model.model.model.audio_mixer.lora_A.weight", "base_model.model.model.language_model.extra.lora_A.weight"],
)
def test_tensors_of_unknown_modules_are_refused_by_name(odd: str, tmp_path: Path) -> None:
    base, lora, _ = saved(tmp_path, "gemma3")
    file = lora / "adapter_model.safetensors"
    save_file(load_file(file) | {odd: torch.ones(3, 32)}, file)
    with pytest.raises(AdapterError, match=r"unknown base_model.model.model.(audio_mixer|extra).lora_A.weight"):
        check_adapter(read_adapter(lora), base, False, lambda line: None)


def test_inspect_says_what_is_of_no_use(tmp_path: Path) -> None:
    _, lora, _ = saved(tmp_path, "gemma3", target_modules=["q_proj"])
    shown = CliRunner().invoke(app, ["inspect", str(lora)])
    assert shown.exit_code == 0 and "of `vision_tower`" in shown.stdout.replace("\n", " ")
