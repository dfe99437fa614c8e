"""Bases of real width with random weights and streams, to time steps: no time depends on a weight. `gpu.py` runs it."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from big_models import make
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

from streamspec.acceptance_stats import Acceptance
from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.bundle.cache_section import CAPTURED
from streamspec.bundle.files import read_manifest
from streamspec.bundle.manifest import MODEL
from streamspec.runtime.hardware.providers import import_onnxruntime, named, prepare, usable

GAMMA, LAYERS, RANKS = 4, 4, 10  # streams, the layers that they run over, candidates of each
# Bytes that the bandwidth is measured with, the smaller of two more than any cache holds; and how often.
COPY, RUNS = (1 << 28, 1 << 30), 20
NONE, DEFERRED, EAGER = "none", "deferred", "eager"
StepTimes = Callable[[Path, str, str, int], dict[str, Any]]


def bandwidth(provider: str, sizes: tuple[int, int] = COPY) -> float:
    """Bytes per second that the provider's device reads and writes, from the median times of y = x + 1 of two sizes: a
    call's own time is in both."""
    few, many = (copy_seconds(provider, size) for size in sizes)
    return 2 * (sizes[1] - sizes[0]) / (many - few)


def copy_seconds(provider: str, size: int) -> float:
    """Median time of y = x + 1 over so many bytes."""
    row, ort = named(provider), import_onnxruntime()
    count = size // 4
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [count]) for name in "xy"]
    one = numpy_helper.from_array(np.ones(1, np.float32), "one")
    graph = helper.make_graph([helper.make_node("Add", ["x", "one"], ["y"])], "copy", value[:1], value[1:], [one])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    options = ort.SessionOptions()
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=prepare(ort, usable(row), options, threads=1)
    )
    io, place = session.io_binding(), row.memory or "cpu"
    x, y = (ort.OrtValue.ortvalue_from_numpy(np.zeros(count, np.float32), place, 0) for _ in "xy")
    io.bind_ortvalue_input("x", x)
    io.bind_ortvalue_output("y", y)
    times = []
    for _ in range(RUNS):
        started = time.perf_counter()
        session.run_with_iobinding(io)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def random_streams(folder: Path, base: Path) -> None:
    """Writes an adapter of random streams without a root token and a LoRA of their own, which can run either way."""
    random, identity = np.random.default_rng(0), resolve_base(str(base), lambda line: None)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    streams = {"gamma": GAMMA, "ns": LAYERS, "scale": 1.0, "positions": "shifted", "root_token": False}
    described = {
        "format_version": 1,
        "method": "streaming",
        "recipe": "joint",
        "base": {"id": identity.id, "sha256": identity.sha256, "model_type": config["model_type"]},
        "prompt_format": {"kind": "raw", "separator": "\n"},
        "streams": streams | {"lora": None, "draft_vocab": None, "pruning": 0},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "streamspec_config.json").write_text(json.dumps(described), encoding="utf-8")
    table = random.normal(size=(GAMMA, config["hidden_size"])) * 0.02
    save_file({"stream_embeddings": table.astype(np.float16)}, folder / "streamspec.safetensors")
    Acceptance(GAMMA, RANKS, [random.integers(0, RANKS, size=(200, GAMMA)).tolist()]).save(folder / "acceptance.json")


def measure_shape(
    out: Path,
    name: str,
    provider: str,
    contexts: list[int],
    given: float | None,
    command: Callable[..., str],
    times: StepTimes,
) -> dict[str, Any]:
    """Times the steps of shape `name` without a drafter and with deferred and eager streams, in fp16, by both graphs.
    `given`: bytes per second, measured where it is None."""
    base, adapter = out / name, out / f"{name}-streams"
    if not (base / "tokenizer_config.json").exists():
        make(name, str(base))
    if not (adapter / "acceptance.json").exists():
        random_streams(adapter, base)
    found: dict[str, Any] = {"bandwidth": given or bandwidth(provider), "streams": {}}
    for streams in (NONE, DEFERRED, EAGER):
        bundle = out / f"{name}-fp16-{streams}"
        if not bundle.exists():
            drafts = [] if streams == NONE else ["--adapter", adapter, "--streams", streams]
            target = ["--target", "cuda", "--capture", "--precision", "fp16"]
            command("export", "--base", base, *drafts, "--out", bundle, *target)
        found["weights"] = found.get("weights") or read_manifest(bundle).weights_bytes
        found["streams"][streams] = {
            f"{graph} {context}": times(bundle, graph, provider, context)
            for graph in (CAPTURED, MODEL)
            for context in contexts
        }
    return found


def shape_report(shapes: dict[str, Any]) -> list[str]:
    """A table: steps by their rows over the plain step of the same graph, and that over reading the weights once."""
    lines = [
        "| shape, streams | graph, tokens in the cache | captured | weights over bandwidth, ms "
        "| plain step, ms | steps by rows, over plain |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in shapes.items():
        least = 1e3 * one["weights"] / one["bandwidth"]
        read = f"{one['weights'] / 1e9:.2f} GB at {one['bandwidth'] / 1e9:.0f} GB/s: {least:.3f}"
        for streams, graphs in one["streams"].items():
            for graph, steps in graphs.items():
                plain = one["streams"][NONE][graph].get("ms", {}).get(1)
                if "why_not" in steps or plain is None:
                    why = steps.get("why_not", "no plain step")
                    lines.append(f"| {name}, {streams} | {graph} | no: {why} | {read} | | |")
                    continue
                ratios = ", ".join(f"{rows}: {ms / plain:.2f}" for rows, ms in steps["ms"].items())
                cell = f"{plain:.3f} ({plain / least:.1f} times)"
                lines.append(f"| {name}, {streams} | {graph} | {steps['captured']} | {read} | {cell} | {ratios} |")
    return lines
