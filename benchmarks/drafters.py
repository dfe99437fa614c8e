#!/usr/bin/env python3
"""Measures several drafters of one target, prompt by prompt in turns:
`python benchmarks/drafters.py BUNDLE BUNDLE ... --prompts TASK.jsonl [--rows 16]`.

Drafters measured one after the other meet different loads of a shared machine, so a few per cent between them mean
nothing. Here each prompt is answered plainly and with every drafter, in an order that changes. Prints one row each:
tokens per step, decode time of a step over a plain step's, speed-up over plain, and speed over the first bundle's
drafter (medians over `--repeats`, with minimum and maximum). All answers must be equal.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

from streamspec.bench.arms import Arm
from streamspec.bench.prompts import read_cases
from streamspec.progress import track
from streamspec.runtime import load
from streamspec.runtime.decoding.sampling_params import Sampling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, help="of every step's tree; default: as many as pay")
    parser.add_argument("--ngram", action="store_true", help="draft from earlier text as well")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    arguments = parser.parse_args()
    cases = read_cases(arguments.prompts, arguments.limit)
    sampling = Sampling(temperature=arguments.temperature, top_p=arguments.top_p, seed=0)
    sessions = [
        load(bundle, threads=arguments.threads, ngram=arguments.ngram, recycling=False) for bundle in arguments.bundles
    ]
    sides = [Arm("plain", sessions[0], False, sampling)]
    sides += [
        Arm(bundle.name, session, True, sampling, arguments.rows)
        for bundle, session in zip(arguments.bundles, sessions, strict=True)
    ]
    seconds = {side.name: [0.0] * arguments.repeats for side in sides}
    steps, tokens = dict.fromkeys(seconds, 0), dict.fromkeys(seconds, 0)
    unequal = 0
    for side in sides:
        side.answer(cases[0].prompt(0, []), 16)
    for repeat in range(arguments.repeats):
        for number, case in enumerate(track(cases, f"pass {repeat + 1}/{arguments.repeats}", len(cases))):
            start, found = (repeat + number) % len(sides), {}
            for side in sides[start:] + sides[:start]:
                found[side.name] = answer = side.answer(case.prompt(0, []), arguments.max_new_tokens)
                seconds[side.name][repeat] += answer.measure.decode
                steps[side.name] += answer.measure.steps + answer.measure.plain_steps
                tokens[side.name] += answer.measure.step_tokens + answer.measure.plain_steps
            unequal += sum(answer.token_ids != found["plain"].token_ids for answer in found.values())
    print(
        "| drafter | tokens per step | step over plain step | speed-up | faster than the first |\n|---|---|---|---|---|"
    )
    plain, first = seconds["plain"], seconds[sides[1].name]
    for side in sides[1:]:
        own = seconds[side.name]
        dearer = (sum(own) / steps[side.name]) / (sum(plain) / steps["plain"])
        print(
            f"| {side.name} | {tokens[side.name] / steps[side.name]:.2f} | {dearer:.2f} | {spread(plain, own)} | "
            f"{spread(first, own)} |"
        )
    print(f"{unequal} answers differ from plain")
    sys.exit(bool(unequal))


def spread(over: list[float], own: list[float]) -> str:
    """Formats the median and range of the time `over` divided by the time `own`."""
    ratios = [a / b for a, b in zip(over, own, strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"


if __name__ == "__main__":
    main()
