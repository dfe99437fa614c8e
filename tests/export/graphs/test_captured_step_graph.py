"""The captured step graph: every node has a kernel of the CUDA provider, K/V lie where they lay, and it computes what
the dynamic graph does. Also covers export/ops/captured_scope.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from streamspec import step_graph as sg
from streamspec.captured.packed_call import CallSizes, Numbers, pack, result_size, unmoved, unpack
from streamspec.draft_tree import MASKED
from streamspec.errors import ConfigError
from streamspec.export.deployment_target import DEVICE_PRECISIONS, Target
from streamspec.export.drafters.draft_layer.layer import DraftLayerSpec
from streamspec.export.drafters.streams.eager_pass import eager
from streamspec.export.graphs.captured_step_graph import CapturedStepGraph, check_capturable
from streamspec.export.graphs.dynamic_step_graph import StepGraph
from streamspec.export.layers.decoder_spec import describe
from streamspec.export.ops.builder import WeightStore
from streamspec.export.ops.captured_scope import OPSET, CapturedScope
from streamspec.export.validate.graph_runner import GraphRunner
from streamspec.export.weights.load_weights import ModelSource
from tests.support.tiny_exports import FAMILIES, VOCAB, tiny_heads, tiny_model, tiny_streams

SIZES = CallSizes((1, 8, 16), 64)
BOOL, INT64, FLOAT, HALF, UINT8 = "bool", "int64", "float", "float16", "uint8"
ANY = {BOOL, INT64, FLOAT, HALF}
REAL, NUMBERS = {FLOAT, HALF}, {FLOAT, HALF, INT64}
# Domain and operator: first and last opset version of the kernel, and types of its first input. From "Operators
# implemented by CUDAExecutionProvider" in OperatorKernels.md of microsoft/onnxruntime; a kernel without an end there
# takes its first version alone (core/framework/kernel_registry.cc).
CUDA = {
    ("", "Add"): (14, 14, NUMBERS),
    ("", "And"): (7, 7, {BOOL}),
    ("", "ArgMax"): (13, 13, REAL),
    ("", "Cast"): (13, 18, ANY),
    ("", "Concat"): (13, 13, ANY),
    ("", "Div"): (14, 14, NUMBERS),
    ("", "Equal"): (13, 13, ANY),
    ("", "Expand"): (13, 13, ANY),
    ("", "Gather"): (13, 13, ANY),
    ("", "Gemm"): (13, 13, REAL),
    ("", "Greater"): (13, 13, NUMBERS),
    ("", "GreaterOrEqual"): (16, 16, NUMBERS),
    ("", "LayerNormalization"): (17, 17, REAL),
    ("", "Less"): (13, 13, NUMBERS),
    ("", "MatMul"): (13, 13, REAL),
    ("", "Max"): (13, 13, NUMBERS),
    ("", "Min"): (13, 13, NUMBERS),
    ("", "Mul"): (14, 14, NUMBERS),
    ("", "Not"): (1, 1, {BOOL}),
    ("", "Or"): (7, 7, {BOOL}),
    ("", "ReduceMax"): (18, 18, NUMBERS),
    ("", "ReduceSum"): (13, 13, NUMBERS),
    ("", "Relu"): (14, 14, REAL),
    ("", "Reshape"): (14, 18, ANY),
    ("", "ScatterElements"): (18, 18, ANY),
    ("", "Sigmoid"): (13, 13, REAL),
    ("", "SimplifiedLayerNormalization"): (1, 1, REAL),
    ("", "Slice"): (13, 13, ANY),
    ("", "Softmax"): (13, 13, REAL),
    ("", "Split"): (18, 18, ANY),
    ("", "Squeeze"): (13, 20, ANY),
    ("", "Sub"): (14, 14, NUMBERS),
    ("", "Tanh"): (13, 13, REAL),
    ("", "Tile"): (13, 13, NUMBERS),
    ("", "TopK"): (11, 11, NUMBERS),
    ("", "Transpose"): (13, 20, ANY),
    ("", "Unsqueeze"): (13, 20, ANY),
    ("", "Where"): (16, 16, {BOOL}),
    ("com.microsoft", "FastGelu"): (1, 1, REAL),
    ("com.microsoft", "FusedMatMul"): (1, 1, REAL),
    ("com.microsoft", "GatherBlockQuantized"): (1, 1, {UINT8}),
    ("com.microsoft", "Gelu"): (1, 1, REAL),
    ("com.microsoft", "MatMulNBits"): (1, 1, REAL),
    ("com.microsoft", "QuickGelu"): (1, 1, REAL),
    ("com.microsoft", "RotaryEmbedding"): (1, 1, REAL),
    ("com.microsoft", "SkipLayerNormalization"): (1, 1, REAL),
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): (1, 1, REAL),
}
# what the CUDA provider reads on the host: allowed as constants alone, which lie there from the beginning
ON_HOST = {"Reshape": 1, "Expand": 1, "Tile": 1, "Slice": 1, "Split": 1, "Squeeze": 1, "Unsqueeze": 1, "TopK": 1}
ON_HOST |= {"ReduceMax": 1, "ReduceSum": 1}


def written(folder: Path, family: str, kind: str, drafter: Any = None, mode: str = "merged", half: bool = False) -> Any:
    """The captured graph and, over the same data, the dynamic one."""
    from dataclasses import replace

    spec, made = describe(tiny_model(family)), DEVICE_PRECISIONS[kind]()
    spec = replace(spec, cache_dtype="float16") if half else spec
    drafter = None if drafter is None else drafter(spec)
    source, store = ModelSource(tiny_model(family), spec), WeightStore(folder / "weights")
    captured = CapturedStepGraph(spec, source, made, SIZES, drafter, 8, mode).build(store)
    return captured, StepGraph(spec, source, made, drafter, None, 8, mode).build(store)


def full(spec: Any) -> Any:
    return tiny_streams(spec, bigram=4, draft_vocab=np.arange(0, VOCAB, 3))


ATTENDING = [family for family in FAMILIES if not any(describe(tiny_model(family)).taps)]
DRAFTERS: dict[str, Any] = {
    "none": None,
    "heads": tiny_heads,
    "own heads": lambda spec: tiny_heads(spec, own=True),
    "same positions": lambda spec: tiny_streams(spec, shifted=False, root=False),
}


def check_kernels(model: onnx.ModelProto) -> set[tuple[str, str]]:
    """Fails for a node that the CUDA provider would leave to the CPU; returns the kinds of operators."""
    constants = {proto.name for proto in model.graph.initializer}
    types = dtypes(model)
    for node in model.graph.node:
        first, last, allowed = CUDA[node.domain, node.op_type]
        version = 1
        if not node.domain and node.op_type != "SimplifiedLayerNormalization":
            version = onnx.defs.get_schema(node.op_type, OPSET).since_version
        assert first <= version <= last, f"{node.op_type} {version}"
        assert types[node.input[0]] in allowed, f"{node.op_type} of {types[node.input[0]]}"
        if node.op_type in ON_HOST:
            for name in node.input[ON_HOST[node.op_type] :]:
                assert name in constants, f"{node.name} reads {name} on the host"
    return {(node.domain, node.op_type) for node in model.graph.node}


def dtypes(model: onnx.ModelProto) -> dict[str, str]:
    """The type of every value, as a session knows it that gives them all out."""
    named = {proto.name: onnx.TensorProto.DataType.Name(proto.data_type).lower() for proto in model.graph.initializer}
    named |= {
        value.name: onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()
        for value in model.graph.input
    }
    changed = {
        "Cast",
        "ArgMax",
        "Equal",
        "Greater",
        "GreaterOrEqual",
        "Less",
        "And",
        "Or",
        "Not",
        "TopK",
        "Where",
        "GatherBlockQuantized",
    }
    for node in model.graph.node:
        kind = named[node.input[0]]
        if node.op_type == "Cast":
            kind = onnx.TensorProto.DataType.Name(node.attribute[0].i).lower()
        elif node.op_type in ("ArgMax",):
            kind = INT64
        elif node.op_type == "Where":
            kind = named[node.input[1]]
        elif node.op_type == "GatherBlockQuantized":
            kind = named[node.input[2]]
        elif node.op_type in changed and node.op_type != "TopK":
            kind = BOOL
        named |= dict.fromkeys(node.output, kind)
        if node.op_type == "TopK":
            named[node.output[1]] = INT64
    return named


def test_every_node_has_a_kernel_on_the_device(tmp_path: Path) -> None:
    seen = set()
    for family in ATTENDING:
        for kind in DEVICE_PRECISIONS if family == "llama" else ["fp16"]:
            captured, _ = written(tmp_path, family, kind, full, "delta" if kind == "fp32" else "merged")
            seen |= check_kernels(captured)
            assert captured.opset_import[0].version == OPSET
    for drafter in DRAFTERS.values():
        seen |= check_kernels(written(tmp_path, "llama", "fp16", drafter, half=True)[0])
    assert {kind for _, kind in seen} >= {"ScatterElements", "MatMulNBits", "GatherBlockQuantized", "FusedMatMul"}
    assert not {kind for _, kind in seen} & {"If", "Loop", "Scan", "Shape", "NonZero", "ScatterND", "Range"}


def test_a_shape_that_only_the_call_knows_is_refused_at_export() -> None:
    ids = onnx.helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["n", 4])
    g = CapturedScope(WeightStore(), [ids])
    assert g.op("Shape", "ids", start=1) == g.ints(4)
    with pytest.raises(AssertionError, match="not known before the call"):
        g.op("Shape", "ids")


class Held:
    """A captured graph over buffers that are bound once, as a device has them."""

    def __init__(self, model: onnx.ModelProto, folder: Path, features: sg.GraphFeatures) -> None:
        onnx.save(model, folder / "captured.onnx")
        self.session = ort.InferenceSession(str(folder / "captured.onnx"), providers=["CPUExecutionProvider"])
        self.features, value = features, ort.OrtValue.ortvalue_from_numpy
        self.cache = {}
        for given in self.session.get_inputs()[1:]:
            dtype = np.float16 if given.type == "tensor(float16)" else np.float32
            self.cache[given.name] = value(np.zeros(given.shape, dtype))

    def run(self, tokens: Any, offsets: Any, mask: Any, parents: Any, past: int, rows: int, sources: Any = None) -> Any:
        value = ort.OrtValue.ortvalue_from_numpy
        call = np.zeros((rows, SIZES.width(rows)), np.int64)
        sources = unmoved(SIZES, past) if sources is None else sources
        positions = [past + offset for offset in offsets]
        pack(call, SIZES, Numbers(past), (tokens, positions, parents), mask == 0, sources)
        result = value(np.zeros(result_size(rows, self.features), np.float32))
        raw = value(np.zeros((rows, self.features.vocab), np.float32))
        binding = self.session.io_binding()
        held = value(call)
        binding.bind_ortvalue_input(sg.CALL, held)
        binding.bind_ortvalue_output(sg.RESULT, result)
        binding.bind_ortvalue_output(sg.RAW_LOGITS, raw)
        for name, bound in self.cache.items():
            binding.bind_ortvalue_input(name, bound)
            binding.bind_ortvalue_output(sg.renamed(name, sg.PAST, sg.PRESENT), bound)
        self.session.run_with_iobinding(binding)
        return unpack(result.numpy(), rows, self.features), raw.numpy()[: len(tokens)].copy()


TREE = np.where(
    np.array([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]), 0, MASKED
)


def features_of(model: onnx.ModelProto, family: str, drafter: Any) -> sg.GraphFeatures:
    from streamspec.captured.packed_call import captured_features
    from streamspec.export.drafters.draft_pass import graph_features

    spec = describe(tiny_model(family))
    return captured_features(graph_features(spec, drafter(spec), 8), SIZES)


@pytest.mark.parametrize("family", ATTENDING)
def test_it_computes_what_the_dynamic_graph_does(family: str, tmp_path: Path) -> None:
    captured, dynamic = written(tmp_path, family, "fp32", full)
    onnx.save(dynamic, tmp_path / "model.onnx")
    plain = GraphRunner(ort.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"]), 80)
    held = Held(captured, tmp_path, features_of(captured, family, full))
    random = np.random.default_rng(0)
    prompt, nodes = random.integers(0, VOCAB, 11), random.integers(0, VOCAB, 5)
    plain.prefill(prompt)
    causal = np.where(np.tri(11, dtype=bool), 0, MASKED)
    held.run(prompt, range(11), causal, [0] * 11, 0, 16)
    parents, offsets = [0, 0, 0, 1, 2], [0, 1, 1, 2, 2]
    out = plain.step(nodes, offsets, TREE, parents=parents, streams=tiny_streams(describe(tiny_model(family))).gamma)
    (choices, node, candidates, scores, pairs), raw = held.run(nodes, offsets, TREE, parents, 11, 8)
    np.testing.assert_allclose(raw, out["logits"], rtol=1e-3, atol=1e-3)
    assert choices[:5].tolist() == out[sg.CHOICES].tolist() and node == out[sg.ACCEPTED_NODE]
    np.testing.assert_array_equal(candidates, out[sg.CANDIDATES])
    np.testing.assert_allclose(scores, out[sg.CANDIDATE_LOGITS], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(pairs, out[sg.PAIR_LOGITS], rtol=1e-3, atol=1e-3)
    # nodes 0, 2 and 4 were accepted: the next call moves 2 and 4, then computes the row after them
    sources = unmoved(SIZES, 14)
    sources[[SIZES.margin - 2, SIZES.margin - 1]] = [SIZES.margin + 11 + 2, SIZES.margin + 11 + 4]
    after = held.run([7], [0], np.zeros((1, 1)), [0], 14, 1, sources)[1]
    plain.prefill(nodes[[0, 2, 4]])
    np.testing.assert_allclose(after, plain.step([7], [0], np.zeros((1, 1)))["logits"], rtol=1e-3, atol=1e-3)


def test_only_the_slots_of_a_call_are_written(tmp_path: Path) -> None:
    captured, _ = written(tmp_path, "llama", "fp32", full)
    held = Held(captured, tmp_path, features_of(captured, "llama", full))
    addresses = [value.data_ptr() for value in held.cache.values()]
    marks = {name: np.random.default_rng(1).standard_normal(value.shape()) for name, value in held.cache.items()}
    for name, value in held.cache.items():
        value.update_inplace(marks[name].astype(np.float32))
    held.run([3, 4], [0, 1], TREE[:2, :2], [0, 0], 20, 8)
    assert [value.data_ptr() for value in held.cache.values()] == addresses
    first = SIZES.margin + 20
    for name, value in held.cache.items():
        changed = np.flatnonzero((value.numpy() != marks[name].astype(np.float32)).any(axis=(0, 1, 3)))
        assert changed.tolist() == [*range(first, first + 8)]


def test_what_cannot_be_captured_is_refused_by_name() -> None:
    llama = describe(tiny_model("llama"))
    check_capturable(llama, tiny_streams(llama))
    with pytest.raises(ConfigError, match="short convolutions in a captured graph"):
        check_capturable(describe(tiny_model("lfm2")), None)
    flags = dict.fromkeys(("contrast", "parallel", "two_lists", "prefix_attention", "own_heads"), False)
    layered = DraftLayerSpec(gamma=2, taps=(1,), active=1, tensors={}, **flags)
    with pytest.raises(ConfigError, match="a drafter with layers of its own in a captured graph"):
        check_capturable(llama, layered)
    with pytest.raises(ConfigError, match="eager streams in a captured graph"):
        check_capturable(llama, eager(tiny_streams(llama, root=False), llama))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "cpu", "capture": True}, "--capture for cpu"),
        ({"name": "cuda", "row_counts": (1, 8)}, "rows for a graph whose shapes are not fixed"),
        ({"name": "cuda", "context": 100}, "a context for a graph whose shapes are not fixed"),
        ({"name": "cuda", "capture": True, "rows": 8}, "rows of a graph of another kind"),
        ({"name": "cpu", "static": True, "row_counts": (1, 8)}, "rows of a graph of another kind"),
        ({"name": "cuda", "capture": True, "row_counts": (8, 16)}, "captured calls of 8, 16 rows"),
        ({"name": "cuda", "capture": True, "row_counts": (1,)}, "captured calls of 1 rows"),
        ({"name": "cuda", "capture": True, "row_counts": (1, 16, 8)}, "captured calls of 1, 16, 8 rows"),
        ({"name": "cuda", "capture": True, "row_counts": (1, 65)}, "captured calls of 1, 65 rows"),
    ],
)
def test_a_target_says_what_is_wrong_with_it(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Target(**options)
