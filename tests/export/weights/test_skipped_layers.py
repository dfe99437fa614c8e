"""A model without some of its layers drafts for the whole one, over the same weights."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from streamspec.bundle.files import read_manifest
from streamspec.bundle.manifest import NATIVE
from streamspec.bundle.model_section import SHORT, SHORT_NATIVE
from streamspec.errors import ConfigError, ResourceError, StreamspecError
from streamspec.export import Target, export_bundle
from streamspec.export.layers.decoder_spec import describe
from streamspec.export.weights.skipped_layers import check_skippable, leave_out, price, read_skipped, search
from streamspec.runtime import Sampling, estimate_memory, load
from streamspec.runtime.draft_model.runner import TwoModelRunner
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
    assert read_skipped("7-9,3,8") == (3, 7, 8, 9)
    for wrong in ("", "a", "3,", "-1", "1..3"):
        with pytest.raises(ConfigError, match="auto, or layers such as"):
            read_skipped(wrong)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_layers_are_left_out_and_put_back(family: str) -> None:
    model = tiny_model(family)
    whole, count = logits(model), model.config.num_hidden_layers
    put_back = leave_out(model, (0, 2))
    spec = describe(model)
    assert spec.layers == count - 2 and len(spec.windows) == count - 2
    assert not torch.equal(logits(model), whole)
    put_back()
    assert describe(model).layers == count and torch.equal(logits(model), whole)


def test_layers_that_add_nothing_change_nothing() -> None:
    model = silenced(tiny_model("llama", initializer_range=0.5), 1, 2)
    whole = logits(model)
    leave_out(model, (1, 2))
    torch.testing.assert_close(logits(model), whole)


def test_the_search_finds_the_layers_that_are_missed_least() -> None:
    model, said = silenced(tiny_model("llama", initializer_range=0.5), 0, 2), list[str]()
    found = search(model, TEXTS, said.append)
    assert found == (0, 2)
    assert [line.partition(":")[2].split()[0] for line in said[:2]] == ["100%", "100%"]
    assert model.config.num_hidden_layers == len(model.model.layers) == 4
    assert 0 < price(model, (0, 1, 2)) < price(model, (0, 2)) < price(model, ()) == 1


def test_layers_that_there_are_not_or_that_others_need_are_refused() -> None:
    model = tiny_model("llama")
    for wrong in ((4,), (0, 1, 2, 3), ()):
        with pytest.raises(ConfigError, match="0 to 3"):
            check_skippable(model, wrong)
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
        export_bundle(base, None, out, precision, progress=lambda line: None, self_draft=given)
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


def test_it_computes_what_the_model_without_these_layers_does(base: Path, exported: Exported) -> None:
    runner = load(exported("fp32 0,2"), draft="self", **OPTIONS).runner
    assert isinstance(runner, TwoModelRunner)
    model = AutoModelForCausalLM.from_pretrained(base)
    leave_out(model, (0, 2))
    tokens = list(range(20, 45))
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(runner.draft.score(tokens), expected, atol=1e-3)


@pytest.mark.parametrize("name", ["int8 auto", "int8 1-2", "fp32 3"])
@pytest.mark.parametrize("provider", ["cpu", "auto"])
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

    def says(match: str, skipped: list[int] | None, without: tuple[str, ...] = ()) -> None:
        manifest = json.loads(text)
        manifest["model"] |= {"skipped_layers": skipped}
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
    says("skipped_layers", [1, 4])
    says("manifest.model is not what the graph was made for", [1])
    (bundle / "manifest.json").write_text(text)
    forge(bundle, SHORT, b"\x08\x0a" + bytes(50))
    refused(bundle, f"cannot load {SHORT}")  # read by the strict reader, used or not


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
