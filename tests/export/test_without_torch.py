"""Bundles made without PyTorch and transformers: configs, descriptions, numpy's own pass, whole exports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from streamspec.adapters.base_models import without_torch
from streamspec.adapters.base_models.check_folder import check_folder
from streamspec.adapters.base_models.config_fields import check_config, fields_read, read_config
from streamspec.adapters.base_models.parameters import report_tensors
from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.adapters.base_models.without_torch.config import LENGTH, completed, read_completed
from streamspec.adapters.base_models.without_torch.families import COMMON, FACTS, facts_of, read_by_model
from streamspec.bundle.files import read_manifest
from streamspec.errors import BaseModelError, StreamspecError
from streamspec.export import adapt, export_bundle, export_swappable
from streamspec.export.held_out import HeldOut
from streamspec.export.reference.reference import reference_of
from streamspec.export.weights import target
from streamspec.export.weights.checkpoint import Checkpoint, CheckpointSource, GgufCheckpoint
from streamspec.export.weights.config_spec import describe_checkpoint
from streamspec.export.weights.load_weights import ModelSource
from streamspec.export.weights.model_spec import describe
from streamspec.model_families.text_parts import TEXT_PARTS
from tests.support import gguf_cases
from tests.support.gguf_files import write_gguf
from tests.support.multimodal import PARTS, tiny_multimodal
from tests.support.published_configs import CONFIGS
from tests.support.tiny_exports import save_base, tiny_model, write_tokenizer

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
BIASES = {"attention_bias": True, "mlp_bias": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FACTS),
    *((family, BIASES) for family in ("llama", "qwen3", "smollm3", "gemma3_text", "granite", "olmo2")),
    ("seed_oss", {"attention_bias": False, "attention_out_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 3, "norm_topk_prob": False}),
    ("qwen3_moe", {"num_experts": 0}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    *(("llama", {"rope_parameters": rope}) for rope in ROPES.values()),
    ("lfm2", {"block_auto_adjust_ff_dim": True, "block_multiple_of": 40, "block_ffn_dim_multiplier": 1.3}),
    ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.7}),
    ("qwen3_5_text", {"attention_bias": True}),
]
PUBLISHED = {name: published for name, published in CONFIGS.items() if published.get("model_type") in FACTS}
# What config.json may leave out, or say in an older way.
SPELLINGS: list[dict[str, Any]] = [
    *({"model_type": family, "vocab_size": 300_000} for family in FACTS),
    *({"model_type": family, "vocab_size": 300_000, "num_hidden_layers": 5, "rope_theta": 7e5} for family in FACTS),
    {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 3e4},
    {"model_type": "llama", "rope_scaling": {k: v for k, v in ROPES["llama3"].items() if k != "rope_theta"}},
    *({"model_type": "llama", LENGTH: 256, "rope_scaling": rope} for rope in (ROPES["llama3"], ROPES["linear"])),
    {"model_type": "llama", LENGTH: 256, "rope_scaling": {k: v for k, v in ROPES["llama3"].items() if k != LENGTH}},
    {"model_type": "gemma3_text", LENGTH: 256, "rope_scaling": ROPES["llama3"]},
    {"model_type": "mistral", "sliding_window": None, "num_attention_heads": 16, "hidden_size": 256},
    {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3, "num_hidden_layers": 6},
    {"model_type": "qwen3", "use_sliding_window": False, "sliding_window": 100, "head_dim": 64},
    {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None},
    {"model_type": "gemma3_text", "sliding_window_pattern": 3, "rope_local_base_freq": 2e4, "rope_theta": 2e6},
    {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}},
    {"model_type": "olmo3", "rope_theta": 1e4, "rope_scaling": ROPES["linear"]},
    {"model_type": "smollm3", "no_rope_layer_interval": 3, "use_sliding_window": True, "sliding_window": 64},
    {"model_type": "ministral", "sliding_window": None, "num_hidden_layers": 3},
    {"model_type": "qwen3_moe", "num_local_experts": 16, "head_dim": 64, "mlp_only_layers": [0, 3]},
    {"model_type": "olmoe", "num_experts": 16, "num_key_value_heads": None},
    {"model_type": "lfm2", "full_attn_idxs": [2, 5], "block_ff_dim": 512, "tie_embedding": False},
    {"model_type": "qwen3_5_text", "full_attention_interval": 3, "partial_rotary_factor": 0.5},
]
# Multimodal checkpoints whose text configs are those of such a family.
TEXT = [name for name, part in TEXT_PARTS.items() if part.family is None and PARTS[name][0]["model_type"] in FACTS]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
today = pytest.mark.skipif(VERSION < (5, 23), reason="older versions have other defaults, and read other fields")
# Blocks what is not there as its absence does, then runs the commands, each a list of words.
COMMANDS = """
import json, sys
for name in ("torch", "transformers", "peft", "accelerate"):
    sys.modules[name] = None
