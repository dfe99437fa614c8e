"""GGUF files become the models they were made of: same weights, same positions, same config.

Covers converter.py, architectures.py, keys.py, rope.py and tensors.py. Truth is a transformers model
built from the original config; the files are written by the `gguf` package.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import gguf as package
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from streamspec.adapters.base_models.generation_config import read_generation, sampling_of, unused_fields
from streamspec.adapters.base_models.gguf import architectures
from streamspec.adapters.base_models.gguf.architectures import RMS
from streamspec.adapters.base_models.gguf.config import architecture_of, config_of
from streamspec.adapters.base_models.gguf.converter import convert, read_parameters
from streamspec.adapters.base_models.gguf.file import GgufFile, read_gguf
from streamspec.adapters.base_models.gguf.keys import Keys
from streamspec.adapters.base_models.gguf.rope import rope_parameters
from streamspec.adapters.base_models.gguf.tokenizer import tokenizer_of
from streamspec.errors import BaseModelError
from streamspec.model_families import FAMILIES
from tests.support import gguf_files as files
from tests.support.gguf_cases import CASES, VOCABULARY, as_folder, in_blocks, made
from tests.support.gguf_positions import GEMMA3_ROPE, LENGTH


def converted(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(as_folder(path), attn_implementation="eager").eval()


def logits(model: PreTrainedModel, first: int) -> torch.Tensor:
    """Of 24 tokens at the positions from `first` on, as if there were none before."""
    torch.manual_seed(1)
    ids = torch.randint(5, VOCABULARY, (1, 24))
    positions = torch.arange(first, first + 24)[None]
    with torch.no_grad():
        return model(ids, position_ids=positions, use_cache=False).logits


@pytest.mark.parametrize("case", CASES)
def test_a_gguf_file_is_the_model_it_was_made_of(case: str, tmp_path: Path) -> None:
    model, architecture, keys, tensors = made(case)
    found = converted(files.write_gguf(tmp_path / "m.gguf", architecture, keys, tensors))
    weights, truth = found.state_dict(), model.state_dict()
    assert weights.keys() == truth.keys()
    for name, values in truth.items():
        if architecture == "falcon-h1":  # the file has multipliers in the weights
            values = values * torch.from_numpy(files.multiplier(name, model.config))
        if architecture in files.ONE_ADDED and name.endswith("norm.weight"):
            assert torch.allclose(weights[name], values, rtol=0, atol=2e-7), name  # what adding one has rounded
        elif name.endswith("A_log"):
            assert torch.allclose(weights[name], values, rtol=1e-6, atol=2e-7), name  # what its power has rounded
        else:
            assert torch.equal(weights[name], values), name
    for first in (0, 100, 2 * LENGTH, 30000) if architecture != "gpt2" else (0, 400):
        want, got = logits(model, first), logits(found, first)
        assert (want - got).abs().max() < 2e-5 * want.abs().max(), first
        assert want.std() > 0.1  # all the same would compare nothing


def test_every_architecture_has_a_case_and_is_of_a_supported_family() -> None:
    assert {case[0] for case in CASES.values()} == set(architectures.ARCHITECTURES)
    assert {row.model_type for row in architectures.ARCHITECTURES.values()} <= FAMILIES.keys()


def test_divisors_that_no_published_model_has_are_carried(tmp_path: Path) -> None:
    _, architecture, keys, tensors = made("llama 3.2")
    divisors = np.linspace(1, 3, 16, dtype=np.float32)
    tensors["rope_freqs.weight"] = divisors
    found = converted(files.write_gguf(tmp_path / "m.gguf", architecture, keys, tensors))
    for first in (0, 20000, 40000):  # the last beyond the context length
        logits(found, first)
        frequencies = 5e5 ** -(torch.arange(0, 32, 2) / 32) / torch.from_numpy(divisors)
        assert torch.allclose(found.model.rotary_emb.inv_freq, frequencies.float(), rtol=1e-6, atol=0)
        assert found.model.rotary_emb.attention_scaling == 1.0


def test_divisors_of_one_are_no_scaling(tmp_path: Path) -> None:
    _, architecture, keys, tensors = made("llama 3.2")
    tensors["rope_freqs.weight"] = np.ones(16, np.float32)
    found = converted(files.write_gguf(tmp_path / "m.gguf", architecture, keys, tensors))
    assert found.config.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "Q8_0", "F16", "BF16"])
def test_quantized_weights_are_those_of_the_gguf_package(kind: str, tmp_path: Path) -> None:
    path, truth = in_blocks(tmp_path / "m.gguf", kind)
    found = converted(path).state_dict()
    assert np.array_equal(found["model.embed_tokens.weight"].numpy(), truth["token_embd.weight"])
    assert np.array_equal(found["model.layers.1.mlp.down_proj.weight"].numpy(), truth["blk.1.ffn_down.weight"])


def test_a_model_in_parts_is_read_whole(tmp_path: Path) -> None:
    model, architecture, keys, tensors = made("qwen3")
    last = files.write_gguf(tmp_path / "m.gguf", architecture, keys, tensors, split=5)
    assert last.name.startswith("m-0000") and len(list(tmp_path.iterdir())) > 3
    found = converted(last).state_dict()
    assert all(torch.equal(found[name], values) for name, values in model.state_dict().items())


def test_the_tied_output_may_be_apart(tmp_path: Path) -> None:
    _, architecture, keys, tensors = made("qwen3")
    tensors["output.weight"] = tensors["token_embd.weight"] * 2
    found = converted(files.write_gguf(tmp_path / "m.gguf", architecture, keys, tensors))
    assert not found.config.tie_word_embeddings
    assert torch.equal(found.lm_head.weight, 2 * found.model.embed_tokens.weight)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A file of Qwen3-MoE whose experts are in blocks, and the parameters of the model that it becomes."""
    _, architecture, keys, tensors = made("qwen3 with experts")
    kind = package.GGMLQuantizationType.Q8_0
    blocks = {name: package.quantize(values, kind) for name, values in tensors.items() if name.endswith("exps.weight")}
    path = tmp_path_factory.mktemp("mixture") / "m.gguf"
    files.write_gguf(path, architecture, keys, tensors | blocks, kinds=dict.fromkeys(blocks, kind))
    return path, converted(path).state_dict()


