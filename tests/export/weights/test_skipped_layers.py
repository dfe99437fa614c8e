"""A model without some of its layers drafts for the whole one, over the same weights."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from transformers import AutoModelForCausalLM

from streamspec.bundle.files import read_manifest
from streamspec.bundle.manifest import NATIVE
from streamspec.bundle.model_section import SHORT, SHORT_NATIVE
from streamspec.bundle.onnx_check import shortened
from streamspec.errors import ConfigError, ResourceError, StreamspecError
from streamspec.export import Target, export_bundle
from streamspec.export.spec.decoder_spec import Skipped
from streamspec.export.weights import skipped_layers
from streamspec.export.weights.model_spec import describe
from streamspec.export.weights.skipped_layers import (
    check_skippable,
    leave_out,
    option_text,
    price,
    read_skipped,
    search,
)
from streamspec.runtime import Sampling, estimate_memory, load
from streamspec.runtime.draft_model.runner import TwoModelRunner
from streamspec.runtime.kv_cache.layout import cache_groups
from streamspec.step_graph import GraphFeatures
from tests.support.forging import forge, refused
from tests.support.tiny_bundles import lettered_base
from tests.support.tiny_models import tiny_model

TEXTS = [[5, 9, 3, 17, 4, 30, 8, 8, 2], [11, 2, 40, 6]]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(input_ids=torch.tensor(TEXTS[:1]), use_cache=False).logits
    return out


def silenced(model: Any, *layers: int) -> Any:
    """Makes the layers add nothing."""
    for layer in layers:
        for module in (model.model.layers[layer].self_attn.o_proj, model.model.layers[layer].mlp.down_proj):
            torch.nn.init.zeros_(module.weight)
    return model


def test_lists_of_layers_are_read() -> None:
    assert read_skipped("auto") is None
    assert read_skipped("7-9,3,8") == Skipped((3, 7, 8, 9))
    assert read_skipped("3a,5-6m,1,4m,4a") == Skipped((1, 4), (3,), (5, 6))
    assert option_text(Skipped((1, 14), (3,), (5, 6))) == "1, 3a, 5m, 6m, 14"
    for wrong in ("", "a", "3,", "-1", "1..3", "3am", "3-a", "3b"):
        with pytest.raises(ConfigError, match="auto, or layers such as"):
            read_skipped(wrong)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_layers_are_left_out_and_put_back(family: str) -> None:
    model = tiny_model(family)
    whole, count = logits(model), model.config.num_hidden_layers
    put_back = leave_out(model, Skipped((0, 2)))
    spec = describe(model)
    assert spec.layers == count - 2 and len(spec.windows) == count - 2
    assert not torch.equal(logits(model), whole)
    put_back()
    assert describe(model).layers == count and torch.equal(logits(model), whole)


@pytest.mark.parametrize("half", ["a", "m"])
def test_halves_are_left_out_and_put_back(half: str) -> None:
    model = tiny_model("llama", initializer_range=0.5)
    whole, layer = logits(model), model.model.layers[1]
    put_back = leave_out(model, read_skipped(f"1{half}"))
    short = logits(model)
    put_back()
    assert torch.equal(logits(model), whole) and not torch.equal(short, whole)
    torch.nn.init.zeros_((layer.self_attn.o_proj if half == "a" else layer.mlp.down_proj).weight)
    assert torch.equal(logits(model), short)


def test_layers_that_add_nothing_change_nothing() -> None:
    model = silenced(tiny_model("llama", initializer_range=0.5), 1, 2)
    whole = logits(model)
    leave_out(model, Skipped((1, 2)))
    torch.testing.assert_close(logits(model), whole)


def test_the_search_finds_the_layers_that_are_missed_least() -> None:
    model, lines = silenced(tiny_model("llama", initializer_range=0.5), 0, 2), list[str]()
    found = search(model, TEXTS, lines.append)
    assert found == Skipped((0, 2))
    assert [line.partition(":")[2].split()[0] for line in lines[:4]] == ["100%"] * 4 and len(lines) == 5
    assert model.config.num_hidden_layers == len(model.model.layers) == 4
    prices = [price(model, read_skipped(text)) for text in ("0-2", "0,2", "0,2a", "0")]
    assert 0 < prices[0] < prices[1] < prices[2] < prices[3] < price(model, Skipped()) == 1


def test_the_search_takes_halves_apart() -> None:
    model, lines = tiny_model("llama", initializer_range=0.5), list[str]()
    for module in (model.model.layers[1].self_attn.o_proj, model.model.layers[3].mlp.down_proj):
        torch.nn.init.zeros_(module.weight)
    found = search(model, TEXTS, lines.append)
    assert lines[1].startswith("without layers 1a, 3m: 100%") and 1 in found.attention + found.layers
    assert skipped_layers.attends_first(found, 4)


def test_the_search_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, runs = tiny_model("llama", num_hidden_layers=10), list[int]()
    monkeypatch.setattr(skipped_layers, "_choices", lambda *_: runs.append(1) or torch.tensor([1, 1]))
    search(model, TEXTS, lambda line: None)
    assert len(runs) <= 1 + 2 * 10 + 8 * 9


def test_layers_that_there_are_not_or_that_others_need_are_refused() -> None:
    model = tiny_model("llama")
    for wrong in (Skipped((4,)), Skipped((0, 1, 2, 3)), Skipped(), Skipped(mlps=(4,))):
        with pytest.raises(ConfigError, match="0 to 3"):
            check_skippable(model, wrong)
    for wrong in (Skipped(attention=(0,)), Skipped((0,), (1,))):
        with pytest.raises(ConfigError, match="the first layer that stays"):
            check_skippable(model, wrong)
    check_skippable(model, Skipped((0,), (2,), (1,)))
    with pytest.raises(ConfigError, match="of halves of gpt_neox's layers; expected whole layers"):
        check_skippable(tiny_model("gpt_neox"), Skipped(mlps=(1,)))
    check_skippable(model, None)
    with pytest.raises(ConfigError, match="share nothing"):
        check_skippable(tiny_model("lfm2"), None)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lettered_base(tmp_path_factory.mktemp("self") / "base", eos=False)


@pytest.fixture(scope="module")
def exported(base: Path) -> Callable[[str], Path]:
    """Bundles by precision and skipped layers, such as `int8 1-2` or `int8 whole`."""

    @functools.cache
    def make(name: str) -> Path:
        precision, skipped = name.split()
        out, given = base.parent / name.replace(" ", "-"), None if skipped == "whole" else skipped
        quiet: dict[str, Any] = {"measure": precision == "fp32", "progress": lambda line: None}
        export_bundle(base, None, out, precision, self_draft=given, **quiet)
        return out

    return make


Exported = Callable[[str], Path]
OPTIONS: dict[str, Any] = {"threads": 1, "tree": 8, "ngram": False, "recycling": False}


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_the_short_graph_lies_over_the_weights_of_the_whole_one(exported: Exported, precision: str) -> None:
    whole, short = exported(f"{precision} whole"), exported(f"{precision} 1-2")
    files, added = read_manifest(whole).files, read_manifest(short).files
    names = {SHORT} | ({SHORT_NATIVE} if NATIVE in files else set())
    assert added.keys() - files.keys() == names and (NATIVE in files) == (precision != "fp32")
    assert abs(added["model.onnx.data"].bytes - files["model.onnx.data"].bytes) < 4096  # of pages
    assert read_manifest(whole).model.skipped_layers == () and read_manifest(short).model.skipped_layers == (1, 2)


@pytest.mark.parametrize("skipped", ["0,2", "1,2a,3m", "0m,3a"])
def test_it_computes_what_the_model_without_these_layers_does(base: Path, exported: Exported, skipped: str) -> None:
    runner = load(exported(f"fp32 {skipped}"), draft="self", **OPTIONS).runner
    assert isinstance(runner, TwoModelRunner)
    model = AutoModelForCausalLM.from_pretrained(base)
    leave_out(model, read_skipped(skipped))
    tokens = list(range(20, 45))
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(runner.draft.score(tokens)[:, :-5], expected[:, :-5], atol=1e-3)


@pytest.mark.parametrize(
    ("name", "provider"),
    [
        *(("int8 auto", "auto"), ("int8 1-2", "cpu"), ("fp32 3", "auto")),
        *(("int8 1,2a,3m", provider) for provider in ("cpu", "auto")),
    ],
)
def test_it_drafts_and_answers_stay_the_same(exported: Exported, name: str, provider: str) -> None:
    session, drafted = load(exported(name), draft="self", provider=provider, **OPTIONS), 0
    for sampling in (Sampling(), Sampling(1.0, seed=5)):
        for prompt in ("hello", "a b c"):
            plain, found = (
                session.generate(prompt, max_new_tokens=30, sampling=sampling, speculate=speculate)
                for speculate in (False, True)
            )
            assert found.token_ids == plain.token_ids
            drafted += found.stats.sources["drafter"].drafted
    assert drafted
    session.unload()
    assert session.generate("hello", max_new_tokens=20).stats.sources["drafter"].drafted
    assert session.another().generate("hello", max_new_tokens=20).stats.sources["drafter"].drafted


def test_without_draft_self_it_is_the_bundle_that_it_was(exported: Exported) -> None:
    whole, short = (load(exported(f"int8 {name}"), threads=1, tree="plain") for name in ("whole", "1-2"))
    assert whole.generate("hello", max_new_tokens=30).text == short.generate("hello", max_new_tokens=30).text


def test_its_memory_is_counted(exported: Exported) -> None:
    bundle = exported("int8 1-2")
    alone, both = (estimate_memory(bundle, context=128, short=short) for short in (False, True))
    assert both.weights == alone.weights and alone.cache * 1.4 < both.cache < alone.cache * 1.6  # two layers of four
    load(bundle, context=128, memory=alone.total + 10, **OPTIONS)
    with pytest.raises(ResourceError, match="the bundle needs"):
        load(bundle, context=128, memory=alone.total + 10, draft="self", **OPTIONS)


def test_what_the_manifest_says_of_it_is_held_by_its_files_and_graph(exported: Exported, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(exported("int8 1-2"), bundle)
    text = (bundle / "manifest.json").read_text()

    def says(match: str, skipped: list[int] | None, without: tuple[str, ...] = (), halves: Any = None) -> None:
        manifest = json.loads(text)
        manifest["model"] |= {"skipped_layers": skipped} | (halves or {})
        if skipped is None:
            del manifest["model"]["skipped_layers"]
        for name in without:
            del manifest["files"][name]
        (bundle / "manifest.json").write_text(json.dumps(manifest))
        for draft in (None, "self"):
            with pytest.raises(StreamspecError, match=match) as caught:
                load(bundle, threads=1, draft=draft)
            assert "\n" not in str(caught.value)

    says("do not go together", None)
    says("do not go together", [1, 2], (SHORT,))
    says("do not go together", [1, 2], (SHORT_NATIVE,))
    says("rising", [2, 1])
    says("each layer once", [1, 2], (), {"skipped_mlps": [2]})
    says("attention in the first that stays", [0, 2], (), {"skipped_attention": [1]})
    says("manifest.model is not what the graph was made for", [1], (), {"skipped_mlps": [2]})
    says("skipped_layers", [1, 4])
    says("manifest.model is not what the graph was made for", [1])
    (bundle / "manifest.json").write_text(text)
    forge(bundle, SHORT, b"\x08\x0a" + bytes(50))
    refused(bundle, f"cannot load {SHORT}")  # read by the strict reader, used or not


def test_a_layer_without_attention_keeps_nothing(exported: Exported) -> None:
    bundle = exported("int8 1,2a,3m")
    manifest = read_manifest(bundle)
    model = manifest.model
    assert (model.skipped_layers, model.skipped_attention, model.skipped_mlps) == ((1,), (2,), (3,))
    names = {row.name for row in onnx.load(bundle / SHORT, load_external_data=False).graph.input}
    assert {name for name in names if name.startswith("past_key_values")} == {
        f"past_key_values.{layer}.{kind}" for layer in (0, 2) for kind in ("key", "value")
    }
    whole, short = (cache_groups(GraphFeatures.of_manifest(one)) for one in (manifest, shortened(manifest)))
    assert [len(group.layers) for group in (*whole, *short)] == [4, 2]


def test_where_there_is_none_it_is_refused(base: Path, exported: Exported, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without a short graph"):
        load(exported("int8 whole"), draft="self")
    for target in (Target(static=True, rows=8), Target("cuda")):
        with pytest.raises(ConfigError, match="--self-draft for"):
            export_bundle(base, None, tmp_path / "out", target=target, self_draft="1", progress=lambda line: None)


def test_a_drafter_beside_it_is_refused(tmp_path: Path) -> None:
    from tests.support.tiny_bundles import tiny_adapter, tiny_base

    base = tiny_base(tmp_path / "base")
    adapter = tiny_adapter(tmp_path / "adapter", base)
    with pytest.raises(ConfigError, match="beside a drafter"):
        export_bundle(base, adapter, tmp_path / "out", self_draft="1", progress=lambda line: None)
