#!/usr/bin/env python3
"""Measures the effect of huge pages: `python benchmarks/huge_pages.py BUNDLE [--loads 5] [--rows 8] [--threads N]`.

Fresh processes open the bundle alternately with and without (`streamspec.runtime.hardware.huge_pages`). Prints seconds
of opening the graph and until its weights have moved, medians of a plain step and of a step of `--rows` rows, resident
memory; then the medians over the loads and their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from step_profile import prepare, step

from streamspec.bundle.files import read_manifest
from streamspec.draft_tree import DraftTree
from streamspec.runtime.decoding.model_runner import ROOT_ONLY
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.hardware import huge_pages as pages

CONTEXT, ROUNDS, BLOCK = 64, 10, 14


def measure(bundle: Path, with_pages: bool, rows: int, threads: int | None) -> dict[str, float]:
    """Measures in this process, which must not have opened a bundle before."""
    if not with_pages:
        pages.SWITCH = Path("/nowhere")
    manifest = read_manifest(bundle)
    started = time.perf_counter()
    engine = OrtRunner(LoadedModel(bundle / "model.onnx", manifest, threads=threads))
    found = {"open s": time.perf_counter() - started}
    engine.model.settle()
    found["settled s"] = time.perf_counter() - started
    trees = {"plain ms": ROOT_ONLY}
    if manifest.trees is not None:
        trees[f"{rows} rows ms"] = DraftTree.from_nodes(manifest.trees.nodes, rows)
    taken: dict[str, list[float]] = {name: [] for name in trees}
    for _ in range(ROUNDS):
        for name, tree in trees.items():
            prepare(engine, CONTEXT)
            taken[name] += [step(engine, tree, CONTEXT)[0] for _ in range(BLOCK)][2:]
    found |= {name: 1e3 * statistics.median(some) for name, some in taken.items()}
    status = Path("/proc/self/status").read_text().split()
    return found | {"resident MB": int(status[status.index("VmRSS:") + 1]) / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--loads", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--one", choices=("with", "without"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.bundle, arguments.one == "with", arguments.rows, arguments.threads)))
        return
    found: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    for _ in range(arguments.loads):
        for side, some in found.items():
            run = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--one", side], check=True, capture_output=True, text=True
            )
            some.append(json.loads(run.stdout))
            print(f"{side:8}" + "".join(f"  {name} {value:.2f}" for name, value in some[-1].items()), flush=True)
    for name in found["with"][0]:
        a, b = (statistics.median(run[name] for run in found[side]) for side in found)
        print(f"{name}: {a:.2f} without, {b:.2f} with: {a / b:.3f}")


if __name__ == "__main__":
    main()
