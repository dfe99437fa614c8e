"""Bad base folders: refused in one line, by `export` and `train` alike, before any work; nothing stays in the cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from streamspec.adapters.base_models.config_fields import read_config
from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.adapters.base_models.text_part import load_causal_lm
from streamspec.adapters.early_checks import check_bits
from streamspec.adapters.train import train
from streamspec.errors import BaseModelError, ConfigError
from streamspec.export import export_bundle
from tests.support.mxfp4 import pack_experts
from tests.support.tiny_exports import VOCAB, save_base, tiny_model, write_tokenizer
from tests.support.tiny_models import options

INDEX = "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "base"
    tiny_model(num_hidden_layers=2).save_pretrained(path)
    write_tokenizer(path)
    return path


@pytest.fixture
def folder(whole: Path, tmp_path: Path, cache: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "base"))


def change_weights(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def add_tokens(folder: Path, *tokens: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer.add_tokens(list(tokens))
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))


def one_number(value: float, dtype: torch.dtype) -> Callable[[Path], None]:
    def change(tensors: dict[str, Any]) -> None:
        tensors[UP] = tensors[UP].to(dtype)
        tensors[UP][-1, -1] = value

    return lambda folder: change_weights(folder, change)


def shards(*missing: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = {}
        for number, (name, tensor) in enumerate(tensors.items()):
            file = f"model-{number % 3}.safetensors"
            names[name] = file
            known = load_file(folder / file) if (folder / file).is_file() else {}
            save_file(known | {name: tensor}, folder / file, metadata={"format": "pt"})
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
        for file in missing:
            (folder / file).unlink()

    return change


def only_bin(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def packed(name: str, dtype: torch.dtype) -> Callable[[Path], None]:
    """The map `UP` as quantizers store it."""
    return lambda folder: change_weights(folder, lambda t: t.update({name: t.pop(UP)[:, :8].to(dtype)}))


def template(folder: Path) -> None:
    add_tokens(folder, "<|turn|>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "<|turn|>{{ messages }}"}))


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard missing": (shards("model-1.safetensors"), rf"lacks 1 of the 3 files that {INDEX} names: model-1"),
    "all shards missing": (
        shards("model-0.safetensors", "model-1.safetensors", "model-2.safetensors"),
        "lacks 3 of the 3 files",
    ),
    "an index of nothing": (
        lambda folder: [shards()(folder), (folder / INDEX).write_text('{"weight_map": ["a"]}')],
        "has no weight_map",
    ),
    "pickled weights alone": (
        only_bin,
        r"holds no \*.safetensors, only pytorch_model.bin; .*M.from_pretrained\(FOLDER\).save",
    ),
    "pickles of another layout": (
        lambda folder: (folder / "model.safetensors").rename(folder / "consolidated.00.pth"),
        "only consolidated.00.pth; .* the layout of transformers",
    ),
    "weights under a name that transformers does not look for": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors"),
        f"holds model-00001-of-00002.safetensors and no {INDEX}; expected model.safetensors, or .* rename it",
    ),
    "an adapter beside the model": (
        lambda folder: (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}'),
        "holds a model and an adapter .*; expected a base alone; move adapter_config.json",
    ),
    "an adapter": (
        lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
        "is an adapter .*; give it as --adapter .*, and its base as --base",
    ),
    "a damaged generation config": (
        lambda folder: (folder / "generation_config.json").write_text("{"),
        "generation_config.json: .*; expected JSON",
    ),
    "an end that is no number": (
        lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}'),
        r"generation_config.json: eos_token_id \['</s>'\]; expected whole numbers",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"holds no \*.safetensors; expected"),
    "GPTQ without a word of it in the config": (
        packed(f"{UP[:-7]}.qweight", torch.int32),
        r"quantized already \(model.layers.1.mlp.up_proj.qweight is of type I32\); .*--precision int8 or int4",
    ),
    "MLX": (packed(UP, torch.uint32), "quantized already .* of type U32"),
    "bitsandbytes": (packed(UP, torch.uint8), "quantized already .* of type U8"),
    "FP8": (packed(UP, torch.float8_e4m3fn), "quantized already .* of type F8_E4M3"),
    "a tensor missing": (lambda folder: change_weights(folder, lambda tensors: tensors.pop(UP)), f"holds no {UP};"),
    "a layer too many": (
        lambda folder: change_config(folder, num_hidden_layers=1),
        r"holds besides its tensors model.layers.1.input_layernorm.weight, .* and \d+ more",
    ),
    "a layer too few": (
        lambda folder: change_config(folder, num_hidden_layers=3),
        r"holds no model.layers.2.input_layernorm.weight, .* and \d+ more",
    ),
    "biases that the config does not speak of": (
        lambda folder: change_config(folder, attention_bias=False),
        "holds besides its tensors model.layers.0.self_attn.k_proj.bias",
    ),
    "another shape": (
        lambda folder: change_weights(folder, lambda tensors: tensors.update({UP: torch.zeros(3, 5)})),
        rf"{UP} of \(3, 5\), not \(96, 64\)",
    ),
    "another width": (lambda folder: change_config(folder, intermediate_size=80), r"\(64, 96\), not \(64, 80\)"),
    "another vocabulary": (
        lambda folder: change_config(folder, vocab_size=VOCAB + 8),
        r"embed_tokens.weight of \(96, 64\), not \(104, 64\)",
    ),
    "heads that do not share": (
        lambda folder: change_config(folder, num_key_value_heads=3),
        r"holds with another shape model.layers.0.self_attn.k_proj.bias of \(32,\), not \(48,\)",
    ),
    "NaN": (one_number(float("nan"), torch.float32), f"{UP} in .*model.safetensors holds 1 numbers that are infinite"),
    "infinity in bfloat16": (one_number(float("inf"), torch.bfloat16), f"{UP} in .* holds 1 numbers"),
    "infinity in float16": (one_number(float("-inf"), torch.float16), f"{UP} in .* holds 1 numbers"),
    "NaN in float64": (one_number(float("nan"), torch.float64), f"{UP} in .* holds 1 numbers"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "holds no tokenizer.json; expected a fast"),
    "a damaged tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json: "),
    "damaged settings of a tokenizer": (
        lambda folder: (folder / "tokenizer_config.json").write_text("{"),
        "tokenizer_config.json",
    ),
    "a token that the template writes, without an embedding": (
        template,
        r"has 1 tokens beyond the model's vocabulary of 96, such as '<|turn|>' \(96\)",
    ),
    "another model's tokenizer": (
        lambda folder: [change_config(folder, vocab_size=80), change_weights(folder, cut)],
        r"has 16 tokens beyond the model's vocabulary of 80",
    ),
    "no model_type": (lambda folder: change_config(folder, model_type=None), "names no model_type"),
}


def cut(tensors: dict[str, Any]) -> None:
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:80].clone()


@pytest.mark.parametrize("name", BAD)
def test_a_bad_folder_is_one_line_for_export_and_train(
    name: str, folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, words = BAD[name]
    change(folder)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    for way in (
        lambda: export_bundle(folder, None, tmp_path / "out", progress=lambda line: None),
        lambda: train(options(folder, data, tmp_path / "out", ns=None)),
    ):
        with pytest.raises(BaseModelError, match=words) as caught:
            way()
        assert "\n" not in str(caught.value) and caught.value.expected and caught.value.fix
    assert not (tmp_path / "out").exists() and not list(cache.rglob("*"))


EXPERTS = "model.layers.0.mlp.experts.down_proj"
PACKED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an exponent that is no number": (
        lambda tensors: tensors[f"{EXPERTS}_scales"][0, 0].fill_(255),
        f"{EXPERTS}_scales in .* holds 2 numbers that are infinite",
    ),
    "exponents missing": (lambda tensors: tensors.pop(f"{EXPERTS}_scales"), "transformers cannot make its model"),
    "another shape": (
        lambda tensors: tensors.update({name: tensors[name][:5].clone() for name in tensors if EXPERTS in name}),
        rf"{EXPERTS} of \(5, 64, 64\), not \(8, 64, 64\)",
    ),
    "blocks of numbers": (
        lambda tensors: tensors.update({f"{EXPERTS}_blocks": tensors[f"{EXPERTS}_blocks"].float()}),
        f"quantized already .{EXPERTS}_blocks is of type F32",
    ),
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A base in MXFP4, and its model."""
    folder, model = tmp_path_factory.mktemp("packed") / "base", tiny_model("gpt_oss", num_hidden_layers=2)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    pack_experts(folder, model)
    return folder, model


