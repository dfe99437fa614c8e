#!/usr/bin/env python3
"""Measures captured and dynamic step graphs on a GPU, in one go:
`python benchmarks/gpu.py OUT --base BASE --adapter DIR --prompts PROMPTS.jsonl [--precision fp16 int4]`.

For each precision: exports `OUT/PRECISION` with `--target cuda --capture` unless it is there, runs `doctor` on it,
times steps of both graphs by their rows, and runs `bench`. For each `--shape` (default: one of 1 B): writes random
weights and streams, exports them in fp16 without a drafter and with deferred and eager streams, and times steps of 1,
8, 16 and 32 rows over the plain one, and that over reading the weights once at the device's bandwidth, measured or
given. Prints markdown tables and writes `OUT/gpu.json`.
With `--provider cpu` the CPU stands in for the device, and nothing is captured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from base_shapes import BASES
from gpu_shapes import measure_shape, shape_report

from streamspec.bundle.cache_section import CAPTURED
from streamspec.bundle.files import read_manifest
from streamspec.bundle.manifest import MODEL
from streamspec.draft_tree import chain
from streamspec.errors import StreamspecError
from streamspec.runtime.decoding.model_runner import StepRequest
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.engine.ort_runner import OrtRunner

WARM, STEPS = 10, 60


def command(*arguments: str | Path) -> str:
    """Runs streamspec; returns what it printed. Ends the program where that fails."""
    print("$ streamspec", *arguments, flush=True)
    command = [sys.executable, "-P", "-m", "streamspec", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\ngpu: streamspec {arguments[0]} failed")
    return done.stdout


def step_times(bundle: Path, graph: str, provider: str, context: int) -> dict[str, Any]:
    """Median ms of a step by rows, with `context` tokens in the cache; or why there is none."""
    manifest = read_manifest(bundle)
    assert manifest.captured is not None
    try:
        model = LoadedModel(bundle / graph, manifest, provider=provider)
        runner = OrtRunner(model)
    except StreamspecError as error:
        return {"why_not": error.found}
    runner.reset()
    runner.prefill(StepRequest([1] * context))
    out: dict[str, Any] = {"nodes_on_cpu": model.on_cpu, "captured": model.captures, "ms": {}}
    for rows in manifest.captured.rows:
        times = []
        for _ in range(WARM + STEPS):
            started = time.perf_counter()
            runner.verify(StepRequest([1] * rows, chain(rows - 1), run_drafter=rows > 1))
            runner.commit((0,))
            times.append(time.perf_counter() - started)
            runner.rewind(context)
        out["ms"][rows] = round(1e3 * statistics.median(times[WARM:]), 3)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", required=True)
    parser.add_argument("--adapter")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--precision", nargs="+", default=["fp16", "int4"])
    parser.add_argument("--provider", default="cuda")
    parser.add_argument("--context", type=int, nargs="+", default=[64, 1024], help="tokens in the cache")
    parser.add_argument("--limit", default="12")
    parser.add_argument("--shape", nargs="*", choices=BASES, default=["llama-3.2-1b"])
    parser.add_argument("--bandwidth", type=float, help="of the device's memory, in GB/s; default: measured")
    arguments = parser.parse_args()
    print(command("doctor"), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    shapes: dict[str, Any] = {}
    for name in arguments.shape:
        given = arguments.bandwidth and 1e9 * arguments.bandwidth
        shapes[name] = measure_shape(
            arguments.out, name, arguments.provider, arguments.context, given, command, step_times
        )
        print("\n".join(["", *shape_report({name: shapes[name]})]), flush=True)
    for precision in arguments.precision:
        bundle = arguments.out / precision
        if not bundle.exists():
            adapter = ["--adapter", arguments.adapter] if arguments.adapter else []
            target = ["--target", "cuda", "--capture", "--precision", precision]
            command("export", "--base", arguments.base, *adapter, "--out", bundle, *target)
        print(command("doctor", bundle), flush=True)
        one = found[precision] = {"steps": {}}
        for graph in (CAPTURED, MODEL):
            for context in arguments.context:
                one["steps"][f"{graph} {context}"] = step_times(bundle, graph, arguments.provider, context)
        options = ["--provider", arguments.provider, "--limit", arguments.limit, "--repeats", "3", "--json"]
        text = command("bench", bundle, "--prompts", arguments.prompts, *options)
        one["bench"] = json.loads(text.splitlines()[-1])
        record = {"shapes": shapes, "precisions": found}
        (arguments.out / "gpu.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    report(found)
    print("\n".join(["", *shape_report(shapes)]))


def report(found: dict[str, Any]) -> None:
    """Prints the tables."""
    print(
        "\n| precision | graph, tokens in the cache | captured | nodes on the CPU | ms of a step by rows |"
        "\n|---|---|---|---|---|"
    )
    for precision, one in found.items():
        for name, steps in one["steps"].items():
            if "why_not" in steps:
                print(f"| {precision} | {name} | no: {steps['why_not']} | | |")
            else:
                times = ", ".join(f"{rows}: {ms:.2f}" for rows, ms in steps["ms"].items())
                print(f"| {precision} | {name} | {steps['captured']} | {steps['nodes_on_cpu']} | {times} |")
    titles = "plain tokens/s", "speculative tokens/s", "speed-up", "tokens per step", "mismatches", "near-ties"
    keys = "plain_tokens_per_s", "spec_tokens_per_s", "speedup", "tokens_per_step", "mismatches", "near_ties"
    print("\n| precision |", " | ".join(titles), "|\n|---|---|---|---|---|---|---|")
    for precision, one in found.items():
        print(f"| {precision} |", " | ".join(f"{one['bench'][key]:.4g}" for key in keys), "|")


if __name__ == "__main__":
    main()