def test_experts_in_blocks_are_those_of_the_gguf_package_and_of_transformers(
    mixture: tuple[Path, dict[str, Any]],
) -> None:
    path, found = mixture
    stored = {tensor.name: tensor for tensor in package.GGUFReader(path).tensors}
    gate, up, down = (
        package.dequantize(tensor.data, tensor.tensor_type)
        for tensor in (stored[f"blk.1.ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
    )
    assert np.array_equal(found["model.layers.1.mlp.experts.gate_up_proj"], np.concatenate([gate, up], axis=1))
    assert np.array_equal(found["model.layers.1.mlp.experts.down_proj"], down)
    unread = {"moe_intermediate_size": 32, "dtype": "float32"}
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **unread).state_dict()
    assert theirs.keys() == found.keys() and all(torch.equal(found[name], theirs[name]) for name in theirs)


def test_gates_may_lie_in_one_tensor_with_what_they_multiply(
    mixture: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, architecture, keys, tensors = made("qwen3 with experts")
    for layer in (0, 1):
        parts = [tensors.pop(f"blk.{layer}.ffn_{name}_exps.weight") for name in ("gate", "up")]
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(parts, axis=1)
    found = converted(files.write_gguf(tmp_path / "m.gguf", architecture, keys, tensors)).state_dict()
    truth = made("qwen3 with experts")[0].state_dict()
    assert all(torch.equal(found[name], values) for name, values in truth.items())


@pytest.mark.parametrize("case", ["qwen3.5", "nemotron-h with experts"])
def test_layers_that_draft_are_left_out(case: str, tmp_path: Path) -> None:
    model, architecture, keys, tensors = made(case)
    layers, copied = keys["block_count"], 1
    drafting: dict[str, Any] = {"block_count": layers + 1, "nextn_predict_layers": 1}
    if case == "qwen3.5":
        del keys["full_attention_interval"]  # a file has either
        drafting["attention.recurrent_layers"] = [True, False, True, False]
    else:  # a layer that attends and has experts
        drafting |= {name: [*keys[name], max(keys[name])] for name in keys if isinstance(keys[name], list)}
    ahead = f"blk.{layers}."
    more = {name.replace(f"blk.{copied}.", ahead): values for name, values in tensors.items()}
    more |= {f"{ahead}nextn.eh_proj.weight": np.zeros((64, 128), np.float32)}
    found = converted(files.write_gguf(tmp_path / "m.gguf", architecture, keys | drafting, tensors | more))
    for one in ("layer_types", "layers_block_type"):
        assert getattr(found.config, one, None) == getattr(model.config, one, None)
    assert found.state_dict().keys() == model.state_dict().keys()


# ---- what is refused

Edit = tuple[dict[str, Any], dict[str, np.ndarray | None], str]
NOTHING: dict[str, Any] = {}
ROW = np.zeros((1, 64), np.float32)
REFUSED: dict[str, Edit] = {
    "a key that nobody knows": ({"attention.new_trick": 2}, NOTHING, r"key llama\.attention\.new_trick \(2\)"),
    "a rope key that nobody knows": ({"rope.scaling.twist": 1.5}, NOTHING, r"llama\.rope\.scaling\.twist"),
    "experts of no MLP": ({"expert_count": 8, "expert_used_count": 2}, NOTHING, r"tensor blk\.0\.ffn_down\.weight and"),
    "experts without end": ({"expert_count": 1 << 20}, NOTHING, r"expert_count is 1048576; expected a whole number 1"),
    "no causal attention": ({"attention.causal": False}, NOTHING, r"attention\.causal is False"),
    "a sort of scaling that nobody knows": ({"rope.scaling.type": "magic"}, NOTHING, "rope.scaling.type is magic"),
    "YaRN by no factor": ({"rope.scaling.type": "yarn"}, {"rope_freqs.weight": None}, "scaling.factor is missing"),
    "factors of half a pair": (NOTHING, {"rope_factors_long.weight": np.ones(16, np.float32)}, "rope_factors_long"),
    "divisors of another size": (NOTHING, {"rope_freqs.weight": np.ones(4, np.float32)}, r"rope_freqs.*\[4\].*16"),
    "divisors beside a factor": ({"rope.scaling.factor": 2.0}, NOTHING, r"rope\.scaling\.factor is 2"),
    "another number of rotated dimensions": (
        {"rope.dimension_count": 7},
        NOTHING,
        r"dimension_count is 7; expected an even",
    ),
    "a part of each head, in a family that rotates all": (
        {"rope.dimension_count": 16},
        {"rope_freqs.weight": None},
        "is 16; expected 32",
    ),
    "values of another size": ({"attention.value_length": 16}, NOTHING, "value_length is 16; expected 32"),
    "heads that differ by layer": ({"attention.head_count_kv": [2, 1]}, NOTHING, r"head_count_kv is \[2, 1\]"),
    "no layers": ({"block_count": 0}, NOTHING, "block_count is 0"),
    "a width without end": (
        {"embedding_length": 1 << 31},
        NOTHING,
        "embedding_length is 2147483648; expected a number",
    ),
    "more heads than columns": (
        {"attention.head_count": 128},
        NOTHING,
        "head_count is 128; expected a number from 1 to 64",
    ),
    "heads in unequal groups": ({"attention.head_count_kv": 3}, NOTHING, "head_count_kv is 3; expected a divisor of 4"),
    "heads that do not divide the width": ({"embedding_length": 63}, NOTHING, "length is 63; expected a multiple of 4"),
    "YaRN of one wavelength": (
        {"rope.freq_base": 1.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
        {"rope_freqs.weight": None},
        r"rope\.freq_base is 1\.0; expected a number above 1 with YaRN",
    ),
    "a window in words": ({"attention.sliding_window": "8"}, NOTHING, "sliding_window is '8'; expected a whole"),
    "rotation of nothing": (
        {"rope.freq_base": 0.0},
        NOTHING,
        r"rope\.freq_base is 0\.0; expected a number 1\.\.1e\+15",
    ),
    "norms that take a root of less than nothing": ({RMS: -1e-5}, NOTHING, rf"{RMS} is -.*; expected a number 0\.\.1"),
    "scaling from a length of one": ({"rope.scaling.original_context_length": 1}, NOTHING, "context_length is 1; exp"),
    "layers without end": (
        {"block_count": 1 << 31},
        NOTHING,
        r"block_count is 2147483648; expected at most 21, as the",
    ),
    "a text for a number": ({"embedding_length": "wide"}, NOTHING, "embedding_length is wide"),
    "more layers than tensors": ({"block_count": 3}, NOTHING, r"no tensor for model\.layers\.2.*and 8 more"),
    "a missing tensor": (NOTHING, {"blk.1.ffn_up.weight": None}, r"no tensor for model\.layers\.1\.mlp\.up_proj"),
    "a tensor too many": (NOTHING, {"blk.0.attn_sinks.weight": ROW}, r"tensor blk\.0\.attn_sinks\.weight"),
    "a layer too many": (NOTHING, {"blk.2.attn_q.weight": ROW}, r"tensor blk\.2\.attn_q\.weight"),
    "a bias that the model has not": (NOTHING, {"blk.0.attn_q.bias": ROW[0]}, r"tensor blk\.0\.attn_q\.bias"),
    "another shape": (NOTHING, {"blk.0.ffn_up.weight": ROW}, r"ffn_up\.weight has the shape \[1, 64\].*\[96, 64\]"),
    "NaN": (NOTHING, {"output_norm.weight": np.full(64, np.nan, np.float32)}, "output_norm.weight holds NaN"),
    "infinity": (
        NOTHING,
        {"blk.0.attn_q.weight": np.full((128, 64), np.inf, np.float32)},
        "attn_q.weight holds NaN or",
    ),
    "no embedding": (NOTHING, {"token_embd.weight": None}, "no tensor token_embd.weight"),
    "more rows than tokens": (NOTHING, {"token_embd.weight": np.zeros((999, 64), np.float32)}, "272 tokens.*999 rows"),
}


def test_blocks_that_are_no_numbers_are_refused_without_a_warning(tmp_path: Path) -> None:
    path, _ = in_blocks(tmp_path / "m.gguf", "Q8_0")
    stored = read_gguf(path).tensors["blk.0.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    data[stored.offset : stored.offset + 34] = np.float16(np.inf).tobytes() + bytes(32)  # infinity times 0
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "ffn_up.weight holds NaN or infinity" in refusal(tmp_path, path)


def refusal(tmp_path: Path, path: Path) -> str:
    """The message of the one line that refuses `path`."""
    folder = tmp_path / "out"
    folder.mkdir()
    with pytest.raises(BaseModelError) as caught:
        convert(path, folder)
    assert "\n" not in str(caught.value) and caught.value.expected and caught.value.fix
    return str(caught.value)


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_understood_is_refused_by_name(reason: str, tmp_path: Path) -> None:
    more, edits, message = REFUSED[reason]
    _, architecture, keys, tensors = made("llama 3.2")
    kept = {name: values for name, values in (tensors | edits).items() if values is not None}
    path = files.write_gguf(tmp_path / "m.gguf", architecture, keys | more, kept)
    assert re.search(message, found := refusal(tmp_path, path)), found


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    _, _, keys, tensors = made("qwen2")
    path = files.write_gguf(tmp_path / "m.gguf", "mamba", keys, tensors)
    assert "architecture mamba; expected one of llama, qwen2" in refusal(tmp_path, path)


@pytest.mark.parametrize(
    ("others", "found"),
    [
        ({"general.type": "mmproj"}, "the projector of a multimodal model"),
        ({"general.type": "adapter", "adapter.type": "lora"}, "a LoRA adapter"),
        ({"adapter.type": "lora"}, "a LoRA adapter"),
        ({"general.type": "imatrix"}, "an importance matrix"),
        ({"general.type": "song"}, "something of the type song"),
    ],
)
def test_what_is_no_language_model_is_named(others: dict[str, str], found: str, tmp_path: Path) -> None:
    _, architecture, keys, tensors = made("qwen2")
    path = files.write_gguf(tmp_path / "m.gguf", architecture, keys, tensors, others=others)
    assert f"holds {found}; expected a language model" in refusal(tmp_path, path)


def test_a_vocabulary_without_a_model_is_no_language_model(tmp_path: Path) -> None:
    path = files.write_gguf(tmp_path / "m.gguf", "llama", {}, {})
    assert "m.gguf holds no tensors; expected a language model" in refusal(tmp_path, path)


@pytest.mark.parametrize("architecture", ["rwkv7", "llama4"])
def test_an_architecture_without_a_row_is_named(architecture: str, tmp_path: Path) -> None:
    _, _, keys, tensors = made("qwen2")
    path = files.write_gguf(tmp_path / "m.gguf", architecture, keys, tensors)
    assert f"m.gguf is of the architecture {architecture}; expected one of llama, " in refusal(tmp_path, path)


# Keys whose value says nothing, or is read with the tensors.
UNREAD = (*architectures.ARCHITECTURES["granite"].harmless, "vocab_size", "rope.scaling.finetuned", ".scores")
UNREAD = (*UNREAD, "xielu.alpha_p", "xielu.alpha_n", "xielu.beta", "xielu.eps")


@pytest.mark.parametrize("case", CASES)
def test_a_key_of_another_type_is_refused_by_its_name(case: str, tmp_path: Path) -> None:
    _, architecture, keys, tensors = made(case)
    good = read_gguf(files.write_gguf(tmp_path / "m.gguf", architecture, keys, tensors))
    unread = tuple({*UNREAD, *(f"{architecture}.{key}" for key in architectures.ARCHITECTURES[architecture].harmless)})
    read = [key for key in good.metadata if not key.endswith(unread)]
    assert len(read) > 15
    for key in read:
        for odd in (math.nan, 7.5 if isinstance(good.metadata[key], str) else "wide"):
            model = GgufFile(good.path, good.metadata | {key: odd}, good.tensors)
            with pytest.raises(BaseModelError, match=re.escape(key)):
                tokenizer_of(model), config_of(model, architecture_of(model))


@pytest.mark.parametrize("case", CASES)
def test_special_tokens_that_a_file_does_not_name_are_none(case: str, tmp_path: Path) -> None:
    """A family's first model had others, which are no tokens of this one."""
    _, architecture, keys, tensors = made(case)
    specials = files.special_keys(bos_token_id=None, padding_token_id=None, add_bos_token=False)
    found = converted(files.write_gguf(tmp_path / "m.gguf", architecture, keys, tensors, specials=specials))
    ids = found.config.bos_token_id, found.config.pad_token_id, found.get_input_embeddings().padding_idx
    assert ids == (None, None, None) and found.config.eos_token_id == files.EOS


@pytest.mark.parametrize(("rotated", "head"), [(30, 88), (26, 92), (16, 32)])
def test_as_many_dimensions_are_rotated_as_the_file_says(rotated: int, head: int) -> None:
    found = rope_parameters(Keys({"x.rope.dimension_count": rotated}, "m", "x"), head, LENGTH, {})
    assert int(head * found["partial_rotary_factor"]) == rotated  # as transformers counts them


def test_what_transformers_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("sizes that\ndo not go together")

    _, architecture, keys, tensors = made("qwen2")
    path = files.write_gguf(tmp_path / "m.gguf", architecture, keys, tensors)
    monkeypatch.setattr(AutoConfig, "for_model", refuse)
    assert "makes no qwen2 of m.gguf (RuntimeError: sizes that do not go" in refusal(tmp_path, path)


Change = tuple[str, dict[str, Any], str]
OF_ONE_FAMILY: dict[str, Change] = {
    "scaling of another kind": ("phi3 with a window", {"rope.scaling.factor": 2.0}, "scaling.type is linear; exp"),
    "another epsilon": ("olmo", {"attention.layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 9.99.*; expected 1e-05"),
    "no numbers": ("apertus", {"xielu.beta": None}, r"has no xielu\.beta; expected 2 numbers"),
    "numbers of one layer": ("apertus", {"xielu.eps": [0.5]}, r"has other values in xielu\.eps; expected 2"),
    "infinity": ("apertus", {"xielu.alpha_p": [0.5, math.inf]}, r"xielu\.alpha_p holds NaN or infinity"),
    "more experts chosen than there are": ("mixtral", {"expert_used_count": 7}, "used_count is 7; expected a whole"),
    "fewer experts than in the tensors": ("mixtral", {"expert_count": 5}, r"tensor blk\.0\.ffn_down_exps\.weight and"),
    "more experts than in the tensors": ("mixtral", {"expert_count": 7}, r"no tensor for .*experts\.6\.down_proj"),
    "experts of two widths": ("olmoe", {"expert_feed_forward_length": 48}, "feed_forward_length is 48; expected 96"),
    "scores by a sigmoid": ("qwen3 with experts", {"expert_gating_func": 2}, "gating_func is 2; expected 1"),
    "scores that keep their sum": ("qwen3 with experts", {"expert_weights_norm": False}, "weights_norm is False; exp"),
    "scores that are multiplied": ("olmoe", {"expert_weights_scale": 2.5}, "weights_scale is 2.5; expected 0.0 or 1.0"),
    "scores of no kind": ("lfm2 with experts", {"expert_gating_func": None}, r"has no lfm2moe\.expert_gating_func"),
    "scores by a softmax": ("lfm2 with experts", {"expert_gating_func": 1}, "gating_func is 1; expected 2"),
    "scores of all experts": ("gpt-oss", {"expert_gating_func": 1}, "gating_func is 1; expected 3"),
    "groups of experts": (
        "ernie with experts",
        {"expert_group_count": 2},
        r"key ernie4_5-moe\.expert_group_count \(2\)",
    ),
    "value heads that no key head has": ("qwen3.5", {"ssm.time_step_rank": 5}, "time_step_rank is 5; expected a mult"),
    "heads of no whole width": ("qwen3.5", {"ssm.inner_size": 97}, "inner_size is 97; expected a multiple of 6"),
    "states of some layers": (
        "qwen3.5",
        {"attention.recurrent_layers": [True]},
        r"layers is \[True\]; expected true or",
    ),
    "drafting layers alone": ("qwen3.5", {"nextn_predict_layers": 3}, "predict_layers is 3; expected a whole number 0"),
    "drafting layers without tensors": (
        "qwen3.5",
        {"nextn_predict_layers": 1},
        r"no tensor blk\.2\.nextn\.eh_proj",
    ),
    "drafting layers of another family": ("olmoe", {"nextn_predict_layers": 1}, "predict_layers is 1; expected 0"),
    "no active experts": ("granite 4, hybrid", {"expert_count": 6}, r"expert_used_count is 0; .* 1\.\.6"),
    "scores of experts": ("qwen3.5 with experts", {"expert_gating_func": 2}, "expert_gating_func is 2; expected 1"),
    "scores by softmax": ("nemotron-h with experts", {"expert_gating_func": 1}, "func is 1; expected 2"),
    "no width of the shared expert": (
        "qwen2 with experts",
        {"expert_shared_feed_forward_length": None},
        r"expert_shared_feed_forward_length",
    ),
    "positions beside scales": (
        "granite 4, hybrid",
        {"rope.scaling.finetuned": True},
        r"attention\.scale \(0\.2.* 4 more",
    ),
    "positions or not": ("granite 4, hybrid", {"rope.scaling.finetuned": None}, r"rope\.scaling\.finetuned"),
    "states of another width": (
        "granite 4, hybrid",
        {"ssm.inner_size": 96},
        "inner_size is 96; expected a multiple of",
    ),
    "one number of heads": ("granite 4, hybrid", {"attention.head_count_kv": 2}, "count_kv is 2; expected 4 numbers"),
    "attention and an MLP in a layer": (
        "nemotron-h",
        {"feed_forward_length": [0, 96, 96, 0, 96]},
        "feed_forward_length is 96; expected 0 in layer 2",
    ),
    "two epsilons": ("nemotron-h", {"attention.layer_norm_rms_epsilon": 1e-5}, r"rms_epsilon is 9.99.*; expected 1.99"),
    "widths of some layers": ("nemotron-h", {"feed_forward_length": 96}, "length is 96; expected 5 numbers"),
    "a window at the end": ("gemma 4", {"attention.sliding_window_pattern": [False, True] * 3}, "last layer without"),
    "keys of no layer of a kind": (
        "gemma 4",
        {"attention.shared_kv_layers": 5},
        "shared_kv_layers is 5; expected less",
    ),
    "keys of no layer": ("gemma 4", {"attention.shared_kv_layers": 6}, r"shared_kv_layers is 6; .* 0\.\.5"),
    "values of another width": ("gemma 4", {"attention.value_length_swa": 64}, "value_length_swa is 64; expected 32"),
    "a part of global heads turns": (
        "gemma 4",
        {"rope.dimension_count": 32},
        "rope.dimension_count is 32; expected 64",
    ),
    "positions that are scaled": (
        "gemma 4",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
        "rope_freqs",
    ),
    "a part of local heads turns": ("gemma 4", {"rope.dimension_count_swa": 16}, "dimension_count_swa is 16; expected"),
    "widths of four kinds": ("gemma 4", {"feed_forward_length": [96] * 5 + [192]}, "a number, in layers without keys"),
    "heads by layer": ("gemma 4", {"attention.head_count_kv": [2, 2, 1, 2, 2, 2]}, "one for each kind of layer"),
    "heads of two kinds with values": ("gemma 4", {"attention.head_count_kv": [2, 1] * 3}, "the same in all layers"),
    "queries that grow, no YaRN": ("mistral small", {"attention.temperature_scale": 0.1}, "temperature_scale is 0.1"),
}


@pytest.mark.parametrize("reason", OF_ONE_FAMILY)
def test_what_one_family_does_not_compute_is_refused_by_name(reason: str, tmp_path: Path) -> None:
    case, more, message = OF_ONE_FAMILY[reason]
    _, architecture, keys, tensors = made(case)
    kept = {key: value for key, value in (keys | more).items() if value is not None}
    path = files.write_gguf(tmp_path / "m.gguf", architecture, kept, tensors)
    assert re.search(message, found := refusal(tmp_path, path)), found


@pytest.mark.parametrize("case", CASES)
def test_a_width_that_the_heads_do_not_divide_is_refused_by_name(case: str, tmp_path: Path) -> None:
    """Or the tensors are: transformers makes the model of some families."""
    _, architecture, keys, tensors = made(case)
    size = keys["embedding_length"] // keys["attention.head_count"]
    given = {"attention.key_length": size, "attention.value_length": size} | keys | {"embedding_length": 63}
    path = files.write_gguf(tmp_path / "m.gguf", architecture, given, tensors)
    assert "transformers makes no" not in refusal(tmp_path, path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ffn_gate_shexp", r"has the tensor blk\.0\.ffn_gate_shexp\.weight"),  # an MLP for all rows
        ("ffn_gate.0", r"has the tensor blk\.0\.ffn_gate\.0\.weight"),  # experts one by one, as of 2023
        ("ffn_up_exps", r"ffn_up_exps\.weight has the shape \[1, 64\]; expected \[experts, rows, columns\]"),
        ("ffn_gate_up_exps", r"has the tensor blk\.0\.ffn_gate_up_exps\.weight"),  # beside those of gate and up
    ],
)
def test_tensors_of_other_mixtures_are_refused(name: str, message: str, tmp_path: Path) -> None:
    _, architecture, keys, tensors = made("mixtral")
    whole = np.concatenate([tensors[f"blk.0.ffn_{part}_exps.weight"] for part in ("gate", "up")], 1)
    added = {f"blk.0.{name}.weight": whole if name == "ffn_gate_up_exps" else ROW}
    path = files.write_gguf(tmp_path / "m.gguf", architecture, keys, tensors | added)
    assert re.search(message, found := refusal(tmp_path, path)), found


def test_a_gate_and_what_it_multiplies_become_one_map_with_their_blocks(tmp_path: Path) -> None:
    model, architecture, keys, tensors = made("granite 4, hybrid")
    kinds = {"gate": "Q8_0", "up": "Q8_0"}, {"gate": "Q8_0", "up": "Q4_0"}
    blocks, values = dict[str, Any](), dict[int, np.ndarray]()
    for layer in (0, 1):  # of one kind, of two kinds
        named = {f"blk.{layer}.ffn_{part}.weight": package.GGMLQuantizationType[k] for part, k in kinds[layer].items()}
        raw = {name: package.quantize(tensors[name], kind) for name, kind in named.items()}
        tensors, blocks = tensors | raw, blocks | named
        values[layer] = np.concatenate([package.dequantize(raw[name], kind) for name, kind in named.items()])
    backwards = dict(reversed(tensors.items()))
    found = read_parameters(files.write_gguf(tmp_path / "m.gguf", architecture, keys, backwards, kinds=blocks), False)
    one, other, plain = (found[f"model.layers.{layer}.shared_mlp.input_linear.weight"] for layer in (0, 1, 2))
    assert np.array_equal(plain.values(), model.model.layers[2].shared_mlp.input_linear.weight.detach().numpy())
    for layer, joined in enumerate((one, other)):
        assert np.array_equal(joined.values(), values[layer])
        assert np.array_equal(np.concatenate(list(joined.chunks())), values[layer])
        assert np.array_equal(joined.rows(slice(90, 100)), values[layer][90:100])
    stored = one.blocks()
    assert stored is not None and other.blocks() is None
    assert np.array_equal(package.dequantize(stored, package.GGMLQuantizationType.Q8_0), values[0])


@pytest.mark.parametrize("rows", [92, 0])
def test_maps_of_two_shapes_do_not_become_one(rows: int, tmp_path: Path) -> None:
    """Though they have as many rows together."""
    _, architecture, keys, tensors = made("granite 4, hybrid")
    whole = np.concatenate([tensors.pop(f"blk.3.ffn_{part}.weight") for part in ("gate", "up")])
    parts = dict(zip(("gate", "up"), np.split(whole, [192 - rows]), strict=True))
    tensors |= {f"blk.3.ffn_{part}.weight": values for part, values in parts.items() if len(values)}
    path = files.write_gguf(tmp_path / "m.gguf", architecture, keys, tensors)
    assert "tensor blk.3.ffn_gate.weight" in refusal(tmp_path, path)


def test_a_head_that_transformers_does_not_tie_is_needed(tmp_path: Path) -> None:
    _, architecture, keys, tensors = made("nemotron-h")
    del tensors["output.weight"]
    path = files.write_gguf(tmp_path / "m.gguf", architecture, keys, tensors)
    assert "has no tensor for lm_head.weight" in refusal(tmp_path, path)


def test_a_mixer_beside_attention_is_refused(tmp_path: Path) -> None:
    """Keys of layers with a state say nothing in dense Granite 4; their tensors would."""
    _, architecture, keys, tensors = made("granite 4, dense")
    tensors["blk.0.ssm_in.weight"] = ROW
    path = files.write_gguf(tmp_path / "m.gguf", architecture, keys, tensors)
    assert "tensor blk.0.ssm_in.weight" in refusal(tmp_path, path)


def test_the_config_holds_what_the_file_says(tmp_path: Path) -> None:
    _, architecture, keys, tensors = made("gemma3, scaled")
    converted(files.write_gguf(tmp_path / "m.gguf", architecture, keys, tensors))
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert config["rope_parameters"] == GEMMA3_ROPE
    assert config["architectures"] == ["Gemma3ForCausalLM"] and config["dtype"] == "float32"


def test_the_sampling_that_a_file_recommends_is_carried(tmp_path: Path) -> None:
    _, architecture, keys, tensors = made("qwen3")
    names = package.Keys.General
    stated = {
        names.SAMPLING_TEMP: 0.6,
        names.SAMPLING_TOP_K: 20,
        names.SAMPLING_TOP_P: 0.95,
        names.SAMPLING_MIN_P: 0.05,
    }
    stated |= {names.SAMPLING_PENALTY_REPEAT: 1.05, names.SAMPLING_MIROSTAT: 2}
    converted(files.write_gguf(tmp_path / "m.gguf", architecture, keys, tensors, others=stated))
    config = GenerationConfig.from_pretrained(tmp_path / "m")
    assert config.do_sample and (config.temperature, config.top_k, config.top_p) == (0.6, 20, 0.95)
    assert (config.min_p, config.repetition_penalty) == (0.05, 1.05)
    found = read_generation(tmp_path / "m")
    assert sampling_of(found) == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
    }
    assert unused_fields(found) == ["mirostat 2"]


def test_a_file_with_a_penalty_alone_is_not_sampled_with(tmp_path: Path) -> None:
    _, architecture, keys, tensors = made("qwen3")
    stated = {package.Keys.General.SAMPLING_PENALTY_REPEAT: 1.1}
    converted(files.write_gguf(tmp_path / "m.gguf", architecture, keys, tensors, others=stated))
    assert sampling_of(read_generation(tmp_path / "m")) == {"repetition_penalty": 1.1}
