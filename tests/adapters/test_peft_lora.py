"""LoRAs that PEFT saved: which base they are of, what is refused before any work, training over them, and cutting."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from streamspec.adapters.adapter_writer import copy_task_lora
from streamspec.adapters.base_models.base_names import stored_name
from streamspec.adapters.base_models.resolve import Base, resolve_base
from streamspec.adapters.shrink import shrink
from streamspec.adapters.task_lora import check_adapter, merged
from streamspec.adapters.train import train
from streamspec.bundle.adapter_folder import HONOURED, NOT_NEEDED, more_than_low_rank, read_adapter
from streamspec.cli import app
from streamspec.errors import AdapterError, ConfigError
from streamspec.prompt.template_file import chat_template
from tests.support.tiny_models import options, tiny_model, tiny_tokenizer

IDS = torch.tensor([[1, 5, 9, 3, 4, 17, 22, 30, 8]])


def tuned(folder: Path, base: Path, named: str | None = None, **changes: Any) -> Path:
    """A LoRA with large numbers over the model in `base`, saved by PEFT."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]} | changes
    settings |= {"init_lora_weights": False, "task_type": "CAUSAL_LM"}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**settings))
    model.peft_config["default"].base_model_name_or_path = named or str(base)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def lora(base: Path, tmp_path: Path) -> Path:
    return tuned(tmp_path / "lora", base)


def checked(adapter: Path, base: Base, allow: bool = False) -> list[str]:
    lines: list[str] = []
    check_adapter(read_adapter(adapter), base, allow, lines.append)
    return lines


def rename(adapter: Path, **values: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("unsloth/Meta-Llama-3.1-8B-bnb-4bit", "meta-llama/Llama-3.1-8B"),
        ("unsloth/gemma-3-270m-it-unsloth-bnb-4bit", "google/gemma-3-270m-it"),
        ("/home/me/models/gemma-3-270m/", "gemma-3-270m-q4_k_m"),
        ("C:\\models\\Phi-2", "microsoft/phi-2"),
        ("/root/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/0123abc", "qwen3-0.6b"),
        ("Qwen2.5-0.5B-Instruct.Q8_0", "Qwen/Qwen2.5-0.5B-Instruct-GGUF"),
    ],
)
def test_names_of_the_same_weights_are_alike(one: str, other: str) -> None:
    assert stored_name(one) == stored_name(other)


@pytest.mark.parametrize("other", ["google/gemma-3-270m-it", "gemma-3-1b", "gemma-3-270m-it-qat-q4_0", "gemma-2-270m"])
def test_names_of_other_weights_are_not(other: str) -> None:
    assert stored_name("gemma-3-270m-q4_k_m") != stored_name(other)


@pytest.mark.parametrize(
    ("folder", "named", "expected"),
    [
        ("Tiny-Llama-2M", "someone/tiny-llama-2m-bnb-4bit", "fits"),
        ("Tiny-Llama-2M", "/elsewhere/Tiny-Llama-2M", "fits"),
        ("Tiny-Llama-2M", "someone/tiny-llama-2m-instruct", "refused"),
        ("Tiny-Llama-2M", "/models/llama-3-base", "refused"),
        ("Tiny-Llama-2M", "/elsewhere/model", "warned"),
        ("Tiny-Llama-2M", "outputs/checkpoint-500", "warned"),
        ("Tiny-Llama-2M", "", "warned"),
        ("my-copy", "someone/tiny-llama-2m", "warned"),
    ],
)
def test_the_base_that_a_lora_names_is_compared(
    base: Path, lora: Path, tmp_path: Path, folder: str, named: str, expected: str
) -> None:
    shutil.copytree(base, tmp_path / folder)
    resolved = resolve_base(tmp_path / folder, lambda line: None)
    rename(lora, base_model_name_or_path=named)
    if expected == "refused":
        with pytest.raises(
            AdapterError, match=f"was trained on {named}; expected an adapter of {folder};.*--allow-base"
        ):
            checked(lora, resolved)
        assert checked(lora, resolved, allow=True) == []
    else:
        lines = checked(lora, resolved)
        assert len(lines) == (expected == "warned") and all(folder in line and "\n" not in line for line in lines)


def test_another_revision_is_pointed_out(base: Path, lora: Path) -> None:
    resolved = resolve_base(base, lambda line: None)
    rename(lora, revision="main")
    assert checked(lora, resolved) == []
    rename(lora, revision="step3000")
    assert [line for line in checked(lora, resolved) if "step3000" in line]


