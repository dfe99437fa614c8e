#!/usr/bin/env python3
"""Measures what rows cost that are pruned at the early exit, against rows that never were drafted:
`python benchmarks/pruned_steps.py BUNDLE [--rows 8 16 32] [--context 64] [--rounds 15] [--threads N]`.

Steps of as many rows, of which half go on above the exit, take turns with steps of all rows and of half of them; each
also runs the drafter. Prints, over a plain step: medians, and the share of the further rows' cost that pruning saves.
`--random BASE` first makes BUNDLE, in int8, of a base with random weights (`big_models.py` makes such) and random
streams of the last fifth of the layers with an early exit at `--exit-layer`: costs do not depend on weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from streamspec.draft_tree import DraftTree, chain
from streamspec.runtime import Pruning, load
from streamspec.runtime.decoding.model_runner import DROPPED, ROOT_ONLY, ModelRunner, StepRequest

GAMMA, RANK, VOCABULARY = 6, 8, 8192  # of random streams: depths, the exit's map, tokens proposed


def make(base_folder: str, bundle: Path, exit_layer: int, when: str) -> None:
    """Exports the base with random streams."""
    from safetensors.numpy import save_file

    from streamspec.adapters.base_models.resolve import resolve_base
    from streamspec.export import export_bundle

    base, rng = resolve_base(base_folder), np.random.default_rng(0)
    sizes = json.loads((base.path / "config.json").read_text(encoding="utf-8"))
    hidden, ns = sizes["hidden_size"], sizes["num_hidden_layers"] // 5
    folder = bundle.parent / f"{bundle.name}-adapter"
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {"stream_embeddings": (GAMMA, hidden), "prune_down": (1, RANK, hidden), "prune_up": (1, hidden, RANK)}
    tensors = {name: rng.standard_normal(shape).astype(np.float32) * 0.02 for name, shape in shapes.items()}
    save_file(tensors | {"draft_vocab": np.arange(VOCABULARY)}, folder / "streamspec.safetensors")
    streams = {
        "gamma": GAMMA,
        "ns": ns,
        "scale": 1.0,
        "positions": "shifted",
        "root_token": False,
        "pruning": RANK,
        "exit_layers": [exit_layer],
        "draft_vocab": VOCABULARY,
    }
    config = {
        "format_version": 1,
        "method": "streaming",
        "recipe": "staged",
        "base": {"id": base.id, "sha256": base.sha256, "model_type": base.model_type},
        "prompt_format": {"kind": "raw", "separator": "\n"},
        "streams": streams,
    }
    (folder / "streamspec_config.json").write_text(json.dumps(config), encoding="utf-8")
    ranks = rng.integers(-1, 3, (8, 24, GAMMA)).tolist()
    record = {"gamma": GAMMA, "max_rank": 10, "ranks": ranks}
    (folder / "acceptance.json").write_text(json.dumps(record), encoding="utf-8")
    export_bundle(base_folder, folder, bundle, "int8", streams=when)


def step(runner: ModelRunner, tree: DraftTree, kept: int, context: int) -> float:
    """Seconds of a step of the tree, of whose rows the first `kept` go on above the exit."""
    priors = np.where(np.arange(len(tree)) < kept, 0, DROPPED).astype(np.float32)
    began = time.perf_counter()
    pruning = Pruning(kept, score="prior") if kept < len(tree) else None
    runner.verify(StepRequest([3] * len(tree), tree, len(tree) > 1, pruning, priors))
    runner.commit((0,))
    seconds = time.perf_counter() - began
    runner.rewind(context)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--random", metavar="BASE", help="folder of a base, of which to make the bundle")
    parser.add_argument("--exit-layer", type=int, default=3)
    parser.add_argument("--streams", default="deferred", help="when random streams run: deferred or eager")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--provider", default="auto")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if arguments.random and not arguments.bundle.exists():
        make(arguments.random, arguments.bundle, arguments.exit_layer, arguments.streams)
    session = load(arguments.bundle, threads=arguments.threads, provider=arguments.provider, tree=2)
    session.manifest.check_prunes()
    runner, context = session.runner, arguments.context
    runner.prefill(StepRequest([1] * context))
    sides = {(1, 1)} | {(rows, kept) for rows in arguments.rows for kept in (rows, rows // 2)}
    sides |= {(rows // 2, rows // 2) for rows in arguments.rows}
    taken: dict[tuple[int, int], list[float]] = {side: [] for side in sorted(sides)}
    for _ in range(arguments.rounds + 1):
        for rows, kept in taken:
            tree = chain(rows - 1) if rows > 1 else ROOT_ONLY
            taken[rows, kept].append(step(runner, tree, kept, context))
    costs = {side: statistics.median(seconds[1:]) for side, seconds in taken.items()}
    plain = costs[1, 1]
    print(f"{session.provider.name}: a plain step takes {1e3 * plain:.1f} ms")
    print("| rows | all | pruned to half | half drafted | of the further rows saved |\n|---|---|---|---|---|")
    for rows in arguments.rows:
        every, pruned, half = (
            costs[side] / plain for side in ((rows, rows), (rows, rows // 2), (rows // 2, rows // 2))
        )
        print(f"| {rows} | {every:.2f} | {pruned:.2f} | {half:.2f} | {(every - pruned) / (every - half):.0%} |")


if __name__ == "__main__":
    main()
