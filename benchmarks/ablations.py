#!/usr/bin/env python3
"""Measures the effect of each design choice of the streams:
`python benchmarks/ablations.py --target-adapter DIR --data DIR/e2e --out OUT`.

The target answers `--rows` training and `--val-rows` validation prompts once. Every variant then starts from the same
seed, learns from the same answers for the same `--minutes` of CPU time, and is scored by the tau that a tree of 16 rows
would have on the same validation answers (`acceptance_stats.simulated_tau`). One process per variant;
`OUT/results.jsonl` gains a line for each, and a later call runs the variants that are missing (another `--minutes`
needs another OUT). `--only NAME ...` picks groups; without `--data` the tables of the existing results are printed.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPORTED_ROWS = 16


@dataclass(frozen=True)
class Variant:
    """`options` are those of TrainConfig."""

    group: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)


BASIS = Variant(
    "basis", "gamma 6, Ns 10, embeddings and root token, t + j, hard labels, no bigram, rank 32"
)  # and a random start
MOST_CHILDREN = (1, 2, 3, 4)  # k: guesses of a stream that a tree may use, tried on the basis
VARIANTS = (
    BASIS,
    *(Variant("gamma", str(n), {"gamma": n}) for n in (2, 4, 8)),
    *(Variant("Ns", str(n), {"ns": n}) for n in (2, 4, 6, 14, 20)),
    *(Variant("learning rate", f"3e-3, Ns {n}", {"ns": n, "stream_lr": 3e-3}) for n in (2, 10)),
    Variant("start", "least squares", {"fit_start": True}),
    Variant("start", "no root token", {"root_token": False}),
    Variant("start", "value rotation, no embeddings", {"value_rotation": True}),
    Variant("start", "value rotation, no embeddings, no root token", {"root_token": False, "value_rotation": True}),
    Variant("start", "f_eta of rank 8 instead of the identity", {"start_rank": 8}),
    Variant("position", "t", {"positions": "same"}),
    *(Variant("alpha", f"{x} of the stream before", {"alpha_decay": x}) for x in (0.8, 0.6)),
    *(Variant("labels", kind, {"labels": kind}) for kind in ("kl", "tv")),
    *(Variant("bigram rank", str(r), {"bigram_rank": r}) for r in (8, 32, 128)),
    *(Variant("stream LoRA rank", str(r), {"stream_rank": r}) for r in (4, 12, 64)),
)


def measure(variant: Variant, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains and scores one variant in this process; the basis also with smaller k."""
    import torch

    from streamspec.acceptance_stats import MISSED, node_order, per_stream_accuracy, simulated_tau
    from streamspec.adapters import models, recipe_stages
    from streamspec.adapters.drafters.acceptance_eval import record_ranks
    from streamspec.adapters.drafters.streams.model import StreamingModel
    from streamspec.adapters.prepare import prepare
    from streamspec.adapters.runs.run_folder import RUN_STATE, WORK
    from streamspec.adapters.runs.run_state import RunState
    from streamspec.adapters.training.config import TrainConfig
    from streamspec.adapters.training.device import spare_allocator, start_budget
    from streamspec.draft_tree import DraftTree

    spare_allocator()
    shared = TrainConfig(
        base=arguments.base,
        data=arguments.data / "train.jsonl",
        val=arguments.data / "dev.jsonl",
        out=arguments.out / "shared",
        recipe="staged",
        target_adapter=arguments.target_adapter,
        regenerate_rows=arguments.rows,
        val_rows=arguments.val_rows,
        max_new_tokens=96,
        threads=arguments.threads,
        epochs=50,
        clock="cpu",
        prune_rank=0,
        resume=True,
        ns=10,
        bigram_rank=0,
        stream_lr=1e-3,
        stream_batch_size=8,
        fit_start=False,
    )
    run = prepare(shared)
    model = models.load_target(run, shared.target_lora)
    rows = recipe_stages.own_answers(run, model, run.prompts, shared.regenerate_rows, "train")
    val_rows = recipe_stages.own_answers(run, model, run.val_prompts, shared.val_rows, "val")
    # From here on everything is the variant's.
    own = arguments.out / "variants" / f"{variant.group}-{variant.name}".replace(" ", "-")
    changes = {name: value for name, value in asdict(shared).items() if name not in variant.options and name != "out"}
    run.config = TrainConfig(**changes, **variant.options, out=own)
    run.ns, run.state = (
        run.config.ns or run.ns,
        RunState(own / WORK / RUN_STATE, run.config.to_json(), run.config.resume),
    )
    vocabulary = models.choose_vocabulary(run, rows)
    StreamingModel.prepare_target(run, model)
    torch.manual_seed(shared.seed)
    streams = StreamingModel.fresh(run, model, vocabulary, frozen=True)
    run.config.max_minutes = arguments.minutes
    run.budget = start_budget(run.config, None)
    recipe_stages.fit_drafter(run, "streams", streams, rows, vocabulary, run.config.stream_lr)
    streams.eval()
    ranks = record_ranks(streams, val_rows, vocabulary)
    shown = {
        "accuracy": [round(float(x), 3) for x in per_stream_accuracy(ranks)],
        "steps": run.state.log["streams"][-1]["step"],
        "parameters": sum(p.numel() for p in streams.parameters() if p.requires_grad),
        "minutes": arguments.minutes,
    }

    def judged(group: str, name: str, ranks: list[list[list[int]]]) -> dict[str, Any]:
        tree = DraftTree.from_nodes(node_order(ranks, streams.gamma), REPORTED_ROWS)
        return {"group": group, "name": name, "tau": round(simulated_tau(ranks, tree), 3)} | shown

    found = [judged(variant.group, variant.name, ranks)]
    for most in MOST_CHILDREN if variant is BASIS else ():
        found.append(
            judged("k", str(most), [[[r if r < most else MISSED for r in row] for row in answer] for answer in ranks])
        )
    return found


