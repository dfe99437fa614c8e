"""`native.onnx` reads tiles as they lie: what turns them back belongs to the graph of standard operators alone."""

from __future__ import annotations

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
