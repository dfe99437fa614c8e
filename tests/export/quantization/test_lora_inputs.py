"""Low-rank updates whose tensors are inputs: what they add, and that a row's share never depends on its siblings or on
threads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from streamspec.export.ops.builder import Scope, WeightStore, declared, finish, tensor
from streamspec.export.quantization.lora_inputs import PIECE, LowRank
from streamspec.export.quantization.precisions import PRECISIONS, Rows, Weight
from streamspec.export.runners.graph_runner import open_session
from tests.support.int4_rows import same_rows

WIDTH, OUTPUTS = 576, (("q", 320), ("k", 192))  # more columns than rows, and more terms than ONNX Runtime adds at once
OUT = sum(width for _, width in OUTPUTS)
ROWS = (1, 2, 3, 5, 8, 13, 17, 24, 32, 48, 64)


class Map:
    """One linear map with an update, in a graph of its own."""

    def __init__(self, folder: Path, kind: str, threads: int, outputs: tuple[tuple[str, int], ...] = OUTPUTS) -> None:
        rng = np.random.default_rng(0)
        self.update, self.precision = LowRank("qk", WIDTH, outputs), PRECISIONS[kind]()
        self.weight = rng.standard_normal((OUT, WIDTH)).astype(np.float32)
        store = WeightStore(folder / "w")
        g = Scope(store)
        rows = Rows(g.op("Shape", "x", start=1, end=2))
        product = self.precision.linear(g, "x", rows, Weight("w", OUT, WIDTH, lambda: self.weight), [self.update])
        g.op("Identity", product, out="y")
        inputs = [tensor("x", TensorProto.FLOAT, [1, "n", WIDTH])]
        rows_in = self.update.inputs(self.precision.coded)
        inputs += declared(rows_in)
        for row in rows_in:
            store.add_inline(row.name, row.filled(0, symbol=0))
        onnx.save(finish(g, inputs, [tensor("y", TensorProto.FLOAT, [1, "n", OUT])]), folder / "m.onnx")
        self.session = open_session(folder / "m.onnx", threads)

    def __call__(self, x: np.ndarray, pairs: list[Any]) -> np.ndarray:
        tensors = {
            name: np.ascontiguousarray(array)
            for name, array in self.update.tensors(pairs, self.precision.coded).items()
        }
        return np.asarray(self.session.run(None, {"x": x, **tensors})[0][0])


def pairs(ranks: tuple[int, ...], seed: int = 1) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [
        (rng.standard_normal((rank, WIDTH)).astype(np.float32), rng.standard_normal((out, rank)).astype(np.float32))
        if rank
        else None
        for rank, (_, out) in zip(ranks, OUTPUTS, strict=True)
    ]


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    return np.random.default_rng(2).standard_normal((1, max(ROWS), WIDTH)).astype(np.float32)


@pytest.mark.parametrize("threads", [1, 2, 6])
@pytest.mark.parametrize("kind", ["fp32", "int8", "int4"])
def test_a_row_is_the_same_alone_and_among_others(kind: str, threads: int, rows: np.ndarray, tmp_path: Path) -> None:
    one = Map(tmp_path, kind, threads)
    for ranks in ((0, 0), (4, 4), (16, 16), (16, 0), (33, 64), (PIECE, PIECE)):
        whole = one(rows, pairs(ranks))
        for n in ROWS:
            assert same_rows(kind, one(rows[:, :n], pairs(ranks)), whole[:n]), (ranks, n)
        assert same_rows(kind, one(rows[:, 7:8], pairs(ranks))[0], whole[7])


@pytest.mark.parametrize("kind", ["fp32", "int8", "int4"])
def test_it_adds_what_its_matrices_say(kind: str, rows: np.ndarray, tmp_path: Path) -> None:
    one = Map(tmp_path, kind, 1)
    nothing, ranks = one(rows, pairs((0, 0))), pairs((4, 9))
    expected = np.concatenate([rows[0] @ a.T @ b.T for a, b in ranks], axis=1)
    off = one(rows, ranks) - nothing - expected
    assert np.abs(off).max() < (1e-3 if kind != "int8" else 0.05) * np.abs(expected).max()


def test_without_rank_nothing_is_added(rows: np.ndarray, tmp_path: Path) -> None:
    one = Map(tmp_path, "fp32", 1)
    assert np.abs(one(rows, pairs((0, 0))) - rows[0] @ one.weight.T).max() < 1e-3
    assert one.update.tensors([None, None], coded=False) == {}
