"""The captured step graph: every node has a kernel of the CUDA provider, K/V lie where they lay, and it computes what
the dynamic graph does. Also covers export/ops/captured_scope.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from streamspec import step_graph as sg
from streamspec.adapters.base_models.resolve import Base
from streamspec.bundle.manifest import Manifest
from streamspec.draft_tree import MASKED
from streamspec.errors import ConfigError, StreamspecError
from streamspec.export import export_bundle
from streamspec.export.deployment_target import DEVICES, Target
from streamspec.export.drafters.streams.eager_pass import eager
from streamspec.export.graphs.captured_step_graph import CapturedStepGraph, check_capturable
from streamspec.export.ops.builder import WeightStore
from streamspec.export.ops.captured_scope import OPSET, CapturedScope
from streamspec.export.quantization.precisions import DEVICE_PRECISIONS
from streamspec.export.weights.load_weights import ModelSource
from streamspec.export.weights.model_spec import describe
from tests.export.drafters.test_draft_layer import METHODS, spec_of, trained
from tests.support.device_kernels import ROCM, check_kernels
from tests.support.near_families import VARIED
from tests.support.tiny_exports import (
    CAPTURED,
    FAMILIES,
    VOCAB,
    build,
    build_captured,
    save_adapter,
    save_base,
    tiny_heads,
    tiny_model,
    tiny_streams,
)


def written(
    folder: Path,
    family: str,
    kind: str,
    drafter: Any = None,
    mode: str = "merged",
    half: bool = False,
    device: str = "cuda",
) -> Any:
    """The captured graph."""
    spec, made = describe(tiny_model(family)), DEVICE_PRECISIONS[kind]()
    spec = replace(spec, cache_dtype="float16") if half else spec
    drafter = None if drafter is None else drafter(spec)
    source, lacks = ModelSource(tiny_model(family), spec), DEVICES[device].lacks
    with closing(WeightStore(folder / "weights")) as store:
        return CapturedStepGraph(spec, source, made, CAPTURED, drafter, 8, mode, lacks).build(store)


def full(spec: Any) -> Any:
    return tiny_streams(spec, bigram=4, draft_vocab=np.arange(0, VOCAB, 3))


ATTENDING = [family for family in FAMILIES if family not in ("lfm2", "lfm3")]  # whose layers have no short convolutions
DRAFTERS: dict[str, Any] = {
    "none": None,
    "heads": tiny_heads,
    "own heads": lambda spec: tiny_heads(spec, own=True),
    "same positions": lambda spec: tiny_streams(spec, shifted=False, root=False),
    "a draft layer": lambda _: spec_of(trained("llama", window=5, two_lists=True)),
    "hydra": lambda _: spec_of(trained("llama", **METHODS["hydra"])),
    "plain hydra": lambda _: spec_of(trained("llama", **METHODS["plain hydra"])),
    "mtp": lambda _: spec_of(trained("llama", **METHODS["mtp"])),
}


def test_every_node_has_a_kernel_on_the_device(tmp_path: Path) -> None:
    seen = set()
    for family in ATTENDING:
        for kind in DEVICE_PRECISIONS if family == "llama" else ["fp16"]:
            captured = written(tmp_path, family, kind, full, "delta" if kind == "fp32" else "merged")
            seen |= check_kernels(captured)
            assert captured.opset_import[0].version == OPSET
    for drafter in DRAFTERS.values():
        seen |= check_kernels(written(tmp_path, "llama", "fp16", drafter, half=True))
    for family in ("llama", "gemma4_text"):
        seen |= check_kernels(written(tmp_path, family, "int4", beside(), "delta"))
    assert {kind for _, kind in seen} >= {"ScatterElements", "MatMulNBits", "GatherBlockQuantized", "FusedMatMul"}
    assert not {kind for _, kind in seen} & {"If", "Loop", "Scan", "Shape", "NonZero", "ScatterND", "Range"}


def test_every_node_has_a_kernel_of_rocm(tmp_path: Path) -> None:
    """In the precisions that are offered for it; RotaryEmbedding, of which it has none, is written out."""
    seen: set[tuple[str, str]] = set()
    for family in ATTENDING:
        for kind in DEVICES["rocm"].precisions if family in VARIED else ["fp16"]:
            mode = "delta" if kind == "fp32" else "merged"
            seen |= check_kernels(written(tmp_path, family, kind, full, mode, device="rocm"), ROCM)
    for drafter in DRAFTERS.values():
        seen |= check_kernels(written(tmp_path, "llama", "fp16", drafter, half=True, device="rocm"), ROCM)
    for family in ("llama", "gemma4_text"):
        seen |= check_kernels(written(tmp_path, family, "fp16", beside(), "delta", device="rocm"), ROCM)
    assert {kind for _, kind in seen} >= {"ScatterElements", "SkipSimplifiedLayerNormalization", "Split", "TopK"}
    with pytest.raises(KeyError, match="RotaryEmbedding"):
        check_kernels(written(tmp_path, "llama", "fp16"), ROCM)


def test_a_shape_that_only_the_call_knows_is_refused_at_export() -> None:
    ids = onnx.helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["n", 4])
    g = CapturedScope(WeightStore(), [ids])
    assert g.op("Shape", "ids", start=1) == g.ints(4)
    with pytest.raises(AssertionError, match="not known before the call"):
        g.op("Shape", "ids")


TREE = np.where(
    np.array([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]), 0, MASKED
)


def beside(**shape: Any) -> Callable[[Any], Any]:
    """Eager streams."""
    return lambda spec: eager(tiny_streams(spec, **{"root": False, "bigram": 4} | shape), spec)


@pytest.mark.parametrize(
    ("family", "made", "device"),
    [
        *((family, full, "cuda") for family in VARIED if family in ATTENDING),
        *((family, full, "rocm") for family in ("llama", "phi", "gemma4_text", "cohere2")),  # rotations, written out
        *((family, beside(), "cuda") for family in ("llama", "gemma2", "gemma3_text", "gemma4_text", "phi", "gpt2")),
        *(
            ("llama", beside(**shape), "cuda")
            for shape in ({"lora": False, "bigram": 0, "shifted": False}, {"paper": 3})
        ),
        ("llama", beside(), "rocm"),
    ],
)
def test_it_computes_what_the_dynamic_graph_does(
    family: str, made: Callable[[Any], Any], device: str, tmp_path: Path
) -> None:
    """A prompt as accepted paths, a tree, and the row after one with gaps."""
    model, random = tiny_model(family), np.random.default_rng(0)
    drafter = made(describe(model))
    mode = "delta" if drafter.eager else "merged"
    plain = build(tmp_path, model, drafter, mode=mode).stepper()
    held = build_captured(tmp_path, model, drafter, mode=mode, lacks=DEVICES[device].lacks).stepper()
    prompt, nodes = random.integers(0, VOCAB, 23), random.integers(0, VOCAB, 5)
    outs = []
    for steps in (plain, held):
        steps.prefill(prompt)
        outs.append(steps.step(nodes, [0, 1, 1, 2, 2], TREE, parents=[0, 0, 0, 1, 2], streams=drafter.gamma))
    theirs, ours = outs
    assert set(ours) == set(theirs) - {sg.RAW_LOGITS, sg.LOGIT_SCALE}
    for name, value in ours.items():
        if value.dtype == np.int64:
            np.testing.assert_array_equal(value, theirs[name])
        else:
            np.testing.assert_allclose(value, theirs[name], rtol=1e-3, atol=1e-3)
    held.accept(np.array([0, 2, 4]))
    plain.prefill(nodes[[0, 2, 4]])
    after = [steps.step([7], [0], np.zeros((1, 1)))["logits"] for steps in (plain, held)]
    np.testing.assert_allclose(*after, rtol=1e-3, atol=1e-3)


def test_only_the_slots_of_a_call_are_written(tmp_path: Path) -> None:
    held = build_captured(tmp_path, tiny_model()).stepper()
    marks = {name: np.random.default_rng(1).standard_normal(rows.shape) for name, rows in held.buffers.items()}
    for name, rows in held.buffers.items():
        rows[:] = marks[name]
    held.skip(20)
    before = {name: rows.copy() for name, rows in held.buffers.items()}
    held.step([3, 4], [0, 1], TREE[:2, :2])
    first = CAPTURED.margin + 20
    for name, rows in held.buffers.items():
        changed = np.flatnonzero((rows != before[name]).any(axis=(0, 1, 3)))
        assert changed.tolist() == [*range(first, first + 8)]


def scaled(model: onnx.ModelProto, name: str) -> None:
    """Makes an initializer in the graph file larger."""
    tensor = next(one for one in model.graph.initializer if one.name == name)
    tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) * np.float32(1.1), name))


def misread(model: onnx.ModelProto, part: str, name: str, other: str) -> None:
    """Lets the first node of a part read another value."""
    node = next(one for one in model.graph.node if one.name.startswith(part) and name in one.input)
    node.input[list(node.input).index(name)] = other


BREAKS: dict[str, tuple[str, Callable[[onnx.ModelProto], None]]] = {
    "a weight": ("plain", lambda model: scaled(model, "model.layers.1.input_layernorm.weight")),
    "moved rows": ("plain", lambda model: misread(model, "layers.1", sg.past(1, sg.KEY), sg.past(0, sg.KEY))),
    "a draft": ("streams", lambda model: misread(model, "streams", sg.present(2, sg.VALUE), sg.present(3, sg.VALUE))),
}


def harming(monkeypatch: pytest.MonkeyPatch, harm: Callable[[onnx.ModelProto], None]) -> None:
    """Lets every captured graph be harmed once it is built."""
    whole = CapturedStepGraph.build

    def harmed(self: CapturedStepGraph, store: WeightStore) -> onnx.ModelProto:
        model = whole(self, store)
        harm(model)
        return model

    monkeypatch.setattr(CapturedStepGraph, "build", harmed)


def exported(folder: Path, base: Base) -> Manifest:
    adapter = save_adapter(folder / "adapter", base, tiny_streams(describe(tiny_model())))
    target = Target("cuda", capture=True, row_counts=(1, 4, 8), context=96)
    return export_bundle(str(base.path), adapter, folder / "bundle", "fp32", progress=lambda line: None, target=target)


def test_an_export_says_how_well_it_computes(tmp_path: Path) -> None:
    parity = exported(tmp_path, save_base(tmp_path / "base")).parity
    assert parity["captured"].keys() == parity.keys() - {"captured", "perplexity", "text"} | {"sampled"}
    assert parity["captured"]["sampled"] == {"rows": 8, "same": 8}
    assert parity["captured"]["plain"]["rows"] == parity["plain"]["rows"] > 80
    assert all(0 < parity["captured"][part]["relative"] < 1e-4 for part in ("plain", "tree", "streams"))


@pytest.mark.parametrize("broken", BREAKS)
def test_a_graph_that_computes_something_else_is_not_exported(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, harm = BREAKS[broken]
    harming(monkeypatch, harm)
    with pytest.raises(StreamspecError, match=f"the captured graph's {part} logits differ"):
        exported(tmp_path, save_base(tmp_path / "base"))
    assert not (tmp_path / "bundle").exists()


def test_a_graph_that_draws_otherwise_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harming(monkeypatch, lambda model: misread(model, "sample", sg.UNIFORMS, sg.MIN_P))
    with pytest.raises(
        StreamspecError, match=r"the captured graph draws \d+ of 8 tokens otherwise than its logits say"
    ):
        exported(tmp_path, save_base(tmp_path / "base"))
    assert not (tmp_path / "bundle").exists()


def test_what_cannot_be_captured_is_refused_by_name() -> None:
    llama = describe(tiny_model("llama"))
    check_capturable(llama)
    with pytest.raises(ConfigError, match="short convolutions in a captured graph"):
        check_capturable(describe(tiny_model("lfm2")))
    with pytest.raises(ConfigError, match="a vocabulary of 20000000 tokens"):
        check_capturable(replace(llama, vocab=20_000_000))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "cpu", "capture": True}, "--capture for cpu"),
        ({"name": "rocm"}, "--target rocm without --capture: it cannot run the dynamic graph"),
        ({"name": "rocm", "static": True, "capture": True}, "a static graph for rocm"),
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


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_device_without_a_precisions_operators_refuses_it(precision: str) -> None:
    rocm = Target("rocm", capture=True)
    with pytest.raises(ConfigError, match=f"{precision} for rocm.*fp32 or fp16: it has no kernel"):
        rocm.precision(precision, None)
    assert rocm.precision("fp16", None) and Target("cuda").precision(precision, None)
