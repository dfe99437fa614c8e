"""Graphs of every kind against the table of their interface, as the manifest of their bundle describes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from streamspec.bundle.cache_section import COMPACT
from streamspec.bundle.files import read_manifest
from streamspec.bundle.manifest import CHOICE, MODEL
from streamspec.export import Target, export_swappable
from streamspec.export.weights.model_spec import describe
from streamspec.step_graph import (
    COMPACTION,
    DYNAMIC,
    SAMPLING,
    STATIC,
    GraphFeatures,
    GraphTensor,
    adapter_inputs,
    inputs,
    is_cache,
    outputs,
)
from tests.support.tiny_bundles import tiny_bundle
from tests.support.tiny_exports import save_adapter, save_base, tiny_model, tiny_streams

Form = tuple[str, str, tuple[int | str, ...]]


def declared(values: list[onnx.ValueInfoProto]) -> list[Form]:
    forms = []
    for value in values:
        kind = value.type.tensor_type
        dims = tuple(dim.dim_param or dim.dim_value for dim in kind.shape.dim)
        forms.append((value.name, str(np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type))), dims))
    return forms


def expected(rows: list[GraphTensor]) -> list[Form]:
    return [(row.name, row.dtype, row.dims) for row in rows]


def check(file: Path, kind: str, features: GraphFeatures) -> None:
    graph = onnx.load(file, load_external_data=False).graph
    assert declared(graph.input) == expected(inputs(kind, features))
    assert declared(graph.output) == expected(outputs(kind, features))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"streams": False},
        {"full": True, "precision": "int8"},
        {"method": "jakiro"},
        {"full": True, "embeddings": True},
        {"full": True, "target": Target("cuda")},
        {"method": "jakiro", "target": Target("cuda")},
        {"full": True, "target": Target("openvino", rows=10, context=64)},
        {"streams": False, "target": Target("openvino", rows=10, context=64)},
    ],
    ids=str,
)
def test_a_bundles_graphs_are_as_the_table_says(options: dict[str, object], tmp_path: Path) -> None:
    bundle = tiny_bundle(tmp_path, **options)  # type: ignore[arg-type]
    manifest = read_manifest(bundle)
    features = GraphFeatures.of_manifest(manifest)
    check(bundle / MODEL, STATIC if manifest.static else DYNAMIC, features)
    for name, kind in ((CHOICE, SAMPLING), (COMPACT, COMPACTION)):
        if name in manifest.files:
            check(bundle / name, kind, features)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_swappable_graph_has_the_tables_inputs_besides_loras(precision: str, tmp_path: Path) -> None:
    base, streams = save_base(tmp_path / "base"), tiny_streams(describe(tiny_model()), pruning=4)
    adapter = save_adapter(tmp_path / "adapter", base, streams)
    export_swappable(base.path, [adapter], tmp_path / "bundle", precision, progress=lambda line: None)
    features = GraphFeatures.of_manifest(read_manifest(tmp_path / "bundle"))
    graph = onnx.load(tmp_path / "bundle" / MODEL, load_external_data=False).graph
    rows = inputs(DYNAMIC, features, adapter_inputs(features))
    known = {row.name for row in rows}
    found = declared(graph.input)
    assert [form for form in found if form[0] in known] == expected(rows)
    assert all(".task" in name or ".streams" in name for name, *_ in found if name not in known)
    assert is_cache(found[-1][0]) and declared(graph.output) == expected(outputs(DYNAMIC, features))
