"""What a `config.json` may say: fields are judged by the code of the model that reads them."""

from __future__ import annotations

import json
import re
import shutil
import sys
from inspect import getsource
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.modeling_rope_utils import RopeParameters

from streamspec.adapters.base_models.config_fields import (
    OWN_ROPE,
    check_config,
    fields_read,
    layer_window,
    read_config,
)
from streamspec.adapters.base_models.hf_decoder import HFDecoder
from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.adapters.train import train
from streamspec.errors import BaseModelError, StreamspecError
from streamspec.export import export_bundle, export_swappable
from streamspec.export.weights.model_spec import describe
from streamspec.model_families import FAMILIES, family_of
from streamspec.model_families.families import RECURRENT_NOT_COMPUTED
from streamspec.model_families.not_computed import NOT_COMPUTED
from tests.support.published_configs import CONFIGS
from tests.support.tiny_exports import save_base, tiny_model
from tests.support.tiny_models import options

USUAL: dict[str, dict[str, Any]] = {  # what the defaults of transformers do not say as published models do
    "granitemoehybrid": {"num_local_experts": 0, "num_hidden_layers": 2, "layer_types": ["attention"] * 2},
    "bamba": {"attn_layer_indices": [9]},
    "nemotron_h": {"hybrid_override_pattern": "M-*"},
    "glm4_moe": {"head_dim": 128},
    "deepseek_v2": {"moe_intermediate_size": 1408, "num_experts_per_tok": 6},
}
LATENT = {"hybrid_override_pattern": "ME*", "moe_intermediate_size": 64, "moe_latent_size": 32}
HARMLESS = {
    "cache_implementation": "hybrid",
    "unk_token_id": 3,
    "n_ctx": 1024,
    "prefix": "</s>",
    "activation": "swiglu",
}


