"""Bundles whose hashes are right and whose content is not: loading ends in one line, never in a traceback or a
crash.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from streamspec.errors import BundleError
from streamspec.runtime import Sampling, load
from tests.support.forging import edit, forge, refused, replace_graph


@pytest.mark.parametrize("content", [b"", b"not a graph", b"\x08\x0a" * 500])
def test_a_model_file_that_is_no_graph(bundle: Path, content: bytes) -> None:
    forge(bundle, "model.onnx", content)
    refused(bundle, r"cannot load model\.onnx|without")


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"model": {"type": "BPE"}}', b"\xff\xff", b"[" * 100_000])
def test_a_tokenizer_file_that_is_no_tokenizer(bundle: Path, content: bytes) -> None:
    forge(bundle, "tokenizer.json", content)
    refused(bundle, r"tokenizer\.json")


def test_weights_outside_the_folder_are_not_read(bundle: Path) -> None:
    graph = (bundle / "model.onnx").read_bytes()
    assert graph.count(b"model.onnx.data") > 0
    shutil.copy(bundle / "model.onnx.data", bundle.parent / "l.onnx.data.x")
    forge(bundle, "model.onnx", graph.replace(b"model.onnx.data", b"../l.onnx.dat.x"))
    shutil.copy(bundle / "model.onnx.data", bundle.parent / "l.onnx.dat.x")
    refused(bundle, "cannot load")


def test_truncated_weights(bundle: Path) -> None:
    forge(bundle, "model.onnx.data", (bundle / "model.onnx.data").read_bytes()[:4096])
    refused(bundle, "cannot load")


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("layers", 3, r"a graph that wants past_key_values\.3\.key"),
        ("layers", 5, r"a graph without past_key_values\.4\.key"),
        ("kv_heads", 1, r"a graph with past_key_values\.0\.key of shape .* as the manifest says"),
        ("head_dim", 16, r"a graph with past_key_values\.0\.key of shape .* as the manifest says"),
    ],
)
def test_sizes_that_are_not_the_graphs(bundle: Path, field: str, value: int, found: str) -> None:
    edit(bundle, lambda m: m["model"].__setitem__(field, value))
    refused(bundle, found)


@pytest.mark.parametrize("ns", [1, 3, 4])
def test_stream_layers_that_are_not_the_graphs(bundle: Path, ns: int) -> None:
    """Rows that the early exit drops would be dropped in other layers of the cache than the graph drops them in."""
    edit(bundle, lambda m: m["streams"].__setitem__("ns", ns))
    refused(
        bundle, f"pruned at the early exit with keys and values .* from layer {4 - ns} on as streams.ns and exit_layer"
    )


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_an_exit_layer_that_is_not_the_graphs(bundle: Path, layer: int) -> None:
    edit(bundle, lambda m: m["streams"].update(exit_layer=layer))
    found = "from layer 1 on as streams.ns and exit_layer" if layer == 1 else "exit_layer is 3"
    if layer != 2:
        refused(bundle, found)
    else:  # where it is by default
        load(bundle, threads=1, tree="plain")


@pytest.mark.parametrize("context", [64, 4096])
def test_a_context_that_is_not_the_graphs(bundle: Path, context: int) -> None:
    """The graph itself holds it, whatever its metadata say."""
    edit(bundle, lambda m: m["model"].__setitem__("context_length", context))
    refused(bundle, f"a graph for a context of 128 tokens; expected {context} as the manifest says")


def of_before(bundle: Path) -> onnx.ModelProto:
    """The graph as format 4 had it: nothing bounds its positions, nothing is stated."""
    graph = onnx.load(bundle / "model.onnx", load_external_data=False)
    bound = next(node for node in graph.graph.node if node.input[:1] == ["position_ids"])
    reader = next(node for node in graph.graph.node if node.input[:1] == bound.output[:])
    reader.input[0] = "position_ids"
    graph.graph.node.remove(bound)
    del graph.metadata_props[:]
    return graph


@pytest.mark.parametrize("stated", ["", "128", "64"])
def test_a_bundle_of_format_4_loads_unless_its_graph_states_another_context(bundle: Path, stated: str) -> None:
    graph = of_before(bundle)
    if stated:
        helper.set_model_props(graph, {"context_length": stated})
    replace_graph(bundle, graph, format_version=4)
    if stated == "64":
        refused(bundle, "a graph for a context of 64 tokens; expected 128 as the manifest says")
    else:
        load(bundle, threads=1, tree="plain").close()


def test_a_graph_of_format_4_is_none_of_format_5(bundle: Path) -> None:
    replace_graph(bundle, of_before(bundle))
    refused(bundle, r"model\.onnx: a graph without a bound of its positions; expected 128 as the manifest says")


def own_name(graph: onnx.GraphProto, bound: onnx.NodeProto) -> None:
    bound.input[1] = "position_ids"
    graph.initializer.append(numpy_helper.from_array(np.asarray(127), "position_ids"))


def swapped(graph: onnx.GraphProto, bound: onnx.NodeProto) -> None:
    bound.input[:] = [bound.input[1], bound.input[0]]


def in_an_attribute(graph: onnx.GraphProto, bound: onnx.NodeProto) -> None:
    """The number that the graph reads is another than the one of that name in an attribute."""
    value = numpy_helper.from_array(np.asarray(127), "elsewhere")
    graph.node.insert(0, helper.make_node("Constant", [], ["unused"], value=value))
    graph.node.insert(0, helper.make_node("Constant", [], ["elsewhere"], value_int=4095))
    bound.input[1] = "elsewhere"


def stated_twice(graph: onnx.GraphProto, bound: onnx.NodeProto) -> None:
    graph.initializer.append(numpy_helper.from_array(np.asarray(127), bound.input[1]))


@pytest.mark.parametrize("fake", [own_name, swapped, in_an_attribute, stated_twice])
def test_a_bound_of_positions_that_is_none(
    fake: Callable[[onnx.GraphProto, onnx.NodeProto], None], bundle: Path
) -> None:
    graph = onnx.load(bundle / "model.onnx", load_external_data=False)
    bound = next(node for node in graph.graph.node if node.input[:1] == ["position_ids"])
    fake(graph.graph, bound)
    replace_graph(bundle, graph)
    refused(bundle, r"model\.onnx: a graph for a context of 0 tokens; expected 128 as the manifest says")


def test_streams_the_graph_does_not_have(bundle: Path, tmp_path: Path) -> None:
    from tests.support.tiny_bundles import tiny_bundle

    plain = tiny_bundle(tmp_path / "plain", streams=False)
    streams = json.loads((bundle / "manifest.json").read_text())
    edit(plain, lambda m: m.update({k: streams[k] for k in ("method", "recipe", "drafter", "streams", "trees")}))
    refused(plain, "graph without")


def test_numbers_of_another_model(bundle: Path) -> None:
    edit(bundle, lambda m: m["probe"]["top_logits"].__setitem__(3, 99.0))
    refused(bundle, "this machine computes a prompt")


def test_more_streams_than_the_graph_has(bundle: Path) -> None:
    edit(bundle, lambda m: m["streams"].__setitem__("gamma", 5))
    with pytest.raises(BundleError, match="the graph failed"):
        load(bundle, threads=1, tree=8, cache_dir=bundle / "c").generate("abc")


def test_a_bigram_the_graph_does_not_have(bundle: Path) -> None:
    edit(bundle, lambda m: m["streams"].__setitem__("bigram", not m["streams"]["bigram"]))
    refused(bundle, "graph without pair_logits")


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from streamspec.export import Target
    from tests.support.tiny_bundles import tiny_bundle

    return tiny_bundle(tmp_path_factory.mktemp("fixed"), target=Target(static=True, rows=8))


def test_a_static_bundle_with_another_bundles_graph(fixed: Path, original: Path, tmp_path: Path) -> None:
    for kept, other, found in ((fixed, original, "a graph without new"), (original, fixed, "a graph without")):
        bundle = tmp_path / kept.parent.name
        shutil.copytree(kept, bundle)
        forge(bundle, "model.onnx.data", (other / "model.onnx.data").read_bytes())
        forge(bundle, "model.onnx", (other / "model.onnx").read_bytes())
        refused(bundle, found)


@pytest.mark.parametrize("content", [b"", b"not a graph"])
def test_a_choice_that_is_no_graph(content: bytes, fixed: Path, tmp_path: Path) -> None:
    shutil.copytree(fixed, tmp_path / "bundle")
    forge(tmp_path / "bundle", "choose.onnx", content)
    refused(tmp_path / "bundle", r"cannot load choose\.onnx")


def test_fixed_shapes_that_the_graph_does_not_have(fixed: Path, tmp_path: Path) -> None:
    shutil.copytree(fixed, tmp_path / "bundle")
    edit(tmp_path / "bundle", lambda manifest: manifest["static"].update(rows=9))
    refused(tmp_path / "bundle", r"input_ids of shape \[1, 8\].*\[1, 9\] as the manifest says")
    edit(
        tmp_path / "bundle",
        lambda manifest: (manifest["static"].update(rows=8, slots=64), manifest["model"].update(context_length=64)),
    )
    refused(tmp_path / "bundle", "past_key_values.0.key of shape")


@pytest.mark.parametrize("answer", [[[1]], [1.5], [1, 2, 3]])
def test_a_graph_beside_a_static_one_that_chooses_no_tokens(answer: list[Any], fixed: Path, tmp_path: Path) -> None:
    """It runs where tokens are sampled, behind the probe."""
    bundle = Path(shutil.copytree(fixed, tmp_path / "bundle"))
    graph = onnx.load(bundle / "choose.onnx")
    value = numpy_helper.from_array(np.asarray(answer), "choices")
    del graph.graph.node[:]
    graph.graph.node.append(helper.make_node("Constant", [], ["choices"], value=value))
    graph.graph.output[0].CopyFrom(helper.make_tensor_value_info("choices", value.data_type, list(value.dims)))
    forge(bundle, "choose.onnx", graph.SerializeToString())
    session = load(bundle, threads=1, tree="plain")
    with pytest.raises(BundleError, match="choose.onnx that chose"):
        session.generate("hello", max_new_tokens=4, sampling=Sampling(temperature=0.9, seed=1))
