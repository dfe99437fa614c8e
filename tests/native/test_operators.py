"""The native operators against numpy: values within rounding, a row's bits whatever else is computed, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from streamspec.export.native.layout import pack_blocks, pack_int4, pack_int8
from streamspec.runtime.hardware import native_library

Array = np.ndarray[Any, np.dtype[Any]]
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "int64": TensorProto.INT64}


@pytest.fixture(autouse=True)
def here() -> None:
    if why_not := native_library.why_not():
        pytest.skip(f"no native operators here: {why_not}")


def session(
    kind: str,
    inputs: dict[str, Array],
    constants: dict[str, Array],
    order: Sequence[str],
    threads: int,
    **attributes: Any,
) -> onnxruntime.InferenceSession:
    names = ("y", "keys_out", "values_out")[: 3 if kind.startswith("Attention") else 1]
    node = helper.make_node(kind, order, names, domain="streamspec", **attributes)
    sides = [helper.make_tensor_value_info(n, TYPES[str(x.dtype)], [None] * x.ndim) for n, x in inputs.items()]
    half = TensorProto.FLOAT16 if kind.endswith("16") else TensorProto.FLOAT
    out = [helper.make_tensor_value_info(n, half if i else TensorProto.FLOAT, None) for i, n in enumerate(names)]
    graph = helper.make_graph([node], "g", sides, out, [numpy_helper.from_array(x, n) for n, x in constants.items()])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("streamspec", 1)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.register_custom_ops_library(str(native_library.library()))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def rounded(x: Array) -> Array:
    """Rows in 8 bits: one step for each. In float32, for ties to fall as in the kernels."""
    step = np.abs(x).max(-1, keepdims=True) * np.float32(1 / 127)
    return np.asarray(np.rint(x * (np.float32(1) / step)).astype(np.float64) * step)


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (5, 33), (100, 72), (576, 96)])
def test_8_bits_are_the_products_of_rounded_rows(inputs: int, outputs: int) -> None:
    rng = np.random.default_rng(inputs)
    codes = rng.integers(-128, 128, (outputs, inputs)).astype(np.int8)
    scales, bias = (rng.random((2, outputs)) * 0.01).astype(np.float32)
    x = rng.standard_normal((1, 40, inputs)).astype(np.float32)
    constants = {"c": pack_int8(codes), "s": scales, "b": bias}
    sizes = {"in_features": inputs, "out_features": outputs}
    runs = [session("LinearInt8", {"x": x}, constants, ["x", "c", "s", "b"], n, **sizes) for n in (1, 2, 8)]
    [y] = runs[0].run(None, {"x": x})
    wanted = rounded(x) @ (codes * scales[:, None].astype(np.float64)).T + bias
    np.testing.assert_allclose(y, wanted, atol=1e-4 * np.abs(wanted).max())
    for run in runs:
        for rows in range(1, 41):
            assert np.array_equal(run.run(None, {"x": x[:, :rows]})[0], y[:, :rows])


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("shifted", [False, True])
def test_4_bits_in_blocks_gated_and_activated(block: int, shifted: bool) -> None:
    rng = np.random.default_rng(block)
    inputs, outputs = 3 * block, 64
    codes = rng.integers(0, 16, (outputs, inputs)).astype(np.uint8)
    scales = (rng.random((outputs, 3)) * 0.01 + 0.001).astype(np.float16)
    zeros = rng.integers(0, 16, (outputs, 3)).astype(np.uint8) if shifted else np.full((outputs, 3), 8, np.uint8)
    nibbles = (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(outputs, 3, block // 2)
    constants = {"c": pack_int4(nibbles, gated=True), "s": pack_blocks(scales, gated=True)}
    if shifted:
        constants["z"] = pack_blocks(zeros, gated=True)
    x = rng.standard_normal((1, 12, inputs)).astype(np.float32)
    own = {"in_features": inputs, "out_features": outputs, "block_size": block, "gated": 1, "activation": 1}
    run = session("LinearInt4", {"x": x}, constants, ["x", *constants], 2, **own)
    [y] = run.run(None, {"x": x})
    weights = (codes.reshape(outputs, 3, block) - zeros[..., None].astype(np.float64)) * scales[..., None]
    gate, up = np.split(rounded(x) @ weights.reshape(outputs, inputs).T, 2, axis=-1)
    wanted = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(y, wanted, atol=1e-4 * np.abs(wanted).max())
    for rows in range(1, 13):
        assert np.array_equal(run.run(None, {"x": x[:, :rows]})[0], y[:, :rows])


def attention(
    kind: str, heads: int, kv_heads: int, rows: int, slots: int, past: int, width: int = 32
) -> dict[str, Array]:
    rng = np.random.default_rng(rows)
    cache = np.float16 if kind.endswith("16") else np.float32
    feeds = {
        "packed": rng.standard_normal((1, rows, (heads + 2 * kv_heads) * width)).astype(np.float32),
        "bias": np.where(rng.random((rows, past + rows)) < 0.4, -10000.0, 0.0).astype(np.float32),
        "past": np.array([past]),
        **{n: rng.standard_normal((1, kv_heads, slots, width)).astype(cache) for n in ("keys", "values")},
    }
    np.fill_diagonal(feeds["bias"][:, past:], 0.0)
    return feeds


@pytest.mark.parametrize("kind", ["Attention", "AttentionFloat16"])
@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_attention_is_that_of_float64(kind: str, cap: float) -> None:
    heads, kv_heads, rows, past, width = 6, 2, 9, 21, 32
    feeds = attention(kind, heads, kv_heads, rows, 40, past)
    own = {"heads": heads, "kv_heads": kv_heads, "width": width, "scale": 0.25, "cap": cap}
    run = session(kind, feeds, {}, [*feeds], 2, **own)
    y, keys, values = run.run(None, feeds)
    queries, k, v = np.split(feeds["packed"][0], [heads * width, (heads + kv_heads) * width], axis=-1)
    for cache, side in ((keys, k), (values, v)):
        written = side.reshape(rows, kv_heads, width).swapaxes(0, 1)
        assert np.array_equal(cache[0, :, past : past + rows], written.astype(cache.dtype))
    for head in range(heads):
        at = head // (heads // kv_heads)
        q = queries[:, head * width : (head + 1) * width].astype(np.float64)
        scores = q @ keys[0, at, : past + rows].T.astype(np.float64) * 0.25
        scores = (np.tanh(scores / cap) * cap if cap else scores) + feeds["bias"]
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        wanted = weights / weights.sum(-1, keepdims=True) @ values[0, at, : past + rows].astype(np.float64)
        np.testing.assert_allclose(y[0, :, head * width : (head + 1) * width], wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"past": np.array([40])}, "slots left"),
        ({"past": np.array([2**62])}, "slots left"),
        ({"past": np.array([-1])}, "past length"),
        ({"bias": np.zeros((9, 41), np.float32)}, "more columns"),
        ({"bias": np.zeros((3, 30), np.float32)}, "bias of another shape"),
        ({"packed": np.zeros((1, 9, 16), np.float32)}, "packed rows"),
        ({"keys": np.zeros((1, 2, 0, 32), np.float32)}, "slots"),
    ],
)
def test_what_does_not_fit_a_cache_is_refused_in_one_line(change: dict[str, Array], words: str) -> None:
    feeds = attention("Attention", 6, 2, 9, 40, 21)
    run = session("Attention", feeds, {}, [*feeds], 2, heads=6, kv_heads=2, width=32)
    with pytest.raises(Exception, match=words) as caught:
        run.run(None, feeds | change)
    assert "\n" not in str(caught.value).strip()


@pytest.mark.parametrize("own", [{"heads": 300}, {"heads": -1}, {"kv_heads": 0}, {"width": 24}, {"width": 2**40}])
def test_heads_that_no_kernel_takes_are_refused_at_load(own: dict[str, int]) -> None:
    feeds = attention("Attention", 1, 1, 2, 8, 1)
    with pytest.raises(Exception, match="head"):
        session("Attention", feeds, {}, [*feeds], 1, **{"heads": 1, "kv_heads": 1, "width": 32} | own)
