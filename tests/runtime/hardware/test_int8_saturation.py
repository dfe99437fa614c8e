from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from streamspec.export.runners.graph_runner import open_session
from streamspec.runtime import load
from streamspec.runtime.hardware import int8_saturation as saturation


def test_the_embedded_graph_is_the_product_it_claims_to_be() -> None:
    graph = onnx.load_model_from_string(saturation._GRAPH)
    onnx.checker.check_model(graph)
    (node,) = graph.graph.node
    assert (node.op_type, list(node.input), graph.opset_import[0].version, graph.ir_version) == (
        "MatMulInteger",
        ["a", "b"],
        21,
        10,
    )
    value = helper.make_tensor_value_info
    assert list(graph.graph.input) == [value("a", TensorProto.UINT8, [1, 64]), value("b", TensorProto.INT8, [64, 16])]


@pytest.mark.parametrize(("off", "expected"), [(0, False), (1, True)])
def test_a_wrong_sum_is_noticed(monkeypatch: pytest.MonkeyPatch, off: int, expected: bool) -> None:
    class Session:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def run(self, _: None, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
            return [feed["a"].astype(np.int32) @ feed["b"].astype(np.int32) - off]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    saturation.products_saturate.cache_clear()
    assert saturation.products_saturate() is expected
    saturation.products_saturate.cache_clear()


@pytest.mark.parametrize(
    "opened",
    [lambda bundle: load(bundle, threads=1, tree="plain"), lambda bundle: open_session(bundle / "model.onnx")],
    ids=["runtime", "export"],
)
@pytest.mark.parametrize("saturates", [True, False])
def test_exact_products_are_asked_for_where_needed(
    bundles: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, saturates: bool, opened: Callable[[Path], Any]
) -> None:
    asked = {}
    add = onnxruntime.SessionOptions.add_session_config_entry

    def spy(self: Any, key: str, value: str) -> None:
        asked[key] = value
        add(self, key, value)

    monkeypatch.setattr(saturation, "products_saturate", lambda: saturates)
    monkeypatch.setattr(onnxruntime.SessionOptions, "add_session_config_entry", spy)
    opened(bundles("int8"))
    assert asked["session.x64quantprecision"] == ("1" if saturates else "0")
