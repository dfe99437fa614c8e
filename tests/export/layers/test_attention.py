"""A row's attention is the same to the last bit alone, among siblings, and with its ancestors in gapped slots."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from streamspec.draft_tree import MASKED
from streamspec.export.layers.attention import RowExactAttention
from streamspec.export.ops.builder import Scope, WeightStore, finish, tensor
from streamspec.export.runners.graph_runner import open_session
from streamspec.layer_cache import SUM_BLOCK

SLOTS = 700


@pytest.fixture(
    params=[
        (4, 4, 16, None, False),
        (9, 3, 64, None, False),
        (8, 2, 128, None, False),
        (8, 4, 64, 5.0, False),
        (3, 1, 72, None, False),
        (4, 1, 256, None, False),
        (9, 3, 64, None, True),
    ],
    ids=["mha", "gqa-64", "gqa-128", "capped", "one-72", "one-256", "sinks"],
)
def attention(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    heads, kv, width, cap, has_sinks = request.param
    store = WeightStore(tmp_path / "w")
    g, sinks = Scope(store), np.linspace(-2, 3, heads).astype(np.float32) if has_sinks else None
    spec = SimpleNamespace(
        heads=heads,
        kv_heads=kv,
        group=heads // kv,
        head_dim=width,
        attention_scale=width**-0.5,
        attention_cap=cap,
        cache_dtype="float32",
        ring=lambda layer, part: None,
        kept_in=lambda layer, part: "float32",
        source=lambda layer: layer,
        at=lambda layer: spec,
    )
    visible = g.op("Add", "past_length", g.op("Shape", "q", start=1, end=2))
    layer = RowExactAttention(g, spec, visible)  # type: ignore[arg-type]
    key, value = layer.append("k", 0, "key"), layer.append("v", 0, "value")
    g.op(
        "Identity",
        layer.mix("q", key, value, "bias", sinks="" if sinks is None else store.add("sinks", sinks)),
        out="mixed",
    )
    floats = {
        "q": [1, "n", heads * width],
        "k": [1, "n", kv * width],
        "v": [1, "n", kv * width],
        "bias": [1, 1, "n", "t"],
    }
    cache: list[int | str] = [1, kv, SLOTS, width]
    inputs = [tensor(n, TensorProto.FLOAT, s) for n, s in floats.items()]
    inputs += [tensor("past_length", TensorProto.INT64, [1])]
    inputs += [tensor(f"past_key_values.0.{x}", TensorProto.FLOAT, cache) for x in ("key", "value")]
    outputs = [tensor("mixed", TensorProto.FLOAT, [1, "n", heads * width])]
    outputs += [tensor(f"present.0.{x}", TensorProto.FLOAT, cache) for x in ("key", "value")]
    onnx.save(finish(g, inputs, outputs), tmp_path / "m.onnx")
    session = open_session(tmp_path / "m.onnx")

    def run(
        past: dict[str, np.ndarray], rows: dict[str, np.ndarray], length: int, bias: np.ndarray
    ) -> list[np.ndarray]:
        feeds = rows | {f"past_key_values.0.{n}": a for n, a in past.items()}
        feeds |= {"past_length": np.array([length]), "bias": bias[None, None]}
        return session.run(None, feeds)  # type: ignore[no-any-return]

    return SimpleNamespace(run=run, heads=heads, kv=kv, width=width, cap=cap, sinks=sinks)


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def rows_of(a: Any, rng: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    return {
        "q": random(rng, 1, n, a.heads * a.width),
        "k": random(rng, 1, n, a.kv * a.width),
        "v": random(rng, 1, n, a.kv * a.width),
    }


@pytest.mark.parametrize("length", [1, 40, 130, 300, 600])
def test_tree_rows_equal_plain_rows_bit_for_bit(attention: Any, length: int) -> None:
    rng = np.random.default_rng(length)
    past = {n: random(rng, 1, attention.kv, SLOTS, attention.width) for n in ("key", "value")}
    rows = rows_of(attention, rng, 9)
    path = [0, 3, 8]  # a chain of three tree nodes in gapped slots
    bias = np.full((9, length + 9), MASKED, np.float32)
    bias[:, :length] = 0
    for i, node in enumerate(path):
        bias[node, [length + p for p in path[: i + 1]]] = 0
    tree = attention.run(past, rows, length, bias)[0]
    assert length // SUM_BLOCK == (length + 8) // SUM_BLOCK
    for i, node in enumerate(path):
        one = {n: a[:, node : node + 1] for n, a in rows.items()}
        plain, key, value = attention.run(past, one, length + i, np.zeros((1, length + i + 1), np.float32))
        assert np.array_equal(plain[0, 0], tree[0, node])
        past = {"key": key, "value": value}


def test_result_is_softmax_attention(attention: Any) -> None:
    rng = np.random.default_rng(0)
    length, n = 37, 5
    past = {x: random(rng, 1, attention.kv, SLOTS, attention.width) for x in ("key", "value")}
    rows = rows_of(attention, rng, n)
    bias = np.where(np.arange(length + n)[None] <= length + np.arange(n)[:, None], 0, MASKED).astype(np.float32)
    mixed, key, value = attention.run(past, rows, length, bias)
    group = attention.heads // attention.kv
    q = rows["q"].reshape(n, attention.heads, attention.width).astype(np.float64)
    for head in range(attention.heads):
        k, v = (x[0, head // group, : length + n].astype(np.float64) for x in (key, value))
        scores = q[:, head] @ k.T / np.sqrt(attention.width)
        scores = (attention.cap * np.tanh(scores / attention.cap) if attention.cap else scores) + bias
        sunk = 0 if attention.sinks is None else np.exp(attention.sinks[head])
        expected = np.exp(scores) / (np.exp(scores).sum(1, keepdims=True) + sunk) @ v
        got = mixed[0, :, head * attention.width : (head + 1) * attention.width]
        np.testing.assert_allclose(got, expected, atol=2e-5)
    assert np.array_equal(key[0, :, :length], past["key"][0, :, :length])
    new = rows["k"].reshape(n, attention.kv, attention.width).transpose(1, 0, 2)
    assert np.array_equal(key[0, :, length : length + n], new)
