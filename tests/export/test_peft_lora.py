"""LoRAs that PEFT saved, exported: merged whatever they hold, beside the base where they are low-rank updates alone."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from streamspec.errors import AdapterError, ConfigError
from streamspec.export import adapt, export_bundle, export_swappable
from streamspec.prompt.prompt_format import PromptFormat
from streamspec.runtime import load
from tests.support.gguf_cases import as_folder, rounded
from tests.support.tiny_models import tiny_model, tiny_tokenizer

IDS = [1, 5, 9, 3, 4, 17, 22, 30, 8]
MERGED: dict[str, dict[str, Any]] = {
    "plain": {},
    "regex": {"target_modules": r".*layers\.[01]\.self_attn\.(q|v)_proj"},
    "ranks by module": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}, "use_rslora": True},
    "some layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1, 2]},
    "all but one": {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
    "DoRA": {"use_dora": True},
    "whole modules": {"modules_to_save": ["lm_head", "input_layernorm"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "rows": {"trainable_token_indices": [3, 4]},
    "biases": {"bias": "all"},
    "updates with biases": {"lora_bias": True, "use_rslora": True},
    "updates of the head with biases": {"lora_bias": True, "target_modules": ["lm_head", "v_proj"]},
    "both ends alike": {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    "both ends whole and alike": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "VeLoRA": {"velora_config": {}},
}


def quiet(line: str) -> None:
    """No progress."""


def tuned(folder: Path, base: Path, **changes: Any) -> Path:
    """A LoRA with large numbers over the model in `base`, saved by PEFT."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]} | changes
    model = AutoModelForCausalLM.from_pretrained(base)
    tuned = get_peft_model(model, LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **settings))
    for value in tuned.parameters():
        if value.requires_grad:
            value.data += torch.randn_like(value) * 0.1
    tuned.save_pretrained(folder)
    return folder