@pytest.mark.parametrize("change", [{"hidden_size": 64}, {"num_hidden_layers": 3}, {"num_hidden_layers": 5}], ids=str)
def test_a_lora_for_other_shapes_is_refused_before_weights_are_read(
    lora: Path, base: Path, tmp_path: Path, change: dict[str, int]
) -> None:
    tiny_model("llama", **change).save_pretrained(tmp_path / base.name)
    tiny_tokenizer().save_pretrained(tmp_path / base.name)
    resolved = resolve_base(tmp_path / base.name, lambda line: None)
    (tmp_path / base.name / "model.safetensors").unlink()  # nothing of it is needed
    with pytest.raises(
        AdapterError, match=r"(no|unknown|\.weight \[4, 32\], not \[4, 64\]).*a LoRA for base"
    ) as caught:
        checked(lora, resolved)
    assert "\n" not in str(caught.value)


def test_a_lora_whose_modules_the_base_has_not_is_refused_in_one_line(base: Path, lora: Path) -> None:
    rename(lora, target_modules=["c_attn"])
    with pytest.raises(AdapterError, match="c_attn") as caught:
        checked(lora, resolve_base(base, lambda line: None))
    assert "\n" not in str(caught.value)


def test_a_pickle_is_refused_with_how_to_convert_it(base: Path, lora: Path) -> None:
    (lora / "adapter_model.safetensors").rename(lora / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin, a pickle.*save_pretrained"):
        read_adapter(lora)


def test_a_tokenizer_with_further_tokens_is_refused_by_their_names(base: Path, lora: Path) -> None:
    resolved, tokenizer = resolve_base(base, lambda line: None), AutoTokenizer.from_pretrained(base)
    tokenizer.save_pretrained(lora)
    assert checked(lora, resolved) == []
    tokenizer.pad_token = "<padding>"
    tokenizer.save_pretrained(lora)
    assert checked(lora, resolved) == []  # nobody ever meets it
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(lora)
    with pytest.raises(AdapterError, match="1 tokens that base.* has not, or elsewhere: <tool>"):
        checked(lora, resolved)


def test_a_gguf_file_has_no_tokens_without_rows(base: Path, lora: Path) -> None:
    """The publisher's tokenizer of Gemma 3 1B has a token for images behind the model's last row."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<image_soft_token>"])
    tokenizer.save_pretrained(lora)
    folder = resolve_base(base, lambda line: None)
    with pytest.raises(AdapterError, match="a tokenizer with 1 tokens that"):
        checked(lora, folder)
    file = replace(folder, made_of=base / "model.gguf")
    assert checked(lora, file) == []
    tokenizer.chat_template = "{{ '<image_soft_token>' }}"
    tokenizer.save_pretrained(lora)
    with pytest.raises(AdapterError, match="a tokenizer with 1 tokens that"):
        checked(lora, file)


def test_a_head_that_the_model_has_under_another_name_is_not_taken_for_a_copy(tmp_path: Path) -> None:
    """GPT-NeoX calls it `embed_out` in transformers 4, `lm_head` in 5; PEFT loads neither under the other's name."""
    tiny_model("gpt_neox").save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    folder = tuned(
        tmp_path / "lora", tmp_path / "base", target_modules=["query_key_value"], modules_to_save=["lm_head"]
    )
    base = resolve_base(tmp_path / "base", lambda line: None)
    checked(folder, base)
    tensors = load_file(folder / "adapter_model.safetensors")
    renamed = {name.replace("lm_head", "embed_out"): value for name, value in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, folder / "adapter_model.safetensors")
    rename(folder, modules_to_save=["embed_out"])
    with pytest.raises(AdapterError, match="unknown base_model.model.embed_out.weight"):
        checked(folder, base)


def test_loras_of_single_experts_are_to_be_merged(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    folder = tuned(tmp_path / "lora", tmp_path / "base", target_modules=["q_proj"])
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    ends = {"A": torch.zeros(4, 32), "B": torch.zeros(16, 4)}
    of_expert = "base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_{}.weight"
    save_file(tensors | {of_expert.format(side): end for side, end in ends.items()}, file)
    with pytest.raises(AdapterError, match=r"unknown .*experts\.0.*merge the adapter into its base with PEFT"):
        checked(folder, resolve_base(tmp_path / "base", lambda line: None))


def test_resized_embeddings_are_refused(base: Path, lora: Path) -> None:
    tensors = load_file(lora / "adapter_model.safetensors")
    name = "base_model.model.model.embed_tokens.weight"
    save_file(tensors | {name: torch.zeros(64, 32)}, lora / "adapter_model.safetensors")
    assert checked(lora, resolve_base(base, lambda line: None)) == []
    save_file(tensors | {name: torch.zeros(66, 32)}, lora / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=f"{name} for 66 tokens; expected 64"):
        checked(lora, resolve_base(base, lambda line: None))


@pytest.mark.parametrize("modules", [["embed_tokens", "q_proj"], ["lm_head"]], ids=str)
def test_a_lora_of_a_shared_matrix_is_merged_into_one_end_only(tmp_path: Path, modules: list[str]) -> None:
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    folder = tuned(tmp_path / "lora", tmp_path / "base", target_modules=modules)
    models = [
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), folder) for _ in range(2)
    ]
    with torch.no_grad():
        assert torch.allclose(merged(models[0])(IDS).logits, models[1](IDS).logits, atol=1e-4)