def config_of(family: str, **changes: Any) -> Any:
    return CONFIG_MAPPING[family](**USUAL.get(family, {}) | changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_model_reads_is_found_in_its_source(family: str) -> None:
    read = fields_read(family)
    assert {"hidden_size", "num_attention_heads", "vocab_size"} <= set(read)
    assert "n_ctx" not in read and "num_labels" not in read


def test_reads_are_found_in_helpers_and_under_other_names() -> None:
    assert "is_causal" in fields_read("llama")  # of the functions that make masks
    assert "n_layer" in fields_read("gpt2")  # which its code calls num_hidden_layers
    assert "layer_types" in fields_read("gemma2")
    assert "sliding_window" in fields_read("mistral")
    assert "sliding_window" not in fields_read("llama")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_of_usual_values_is_fine(family: str) -> None:
    assert check_config(config_of(family)) == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_that_the_model_does_not_read_are_left_alone_by_name(family: str) -> None:
    left = check_config(config_of(family, **HARMLESS, empty=0, is_causal=True, _note=1, auto_map={"AutoConfig": "a.B"}))
    assert left == tuple(f"`{name}` = {value}" for name, value in HARMLESS.items())


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"hidden_act": "tanh"}, "activation `tanh` (only silu, gelu"),
        ("llama", {"is_causal": False}, "`is_causal` = False in the config"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantized already (gptq)"),
        ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, "quantized already (mxfp4)"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "`swiglu_limit` = 0.0 (only numbers above 0 are supported)"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantized already (fp8)"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantized already (`quantization_config` in its config)"),
        ("qwen2", {"quantization": {"group_size": 64, "bits": 4}}, "quantized already (`quantization` in its config)"),
        ("llama", {"hidden_size": 60, "num_attention_heads": 5}, "heads of 12 (only multiples of 8, from 64 on of 4"),
        ("lfm2", {"num_attention_heads": 0}, "heads of 0"),
        ("llama", {"head_dim": 102}, "heads of 102 (only multiples of 8, from 64 on of 4"),
        ("opt", {"do_layer_norm_before": False}, "`do_layer_norm_before` = False (only True is supported)"),
        ("opt", {"word_embed_proj_dim": 32, "hidden_size": 64, "num_attention_heads": 4}, "(only 64 is supported)"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "`scale_attn_by_inverse_layer_idx` = True"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "`attn_logit_softcapping` = 50.0 (only None"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "`use_bidirectional_attention` = True"),
        (
            "granitemoehybrid",
            {"layer_types": ["attention", "mamba"], "hidden_act": "gelu"},
            "convolutions under `gelu` (only silu",
        ),
        (
            "granitemoehybrid",
            {"layer_types": ["attention", "mamba"], "mamba_d_state": 520},
            "recurrent states of 520 x 64 (only multiples of",
        ),
        ("granitemoehybrid", {"layer_types": ["mamba", "mamba"]}, "no layer of attention"),
        ("nemotron_h", {"hybrid_override_pattern": "EM*"}, "a first layer of kind `moe`, where the cache begins"),
        ("nemotron_h", {"hybrid_override_pattern": "-M*"}, "a first layer of kind `mlp`"),
        ("nemotron_h", {"hybrid_override_pattern": "ME*"}, "experts of 7688 inner numbers (only multiples of 32"),
        ("nemotron_h", LATENT | {"moe_latent_size": 40}, "experts of 40 outputs (only multiples of 32"),
        ("nemotron_h", LATENT | {"topk_group": 2}, "2 of 8 experts from 2 of 1 groups"),
        ("nemotron_h", LATENT | {"n_group": 4, "num_experts_per_tok": 3}, "3 of 8 experts from 1 of 4 groups"),
        ("nemotron_h", LATENT | {"n_group": 8}, "2 of 8 experts from 1 of 8 groups (only groups of one size"),
        ("nemotron_h", {"hybrid_override_pattern": "M-M-"}, "no layer of attention"),
        ("nemotron_h", {"hybrid_override_pattern": "M*", "mamba_hidden_act": "gelu"}, "convolutions under `gelu`"),
        ("nemotron_h", {"hybrid_override_pattern": "M*", "mlp_hidden_act": "tanh"}, "activation `tanh`"),
        ("qwen3_5_text", {"hidden_act": "gelu"}, "convolutions under `gelu` (only silu"),
        ("granitemoehybrid", {"num_local_experts": 4, "intermediate_size": 40}, "experts of 40 inner numbers"),
        ("minimax_m2", {"quantization_config": {"quant_method": "fp8"}}, "quantized already (fp8)"),
        ("deepseek_v3", {"n_group": None}, "`n_group` = None (only whole numbers from 1 are supported)"),
        ("deepseek_v3", {"topk_group": None}, "`topk_group` = None (only whole numbers from 1"),
        ("youtu", {"v_head_dim": None}, "`v_head_dim` = None (only whole numbers from 1"),
        ("bamba", {"mamba_n_groups": None}, "`mamba_n_groups` = None (only whole numbers from 1"),
        ("bamba", {"mamba_d_state": None}, "`mamba_d_state` = None (only whole numbers from 1"),
        ("exaone_moe", {"n_group": 3}, "8 of 64 experts from 1 of 3 groups (only groups of one size"),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2]}, "`moe_topk` = [1, 2] (only one number for all layers is supported)"),
        ("mamba", {}, "of the family `mamba`"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(family: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BaseModelError) as refused:
        check_config(config_of(family, **changes))
    assert words in str(refused.value)


def test_a_rotary_embedding_of_another_kind_is_refused() -> None:
    config = config_of("llama")
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1e4}
    with pytest.raises(BaseModelError, match="rotary embedding of type `spiral` .only default, linear, llama3"):
        check_config(config)


