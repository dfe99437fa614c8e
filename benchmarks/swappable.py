#!/usr/bin/env python3
"""Measures the cost of swappable adapters:
`python benchmarks/swappable.py SWAPPABLE --adapter NAME MERGED PROMPTS.jsonl [--adapter ...] [--limit 20]`.

Each adapter NAME of a swappable bundle is compared with MERGED, the bundle that has it in its weights, prompt by prompt
in an order that changes: a plain step, tokens per step, tokens per second and speed-up on either side (medians over
`--repeats`). Every answer must be the same with and without drafts; between the two bundles, which round differently,
equal answers are counted. Then the sizes of the adapters' files, and seconds of a swap to each, the others between
(median of `--swaps`), once known to this machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

from streamspec.bench.arms import Arm
from streamspec.bench.prompts import read_cases
from streamspec.progress import track
from streamspec.runtime import Completion, Session, load

SIDES = ("merged, plain", "swapped, plain", "merged", "swapped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--adapter", nargs=3, action="append", required=True, metavar=("NAME", "MERGED", "PROMPTS"))
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, help="of every step's tree; default: as many as pay")
    parser.add_argument("--ngram", action="store_true", help="draft from earlier text as well")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--swaps", type=int, default=10)
    arguments = parser.parse_args()
    session = load(arguments.bundle, threads=arguments.threads, ngram=arguments.ngram, recycling=False)
    print(
        "| adapter | plain step, ms: merged, swapped | ratio | tokens per step | speed-up over own plain | tokens/s "
        "| ratio | answers equal |\n|---|---|---|---|---|---|---|---|"
    )
    broken = 0
    for name, merged, prompts in arguments.adapter:
        session.swap(name)
        sessions = {
            "merged": load(merged, threads=arguments.threads, ngram=arguments.ngram, recycling=False),
            "swapped": session,
        }
        line, differ = compare(name, sessions, Path(prompts), arguments)
        print(line, flush=True)
        broken += differ
    names = [name for name, *_ in arguments.adapter]
    taken: dict[str | None, list[float]] = {name: [] for name in (*names, None)}
    for _ in range(arguments.swaps):
        for adapter, seconds in taken.items():
            started = time.perf_counter()
            session.swap(adapter)
            seconds.append(time.perf_counter() - started)
    for adapter, seconds in taken.items():
        size = (
            (arguments.bundle / "adapters" / adapter / "adapter.onnx_adapter").stat().st_size / 1e6 if adapter else 0.0
        )
        print(
            f"{adapter or 'the base'}: {size:.1f} MB, swapped in {1e3 * median(seconds):.0f} ms "
            f"({1e3 * min(seconds):.0f}..{1e3 * max(seconds):.0f})"
        )
    print(f"{broken} answers differ with drafts")
    sys.exit(bool(broken))


def compare(name: str, sessions: dict[str, Session], prompts: Path, arguments: argparse.Namespace) -> tuple[str, int]:
    """Returns a row of the table, and how many answers differed with drafts."""
    cases = read_cases(prompts, arguments.limit)
    sides = [Arm(side, sessions[side.split(",")[0]], "plain" not in side, rows=arguments.rows) for side in SIDES]
    for side in sides:
        side.answer(cases[0].prompt(0, []), 16)
    passes: dict[str, list[list[Completion]]] = {side: [] for side in SIDES}
    for repeat in range(arguments.repeats):
        for side in sides:
            side.begin_pass()
            passes[side.name].append([])
        for number, case in enumerate(track(cases, f"{name} {repeat + 1}/{arguments.repeats}", len(cases))):
            start = (repeat + number) % len(sides)
            for side in sides[start:] + sides[:start]:
                passes[side.name][-1].append(side.answer(case.prompt(0, []), arguments.max_new_tokens))
    said = {side: [answer.token_ids for answers in passes[side] for answer in answers] for side in SIDES}
    differ = sum(
        a != b for side in ("merged", "swapped") for a, b in zip(said[side], said[f"{side}, plain"], strict=True)
    )
    equal = sum(a == b for a, b in zip(said["merged"], said["swapped"], strict=True)) / len(said["merged"])
    rates = {side: [per_second(answers) for answers in passes[side]] for side in SIDES}
    step = {side: 1e3 / median(rates[f"{side}, plain"]) for side in ("merged", "swapped")}
    faster = {side: median(a / b for a, b in zip(rates[side], rates[f"{side}, plain"], strict=True)) for side in step}
    tau = {side: per_step(passes[side]) for side in step}
    return (
        f"| {name} | {step['merged']:.2f}, {step['swapped']:.2f} | "
        f"{median(a / b for a, b in zip(rates['merged, plain'], rates['swapped, plain'], strict=True)):.2f} "
        f"| {tau['merged']:.2f}, {tau['swapped']:.2f} | {faster['merged']:.2f}, {faster['swapped']:.2f} | "
        f"{median(rates['merged']):.1f}, {median(rates['swapped']):.1f} "
        f"| {median(a / b for a, b in zip(rates['merged'], rates['swapped'], strict=True)):.2f} | {equal:.0%} |"
    ), differ


def per_second(answers: list[Completion]) -> float:
    """Returns tokens of the decode phase over its time."""
    return sum(a.stats.step_tokens + a.stats.plain_steps for a in answers) / sum(
        a.stats.decode_seconds for a in answers
    )


def per_step(passes: list[list[Completion]]) -> float:
    """Returns tokens per step of any kind."""
    measures = [answer.stats for answers in passes for answer in answers]
    return sum(m.step_tokens + m.plain_steps for m in measures) / sum(m.steps + m.plain_steps for m in measures)


if __name__ == "__main__":
    main()