def test_a_drafter_learns_over_a_lora_of_peft(base: Path, data: Path, tmp_path: Path) -> None:
    folder, chat = tuned(tmp_path / "lora", base), tiny_tokenizer(chat=True)
    (folder / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    chat.save_pretrained(folder)  # as TRL does: its chat template is the one the LoRA was trained with
    train(options(base, data, tmp_path / "out", recipe="staged", target_adapter=folder))
    described = json.loads((tmp_path / "out" / "streamspec_config.json").read_text())
    assert described["prompt_format"]["kind"] == "chat" and len(described["base"]["sha256"]) == 64
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == chat.chat_template
    assert (tmp_path / "out" / "special_tokens_map.json").is_file()
    (folder / "chat_template.jinja").rename(folder / "chat_template.json")  # where older processors have it
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": chat.chat_template}))
    (tmp_path / "copied").mkdir()
    copy_task_lora(folder, tmp_path / "copied")
    assert chat_template(tmp_path / "copied") == chat_template(folder) == chat.chat_template.encode()
    rename(folder, base_model_name_or_path="someone/llama-2-7b")
    wrong = tmp_path / "llama-3-8b"
    shutil.copytree(base, wrong)
    with pytest.raises(AdapterError, match="was trained on someone/llama-2-7b"):
        train(options(wrong, data, tmp_path / "no", recipe="staged", target_adapter=folder))
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.self_attn.q_proj": 5}},
        {"rank_pattern": {"q_proj": 1}, "use_rslora": True},
    ],
    ids=str,
)
def test_a_lora_of_peft_is_cut_and_keeps_its_scales(base: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = tuned(tmp_path / "lora", base, **changes)
    tensors = load_file(folder / "adapter_model.safetensors")
    for name in tensors:  # of the upper half of the ranks nothing is left: cutting loses nothing
        if "lora_B" in name:
            tensors[name][:, 2:] = 0
    save_file(tensors, folder / "adapter_model.safetensors")
    kept = shrink(folder, tmp_path / "cut", 2)
    assert kept["task LoRA"] == pytest.approx(1, abs=1e-3)
    logits = []
    for one in (folder, tmp_path / "cut"):
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), one).eval()
        with torch.no_grad():
            logits.append(model(IDS).logits)
    assert torch.allclose(*logits, atol=1e-3)
    with pytest.raises(ConfigError, match="less than the rank of a LoRA"):
        shrink(folder, tmp_path / "none", 4)


def test_a_lora_is_cut_to_any_rank_however_it_was_begun(base: Path, tmp_path: Path) -> None:
    folder = tuned(tmp_path / "lora", base)
    config = json.loads((folder / "adapter_config.json").read_text())  # which PEFT takes for even ranks alone
    (folder / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": "orthogonal"}))
    shrink(folder, tmp_path / "cut", 3)
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "cut")


def test_what_is_more_than_a_lora_is_not_cut(base: Path, tmp_path: Path) -> None:
    folder = tuned(tmp_path / "lora", base, use_dora=True)
    with pytest.raises(AdapterError, match="^a task LoRA with DoRA; expected a plain LoRA"):
        shrink(folder, tmp_path / "cut", 2)