def test_parameters_of_a_rotary_embedding_that_transformers_does_not_read_are_told() -> None:
    """YaRN of DeepSeek-R1-0528-Qwen3-8B names a factor that vLLM and llama.cpp read."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attn_factor": 0.878}
    left = check_config(config_of("qwen3", rope_scaling=rope | {"finetuned": False}, max_position_embeddings=131072))
    assert left == ("`attn_factor` = 0.878 of the rotary embedding",)
    assert check_config(config_of("llama", rope_scaling={"type": "linear", "factor": 4.0})) == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_rope_parameters_that_a_family_reads_itself_are_known(family: str) -> None:
    module = AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[family]].__module__
    read = set(re.findall(r"""rope_(?:parameters|params)\w*(?:\.get\(|\[)["'](\w+)""", getsource(sys.modules[module])))
    usual = {*RopeParameters.__annotations__, *(getattr(config_of(family), "rope_parameters", None) or ()), "type"}
    assert read - usual == {*OWN_ROPE.get(family, ())}


@pytest.mark.parametrize("name", CONFIGS)
def test_fields_that_are_told_as_not_read_change_nothing(name: str, tmp_path: Path) -> None:
    """A config without them is the same, and so are the rotary frequencies of its model."""
    told = {*re.findall(r"`(\w+)` = ", " ".join(check_config(read_text(CONFIGS[name], tmp_path))))}
    if not told:
        return
    with_them, without = (read_text(one, tmp_path) for one in (CONFIGS[name], stripped(CONFIGS[name], told)))
    assert stripped(with_them.to_dict(), told) == stripped(without.to_dict(), told)
    assert frequencies(with_them).keys() == frequencies(without).keys()
    assert all(torch.equal(frequencies(without)[at], values) for at, values in frequencies(with_them).items())


def read_text(values: dict[str, Any], folder: Path) -> Any:
    (folder / "config.json").write_text(json.dumps(values))
    return read_config(folder)


def stripped(values: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """A config without these fields, at whatever depth."""
    kept = {name: value for name, value in values.items() if name not in names}
    return {name: stripped(value, names) if isinstance(value, dict) else value for name, value in kept.items()}


def frequencies(config: Any) -> dict[str, torch.Tensor]:
    buffers = AutoModelForCausalLM.from_config(config).named_buffers()
    return {name: buffer for name, buffer in buffers if "inv_freq" in name}


@pytest.mark.parametrize(("rope", "told"), [("default", 1), ("yarn", 0)])
def test_a_length_before_scaling_is_told_where_no_rotary_embedding_reads_it(rope: str, told: int) -> None:
    scaling = {"rope_type": rope, "factor": 4.0, "rope_theta": 1e4}
    config = config_of("llama", rope_parameters=scaling, original_max_position_embeddings=512)
    assert len(check_config(config)) == told


def test_all_faults_are_in_one_line() -> None:
    config = config_of("opt", do_layer_norm_before=False, activation_function="tanh", is_causal=False)
    with pytest.raises(BaseModelError, match="is_causal.*do_layer_norm_before.*tanh") as refused:
        check_config(config)
    assert "\n" not in str(refused.value)


def test_fields_that_a_model_does_not_read_have_no_say_in_the_graph() -> None:
    model = tiny_model(final_logit_softcapping=5.0, attn_logit_softcapping=4.0)
    spec = describe(model)
    assert spec.windows == (None,) * 4 and HFDecoder(model).window(0) is None
    assert spec.logit_cap is None and spec.attention_cap is None
    assert len(check_config(model.config)) == 2


@pytest.mark.parametrize("field", ["sliding_window", "attention_chunk_size"])
def test_a_window_that_only_the_cache_reads_is_refused(field: str) -> None:
    """transformers attends to everything in a prompt, and in an answer only to what its cache keeps."""
    with pytest.raises(BaseModelError, match=f"`{field}` = 6, which only its cache reads"):
        check_config(config_of("llama", **{field: 6}))


def test_a_window_that_cuts_nothing_is_none() -> None:
    assert check_config(config_of("llama", sliding_window=4096, max_position_embeddings=4096))
    full, cut = (["full_attention"] * 2, ["full_attention", "sliding_attention"])
    assert check_config(config_of("llama", sliding_window=6, num_hidden_layers=2, layer_types=full))
    with pytest.raises(BaseModelError, match="`sliding_window` = 6, which only its cache reads"):
        check_config(config_of("llama", sliding_window=6, num_hidden_layers=2, layer_types=cut))


def test_kinds_of_layers_count_where_the_model_reads_them() -> None:
    kinds = ["full_attention"] * 4
    config = config_of("mistral", sliding_window=6, num_hidden_layers=4, layer_types=kinds)
    assert [layer_window(config, FAMILIES["mistral"], layer) for layer in range(4)] == [6] * 4
    config = config_of("qwen3", sliding_window=6, use_sliding_window=True, num_hidden_layers=4, layer_types=kinds)
    assert [layer_window(config, FAMILIES["qwen3"], layer) for layer in range(4)] == [None] * 4


def test_a_scale_of_each_layer_is_refused() -> None:
    model = tiny_model()
    model.model.layers[1].self_attn.scaling = 0.5
    with pytest.raises(BaseModelError, match="attention that is scaled otherwise in each layer"):
        describe(model)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose config asks for another attention, with nothing to fine-tune or export but its config."""
    folder = tmp_path_factory.mktemp("refused") / "base"
    save_base(folder)
    changed = json.loads((folder / "config.json").read_text()) | {"is_causal": False, "n_ctx": 9}
    (folder / "config.json").write_text(json.dumps(changed))
    (folder / "model.safetensors").write_bytes(b"never read")
    return folder


def test_every_way_in_refuses_before_any_work(refused: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    ways = [
        lambda out: export_bundle(refused, None, out),
        lambda out: export_swappable(refused, [], out),
        lambda out: train(options(refused, data, out)),
    ]
    for number, way in enumerate(ways):
        with pytest.raises(StreamspecError, match=r"`is_causal` = False in the config of this llama"):
            way(tmp_path / str(number))
        assert not (tmp_path / str(number)).exists()


def test_fields_left_alone_are_told_in_one_line(tmp_path: Path) -> None:
    save_base(tmp_path / "base")
    changed = (
        json.loads((tmp_path / "base" / "config.json").read_text()) | HARMLESS | {"auto_map": {"AutoConfig": "a.B"}}
    )
    (tmp_path / "base" / "config.json").write_text(json.dumps(changed))
    lines: list[str] = []
    assert resolve_base(tmp_path / "base", lines.append).model_type == "llama"
    assert len(lines) == 1 and all(f"`{name}`" in lines[0] for name in HARMLESS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '{"hidden_size": 64}',
            "names no model_type; expected llama, mistral, qwen2 or another of the .* families that the docu",
        ),
        ('{"model_type": "llama", "hidden_size": "wide"}', "config.json cannot be read"),
        ('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 5}', "config.json cannot be read"),
    ],
)
def test_a_config_that_makes_no_sense_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "base", ignore_errors=True)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(text)
    with pytest.raises(BaseModelError, match=words) as caught:
        resolve_base(tmp_path / "base", lambda line: None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("cohere2", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
        ("cohere2", {"sliding_window": None}),
        ("gemma3_text", {"sliding_window": None}),
    ],
)
def test_windows_without_a_length_are_refused_as_transformers_cannot_run_them(
    family: str, values: dict[str, Any]
) -> None:
    config = config_of(family, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, **values)
    with pytest.raises(BaseModelError, match="no `sliding_window` in the config of this"):
        check_config(config)
    with pytest.raises((ValueError, TypeError)):
        AutoModelForCausalLM.from_config(config)(input_ids=torch.ones(1, 4, dtype=torch.long))


def test_a_family_that_is_not_supported_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(
        BaseModelError, match="of the family `gemma33_text`; expected gemma3_text, .* or another"
    ) as told:
        family_of("gemma33_text", "a model")
    assert len(str(told.value)) < 250


def test_a_config_reads_back(tmp_path: Path) -> None:
    config_of("qwen3", hidden_size=64).save_pretrained(tmp_path)
    assert read_config(tmp_path).hidden_size == 64


def test_families_that_are_not_computed_are_refused_with_what_they_have() -> None:
    assert not NOT_COMPUTED.keys() & {*FAMILIES, *RECURRENT_NOT_COMPUTED}
    with pytest.raises(BaseModelError, match=r"of the family `phimoe`, which has experts .*; expected phi, "):
        family_of("phimoe", "a model")
