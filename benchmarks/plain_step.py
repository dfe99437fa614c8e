#!/usr/bin/env python3
"""Compares the plain steps of bundles: `python benchmarks/plain_step.py BUNDLE OTHER ... [--loads 6] [--threads N]`.

Opens all bundles afresh `--loads` times, in turns in the given and in the reverse order, because the placement of
memory decides several per cent; within a load their steps alternate. Prints medians in ms and the ratio of the first
bundle to each other.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from step_profile import prepare, step

from streamspec.bundle.files import read_manifest
from streamspec.runtime.decoding.model_runner import ROOT_ONLY
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.engine.ort_runner import OrtRunner

BLOCK = 12  # steps of a bundle before the next one's turn; the first two bring its weights back into the caches


def medians(engines: dict[Path, OrtRunner], context: int, rounds: int) -> dict[Path, float]:
    """Maps each bundle to the median ms of its plain step."""
    times: dict[Path, list[float]] = {bundle: [] for bundle in engines}
    for _ in range(rounds):
        for bundle, engine in engines.items():
            prepare(engine, context)
            times[bundle] += [step(engine, ROOT_ONLY, context)[0] for _ in range(BLOCK)][2:]
    return {bundle: 1e3 * statistics.median(taken) for bundle, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--loads", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    first, *others = arguments.bundles
    ratios: dict[Path, list[float]] = {other: [] for other in others}
    for load in range(arguments.loads):
        order = arguments.bundles if load % 2 == 0 else arguments.bundles[::-1]
        engines = {
            b: OrtRunner(LoadedModel(b / "model.onnx", read_manifest(b), threads=arguments.threads)) for b in order
        }
        found = medians(engines, arguments.context, arguments.rounds)
        del engines
        print(f"load {load + 1}: " + ", ".join(f"{b.name} {found[b]:.2f}" for b in arguments.bundles), flush=True)
        for other in others:
            ratios[other].append(found[first] / found[other])
    for other, some in ratios.items():
        print(
            f"{first.name} over {other.name}: median {statistics.median(some):.3f} ({min(some):.3f}..{max(some):.3f})"
        )


if __name__ == "__main__":
    main()
