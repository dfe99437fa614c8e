#!/usr/bin/env python3
"""Measures the time of a step by part and rows:
`python benchmarks/step_profile.py BUNDLE [--provider native] [--rows 1 4 8 16] [--context 64] [--steps 30]`.

Times without the profiler come first (medians, row counts interleaved); the profiler's shares of the parts are then
applied to them, because profiling itself slows small nodes down. Parts follow the node names of the exported graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from streamspec.bundle.files import read_manifest
from streamspec.draft_tree import DraftTree
from streamspec.runtime.decoding.model_runner import ROOT_ONLY, StepRequest
from streamspec.runtime.decoding.verify import accept
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.hardware.providers import named

PARTS = ("trunk", "attention", "main head", "streams", "stream head", "acceptance and rest")


def part_of(name: str) -> str:
    """Returns the part of a node, by its name in the graph."""
    if name.startswith("streams/accept"):
        return "acceptance and rest"
    if name.startswith("streams"):
        return "stream head" if "/head" in name or "TopK" in name else "streams"
    if name.startswith("layers."):
        return "attention" if "ttention" in name else "trunk"
    if name.startswith("head"):
        return "main head"
    return "acceptance and rest"


def prepare(engine: OrtRunner, context: int) -> None:
    engine.reset()
    engine.prefill(StepRequest([1 % engine.vocab_size] * context))


def step(engine: OrtRunner, tree: DraftTree, context: int) -> tuple[float, float]:
    """Returns seconds of (whole step, graph call): verify, accept, compact; without building a draft."""
    before, started = engine.graph_seconds, time.perf_counter()
    tokens = [node % engine.vocab_size for node in range(len(tree))]
    result = engine.verify(StepRequest(tokens, tree, run_drafter=len(tree) > 1))
    engine.commit(accept(tree, tokens, result.choices)[1])
    whole = time.perf_counter() - started
    engine.rewind(context)
    return whole, engine.graph_seconds - before


def measure(engine: OrtRunner, trees: dict[int, DraftTree], context: int, steps: int) -> dict[int, tuple[float, float]]:
    """Maps rows to the median (whole step, graph call) in ms."""
    prepare(engine, context)
    times: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for round_ in range(steps + 2):
        for rows, tree in trees.items():
            taken = step(engine, tree, context)
            if round_ >= 2:
                times[rows].append(taken)
    return {
        n: (1e3 * statistics.median(w for w, _ in t), 1e3 * statistics.median(g for _, g in t))
        for n, t in times.items()
    }


def opened(bundle: Path, provider: str, profile: Path | None = None) -> OrtRunner:
    graph = named(provider).graph
    return OrtRunner(LoadedModel(bundle / graph, read_manifest(bundle), provider=provider, profile=profile))


def shares(bundle: Path, provider: str, tree: DraftTree, context: int, steps: int) -> dict[str, float]:
    """Returns each part's share of the nodes' time, from ONNX Runtime's profiler."""
    with tempfile.TemporaryDirectory() as folder:
        engine = opened(bundle, provider, Path(folder) / "profile")
        prepare(engine, context)
        for _ in range(steps):
            step(engine, tree, context)
        events = json.loads(engine.model.end_profile().read_text())
    runs = [e for e in events if e.get("name") == "model_run"]
    first = min(e["ts"] for e in runs[-steps:])
    totals: dict[str, float] = defaultdict(float)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time") and event["ts"] >= first:
            name = event["name"].removesuffix("_kernel_time")
            if event.get("args", {}).get("op_name") != "If":  # its branch's nodes are listed themselves
                totals[part_of(name)] += event["dur"]
    return {part: totals[part] / sum(totals.values()) for part in PARTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--provider", choices=("cpu", "native"), default="cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 6, 8, 12, 16])
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    manifest = read_manifest(arguments.bundle)
    nodes = manifest.trees.nodes if manifest.trees else [(0, 0, 1.0)]
    trees = {n: DraftTree.from_nodes(nodes, n) if n > 1 else ROOT_ONLY for n in arguments.rows if n <= len(nodes)}
    engine = opened(arguments.bundle, arguments.provider)
    times = measure(engine, trees, arguments.context, arguments.steps)
    del engine
    print("| rows | step ms | " + " | ".join(PARTS) + " | call overhead |")
    print("|---" * (len(PARTS) + 3) + "|")
    for rows, (whole, graph) in times.items():
        found = shares(arguments.bundle, arguments.provider, trees[rows], arguments.context, arguments.steps)
        cells = " | ".join(f"{graph * found[part]:.2f}" for part in PARTS)
        print(f"| {rows} | {whole:.2f} | {cells} | {whole - graph:.2f} |", flush=True)


if __name__ == "__main__":
    main()
