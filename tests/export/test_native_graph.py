"""`native.onnx` reads tiles as they lie: what turns them back belongs to the graph of standard operators alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from streamspec.export import export_bundle
from streamspec.runtime import load
from tests.support.tiny_bundles import draft_layer, tiny_adapter, tiny_base
from tests.support.tiny_models import tiny_model, tiny_tokenizer


def unpacked(graph: Path) -> list[str]:
    return [node.name for node in onnx.load(graph, load_external_data=False).graph.node if "unpacked" in node.name]


Made = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Bundles of one base by precision and drafter: '' for streams with weights of their own."""
    folder = tmp_path_factory.mktemp("bundles")
    base = tiny_base(folder / "base")

    @cache
    def adapter(method: str) -> Path:
        out = folder / f"adapter-{method}"
        return draft_layer(out, base, method) if method else tiny_adapter(out, base, full=True)

    @cache
    def make(precision: str, method: str) -> Path:
        bundle = folder / f"{precision}-{method}"
        export_bundle(base, adapter(method), bundle, precision, measure=False, progress=lambda line: None)
        return bundle

    return make


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("method", ["", "eagle", "jakiro"])
def test_no_tiles_are_turned_back_in_it(made: Made, precision: str, method: str) -> None:
    bundle = made(precision, method)
    assert not unpacked(bundle / "native.onnx") and unpacked(bundle / "model.onnx")


def test_a_table_that_is_only_looked_up_lies_in_no_tiles(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_model("llama", tie_word_embeddings=False).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    export_bundle(base, None, tmp_path / "bundle", "int4", progress=lambda line: None)
    graphs = [onnx.load(tmp_path / "bundle" / name, load_external_data=False) for name in ("model.onnx", "native.onnx")]
    stored = [{one.name: tuple(one.dims) for one in graph.graph.initializer} for graph in graphs]
    assert stored[0]["model.embed_tokens.weight.int8"] == stored[1]["model.embed_tokens.weight.int8"]
    assert len(stored[0]["model.embed_tokens.weight.int8"]) == 2 and len(stored[1]["lm_head.weight.int6"]) == 6


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_gate_with_an_activation_of_standard_nodes_is_left_to_them(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, hidden_act="gelu", intermediate_size=64)
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    export_bundle(tmp_path / "base", None, tmp_path / "bundle", "int8", measure=False, progress=lambda line: None)
    tokens = list(range(20, 45))
    session = load(tmp_path / "bundle", threads=1, tree="plain", provider="native", cache_dir=tmp_path)
    found = session.runner.score(tokens)
    session.close()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens])).logits[0].numpy()
    assert np.abs(found - expected).mean() < 0.12 * np.abs(expected).mean()  # with silu: 0.25


@pytest.mark.parametrize("method", ["", "eagle", "jakiro"])
def test_a_drafters_own_weights_in_an_int8_bundle_take_4_and_6_bits(made: Made, method: str) -> None:
    graph = onnx.load(made("int8", method) / "native.onnx", load_external_data=False).graph
    (branch,) = [node for node in graph.node if node.op_type == "If" and "candidates" in node.output]
    (drafting,) = [one.g for one in branch.attribute if one.name == "then_branch"]
    maps = {node.input[1]: node.op_type for node in drafting.node if node.op_type.startswith("LinearInt")}
    layers = {node.input[1]: node.op_type for node in graph.node if re.match(r"layers\.[0-3]/LinearInt", node.name)}
    own = {kind for weight, kind in maps.items() if not weight.startswith("lm_head.")}
    assert set(layers.values()) == {"LinearInt8"} and own == {"LinearInt4", "LinearInt6"}
