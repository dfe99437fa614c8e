"""The text part of a multimodal checkpoint: the same model, whole, whatever the layout of its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamspec.adapters.base_models.config_fields import check_config, layer_window, read_config
from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.adapters.base_models.text_part import load_causal_lm, text_config
from streamspec.adapters.base_models.tokenizer import load_tokenizer
from streamspec.errors import BaseModelError
from streamspec.export.described_base import describe_base
from streamspec.model_families import FAMILIES
from streamspec.model_families.text_parts import TEXT_PARTS
from tests.support.multimodal import rename, tiny_multimodal
from tests.support.tiny_exports import write_tokenizer

IDS = torch.arange(3, 40)[None]


def newer(name: str) -> str:
    """The name of a tensor as transformers 5 has it in memory."""
    stack, _, rest = name.partition(".")
    if stack == "language_model":
        return rest if rest.startswith("lm_head") else f"model.language_model.{rest.removeprefix('model.')}"
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", TEXT_PARTS)
def test_the_text_part_computes_what_the_whole_model_computes(model_type: str, tied: bool, tmp_path: Path) -> None:
    whole = tiny_multimodal(model_type, tied)
    whole.save_pretrained(tmp_path)
    for layout in (str, newer):
        rename(tmp_path, layout)
        part = load_causal_lm(tmp_path, dtype=torch.float32)
        assert (part.lm_head.weight is part.get_input_embeddings().weight) == tied
        with torch.no_grad():
            # On some processors the order of sums depends on addresses, which Qwen3.5's random layers amplify.
            torch.testing.assert_close(part(input_ids=IDS).logits, whole(input_ids=IDS).logits, rtol=1e-3, atol=1e-3)


def test_qwens_first_layout_has_the_text_at_the_root(tmp_path: Path) -> None:
    whole = tiny_multimodal("qwen2_5_vl", tied=False)
    whole.save_pretrained(tmp_path)
    rename(tmp_path, lambda name: name.replace("model.language_model.", "model.").replace("model.visual.", "visual."))
    part = load_causal_lm(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(part(input_ids=IDS).logits, whole(input_ids=IDS).logits)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_fields_of_the_text_that_are_no_other_familys_are_judged(model_type: str) -> None:
    config = tiny_multimodal(model_type, tied=False).config
    config.text_config.is_causal = False
    with pytest.raises(BaseModelError, match="`is_causal` = False"):
        check_config(text_config(config))


def test_windows_that_the_texts_code_does_not_know_are_none() -> None:
    config = tiny_multimodal("qwen3_vl", tied=False).config
    config.text_config.update({"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0})
    text = text_config(config)
    assert layer_window(text, FAMILIES[text.model_type], 1) is None


@pytest.mark.parametrize("gone", ["layers.1.mlp.up_proj.weight", "embed_tokens.weight", "norm.weight"])
def test_a_text_part_that_is_not_whole_is_refused(gone: str, tmp_path: Path) -> None:
    tiny_multimodal("gemma3").save_pretrained(tmp_path)
    rename(tmp_path, lambda name: None if name == f"language_model.model.{gone}" else name)
    with pytest.raises(BaseModelError, match=f"the text part of .*: no model.{gone}"):
        load_causal_lm(tmp_path, dtype=torch.float32)


def test_a_tensor_of_the_text_that_the_model_has_no_place_for_is_refused(tmp_path: Path) -> None:
    tiny_multimodal("gemma3").save_pretrained(tmp_path)
    rename(tmp_path, lambda name: name.replace("layers.3.mlp.up_proj", "layers.9.mlp.up_proj"))
    with pytest.raises(BaseModelError, match="no model.layers.3.mlp.up_proj.*unknown model.layers.9.mlp.up_proj"):
        load_causal_lm(tmp_path, dtype=torch.float32)


def test_keys_of_layers_that_share_others_may_lie_in_the_files(tmp_path: Path) -> None:
    """Gemma 4's have them, unused."""
    whole = tiny_multimodal("gemma4")
    whole.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    own = [name for name in tensors if "layers.1.self_attn.k_" in name or "layers.1.self_attn.v_" in name]
    spare = {name.replace("layers.1", "layers.3"): tensors[name].clone() for name in own}
    save_file(tensors | spare, file, {"format": "pt"})
    with torch.no_grad():
        part = load_causal_lm(tmp_path, dtype=torch.float32)
        torch.testing.assert_close(part(input_ids=IDS).logits, whole(input_ids=IDS).logits)
    assert len(spare) == 3


def test_a_base_is_of_its_texts_family_and_tells_what_is_left_out(tmp_path: Path) -> None:
    tiny_multimodal("gemma3").save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 64)
    lines: list[str] = []
    assert resolve_base(tmp_path, lines.append).model_type == "gemma3_text"
    assert lines == ["the text part of a multimodal checkpoint; left out: multi_modal_projector, vision_tower"]


def test_a_text_of_another_family_is_one_line(tmp_path: Path) -> None:
    tiny_multimodal("llava").save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 64)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] = {"model_type": "bloom"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BaseModelError, match="of the family `bloom`, which has .*; expected ") as caught:
        resolve_base(str(tmp_path), lambda line: None)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_cut_off_is_one_line(tmp_path: Path) -> None:
    tiny_multimodal("gemma3").save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 64)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(BaseModelError, match="model.safetensors is cut off or damaged"):
        resolve_base(tmp_path, lambda line: None)


def test_end_tokens_beside_the_text_config_count(tmp_path: Path) -> None:
    tiny_multimodal("gemma3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": [2, 7]}))
    assert read_config(tmp_path).eos_token_id == [2, 7]


def test_a_quantized_checkpoint_is_refused_as_one(tmp_path: Path) -> None:
    tiny_multimodal("mistral3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    quantized = config | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(BaseModelError, match="quantized already"):
        resolve_base(tmp_path, lambda line: None)


def test_the_chat_template_of_a_processor_is_found(tmp_path: Path) -> None:
    tiny_multimodal("gemma3").save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 64)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ messages[0].content }}"}')
    base, out = resolve_base(tmp_path, lambda line: None), tmp_path / "out"
    out.mkdir()
    describe_base(base, None, None).copy_tokenizer(out)
    assert (out / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert load_tokenizer(base).chat_template == "{{ messages[0].content }}"