def table(results: Path) -> str:
    found = [json.loads(line) for line in results.read_text().splitlines()]
    basis = next((r["tau"] for r in found if r["group"] == BASIS.group), math.nan)
    lines = [
        "| group | variant | tau, 16 rows | over basis | first guesses right, per stream | steps | parameters |",
        "|---|---|---|---|---|---|---|",
    ]
    order = [BASIS.group, "k", *(variant.group for variant in VARIANTS)]
    for r in sorted(found, key=lambda r: order.index(r["group"])):
        right = " ".join(f"{100 * x:.0f}" for x in r["accuracy"])
        lines.append(
            f"| {r['group']} | {r['name']} | {r['tau']:.2f} | {r['tau'] / basis - 1:+.1%} | {right} | {r['steps']} | "
            f"{r['parameters'] / 1e6:.2f} M |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="smollm2-135m")
    parser.add_argument("--target-adapter", type=Path)
    parser.add_argument("--data", type=Path, help="folder with train.jsonl and dev.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--val-rows", type=int, default=100)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    results = arguments.out / "results.jsonl"
    wanted = [v for v in VARIANTS if not arguments.only or v.group in arguments.only]
    if arguments.one:
        found = measure(next(v for v in VARIANTS if f"{v.group} {v.name}" == arguments.one), arguments)
        with results.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in found)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.data and not arguments.target_adapter:
        parser.error("--target-adapter: the folder of a task LoRA, or `base`")
    for variant in wanted if arguments.data else ():
        done = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        if not any((r["group"], r["name"]) == (variant.group, variant.name) for r in done):
            print(f"{variant.group}: {variant.name}", file=sys.stderr, flush=True)
            subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--one", f"{variant.group} {variant.name}"], check=True
            )
    print(table(results) if results.exists() else "nothing measured yet")


if __name__ == "__main__":
    main()
