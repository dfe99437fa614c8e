"""A graph that runs a few layers at a time computes what it computes as a whole, and its faults are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.numpy_helper import from_array

from streamspec.errors import StreamspecError
from streamspec.export.graphs.dynamic_step_graph import StepGraph
from streamspec.export.native.file_weights import CPU_PRECISIONS
from streamspec.export.ops.builder import WeightStore
from streamspec.export.quantization.precisions import PRECISIONS
from streamspec.export.runners import layerwise
from streamspec.export.runners.graph_runner import open_session
from streamspec.export.runners.layerwise import LayerwiseGraph
from streamspec.export.validate.parity import check_parity, expect
from streamspec.export.weights.load_weights import ModelSource
from streamspec.export.weights.model_spec import describe
from tests.support.tiny_exports import VOCAB, tiny_model

TOKENS = np.random.default_rng(0).integers(0, VOCAB, 40)
WINDOW = {"sliding_window": 150, "max_position_embeddings": 512}


@pytest.fixture(autouse=True)
def a_part_for_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layerwise, "PART", 0)


def written(folder: Path, family: str, precision: str, **changes: Any) -> tuple[Path, Any]:
    """A graph in its file, and what the model gives."""
    model = tiny_model(family, **changes)
    spec, kind = describe(model), (PRECISIONS | CPU_PRECISIONS)[precision]()
    graph = StepGraph(spec, ModelSource(model, spec), kind).build(WeightStore(folder / "model.onnx.data"))
    onnx.save(graph, folder / "model.onnx")
    return folder / "model.onnx", expect(model, None, TOKENS, spec=spec)


@pytest.mark.parametrize(
    ("family", "precision", "changes"),
    [("llama", "int8", {}), ("llama", "int4", {}), ("gemma3_text", "fp32", WINDOW), ("gemma2", "int4", WINDOW)],
    ids=str,
)
def test_it_computes_what_the_whole_graph_does(
    family: str, precision: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    file, expected = written(tmp_path, family, precision, **changes)
    graph = LayerwiseGraph(file)
    assert len(graph.parts) == 2 + sum(part.nodes[0].name.startswith("layers.") for part in graph.parts) > 3
    whole = check_parity(open_session(file, threads=1), expected, precision)
    assert check_parity(graph, expected, precision) == whole and ("long" in whole) == bool(changes)


def test_bytes_that_onnxruntime_rewrites_lie_in_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, expected = written(tmp_path, "llama", "int8")
    monkeypatch.setattr(layerwise, "products_saturate", lambda: True)
    within = list[str]()
    monkeypatch.setattr(layerwise, "from_array", lambda value, name: within.append(name) or from_array(value, name))
    assert check_parity(LayerwiseGraph(file), expected, "int8") == check_parity(open_session(file, 1), expected, "int8")
    assert within


def test_constants_of_a_part_are_computed_for_it_alone(tmp_path: Path) -> None:
    graph = LayerwiseGraph(written(tmp_path, "llama", "int4")[0])
    turned = [{name for node in part.constant for name in node.output} for part in graph.parts]
    assert all(turned) and not turned[1] & turned[2]


def test_a_fault_of_one_layer_is_found(tmp_path: Path) -> None:
    file, expected = written(tmp_path, "llama", "fp32")
    model = onnx.load(file, load_external_data=False)
    (norm,) = [node for node in model.graph.node if node.name == "layers.1/SkipSimplifiedLayerNormalization"]
    (epsilon,) = [attribute for attribute in norm.attribute if attribute.name == "epsilon"]
    epsilon.f = 1.0
    onnx.save(model, file)
    with pytest.raises(StreamspecError, match="plain logits differ from the reference"):
        check_parity(LayerwiseGraph(file), expected, "fp32")
