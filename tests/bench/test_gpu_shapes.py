"""The parts of `benchmarks/gpu.py` that no GPU is needed for: the bandwidth, random streams, and the table."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from streamspec.bundle.adapter_folder import read_adapter
from tests.support.tiny_bundles import tiny_base

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
gpu_shapes = __import__("gpu_shapes")


def test_the_bandwidth_is_of_a_read_and_a_write_without_a_calls_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))  # each copy takes a second
    with monkeypatch.context() as patched:
        patched.setattr(gpu_shapes, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
        assert gpu_shapes.copy_seconds("cpu", 1 << 16) == 1.0
    monkeypatch.setattr(gpu_shapes, "copy_seconds", lambda provider, size: 0.5 + 2 * size / 1e9)
    assert gpu_shapes.bandwidth("cpu", (1 << 16, 1 << 18)) == pytest.approx(1e9)


def test_random_streams_are_an_adapter_that_can_run_eagerly(tmp_path: Path) -> None:
    gpu_shapes.random_streams(tmp_path / "streams", tiny_base(tmp_path / "base"))
    adapter = read_adapter(tmp_path / "streams")
    assert adapter.method == "streaming" and adapter.streams is not None and not adapter.streams["root_token"]


def test_steps_are_shown_over_the_plain_one_of_their_graph() -> None:
    steps = lambda *ms: {"captured": True, "ms": dict(zip((1, 8), ms, strict=True))}  # noqa: E731
    streams = {
        "none": {"captured.onnx 64": steps(2.0, 2.2)},
        "deferred": {"captured.onnx 64": steps(2.4, 3.0)},
        "eager": {"captured.onnx 64": {"why_not": "no kernel"}},
    }
    *_, none, deferred, eager = gpu_shapes.shape_report({"1b": {"weights": 2e9, "bandwidth": 2e12, "streams": streams}})
    read = "2.00 GB at 2000 GB/s: 1.000"
    assert none == f"| 1b, none | captured.onnx 64 | True | {read} | 2.000 (2.0 times) | 1: 1.00, 8: 1.10 |"
    assert deferred == f"| 1b, deferred | captured.onnx 64 | True | {read} | 2.000 (2.0 times) | 1: 1.20, 8: 1.50 |"
    assert eager == f"| 1b, eager | captured.onnx 64 | no: no kernel | {read} | | |"
