"""Gemma 4: streams through layers that share keys, keys that are values, answers beyond the window, and the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from streamspec.bundle.adapter_folder import read_adapter
from streamspec.bundle.files import read_manifest
from streamspec.errors import BaseModelError
from streamspec.export import export_bundle
from streamspec.export.weights.load_weights import ModelSource, load_model
from streamspec.export.weights.model_spec import describe
from streamspec.layer_cache import SHARED
from streamspec.runtime import load
from tests.export.graphs.test_dynamic_step_graph import check_against_reference
from tests.export.graphs.test_static_step_graph import check_against_reference as check_static
from tests.support.tiny_exports import build, build_static, save_adapter, save_base, tiny_model, tiny_streams

DENSE = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
}


@pytest.mark.parametrize("ns", [1, 3, 4])
def test_streams_see_each_other_where_they_pass_the_layer_that_is_shared_with(ns: int, tmp_path: Path) -> None:
    model = tiny_model("gemma4_text")
    streams = tiny_streams(describe(model), ns=ns)
    check_against_reference(build(tmp_path, model, streams))


def test_keys_that_are_values_and_no_inputs_of_layers(tmp_path: Path) -> None:
    model = tiny_model("gemma4_text", **DENSE)
    spec = describe(model)
    assert not spec.per_layer_width and "self_attn.v_proj" not in spec.at(1).widths
    check_against_reference(build(tmp_path, model))
    (tmp_path / "static").mkdir()
    check_static(build_static(tmp_path / "static", model))


@pytest.mark.parametrize("kind", ["fp32", "int8", "int4"])
def test_answers_beyond_the_window_are_those_of_plain_decoding(kind: str, tmp_path: Path) -> None:
    model = tiny_model("gemma4_text", max_position_embeddings=1024)
    base = save_base(tmp_path / "base", model)
    adapter = save_adapter(tmp_path / "adapter", base, tiny_streams(describe(model), pruning=4))
    export_bundle(base.path, adapter, tmp_path / "bundle", kind, progress=lambda line: None)
    described = read_manifest(tmp_path / "bundle").model
    kept = described.caches
    assert described.per_layer_width == 32
    assert kept[0].window == 6 and (kept[1].window, kept[3].kind) == (None, SHARED)
    session = load(tmp_path / "bundle", cache_dir=tmp_path, tree=8)
    text = np.random.default_rng(0).integers(3, 90, 380).tolist()
    plain = session.generate(text, max_new_tokens=90, speculate=False)
    drafted = session.generate(text, max_new_tokens=90)
    assert len(plain.token_ids) > 60 and drafted.token_ids == plain.token_ids
    assert session.generate([*text, *plain.token_ids[:50], 5], max_new_tokens=9).stats.reused_tokens > 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 8},
            "experts of 8 inner numbers",
        ),
        ({"use_bidirectional_attention": "all"}, "only None or vision"),
        ({"vocab_size_per_layer_input": 192}, "vocab_size_per_layer_input"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(BaseModelError, match=named):
        describe(tiny_model("gemma4_text", **changes))


def test_a_lora_of_what_stands_beside_the_layers_is_merged(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", tiny_model("gemma4_text"))
    names = ["embed_tokens_per_layer", "per_layer_model_projection"]
    settings = LoraConfig(r=2, target_modules=names, init_lora_weights=False, task_type="CAUSAL_LM")
    tuned = get_peft_model(tiny_model("gemma4_text"), settings)
    tuned.peft_config["default"].base_model_name_or_path = str(base.path)
    tuned.save_pretrained(tmp_path / "lora")
    plain, merged = tiny_model("gemma4_text").model, tuned.merge_and_unload().model
    model = load_model(base, read_adapter(tmp_path / "lora"), whole=False)
    source = ModelSource(model, describe(model))
    for name, read in zip(names, (source.rows_of, source.weight), strict=True):
        expected, before = (getattr(one, name).weight.detach().numpy() for one in (merged, plain))
        written = np.asarray(read(f"model.{name}.weight")).reshape(expected.shape)
        np.testing.assert_allclose(written, expected, atol=1e-6)
        assert np.abs(written - before).max() > 1e-2


def test_each_part_of_a_layer_matters() -> None:
    """Or the comparisons above could not fail."""
    model, ids = tiny_model("gemma4_text"), torch.arange(9)[None]
    layers = model.model.layers
    before = model(ids).logits
    for change in (
        lambda: layers[2].layer_scalar.mul_(2),
        lambda: layers[2].post_per_layer_input_norm.weight.mul_(2),
        lambda: model.model.embed_tokens_per_layer.weight.mul_(2),
        lambda: model.model.per_layer_model_projection.weight.add_(0.1),
    ):
        with torch.no_grad():
            change()
        after = model(ids).logits
        assert (after - before).abs().max() > 1e-2 * before.std()
        before = after


def test_a_description_of_a_layer_is_the_decoders_but_for_its_sizes() -> None:
    spec = describe(tiny_model("gemma4_text"))
    assert [spec.at(layer).head_dim for layer in range(5)] == [24, 32, 24, 32, spec.head_dim]
    assert spec.last_attention == 2 and spec.head_dim == 24 and spec.at(3).intermediate == 2 * spec.intermediate
    assert replace(spec.at(1), **vars(spec.sizes[2])) == spec.at(2)
