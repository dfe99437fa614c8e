#!/usr/bin/env python3
"""Compares the training time per token of `--recipe joint` with that of `--method lora`:
`python benchmarks/train_time.py DATA.jsonl [--steps 40]`.

Both train on the same batches in the same order (equal seeds), alternately, `--repeats` times; the first ten steps of a
run (warm-up) are not counted. Prints seconds a step of every run and the ratio of each pair.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from itertools import islice
from pathlib import Path

from streamspec.adapters.train import train
from streamspec.adapters.training.config import TrainConfig
from streamspec.bundle.adapter_folder import PROVENANCE

RECIPES = {"lora": {"method": "lora"}, "joint": {"method": "streaming", "recipe": "joint"}}
LOGGED = 10  # steps between two entries of a run's log


def seconds_a_step(recipe: str, base: str, data: Path, out: Path, threads: int | None) -> float:
    """Trains once over `data` and reads the adapter's own log: time from the first entry to the last."""
    shortest = {"val_rows": 1, "max_new_tokens": 1}  # validation is not part of the comparison
    shortest["separator"] = "\n"
    train(TrainConfig(base=base, data=data, out=out, threads=threads, save_steps=10**6, **shortest, **RECIPES[recipe]))
    log = next(part for part in json.loads((out / PROVENANCE).read_text())["log"].values() if isinstance(part, list))
    entries = [entry for entry in log if entry["step"] % LOGGED == 0]
    return 60 * (entries[-1]["minutes"] - entries[0]["minutes"]) / (entries[-1]["step"] - entries[0]["step"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--base", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=40, help="at least 30")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if arguments.steps < 30:
        parser.error("--steps: at least 30, or there is nothing to time after the warm-up")
    times: dict[str, list[float]] = {recipe: [] for recipe in RECIPES}
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        with arguments.data.open(encoding="utf-8") as lines:
            rows.write_text("".join(islice(lines, 8 * arguments.steps + 1)), encoding="utf-8")  # one is held out
        for turn in range(arguments.repeats):
            for recipe in RECIPES:
                out = Path(folder) / f"{recipe}-{turn}"
                times[recipe].append(seconds_a_step(recipe, arguments.base, rows, out, arguments.threads))
    ratios = [joint / lora for lora, joint in zip(times["lora"], times["joint"], strict=True)]
    for recipe, taken in times.items():
        print(f"{recipe:6}" + "".join(f" {s:.2f}" for s in taken) + " s a step")
    print(f"joint over lora: median {statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})")


if __name__ == "__main__":
    main()