@pytest.mark.parametrize("name", PACKED)
def test_bad_blocks_of_mxfp4_are_one_line(name: str, experts: tuple[Path, Any], tmp_path: Path, cache: Path) -> None:
    change, words = PACKED[name]
    folder = Path(shutil.copytree(experts[0], tmp_path / "base"))
    change_weights(folder, change)
    with pytest.raises(BaseModelError, match=words) as caught:
        resolve_base(folder, lambda line: None)
    assert "\n" not in str(caught.value) and not list(cache.rglob("*"))


def test_mxfp4_is_turned_back_exactly_in_any_dtype(experts: tuple[Path, Any], cache: Path) -> None:
    folder, model = experts
    resolve_base(folder, lambda line: None)
    for dtype in ("float32", "bfloat16"):
        loaded = dict(load_causal_lm(folder, dtype=dtype).named_parameters())
        for name, value in model.named_parameters():
            if name.endswith(("gate_up_proj", "down_proj")):
                assert f"torch.{dtype}" == str(loaded[name].dtype)
                assert torch.equal(loaded[name].float(), value), name


def test_a_packed_base_is_not_rounded_once_more(experts: tuple[Path, Any], tmp_path: Path) -> None:
    config = options(experts[0], tmp_path / "data.jsonl", tmp_path / "out", base_bits=4)
    with pytest.raises(ConfigError, match="--base-bits 4 for a base whose weights are packed already; expected"):
        check_bits(config, read_config(experts[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_numbers_of_a_dtype_are_finite(dtype: torch.dtype, folder: Path) -> None:
    one_number(torch.finfo(dtype).max, dtype)(folder)
    resolve_base(folder, lambda line: None)


def test_whole_shards_are_fine(folder: Path) -> None:
    before = resolve_base(folder, lambda line: None)
    shards()(folder)
    assert resolve_base(folder, lambda line: None) == before


def test_what_older_versions_saved_besides_is_fine(folder: Path) -> None:
    change_weights(
        folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    )
    resolve_base(folder, lambda line: None)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_tables_of_masks_are_fine(family: str, tmp_path: Path, cache: Path) -> None:
    base = save_base(tmp_path / "base", tiny_model(family))
    holder = "transformer.h.0.attn" if family == "gpt2" else "gpt_neox.layers.0.attention"
    tables = {f"{holder}.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool), f"{holder}.masked_bias": torch.tensor(-1e4)}
    change_weights(base.path, lambda tensors: tensors.update(tables))
    resolve_base(base.path, lambda line: None)


def test_gpt2_without_the_prefix_of_its_names_is_fine(tmp_path: Path, cache: Path) -> None:
    base = save_base(tmp_path / "base", tiny_model("gpt2"))
    tensors = load_file(base.path / "model.safetensors")
    short = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(short, base.path / "model.safetensors", metadata={"format": "pt"})
    resolve_base(base.path, lambda line: None)


def test_a_tied_head_may_be_in_the_files(folder: Path) -> None:
    change_weights(
        folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    resolve_base(folder, lambda line: None)


def test_added_tokens_that_nothing_uses_are_told(folder: Path) -> None:
    add_tokens(folder, "<image_soft_token>")
    lines: list[str] = []
    resolve_base(folder, lines.append)
    assert lines == ["tokens that the model has no embedding for, left alone: <image_soft_token>"]


def test_ends_of_texts_that_the_model_cannot_write_are_told_and_left_out(folder: Path, tmp_path: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 128009], "temperature": 7}')
    change_config(folder, bos_token_id=128000, eos_token_id=[3, -1])
    lines: list[str] = []
    made = export_bundle(folder, None, tmp_path / "out", "fp32", progress=lines.append)
    assert (made.model.bos_token_id, made.model.eos_token_ids) == (None, (3,))
    assert lines[0].endswith("left alone: bos_token_id 128000, eos_token_id -1, eos_token_id 128009")


def test_warnings_of_transformers_are_not_shown(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change_config(folder, pad_token_id=-1)
    resolve_base(folder, lambda line: None)
    assert capfd.readouterr() == ("", "")


def test_an_attention_that_the_config_names_is_not_looked_for(folder: Path) -> None:
    change_config(folder, _attn_implementation="flash_attention_2")
    resolve_base(folder, lambda line: None)


def test_weights_that_were_seen_before_are_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from streamspec.adapters.base_models import resolve

    first = resolve_base(folder, lambda line: None)
    monkeypatch.setattr(resolve, "weights_hash", lambda _: pytest.fail("read again"))
    assert resolve_base(folder, lambda line: None) == first


def test_what_the_generation_config_asks_for_in_vain_is_told(folder: Path) -> None:
    asked = {"do_sample": True, "temperature": 0.6, "num_beams": 4, "typical_p": 0.9, "a\n\x1b[2J": "b\rc"}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    lines: list[str] = []
    resolve_base(folder, lines.append)
    assert lines == ["generation_config.json, left alone: num_beams 4, typical_p 0.9, a [2J b c"]
