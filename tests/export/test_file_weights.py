"""Graphs over the weights of a GGUF file: native operators and standard ones multiply by what the `gguf` package
decodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto

from streamspec.errors import ConfigError
from streamspec.export.deployment_target import Target
from streamspec.export.file_blocks.kinds import KINDS
from streamspec.export.native.file_weights import FileWeights
from streamspec.export.native.operators import NativeOps, native_ops
from streamspec.export.native.precisions import TiledInt4, TiledInt8
from streamspec.export.ops.builder import Scope, WeightStore, finish, tensor
from streamspec.export.quantization.precisions import Rows, Weight
from streamspec.runtime.hardware import native_library
from streamspec.runtime.hardware.int8_saturation import X64_PRECISION
from tests.support.gguf_blocks import Array, random_blocks, values

INPUTS, NATIVE, STANDARD = 512, True, False
Write = Callable[[Scope, str, Rows, FileWeights, NativeOps | None], str]


def weight_of(*kinds: str, rows: int = 64, gated: bool = False, looked_up: bool = False) -> tuple[Weight, Array]:
    """A weight of a run of `rows` for each kind, and its values [out, in]."""
    runs = [random_blocks(np.random.default_rng(i), kind, rows, INPUTS) for i, kind in enumerate(kinds)]
    whole = np.concatenate([values(run) for run in runs])
    weight = Weight("w", len(whole), INPUTS, lambda: whole, gated=gated, looked_up=looked_up, stored=lambda: runs)
    return weight, whole


def run(native: bool, write: Write, x: Array) -> Array:
    """The output of a graph that `write` writes, for x as its input."""
    store, precision = WeightStore(), FileWeights()
    g, ops = Scope(store), native_ops(precision) if native else None
    rows = Rows(g.op("Shape", "x", start=1, end=2))
    y = g.op("Identity", write(g, "x", rows, precision, ops), out="y")
    kind = TensorProto.INT64 if x.dtype == np.int64 else TensorProto.FLOAT
    model = finish(g, [tensor("x", kind, [None] * x.ndim)], [tensor(y, TensorProto.FLOAT, None)], native=native)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(X64_PRECISION, "1")  # int8 sums of standard operators saturate on some processors
    if native:
        library = native_library.library()
        if library is None:
            pytest.skip("no native operators here")
        options.register_custom_ops_library(str(library))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


def mapped(weight: Weight, bias: Array | None = None, activation: str = "") -> Write:
    def write(g: Scope, x: str, rows: Rows, precision: FileWeights, ops: NativeOps | None) -> str:
        added = "" if bias is None else g.store.add("bias", bias)
        if ops is not None:
            return ops.linear(g, x, weight, added, activation)
        y = precision.linear(g, x, rows, weight)
        return g.op("Add", y, added) if added else y

    return write


def stack_of(*kinds: str, gated: bool = False, rows: int = 32) -> tuple[Weight, Array]:
    """A stack of three weights of `rows` for each kind, and its values [parts, out, in]."""
    parts, every = [], []
    for i in range(3):
        runs = [random_blocks(np.random.default_rng([i, j]), kind, rows, INPUTS) for j, kind in enumerate(kinds)]
        every.append(np.concatenate([values(run) for run in runs]))
        load, stored = every[i].copy, lambda runs=runs: runs
        parts.append(Weight(f"w.{i}", len(every[i]), INPUTS, load, gated=gated, stored=stored))
    return replace(parts[0], name="w", rows=3 * parts[0].rows, parts=parts), np.stack(every)


def rows_and_rounded(n: int = 5) -> tuple[Array, Array]:
    x = np.random.default_rng(9).standard_normal((1, n, INPUTS)).astype(np.float32)
    blocks = x.reshape(1, n, -1, 32)
    step = np.abs(blocks).max(-1, keepdims=True) / 127
    return x, (np.rint(blocks / step) * step).reshape(x.shape).astype(np.float64)


def near(found: Array, wanted: Array, share: float) -> None:
    assert found.shape == wanted.shape and np.abs(found - wanted).max() < share * np.abs(wanted).max()


@pytest.mark.parametrize("kind", KINDS)
def test_both_graphs_multiply_by_the_files_weights(kind: str) -> None:
    weight, whole = weight_of(kind)
    x, rounded = rows_and_rounded()
    near(run(NATIVE, mapped(weight), x), rounded @ whole.astype(np.float64).T, 1e-5)
    near(run(STANDARD, mapped(weight), x), x @ whole.T, 0.03)


@pytest.mark.parametrize("native", [NATIVE, STANDARD])
@pytest.mark.parametrize("kind", KINDS)
def test_both_graphs_look_up_the_files_weights(native: bool, kind: str) -> None:
    weight, whole = weight_of(kind)

    def write(g: Scope, ids: str, rows: Rows, precision: FileWeights, ops: NativeOps | None) -> str:
        return (ops or precision).embedding(g, ids, weight)

    ids = np.array([[63, 0, 17, 33]])
    assert np.array_equal(run(native, write, ids), whole[ids])


@pytest.mark.parametrize("native", [NATIVE, STANDARD])
def test_runs_of_several_kinds_lie_side_by_side(native: bool) -> None:
    weight, whole = weight_of("Q4_K", "Q4_K", "Q6_K", rows=40)
    bias = np.random.default_rng(3).standard_normal(120).astype(np.float32)
    x, rounded = rows_and_rounded()
    found = run(native, mapped(weight, bias), x)
    near(found, rounded @ whole.astype(np.float64).T + bias, 1e-5 if native else 0.03)
    assert np.array_equal(found[:, 2:3], run(native, mapped(weight, bias), x[:, 2:3])) or not native


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def test_a_gate_of_one_kind_is_applied_by_the_operator() -> None:
    weight, whole = weight_of("Q4_K", "Q4_K", gated=True)
    x, rounded = rows_and_rounded()
    gate, up = np.split(rounded @ whole.astype(np.float64).T, 2, -1)
    assert NativeOps(FileWeights()).activates("silu", weight, True)
    near(run(NATIVE, mapped(weight, activation="silu"), x), silu(gate) * up, 1e-5)
    near(run(STANDARD, mapped(weight), x), x @ whole.T, 0.03)


def test_a_gate_of_two_kinds_is_left_to_standard_nodes() -> None:
    weight, whole = weight_of("Q4_K", "Q5_K", gated=True)
    x, rounded = rows_and_rounded()
    assert not NativeOps(FileWeights()).activates("silu", weight, True)
    near(run(NATIVE, mapped(weight), x), rounded @ whole.astype(np.float64).T, 1e-5)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS), ("Q4_K", "Q6_K")], ids="+".join)
def test_both_graphs_multiply_by_the_weights_of_chosen_experts(kinds: tuple[str, ...], gated: bool) -> None:
    stack, whole = stack_of(*(kinds if len(kinds) > 1 else kinds * 2), gated=gated)
    chosen, bias = np.array([[[0, 2], [2, 0], [1, 0], [0, 1], [2, 1]]]), np.arange(3.0 * 64, dtype=np.float32)

    def write(g: Scope, x: str, rows: Rows, precision: FileWeights, ops: NativeOps | None) -> str:
        if ops is not None:
            return ops.experts(g, x, g.store.add("chosen", chosen), stack, bias=g.store.add("bias", bias))
        return precision.grouped(g, x, rows, g.ints(2, 0, 3), stack)

    x, rounded = rows_and_rounded()
    every = np.einsum("eoi,bni->bneo", whole.astype(np.float64), rounded)
    truth = np.take_along_axis(every + bias.reshape(3, -1), chosen[..., None], 2)
    near(run(NATIVE, write, x), np.prod(np.split(truth, 2, -1), 0) if gated and len(kinds) == 1 else truth, 1e-5)
    near(run(STANDARD, write, x)[0], np.concatenate([x[0, :2] @ whole[0].T, x[0, 2:] @ whole[2].T]), 0.03)


def test_experts_that_would_share_a_tile_are_refused() -> None:
    """Three of 24 outputs lie in three tiles, as if these were full."""
    stack, _ = stack_of("Q8_0", rows=24)
    for precision in (FileWeights(), TiledInt8(), TiledInt4()):
        with pytest.raises(ConfigError, match="experts of 24 outputs"):
            precision.operator(WeightStore(), stack)


@pytest.mark.parametrize("native", [NATIVE, STANDARD])
def test_the_head_shares_the_tiles_of_the_embedding(native: bool) -> None:
    weight, whole = weight_of("Q6_K", rows=50)
    names = []

    def write(g: Scope, x: str, rows: Rows, precision: FileWeights, ops: NativeOps | None) -> str:
        flat = g.op("Reshape", x, g.ints(-1, INPUTS))
        (ops or precision).embedding(g, g.store.add("ids", np.array([[1]])), weight)
        logits, factor = (ops or precision).head(g, flat, rows, weight)
        names.extend(name for name in g.store.protos if name.startswith("w."))
        assert not factor
        return logits

    x, rounded = rows_and_rounded()
    near(run(native, write, x), (rounded @ whole.astype(np.float64).T)[0], 1e-5 if native else 0.03)
    assert sorted(names) == ["w.q6_k.codes", "w.q6_k.multipliers", "w.q6_k.scales"]


@pytest.mark.parametrize("native", [NATIVE, STANDARD])
def test_what_has_no_blocks_is_int8_and_a_base_without_any_is_refused(native: bool) -> None:
    whole = np.random.default_rng(0).standard_normal((64, INPUTS)).astype(np.float32)
    weight = Weight("w", 64, INPUTS, lambda: whole)
    x, _ = rows_and_rounded()
    near(run(native, mapped(weight), x), x @ whole.T, 0.03)

    def head(g: Scope, x: str, rows: Rows, precision: FileWeights, ops: NativeOps | None) -> str:
        return (ops or precision).head(g, x, rows, weight)[0]

    def embedding(g: Scope, x: str, rows: Rows, precision: FileWeights, ops: NativeOps | None) -> str:
        return (ops or precision).embedding(g, x, weight)

    for write in (head, embedding):
        with pytest.raises(ConfigError, match="w that is not as in a GGUF file"):
            run(native, write, x)


def test_types_without_tiles_are_refused_by_name() -> None:
    weight, _ = weight_of("Q8_0")
    (one,) = weight.stored() or ()
    other = type(one)("F16", one.data, one.columns)
    with pytest.raises(ConfigError, match="w of type F16; expected one of Q4_0, "):
        FileWeights().operator(WeightStore(), Weight("w", 64, INPUTS, lambda: one.data, stored=lambda: [other]))


def test_it_is_a_precision_of_the_cpu() -> None:
    assert Target().precision("gguf", None).name == "gguf"
    with pytest.raises(ConfigError, match="precision `gguf`"):
        Target("cuda").precision("gguf", None)