def test_folders_that_hold_adapters_are_named(base: Path, tmp_path: Path) -> None:
    tuned(tmp_path / "run" / "checkpoint-7", base)
    with pytest.raises(AdapterError, match="name a folder in it: checkpoint-7"):
        read_adapter(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"init_lora_weights": "eva", "eva_config": {"rho": 2.0}}, None),  # both leave the base's weights alone
        ({"init_lora_weights": "orthogonal"}, None),
        ({"init_lora_weights": "olora"}, "init_lora_weights olora; .*merge it into its base with PEFT"),
        ({"peft_type": "LOKR", "r": None}, "peft_type LOKR; .*merge it into its base with PEFT"),
        ({"use_something_new": True}, "use_something_new True; .*merge it into its base with PEFT"),
        ({"new_config": {"x": 1}}, "new_config .*; .*merge it into its base with PEFT"),
        ({"new_size": 16, "new_module": "a", "new_switch": False, "new_list": []}, None),  # of what is switched off
    ],
)
def test_a_start_that_leaves_the_base_alone_is_taken(
    changes: dict[str, Any], refused: str | None, base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tuned(tmp_path / "lora", base)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    capfd.readouterr()
    if refused is not None:
        with pytest.raises(AdapterError, match=refused):
            read_adapter(folder)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("error", FutureWarning)
        check_adapter(read_adapter(folder), resolve_base(base, lambda line: None), True, lambda line: None)
    assert capfd.readouterr().err == ""


def test_every_setting_of_peft_is_honoured_or_refused() -> None:
    """Or says only where to find and how to train it, as numbers and names that something else must switch on."""
    numbers = {"r", "lora_alpha", "lora_dropout", "qalora_group_size"}
    names = {"base_model_name_or_path", "bias", "megatron_core", "peft_type", "peft_version", "revision", "task_type"}
    assert {field.name for field in fields(LoraConfig)} <= HONOURED | {*NOT_NEEDED} | numbers | names


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_an_adapter_of_mlx_lm_is_named_with_what_to_do(kind: str, base: Path, data: Path, tmp_path: Path) -> None:
    """Its files as `mlx_lm.lora` writes them."""
    folder = tmp_path / "mlx"
    folder.mkdir()
    save_file({"model.layers.0.self_attn.q_proj.lora_a": torch.zeros(32, 4)}, folder / "adapters.safetensors")
    scales = {"rank": 8, "dropout": 0.0, "scale": 20.0}
    settings = {"fine_tune_type": kind, "num_layers": 16, "lora_parameters": scales, "model": "someone/a-1b"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    named = rf"is an adapter of mlx-lm \({kind}\); expected a LoRA of PEFT; fuse it .* mlx_lm\.fuse .*{folder.name}"
    for refused in (
        lambda: read_adapter(folder),
        lambda: train(options(base, data, tmp_path / "out", target_adapter=folder)),
    ):
        with pytest.raises(AdapterError, match=named):
            refused()


def test_a_drafter_learns_over_updates_with_biases(base: Path, data: Path, tmp_path: Path) -> None:
    folder = tuned(tmp_path / "lora", base, lora_bias=True)
    train(options(base, data, tmp_path / "out", recipe="staged", target_adapter=folder))
    assert (tmp_path / "out" / "streamspec.safetensors").is_file()


def test_inspect_describes_a_lora_of_peft(base: Path, tmp_path: Path) -> None:
    folder = tuned(tmp_path / "lora", base, "someone/a-1b", use_dora=True, rank_pattern={"q_proj": 2})
    done = CliRunner().invoke(app, ["inspect", str(folder), "--json"])
    facts = json.loads(done.stdout)
    assert facts["base"].startswith("someone/a-1b (a LoRA of PEFT")
    assert facts["task LoRA"] == "rank 2 to 4, DoRA; modules down_proj, q_proj"


@pytest.mark.parametrize("changes", [{"modules_to_save": 3}, {"trainable_token_indices": 1e30}], ids=str)
def test_settings_of_another_type_are_one_line(changes: dict[str, Any], lora: Path, base: Path) -> None:
    rename(lora, **changes)
    assert str(next(iter(changes.values()))) in more_than_low_rank(lora)[0]
    with pytest.raises(AdapterError) as caught:
        checked(lora, resolve_base(base, lambda line: None), allow=True)
    assert "\n" not in str(caught.value)
