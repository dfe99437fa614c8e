"""`native.onnx` reads tiles as they lie: what turns them back belongs to the graph of standard operators alone."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest

from streamspec.export import export_bundle
from tests.support.tiny_bundles import tiny_bundle
from tests.support.tiny_models import tiny_model, tiny_tokenizer


def unpacked(graph: Path) -> list[str]:
    return [node.name for node in onnx.load(graph, load_external_data=False).graph.node if "unpacked" in node.name]


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("method", ["", "eagle", "jakiro"])
def test_no_tiles_are_turned_back_in_it(tmp_path: Path, precision: str, method: str) -> None:
    bundle = tiny_bundle(tmp_path, precision, method=method)
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


@pytest.mark.parametrize("method", ["", "eagle", "jakiro"])
def test_a_drafters_own_weights_in_an_int8_bundle_take_4_and_6_bits(tmp_path: Path, method: str) -> None:
    bundle = tiny_bundle(tmp_path, "int8", method=method, full=not method)
    graph = onnx.load(bundle / "native.onnx", load_external_data=False).graph
    (branch,) = [node for node in graph.node if node.op_type == "If" and "candidates" in node.output]
    (drafting,) = [one.g for one in branch.attribute if one.name == "then_branch"]
    maps = {node.input[1]: node.op_type for node in drafting.node if node.op_type.startswith("LinearInt")}
    layers = {node.input[1]: node.op_type for node in graph.node if re.match(r"layers\.[0-3]/LinearInt", node.name)}
    own = {kind for weight, kind in maps.items() if not weight.startswith("lm_head.")}
    assert set(layers.values()) == {"LinearInt8"} and own == {"LinearInt4", "LinearInt6"}
