"""The sampler of a captured graph against `choose.onnx`: the same tokens, but where it says that it is unsure."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

from streamspec import step_graph as sg
from streamspec.captured.packed_call import DRAW_COLUMNS, pack_draw, unsure
from streamspec.draft_tree import MASKED
from streamspec.export.graphs import captured_sampler
from streamspec.export.graphs.captured_sampler import CapturedSampler
from streamspec.export.layers.sampling import choice_graph
from streamspec.export.ops.builder import WeightStore, finish, tensor
from streamspec.export.ops.captured_scope import OPSET, CapturedScope
from streamspec.runtime import Sampling
from tests.export.graphs.test_captured_step_graph import check_kernels

ROWS, VOCAB, RANKED = 12, 3000, 64
RANDOM = np.random.default_rng(0)
LOGITS = (RANDOM.standard_normal((ROWS, VOCAB)) * RANDOM.uniform(1, 6, (ROWS, 1))).astype(np.float32)
TOKENS = RANDOM.integers(0, VOCAB, ROWS)
MASK = np.where(np.tri(ROWS), 0, MASKED).astype(np.float32)
SEEN = RANDOM.random(VOCAB) < 0.2
UNIFORMS = RANDOM.random((40, ROWS)).astype(np.float32)
SURE = [
    Sampling(temperature=1.0, seed=0),
    Sampling(temperature=0.5, min_p=0.05, seed=0),
    Sampling(temperature=1.3, top_k=RANKED, seed=0),
    Sampling(temperature=1.0, top_k=1, seed=0),
    Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.3, seed=0),
    Sampling(temperature=3.0, top_p=0.99, min_p=0.5, seed=0),  # min-p drops more than is sorted
    Sampling(repetition_penalty=1.7),
    Sampling(repetition_penalty=0.6, top_k=3),
]


def opened(model: onnx.ModelProto) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options)


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    """Of `ROWS` rows and `RANKED` sorted tokens: `choice` and `said` after them."""
    shapes: dict[str, tuple[int, list[int | str]]] = {
        sg.DRAW: (TensorProto.FLOAT, ["d", DRAW_COLUMNS]),
        sg.SEEN: (TensorProto.BOOL, [VOCAB]),
        "raw": (TensorProto.FLOAT, ["n", VOCAB]),
        sg.TREE_MASK: (TensorProto.FLOAT, ["n", "n"]),
        **dict.fromkeys(("tokens", "greedy", "numbers"), (TensorProto.INT64, ["n"])),
    }
    inputs = [tensor(name, kind, shape) for name, (kind, shape) in shapes.items()]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(captured_sampler, "RANKED", RANKED)
        g = CapturedScope(WeightStore(), inputs)
        given = CapturedSampler(g, VOCAB).add("raw", "tokens", "greedy", "numbers")
    outputs = [tensor(name, TensorProto.INT64, ["n"]) for name in given]
    return finish(g, inputs, outputs, OPSET)


@pytest.fixture(scope="module")
def graph(model: onnx.ModelProto) -> Any:
    return opened(model)


@pytest.fixture(scope="module")
def host() -> Any:
    return opened(choice_graph(VOCAB))


def by_device(graph: Any, sampling: Sampling, uniforms: np.ndarray, sampled: bool = True) -> list[np.ndarray]:
    draw = np.zeros((1 + ROWS * sampled, DRAW_COLUMNS), np.float32)
    if sampled:
        pack_draw(draw, [*sampling.scalars().values()], np.arange(ROWS), uniforms)
    fed = {"raw": LOGITS, sg.TREE_MASK: MASK, "tokens": TOKENS, sg.DRAW: draw, sg.SEEN: SEEN}
    fed |= {"greedy": LOGITS.argmax(axis=1), "numbers": np.arange(ROWS)}
    return list(graph.run(None, fed))


def by_host(host: Any, sampling: Sampling, uniforms: np.ndarray) -> np.ndarray:
    fed = {sg.RAW_LOGITS: LOGITS, sg.INPUT_IDS: TOKENS[None], sg.TREE_MASK: MASK, sg.UNIFORMS: uniforms, sg.SEEN: SEEN}
    return np.asarray(host.run(None, fed | sampling.scalars())[0])


@pytest.mark.parametrize("sampling", SURE, ids=str)
def test_it_draws_what_the_host_draws(sampling: Sampling, graph: Any, host: Any) -> None:
    for uniforms in UNIFORMS:
        choice, said = by_device(graph, sampling, uniforms)
        np.testing.assert_array_equal(choice, by_host(host, sampling, uniforms))
        np.testing.assert_array_equal(said, choice)


def test_a_threshold_beyond_what_is_sorted_is_said(graph: Any, host: Any) -> None:
    flat = Sampling(temperature=2.0, top_p=0.4, seed=0)
    weights = np.exp((LOGITS - LOGITS.max(axis=1, keepdims=True)).astype(float) / 2)
    held = -np.sort(-weights)[:, :RANKED].sum(axis=1) / weights.sum(axis=1)
    assert 0 < (held < 0.4).sum() < ROWS
    for uniforms in UNIFORMS:
        choice, said = by_device(graph, flat, uniforms)
        tokens, coarse = unsure(said)
        np.testing.assert_array_equal(coarse, held < 0.4)
        np.testing.assert_array_equal(tokens, choice)
        np.testing.assert_array_equal(tokens[~coarse], by_host(host, flat, uniforms)[~coarse])
    for more in (Sampling(temperature=1.0, top_k=RANKED + 1, seed=0), Sampling(temperature=1.0, top_k=2**31, seed=0)):
        assert unsure(by_device(graph, more, UNIFORMS[0])[1])[1].all()
    assert not unsure(by_device(graph, Sampling(top_k=RANKED + 1, repetition_penalty=1.2), UNIFORMS[0])[1])[1].any()


def test_a_greedy_call_samples_no_row(graph: Any, model: onnx.ModelProto) -> None:
    """All that follows the rows to sample is of no rows then, so there is no kernel to run."""
    for choice in by_device(graph, SURE[0], UNIFORMS[0], sampled=False):
        np.testing.assert_array_equal(choice, LOGITS.argmax(axis=1))
    every = onnx.ModelProto()
    every.CopyFrom(model)
    names = [node.output[0] for node in model.graph.node]
    every.graph.ClearField("output")
    every.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    large = {
        name: value.size
        for name, value in zip(names, by_device(opened(every), SURE[0], UNIFORMS[0], sampled=False), strict=True)
        if value.size > ROWS * ROWS
    }
    assert not large


def test_every_node_has_a_kernel_on_the_device(model: onnx.ModelProto) -> None:
    assert {"TopK", "CumSum", "Exp"} <= {kind for _, kind in check_kernels(model)}
