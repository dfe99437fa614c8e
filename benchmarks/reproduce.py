#!/usr/bin/env python3
"""Reproduces every figure of docs/benchmarks.md: `python benchmarks/reproduce.py --data DIR [--work DIR] [--only PART ...]`.

`DIR` holds `e2e/` and `wikisql/` with train, dev and test files (prompt/completion rows; test rows may have `references`).
Each part is a list of streamspec commands, printed before they run; what is already there is not made again. Parts:

    train     the shipped adapters, from nothing (hours; without it the ones under benchmarks/adapters are measured)
    arms      joint, joint + self-distill and staged at equal total time
    export    bundles of the task LoRA and of the streaming adapter in all precisions
    speed     tau and speed-up per tree size, against the own and the fastest plain decoding
    identity  20,000 tokens against plain decoding, fp32 and int8
    quality   EM and ROUGE of the streaming bundle against `--method lora`, paired bootstrap
    profile   where a step's time goes
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
BASE = "smollm2-135m"
TASKS = ("e2e", "wikisql")
NEW_TOKENS = {"e2e": 96, "wikisql": 96}
TASK_MINUTES = {"e2e": 7, "wikisql": 13}
STREAM_MINUTES = {"e2e": 16, "wikisql": 25}
ARM_MINUTES = 20
ROWS = "2,4,6,8,10,12,14,16"
Command = list[str]


def parts(data: Path, work: Path, adapters: Path) -> dict[str, Iterator[tuple[Path | None, Command]]]:
    """Part -> (result that makes the command unnecessary, command)."""
    return {
        "train": train(data, work),
        "arms": arms(data, work),
        "export": export(work, adapters),
        "speed": speed(data, work),
        "identity": identity(data, work),
        "quality": quality(data, work),
        "profile": profile(work),
    }


def train(data: Path, work: Path) -> Iterator[tuple[Path | None, Command]]:
    for task in TASKS:
        files = ["--data", f"{data}/{task}/train.jsonl", "--val", f"{data}/{task}/dev.jsonl"]
        lora, out = work / f"{task}-lora", work / task
        yield (
            lora,
            [
                "train",
                "--base",
                BASE,
                *files,
                "--out",
                f"{lora}",
                "--method",
                "lora",
                "--lr",
                "1e-3",
                "--max-minutes",
                f"{TASK_MINUTES[task]}",
            ],
        )
        yield (
            out,
            [
                "train",
                "--base",
                BASE,
                *files,
                "--out",
                f"{out}",
                "--target-adapter",
                f"{lora}",
                "--max-minutes",
                f"{STREAM_MINUTES[task]}",
                "--epochs",
                "6",
                "--regenerate-rows",
                "3000",
                "--max-new-tokens",
                "96",
                "--val-rows",
                "150",
            ],
        )


def arms(data: Path, work: Path) -> Iterator[tuple[Path | None, Command]]:
    flags = {
        "joint": ["--recipe", "joint"],
        "joint-distill": ["--recipe", "joint", "--self-distill"],
        "staged": ["--recipe", "staged", "--lr", "1e-3"],
    }
    for task in TASKS:
        for arm, recipe in flags.items():
            out = work / f"arm-{task}-{arm}"
            yield (
                out,
                [
                    "train",
                    "--base",
                    BASE,
                    "--data",
                    f"{data}/{task}/train.jsonl",
                    "--val",
                    f"{data}/{task}/dev.jsonl",
                    "--out",
                    f"{out}",
                    *recipe,
                    "--max-minutes",
                    f"{ARM_MINUTES}",
                    "--epochs",
                    "6",
                    "--regenerate-rows",
                    "3000",
                    "--max-new-tokens",
                    "96",
                ],
            )
            yield (
                work / f"{out.name}-int8",
                ["export", "--base", BASE, "--adapter", f"{out}", "--out", f"{work / out.name}-int8"],
            )
            yield (
                None,
                [
                    "bench",
                    f"{work / out.name}-int8",
                    "--prompts",
                    f"{data}/{task}/test.jsonl",
                    "--limit",
                    "300",
                    "--rows",
                    "16",
                    "--repeats",
                    "1",
                    "--max-new-tokens",
                    f"{NEW_TOKENS[task]}",
                    "--json",
                ],
            )


def export(work: Path, adapters: Path) -> Iterator[tuple[Path | None, Command]]:
    for task in TASKS:
        adapter = work / task if (work / task).exists() else adapters / task
        for precision in ("fp32", "int8", "int4"):
            out = work / f"{task}-{precision}"
            yield (
                out,
                ["export", "--base", BASE, "--adapter", f"{adapter}", "--out", f"{out}", "--precision", precision],
            )
        if (work / f"{task}-lora").exists():
            out = work / f"{task}-lora-int8"
            yield out, ["export", "--base", BASE, "--adapter", f"{work / f'{task}-lora'}", "--out", f"{out}"]


def speed(data: Path, work: Path) -> Iterator[tuple[Path | None, Command]]:
    for task in TASKS:
        yield (
            None,
            [
                "bench",
                f"{work / task}-int8",
                "--prompts",
                f"{data}/{task}/test.jsonl",
                "--limit",
                "100",
                "--repeats",
                "5",
                "--rows",
                ROWS,
                "--also",
                f"{work / task}-fp32",
                "--also",
                f"{work / task}-int4",
                "--max-new-tokens",
                f"{NEW_TOKENS[task]}",
                "--json",
            ],
        )


def identity(data: Path, work: Path) -> Iterator[tuple[Path | None, Command]]:
    for precision in ("int8", "fp32"):
        yield (
            None,
            [
                "bench",
                f"{work / 'wikisql'}-{precision}",
                "--prompts",
                f"{data}/wikisql/test.jsonl",
                "--limit",
                "650",
                "--repeats",
                "1",
                "--max-new-tokens",
                "96",
                "--json",
            ],
        )


def quality(data: Path, work: Path) -> Iterator[tuple[Path | None, Command]]:
    for task, limit in (("e2e", "315"), ("wikisql", "2000")):
        for bundle in (f"{task}-int8", f"{task}-lora-int8"):
            yield (
                work / f"{bundle}.jsonl",
                [
                    "bench",
                    f"{work / bundle}",
                    "--prompts",
                    f"{data}/{task}/test.jsonl",
                    "--limit",
                    limit,
                    "--repeats",
                    "1",
                    "--max-new-tokens",
                    "128",
                    "--save-outputs",
                    f"{work / bundle}.jsonl",
                    "--json",
                ],
            )
        yield None, [f"{HERE}/compare.py", f"{work / task}-lora-int8.jsonl", f"{work / task}-int8.jsonl"]


def profile(work: Path) -> Iterator[tuple[Path | None, Command]]:
    for task in TASKS:
        yield None, [f"{HERE}/step_profile.py", f"{work / task}-int8"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("benchmarks-work"))
    parser.add_argument("--adapters", type=Path, default=HERE / "adapters")
    parser.add_argument("--only", nargs="+", default=["export", "speed", "identity", "quality", "profile"])
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    known = parts(arguments.data, arguments.work, arguments.adapters)
    unknown = sorted(set(arguments.only) - set(known))
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}; expected {', '.join(known)}")
    for part in arguments.only:
        for result, command in known[part]:
            if result is not None and result.exists():
                print(f"# {result} is there already", flush=True)
                continue
            script = command[0].endswith(".py")
            print("$ " + " ".join(["python" if script else "streamspec", *command]), flush=True)
            subprocess.run([sys.executable, *([] if script else ["-m", "streamspec"]), *command], check=True)


if __name__ == "__main__":
    main()