def base_of(folder: Path, family: str = "llama", **changes: Any) -> Path:
    tiny_model(family, **changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_of(tmp_path_factory.mktemp("bases") / "tied", "qwen2", tie_word_embeddings=True)


def peft_logits(base: Path, lora: Path) -> np.ndarray:
    """What PEFT itself computes, its LoRA beside the base."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager"), lora)
    with torch.no_grad():
        logits: np.ndarray = model.eval()(torch.tensor([IDS])).logits[0].numpy()
    return logits


def compare(base: Path, lora: Path, out: Path) -> None:
    export_bundle(base, lora, out, "fp32", measure=False, progress=quiet)  # the comparison below is the stricter
    session = load(out, tree="plain", cache_dir=out.parent)
    expected = peft_logits(base, lora)
    assert np.abs(session.score(IDS) - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("kind", MERGED)
def test_what_peft_merges_is_exported_merged(tied: Path, tmp_path: Path, kind: str) -> None:
    if unknown := MERGED[kind].keys() - {field.name for field in fields(LoraConfig)}:
        pytest.skip(f"this PEFT has no {', '.join(unknown)}")
    compare(tied, tuned(tmp_path / "lora", tied, **MERGED[kind]), tmp_path / "bundle")


@pytest.mark.parametrize("kind", ["embedding", "head"])
def test_a_lora_of_an_end_is_merged_over_a_gguf_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    file = rounded(tmp_path / "base.gguf")
    folder = as_folder(file)
    lora = tuned(tmp_path / "lora", folder, **MERGED[kind])
    export_bundle(file, lora, tmp_path / "bundle", "fp32", measure=False, progress=quiet)
    expected = peft_logits(folder, lora)
    found = load(tmp_path / "bundle", tree="plain", cache_dir=tmp_path).score(IDS)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("changes", [{}, {"use_dora": True}, {"target_modules": "all-linear"}], ids=str)
def test_gpt2_keeps_its_weights_the_other_way_round(tmp_path: Path, changes: dict[str, Any]) -> None:
    base = base_of(tmp_path / "base", "gpt2")
    settings = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True} | changes
    compare(base, tuned(tmp_path / "lora", base, **settings), tmp_path / "bundle")


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "phi3"])
def test_a_lora_of_peft_is_swapped_in(tmp_path: Path, family: str) -> None:
    base = base_of(tmp_path / "base", family)
    modules = {"qwen2": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"], "phi3": ["qkv_proj", "gate_up_proj"]}
    settings = {"target_modules": modules[family], "fan_in_fan_out": family == "gpt2", "use_rslora": True}
    one, other = (tuned(tmp_path / name, base, **settings, r=rank) for name, rank in (("one", 4), ("other", 3)))
    export_swappable(base, [one], tmp_path / "bundle", "fp32", progress=quiet)
    adapt(tmp_path / "bundle", other, base=base, progress=quiet)
    session = load(tmp_path / "bundle", cache_dir=tmp_path)
    for lora in (one, other):
        session.swap(lora.name)
        expected = peft_logits(base, lora)
        assert np.abs(session.score(IDS) - expected).max() < 1e-4 * np.abs(expected).max()
    with pytest.raises(AdapterError, match="as it was trained; expected one converted.*streamspec adapt"):
        session.swap(one)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"use_dora": True}, "DoRA"), ({"modules_to_save": ["lm_head"]}, r"whole modules \(lm_head\)")],
)
def test_what_cannot_be_swapped_is_refused_by_name_and_leaves_nothing(
    tied: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(AdapterError, match=f"{named}; expected low-rank updates.*without --swappable"):
        export_swappable(tied, [tuned(tmp_path / "lora", tied, **changes)], tmp_path / "out", "fp32", progress=quiet)
    assert not (tmp_path / "out").exists()


def test_the_prompt_format_is_the_template_beside_the_lora(tied: Path, tmp_path: Path) -> None:
    lora, chat = tuned(tmp_path / "lora", tied), tiny_tokenizer(chat=True)
    assert export_bundle(tied, lora, tmp_path / "raw", "fp32", progress=quiet).prompt_format == PromptFormat("raw", "")
    chat.save_pretrained(lora)
    manifest = export_bundle(tied, lora, tmp_path / "chat", "fp32", progress=quiet)
    assert manifest.prompt_format.kind == "chat"
    session = load(tmp_path / "chat", tree="plain", cache_dir=tmp_path)
    expected = chat.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)["input_ids"]
    assert session.encode("hi") == expected
    asked = PromptFormat("raw", "|")
    manifest = export_bundle(tied, lora, tmp_path / "asked", "fp32", prompt_format=asked, progress=quiet)
    assert manifest.prompt_format == asked
    with pytest.raises(AdapterError, match="a chat template of its own"):
        export_swappable(tied, [lora], tmp_path / "none", "fp32", progress=quiet)
    export_swappable(tied, [lora], tmp_path / "swappable", "fp32", prompt_format=asked, progress=quiet)
    with pytest.raises(ConfigError, match="which has no chat template"):
        export_bundle(tied, None, tmp_path / "none", "fp32", prompt_format=PromptFormat("chat"), progress=quiet)


def test_answers_end_where_the_lora_was_taught_to_end(tied: Path, tmp_path: Path) -> None:
    lora, tokenizer = tuned(tmp_path / "lora", tied), tiny_tokenizer()
    tokenizer.eos_token = "<s>"
    tokenizer.save_pretrained(lora)
    manifest = export_bundle(tied, lora, tmp_path / "bundle", "fp32", progress=quiet)
    assert manifest.model.eos_token_ids == (1, 2)
    with pytest.raises(AdapterError, match="an end token of its own, <s>"):
        export_swappable(tied, [lora], tmp_path / "none", "fp32", progress=quiet)


def test_a_bundle_tells_the_weights_that_answer_however_they_are_rounded(tied: Path, tmp_path: Path) -> None:
    made = {
        "fp32": tuned(tmp_path / "lora", tied),
        "fp16": tmp_path / "lora",
        "other": tuned(tmp_path / "b", tied, r=2),
    }
    told = [
        export_bundle(tied, lora, tmp_path / name, "fp16" if name == "fp16" else "fp32", progress=quiet)
        for name, lora in ({"alone": None} | made).items()
    ]
    alone, one, rounded, other = (manifest.weights_sha256 for manifest in told)
    assert alone == told[0].base.sha256 and one == rounded and len({alone, one, other}) == 3


def test_a_lora_of_another_base_is_refused_unless_the_user_says_so(tmp_path: Path) -> None:
    base = base_of(tmp_path / "llama-3-8b")
    lora = tuned(tmp_path / "lora", base)
    file = lora / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "someone/llama-2-7b"}))
    with pytest.raises(AdapterError, match="trained on someone/llama-2-7b"):
        export_bundle(base, lora, tmp_path / "out", "fp32", progress=quiet)
    assert not (tmp_path / "out").exists()
    export_bundle(base, lora, tmp_path / "out", "fp32", progress=quiet, allow_base_mismatch=True)