from streamspec.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["streamspec", *words]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
"""


def without(*commands: list[object], stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs commands of the CLI in a process that cannot import torch and transformers."""
    words = json.dumps([[str(word) for word in command] for command in commands])
    return subprocess.run(
        [sys.executable, "-c", COMMANDS, words],
        capture_output=True,
        text=True,
        input=stdin,
        env=os.environ | environment,
    )


def saved(folder: Path, family: str, **changes: Any) -> Any:
    """A tiny model in `folder`, no parameter of which is what transformers starts it with."""
    model = tiny_model(family, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called: PyTorch is not found any more. (transformers would miss it, once it has it.)"""

    def now() -> None:
        monkeypatch.setattr(without_torch, "find_spec", lambda name: None)

    return now


@today
@pytest.mark.parametrize("given", [*PUBLISHED.values(), *SPELLINGS], ids=str)
def test_a_config_is_completed_as_transformers_does(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(given))
    theirs, ours = read_config(tmp_path), completed(given)
    theirs.standardize_rope_params()  # as its model does
    facts = facts_of(given["model_type"])
    for name in {*COMMON, *facts.fields, *facts.also_read} - {"sliding_window_pattern"}:
        assert getattr(ours, name, None) == getattr(theirs, name, None), name
    assert check_config(ours) == check_config(theirs)


@today
@pytest.mark.parametrize("family", FACTS)
def test_the_fields_that_a_model_reads_are_known(family: str) -> None:
    ours, theirs = read_by_model(family), fields_read(family)
    assert ours.keys() == theirs.keys()
    assert all(set(theirs[name]) <= {*ours[name]} for name in theirs if name not in facts_of(family).fields)
    config = {"model_type": family, "vocab_size": 300_000}
    known = AutoConfig.for_model(**config)
    strange = {"attention_chunk_size": 7, "is_causal": False}
    for name, value in strange.items():
        setattr(known, name, value)
    errors = []
    for one in (known, completed(config | strange)):
        with pytest.raises(BaseModelError, match="`is_causal` = False") as error:
            check_config(one)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 1 << 30}, "num_hidden_layers is 1073741824; expected a whole number from 1 to 4096"),
        ({"hidden_size": "64"}, "hidden_size is 64; expected a whole number"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"num_key_value_heads": 3}, "32 heads, 3 of keys"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; expected an object"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "factor is 2; expected a number above 0"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "1 no_rope_layers for 36 layers"),
        (
            {"model_type": "olmoe", "num_experts": "many"},
            "num_experts is many; expected a whole number to 4096",
        ),
        ({"model_type": "qwen3_moe", "num_local_experts": 1 << 30}, "num_local_experts is 1073741824"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [True]}, r"mlp_only_layers is \[True\]; expected a list"),
        ({"model_type": "gemma3_text", "rope_parameters": {"factor": 2}}, "rope_parameters of factor"),
        ({"model_type": "lfm2", "block_ff_dim": "7"}, "block_ff_dim is 7; expected a whole number from 1, or null"),
        ({"model_type": "lfm2", "full_attn_idxs": 2}, "full_attn_idxs is 2; expected a list of whole numbers"),
        ({"model_type": "lfm2", "norm_eps": -1}, "norm_eps is -1; expected a number from 0"),
        (
            {"model_type": "lfm2", "full_attn_idxs": [0], "rope_parameters": {"full_attention": {}}},
            "rope_parameters of full_attention beside layers of conv; expected one rotary embedding",
        ),
        (
            {"model_type": "qwen3_5_text", "partial_rotary_factor": 1.5},
            "partial_rotary_factor is 1.5; expected a number",
        ),
        ({"model_type": "cohere"}, r"family `cohere` without PyTorch.*streamspec\[export\]"),
        ({"model_type": ["llama"]}, "without PyTorch"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BaseModelError, match=said):
        completed({"model_type": "llama"} | changes)


@pytest.mark.parametrize("window", [64, "x"])
def test_a_window_that_only_a_part_of_a_model_reads_is_refused(window: object) -> None:
    with pytest.raises(BaseModelError, match="`sliding_window` = "):
        check_config(completed({"model_type": "olmoe", "sliding_window": window}))


def test_a_folder_with_odd_or_doubled_experts_is_no_base(tmp_path: Path) -> None:
    saved(tmp_path, "olmoe")
    file, stack = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.gate_up_proj"
    whole = load_file(file)
    stacked = np.zeros((2, 128, 64), np.float32)
    save_file(whole | {stack: stacked}, file, metadata={"format": "pt"})
    with pytest.raises(BaseModelError, match="holds model.layers.0.mlp.experts.0.gate_proj.weight twice"):
        report_tensors(tmp_path)
    for odd in (stacked[:, :9], stacked[:0]):
        save_file(whole | {stack: odd.copy()}, file, metadata={"format": "pt"})
        assert report_tensors(tmp_path) == ([], [stack], [])


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_config_and_tensors_describe_what_the_modules_do(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """The description is that of transformers' modules, the logits are those of its layers."""
    model = saved(tmp_path, family, **changes)
    checkpoint = Checkpoint(tmp_path)
    assert target.alike(describe_checkpoint(checkpoint), describe(model))
    assert report_tensors(tmp_path) == ([], [], [])
    tokens, positions, sees = np.arange(40) % 64, np.arange(40), np.tri(40, dtype=bool)
    sees[35:, 30:] = np.eye(40, dtype=bool)[35:, 30:]  # rows that do not see each other, as in a draft tree
    left, right = reference_of(checkpoint), reference_of(model)
    mine, own = (side.logits(side.states(tokens, positions, sees)) for side in (left, right))
    assert np.abs(mine - own).max() < 3e-5 * own.std()
    assert left.parameters == right.parameters


@pytest.mark.parametrize("nested", [64, None])
def test_a_length_beside_the_rotary_parameters_counts_first_as_in_transformers(
    nested: int | None, tmp_path: Path
) -> None:
    saved(tmp_path, "llama", max_position_embeddings=512)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = {name: value for name, value in (ROPES["llama3"] | {LENGTH: nested}).items() if value is not None}
    config = {name: value for name, value in config.items() if name != "rope_parameters"} | {"rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(config | {LENGTH: 256}))
    described = describe_checkpoint(Checkpoint(tmp_path))
    assert target.alike(described, describe(tiny_loaded(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(config))
    (inside,), (outside,) = describe_checkpoint(Checkpoint(tmp_path)).rotaries, described.rotaries
    assert not np.allclose(inside.inv_freq, outside.inv_freq)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", [*TEXT])
def test_the_text_part_of_a_multimodal_checkpoint_is_read_without_pytorch(
    model_type: str, tied: bool, tmp_path: Path, block: Callable[[], None]
) -> None:
    whole = tiny_multimodal(model_type, tied)
    whole.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 64)
    theirs, model = read_config(tmp_path), tiny_loaded(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    ours = checkpoint.config
    for name in {*COMMON, *facts_of(ours.model_type).fields} - {"sliding_window_pattern", "tie_word_embeddings"}:
        assert getattr(ours, name, None) == getattr(theirs, name, None), name
    assert ours.tie_word_embeddings == tied and target.alike(describe_checkpoint(checkpoint), describe(model))
    tokens, sees = np.arange(40) % 64, np.tri(40, dtype=bool)
    mine, own = (
        side.logits(side.states(tokens, np.arange(40), sees)) for side in map(reference_of, (checkpoint, model))
    )
    assert np.abs(mine - own).max() < 5e-4 * own.std()  # Qwen3.5's random layers amplify the order of sums
    block()
    said = list[str]()
    check_folder(tmp_path, said.append)
    assert said[0].startswith("the text part of a multimodal checkpoint; left out: ")


def test_what_a_multimodal_config_states_of_its_text_counts_without_pytorch(tmp_path: Path) -> None:
    """Also where it contradicts the text config, or the files do."""
    tiny_multimodal("lfm2_vl", tied=False).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config |= {
        "eos_token_id": [2, 7],
        "text_config": config["text_config"] | {"eos_token_id": 3, "tie_embedding": True},
    }
    file.write_text(json.dumps(config))
    ours, theirs = read_completed(tmp_path), read_config(tmp_path)
    assert ours.eos_token_id == theirs.eos_token_id == [2, 7] and not ours.tie_word_embeddings
    file.write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(BaseModelError, match="quantized already"):
        check_config(read_completed(tmp_path))


def test_states_whose_heads_do_not_divide_are_refused() -> None:
    config = {"model_type": "qwen3_5_text", "linear_num_key_heads": 4, "linear_num_value_heads": 6}
    for whole in (completed(config), AutoConfig.for_model(**config)):
        with pytest.raises(
            BaseModelError, match=r"6 states for 4 heads of keys \(only a multiple of these is supported\)"
        ):
            check_config(whole)


def test_a_text_part_that_transformers_alone_reads_is_refused(tmp_path: Path) -> None:
    tiny_multimodal("qwen3_vl").save_pretrained(tmp_path)
    with pytest.raises(BaseModelError, match=r"multimodal checkpoint \(qwen3_vl\) without PyTorch.*streamspec\[export"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_those_of_the_files(dtype: torch.dtype, tmp_path: Path) -> None:
    saved(tmp_path, "gemma3_text").to(dtype).save_pretrained(tmp_path)
    model, checkpoint = tiny_loaded(tmp_path), Checkpoint(tmp_path)
    spec = describe(model)
    ours, theirs = CheckpointSource(checkpoint, spec), ModelSource(model, spec)
    for name in (n for n in checkpoint.tensors if "embed" not in n):
        np.testing.assert_array_equal(ours.weight(name), theirs.weight(name))
    for rows in (slice(3, 9), np.array([5, 2, 5])):
        table = "model.embed_tokens.weight"
        np.testing.assert_array_equal(ours.rows_of(table)[rows], theirs.rows_of(table)[rows])


def tiny_loaded(folder: Path) -> Any:
    from streamspec.adapters.base_models.text_part import load_causal_lm

    return load_causal_lm(folder, dtype="float32").eval()


@pytest.mark.parametrize("computed", [range(60), [*range(8), *range(40, 60)]])
def test_a_long_text_gives_what_pytorch_gives(computed: Any, tmp_path: Path) -> None:
    """Also where rows are skipped, whose keys and values are zeros."""
    from streamspec.export.reference.long_context import LongText

    model, rows = saved(tmp_path, "gemma3_text"), np.isin(np.arange(60), computed)
    text, tokens = LongText(rows, {44: "window"}, 16), np.arange(int(rows.sum())) % 64
    ours, theirs = (reference_of(one).long(text, tokens) for one in (Checkpoint(tmp_path), model))
    assert np.abs(ours - theirs).max() < 3e-5 * theirs.std()


def test_folders_are_checked_as_with_pytorch(tmp_path: Path, block: Callable[[], None]) -> None:
    base = save_base(tmp_path / "base")
    block()
    check_folder(base.path, print)
    whole = load_file(base.path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for changed, said in (
        ({n: v for n, v in whole.items() if n != name}, f"no {name}"),
        (
            whole | {"model.layers.0.self_attn.other.bias": np.zeros(32, np.float32)},
            "besides its tensors model.layers.0",
        ),
        (whole | {name: whole[name][:-1].copy()}, "with another shape"),
    ):
        save_file(changed, base.path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(BaseModelError, match=said):
            check_folder(base.path, print)


def test_an_output_map_beside_a_tied_embedding_must_be_the_embedding(tmp_path: Path) -> None:
    saved(tmp_path, "llama", tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    table = whole["model.embed_tokens.weight"]
    save_file(whole | {"lm_head.weight": table.copy()}, file, metadata={"format": "pt"})
    assert report_tensors(tmp_path) == ([], [], []) and describe_checkpoint(Checkpoint(tmp_path)).tied
    save_file(whole | {"lm_head.weight": table + 1}, file, metadata={"format": "pt"})
    with pytest.raises(BaseModelError, match="tie_word_embeddings"):
        report_tensors(tmp_path)


def test_what_needs_pytorch_is_refused_in_one_line(tmp_path: Path, block: Callable[[], None]) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    tiny_model("llama", rope_parameters=yarn).save_pretrained(tmp_path / "yarn")
    save_base(tmp_path / "cohere", tiny_model("cohere"))
    save_base(tmp_path / "base")
    block()
    calls: list[Callable[[], Any]] = [
        lambda: export_bundle("smollm2-135m", tmp_path, tmp_path / "out"),
        lambda: export_bundle(tmp_path / "base", None, tmp_path / "out", held_out=HeldOut(tmp_path / "data.jsonl")),
        lambda: export_swappable("smollm2-135m", [], tmp_path / "out"),
        lambda: adapt(tmp_path, tmp_path),
        lambda: export_bundle(tmp_path / "cohere", None, tmp_path / "out"),
        lambda: describe_checkpoint(Checkpoint(tmp_path / "yarn")),
    ]
    for part in (0.5, 1e-3):  # llama's code has no such thing; nothing turns
        turned = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": part}
        save_base(tmp_path / str(part), tiny_model("llama" if part == 0.5 else "qwen3_5_text"))
        file = tmp_path / str(part) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_parameters": turned}))
        calls.append(lambda folder=file.parent: describe_checkpoint(Checkpoint(folder)))
    for call in calls:
        with pytest.raises(StreamspecError, match=r"without PyTorch.*streamspec\[export\]") as error:
            call()
        assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_a_gguf_file_takes_a_store_and_is_refused_at_once_where_pytorch_alone_knows_it(tmp_path: Path) -> None:
    known = gguf_cases.rounded(tmp_path / "known.gguf", "llama 3.2", "Q8_0")
    (tmp_path / "texts.jsonl").write_text('{"text": "the and then"}\n')
    stretched = gguf_cases.rounded(tmp_path / "yarn.gguf", "qwen2, yarn", "Q8_0")
    ran = without(
        ["export", "--base", known, "--store", tmp_path / "texts.jsonl", "--out", tmp_path / "out"],
        STREAMSPEC_CACHE=str(tmp_path / "cache"),
    )
    assert ran.returncode == 0, ran.stderr
    ran = without(["export", "--base", stretched, "--out", tmp_path / "no"], STREAMSPEC_CACHE=str(tmp_path / "other"))
    assert "yarn" in ran.stderr and "without PyTorch" in ran.stderr and "hashing the weights" not in ran.stderr


def test_a_base_becomes_the_same_bundle_with_pytorch_and_without(tmp_path: Path) -> None:
    """In a process that cannot import torch and transformers: all files but for what is measured."""
    tried = {"llama": ("int8", "int4"), "qwen2": ("int8",), "qwen3": ("int4",), "gemma3_text": ("int4",)}
    tried |= {"qwen3_moe": ("int8",), "olmoe": ("int4",), "lfm2": ("int8",), "lfm2_moe": ("int4",)}
    tried |= {"qwen3_5_text": ("int8",), "qwen3_5_moe_text": ("int4",)}
    for family in tried:
        save_base(tmp_path / family, saved(tmp_path / family, family))
    outs = [(family, kind, f"{family}-{kind}") for family, precisions in tried.items() for kind in precisions]
    commands = [
        ["export", "--base", tmp_path / family, "--precision", kind, "--out", tmp_path / "numpy" / name]
        for family, kind, name in outs
    ]
    ran = without(*commands)
    assert ran.returncode == 0, ran.stderr
    for family, kind, name in outs:
        mine, own = tmp_path / "numpy" / name, tmp_path / "torch" / name
        export_bundle(tmp_path / family, None, own, precision=kind, progress=lambda line: None)
        ours, theirs = (read_manifest(folder) for folder in (mine, own))
        measured = {"README.md", "manifest.json"}
        assert all(ours.files[file] == theirs.files[file] for file in ours.files.keys() - measured), name
        assert replace(ours, parity={}, tools={}, files={}) == replace(theirs, parity={}, tools={}, files={})
        assert ours.files.keys() == theirs.files.keys() > measured - {"manifest.json"}
        assert ours.parity["reference"] == "numpy" and "torch" not in ours.tools and "reference" not in theirs.parity
        for part in ("plain", "tree"):
            assert ours.parity[part]["relative"] == pytest.approx(theirs.parity[part]["relative"], rel=1e-3)
        assert ours.parity["text"]["pytorch"] == pytest.approx(theirs.parity["text"]["pytorch"], rel=1e-5)
        assert "Compared with numpy in float32" in (mine / "README.md").read_text()


def test_an_export_that_fails_does_not_wait_for_the_pass_beside_it(
    tmp_path: Path, block: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended, waited = threading.Event(), threading.Event(), list[bool]()

    def computes(*given: Any, **more: Any) -> None:
        begun.set()
        waited.append(ended.wait(20))

    def fails(*given: Any, **more: Any) -> None:
        assert begun.wait(20)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("streamspec.export.bundle_writer.compute_reference", computes)
    monkeypatch.setattr("streamspec.export.bundle_writer.build_graph", fails)
    save_base(tmp_path / "base")
    block()
    with pytest.raises(OSError, match="No space"):
        export_bundle(tmp_path / "base", None, tmp_path / "out", progress=lambda line: None)
    assert not waited and not (tmp_path / "out").exists()
    ended.set()


def test_a_mixture_beyond_memory_is_read_an_expert_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PyTorch: the same files; other bases are mapped whatever there is, and some options need its model."""
    families = "qwen3_moe", "lfm2_moe", "llama"
    for family in families:
        save_base(tmp_path / family, saved(tmp_path / family, family))
    hashes = {}
    for room in (None, 1 << 40, 1):
        monkeypatch.setattr(target, "available", lambda room=room: room)
        for family in families:
            base, out = tmp_path / family, tmp_path / f"{family}-{room}"
            manifest = export_bundle(base, None, out, measure=False, progress=lambda line: None)
            assert manifest.parity.get("reference") == ("numpy" if room == 1 and family != "llama" else None)
            assert hashes.setdefault(family, manifest.files["model.onnx.data"]) == manifest.files["model.onnx.data"]
    file = tmp_path / "lfm2_moe" / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file)
    manifest = export_bundle(file.parent, None, tmp_path / "out", measure=False, progress=lambda line: None)
    assert "reference" not in manifest.parity  # transformers knows these names, numpy does not
    base = resolve_base(tmp_path / "qwen3_moe")
    models = [target.read_target(base, None, False, alone=alone).model for alone in (True, False)]
    assert [isinstance(model, Checkpoint) for model in models] == [True, False]


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("llama 3.2", "LlamaForCausalLM"),
        ("qwen3 with experts", "Qwen3MoeForCausalLM"),
        ("lfm2 with experts", "Lfm2MoeForCausalLM"),
        ("qwen3.5", "Qwen3_5ForCausalLM"),
    ],
)
def test_a_gguf_file_is_chatted_with_without_pytorch(
    case: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`streamspec chat FILE`; the config that the file became is one that transformers reads, of the same model."""
    _, architecture, keys, tensors = gguf_cases.made(case)
    file = write_gguf(tmp_path / "a.gguf", architecture, keys, tensors, others={"tokenizer.chat_template": TEMPLATE})
    cache = tmp_path / "cache"
    ran = without(["chat", file, "--max-new-tokens", "4"], stdin="the\n", STREAMSPEC_CACHE=str(cache))
    assert ran.returncode == 0 and ran.stdout.strip(), ran.stderr
    assert "a.gguf (0.0 GB)" in ran.stderr and not list(cache.rglob("*.safetensors"))
    (made,) = (cache / "bases").glob("gguf-*")
    monkeypatch.setenv("STREAMSPEC_CACHE", str(cache))
    whole = gguf_cases.as_folder(file)
    theirs, ours = read_config(made), completed(json.loads((made / "config.json").read_text()))
    assert target.alike(describe(tiny_loaded(whole)), describe_checkpoint(GgufCheckpoint(made, file)))
    assert theirs.architectures == ours.architectures == [named]


def test_a_description_that_differs_from_that_of_the_modules_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_base(tmp_path / "base")
    assert isinstance(target.read_target(base, None, False).weighed, Checkpoint)
    real = target.describe_checkpoint
    monkeypatch.setattr(target, "describe_checkpoint", lambda checkpoint: replace(real(checkpoint), eps=1e-3))
    read = target.read_target(base, None, False)
    assert read.weighed is read.model and read.spec.eps != 1e-3
