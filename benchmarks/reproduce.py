#!/usr/bin/env python3
"""Reproduces the figures of docs/lab/benchmarks.md:
`python benchmarks/reproduce.py --data DIR [--work DIR] [--only PART ...]`.

DialogSum, which is not shipped, is measured by the commands given on that page. `DIR` holds `e2e/` and `wikisql/` with
train, dev and test files (prompt/completion rows; test rows may have `references`); some parts also read
`books/train.jsonl.gz` and `spec_bench/question.jsonl`. Each part is a list of streamspec commands, printed before they
run; existing results are not made again. Parts:

    train        the shipped adapters, from nothing (hours; without it those of benchmarks/adapters are measured)
    arms         joint, joint + self-distill and staged at equal total time
    export       bundles of the streaming adapter in all precisions, of its task LoRA alone, and of `--method lora` if
                 trained
    speed        tau and speed-up per tree size, over the own, the fastest and the task LoRA's plain decoding
    identity     20,000 tokens compared with plain decoding, fp32 (int8: the quality part compares more)
    quality      EM and ROUGE of the streaming bundle against `--method lora`, paired bootstrap
    profile      time of a step by part, memory of the runtime by part
    training     time of a joint step over a step of `--method lora`
    pages        a load with and without huge pages
    typical      tokens per step and quality with typical acceptance
    trees        trees chosen each step, fixed, Cartesian and pruned
    sampled      temperature 1, top-p 0.9, against plain sampling with the same seeds
    adversarial  prompts that no drafter has learnt, greedy and at temperature 1.5
    chat         Spec-Bench by category: chat drafter with n-grams, each of them alone
    baselines    streams, Medusa heads and a second model from the same start (hours)
    ablations    the effect of each design choice of the streams (hours)
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
BASE = ["--base", "smollm2-135m"]
TASKS = ("e2e", "wikisql")
ANSWERS = ["--max-new-tokens", "96"]
# Minutes: E2E's and chat's of one core, WikiSQL's of one H100 that three runs shared.
TASK_LORA = {"e2e": "--max-minutes 7", "wikisql": "--batch-size 64 --max-minutes 4"}
SHIPPED_RANK = "12"  # the task LoRAs are trained at rank 32, then cut
# behind the cut target; E2E's and chat's are from before streams had a fitted start
STREAMS = {
    "e2e": "--no-fit-start --ns 2 --stream-rank 64 --stream-lr 1e-3 --regenerate-rows 2000 --answer-temperature 1 "
    "--answer-top-p 0.9 --stream-batch-size 8 --max-minutes 30 --clock cpu --threads 1",
    "wikisql": "--ns 6 --stream-rank 24 --bigram-rank 64 --alpha-decay 0.8 --stream-lr 2e-3 --regenerate-rows 8000 "
    "--stream-batch-size 32 --max-minutes 9",
}
ARMS = {"joint": "--recipe joint", "distill": "--recipe joint --self-distill", "staged": "--recipe staged"}
ARM = (
    "--no-fit-start --stream-batch-size 8 --lr 1e-3 --max-minutes 28 --epochs 6 --regenerate-rows 3000 --val-rows "
    "150 --threads 1"
)
QUALITY_PROMPTS = {"e2e": 315, "wikisql": 2000}
CHAT = (
    "--no-fit-start --format chat --gamma 4 --ns 10 --stream-lr 1e-3 --max-length 640 --max-new-tokens 160 "
    "--val-rows 60 --threads 1 --stream-batch-size 8"
)
Command = list[str]
Part = Iterator[tuple[Path | None, Command]]  # a result that makes the command unnecessary, the command


def train(data: Path, work: Path) -> Part:
    for task in TASKS:
        files = [*BASE, "--data", f"{data}/{task}/train.jsonl", "--val", f"{data}/{task}/dev.jsonl"]
        files += ["--separator", "\n"]
        lora, cut, out = (work / f"{task}{part}" for part in ("-lora", "-cut", ""))
        yield lora, ["train", *files, "--out", f"{lora}", *f"--method lora --lr 1e-3 {TASK_LORA[task]}".split()]
        yield cut, ["shrink", f"{lora}", "--rank", SHIPPED_RANK, "--out", f"{cut}"]
        shared = ["train", *files, "--target-adapter", f"{cut}", *ANSWERS, "--val-rows", "150", "--epochs", "60"]
        yield out, [*shared, "--out", f"{out}", *STREAMS[task].split()]
    prompts_of_chat, first, out = (work / f"chat{part}" for part in ("-data", "-first", ""))
    yield prompts_of_chat / "train.jsonl", [f"{HERE}/chat_data.py", "--data", f"{data}", "--out", f"{prompts_of_chat}"]
    chat = [
        "train",
        *BASE,
        "--data",
        f"{prompts_of_chat}/train.jsonl",
        "--val",
        f"{prompts_of_chat}/dev.jsonl",
        "--target-adapter",
        "base",
        *CHAT.split(),
    ]
    yield first, [*chat, "--out", f"{first}", *["--regenerate-rows", "1500", "--epochs", "8", "--max-minutes", "50"]]
    yield (
        out,
        [
            *chat,
            "--out",
            f"{out}",
            "--warm-start",
            f"{first}",
            *["--regenerate-rows", "4000", "--epochs", "20", "--max-minutes", "90"],
        ],
    )


def arms(data: Path, work: Path) -> Part:
    for task in TASKS:
        files = [*BASE, "--data", f"{data}/{task}/train.jsonl", "--val", f"{data}/{task}/dev.jsonl"]
        files += ["--separator", "\n"]
        for arm, recipe in ARMS.items():
            out = work / f"arm-{task}-{arm}"
            bundle = out.with_name(f"{out.name}-int8")
            yield out, ["train", *files, "--out", f"{out}", *recipe.split(), *ARM.split(), *ANSWERS]
            yield bundle, ["export", *BASE, "--adapter", f"{out}", "--out", f"{bundle}"]
            yield None, ["bench", f"{bundle}", *prompts(data, task, 150), "--repeats", "1", "--rows", "16"]


def export(data: Path, work: Path) -> Part:
    for task in TASKS:
        adapter = work / task if finished(work / task) else HERE / "adapters" / task
        for precision in ("fp32", "int8", "int4"):
            out = work / f"{task}-{precision}"
            yield out, ["export", *BASE, "--adapter", f"{adapter}", "--out", f"{out}", "--precision", precision]
        target, lora = work / f"{task}-target", work / f"{task}-lora"
        if not finished(target):
            copy_task_lora(adapter, target)
        for plain in (target, lora) if finished(lora) else (target,):
            out = plain.with_name(f"{plain.name}-int8")
            yield out, ["export", *BASE, "--adapter", f"{plain}", "--out", f"{out}"]


def copy_task_lora(adapter: Path, out: Path) -> None:
    """Copies the task LoRA of a staged adapter without its streams: the target alone."""
    out.mkdir(exist_ok=True)
    config = json.loads((adapter / "streamspec_config.json").read_text())
    config |= {"method": "lora", "recipe": None, "streams": None}
    (out / "streamspec_config.json").write_text(json.dumps(config))
    for name in ("adapter_config.json", "adapter_model.safetensors", "training.json"):
        shutil.copyfile(adapter / name, out / name)


def speed(data: Path, work: Path) -> Part:
    for task in TASKS:
        others = [f"--also={work / task}-{other}" for other in ("fp32", "int4", "target-int8")]
        yield None, ["bench", f"{work / task}-int8", *prompts(data, task, 100), "--rows", "8,16", *others]


def identity(data: Path, work: Path) -> Part:
    yield None, ["bench", f"{work}/wikisql-fp32", *prompts(data, "wikisql", 700), "--repeats", "1"]


def quality(data: Path, work: Path) -> Part:
    """Compares with `--method lora` at the rank it was trained with, or else with the target alone."""
    for task in TASKS:
        out, lora = work / f"{task}-quality.jsonl", work / f"{task}-lora-int8"
        other = lora if lora.exists() else work / f"{task}-target-int8"
        asked = prompts(data, task, QUALITY_PROMPTS[task])
        yield (
            out,
            [
                "bench",
                f"{work / task}-int8",
                *asked,
                "--repeats",
                "1",
                "--also",
                f"{other}",
                "--save-outputs",
                f"{out}",
            ],
        )
        yield None, [f"{HERE}/compare.py", f"{out}", f"{out}", "--side", f"{other}", "--side-b", "speculative"]


def profile(data: Path, work: Path) -> Part:
    for task in TASKS:
        yield None, [f"{HERE}/step_profile.py", f"{work / task}-int8"]
        yield None, [f"{HERE}/plain_step.py", *(f"{work / task}-{kind}" for kind in ("int8", "target-int8"))]
        yield None, [f"{HERE}/memory.py", f"{work / task}-int8", "--prompts", f"{data}/{task}/test.jsonl"]


def training(data: Path, work: Path) -> Part:
    for task in TASKS:
        yield None, [f"{HERE}/train_time.py", f"{data}/{task}/train.jsonl"]


def pages(data: Path, work: Path) -> Part:
    yield None, [f"{HERE}/huge_pages.py", f"{work}/e2e-int8"]


def typical(data: Path, work: Path) -> Part:
    for task in TASKS:
        yield None, [f"{HERE}/typical.py", f"{work / task}-int8", "--prompts", f"{data}/{task}/test.jsonl"]


def trees(data: Path, work: Path) -> Part:
    for task in TASKS:
        yield None, [f"{HERE}/trees.py", f"{work / task}-int8", "--prompts", f"{data}/{task}/test.jsonl"]


def sampled(data: Path, work: Path) -> Part:
    for task in TASKS:
        yield None, ["bench", f"{work / task}-int8", *prompts(data, task, 100), "--temperature", "1", "--top-p", "0.9"]


def adversarial(data: Path, work: Path) -> Part:
    out = work / "adversarial"
    yield out / "random.jsonl", [f"{HERE}/adversarial.py", "--data", f"{data}", "--out", f"{out}"]
    for name in ("random", "books"):
        asked = ["--prompts", f"{out}/{name}.jsonl", *ANSWERS, "--json"]
        yield None, ["bench", f"{work}/e2e-int8", *asked]
        yield None, ["bench", f"{work}/e2e-int8", *asked, "--temperature", "1.5"]


def chat(data: Path, work: Path) -> Part:
    adapter = work / "chat" if finished(work / "chat") else HERE / "adapters" / "chat"
    asked = ["--prompts", f"{data}/spec_bench/question.jsonl", "--max-new-tokens", "128", "--json", "--repeats", "1"]
    yield work / "chat-int8", ["export", *BASE, "--adapter", f"{adapter}", "--out", f"{work}/chat-int8"]
    yield work / "base-int8", ["export", *BASE, "--out", f"{work}/base-int8"]
    yield None, ["bench", f"{work}/chat-int8", *asked]
    yield None, ["bench", f"{work}/chat-int8", *asked, "--no-ngram", "--no-recycling"]
    yield None, ["bench", f"{work}/base-int8", *asked]


def baselines(data: Path, work: Path) -> Part:
    for task, rows in (("e2e", 1500), ("wikisql", 900)):
        adapter, budget = (
            f"{HERE}/adapters/{task}",
            f"--rows {rows} --minutes 6 --threads 1 --limit 40 --repeats 2".split(),
        )
        yield (
            None,
            [
                f"{HERE}/baselines.py",
                "--task",
                task,
                "--target-adapter",
                adapter,
                "--data",
                f"{data}/{task}",
                "--out",
                f"{work}/baselines",
                *budget,
            ],
        )


def ablations(data: Path, work: Path) -> Part:
    budget = ["--rows", "1500", "--val-rows", "80", "--minutes", "6", "--threads", "1"]
    yield (
        None,
        [
            f"{HERE}/ablations.py",
            "--target-adapter",
            f"{HERE}/adapters/e2e",
            "--data",
            f"{data}/e2e",
            "--out",
            f"{work}/ablations",
            *budget,
        ],
    )


def prompts(data: Path, task: str, limit: int) -> Command:
    return ["--prompts", f"{data}/{task}/test.jsonl", "--limit", f"{limit}", *ANSWERS, "--json"]


def finished(result: Path) -> bool:
    """Returns whether a file exists, or the last file of an adapter or bundle does."""
    return result.is_file() or any((result / last).exists() for last in ("training.json", "manifest.json"))


ON_REQUEST = (train, arms, baselines, ablations)
PARTS = {
    part.__name__: part
    for part in (
        export,
        speed,
        identity,
        quality,
        profile,
        training,
        pages,
        typical,
        trees,
        sampled,
        adversarial,
        chat,
        *ON_REQUEST,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("benchmarks-work"))
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=[name for name, part in PARTS.items() if part not in ON_REQUEST]
    )
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    for part in arguments.only:
        for result, command in PARTS[part](arguments.data, arguments.work):
            if result is not None and finished(result):
                print(f"# {result} is there already", flush=True)
                continue
            if command[0] == "train" and result is not None and result.exists():
                command = [*command, "--resume"]
            script = command[0].endswith(".py")
            print("$ " + " ".join(["python" if script else "streamspec", *command]), flush=True)
            subprocess.run([sys.executable, *([] if script else ["-m", "streamspec"]), *command], check=True)


if __name__ == "__main__":
    main()
