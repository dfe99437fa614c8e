#!/usr/bin/env python3
"""Measures several drafters of one target, prompt by prompt in turns:
`python benchmarks/drafters.py SIDE SIDE ... --prompts TASK.jsonl [--rows 16] [--both] [--json FILE]`.

A side is a bundle, or BUNDLE:OPTION,.. with options of `load`: `e2e-int8:ngram,recycling`, `e2e-target-int8:lookahead`,
`target:draft=small`. Sources of drafts that it does not name are off. `--both` measures each side a second time with
n-grams and recycled tokens. Drafters measured one after the other meet different loads of a shared machine, so a few
per cent between them mean nothing. Here each prompt is answered plainly and by every side, in an order that changes.
Prints one row each: tokens per step, decode time of a step over a plain step's, speed-up over plain, and speed over the
first side's (medians over `--repeats`, with minimum and maximum). All answers must be equal. `--json` keeps the rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from streamspec.bench.arms import Arm
from streamspec.bench.prompts import BenchPrompt, read_cases
from streamspec.progress import track
from streamspec.runtime import LoadOptions, load
from streamspec.runtime.decoding.sampling_params import Sampling
from streamspec.runtime.draft_sources.registry import SOURCES

TEXT_SOURCES = ("ngram", "recycling")  # that need neither training nor a file
HEAD = "| drafter | tokens per step | step over plain step | speed-up | faster than the first |\n|---|---|---|---|---|"


@dataclass(frozen=True)
class Row:
    """What was measured of a side: tokens and steps are of all repetitions, ratios one for each."""

    side: str
    tokens_per_step: float
    step_over_plain: float
    speedup: list[float]
    over_first: list[float]


def load_options(text: str) -> dict[str, Any]:
    """Options of `load` from `name,name=value`: sources that are not named are off."""
    given: dict[str, Any] = dict.fromkeys(SOURCES, False)
    known = {field.name for field in fields(LoadOptions)}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        if name not in known:
            sys.exit(f"found the option {name}; expected one of {', '.join(sorted(known))}")
        given[name] = value or True
    return given


def arms(texts: list[str], both: bool, threads: int | None, sampling: Sampling, rows: int | None) -> list[Arm]:
    """The plain side, over the first bundle, and one arm for each side, or two."""
    made = []
    for text in texts:
        bundle, _, options = text.partition(":")
        given = load_options(options)
        for more in ("", *TEXT_SOURCES)[: 2 if both else 1]:
            chosen = given | (dict.fromkeys(TEXT_SOURCES, True) if more else {})
            name = Path(bundle).name + (f":{options}" if options else "") + (" + text" if more else "")
            made.append(Arm(name, load(bundle, threads=threads, **chosen), True, sampling, rows))
    providers = {arm.name: arm.session.provider.name for arm in made}
    if len(set(providers.values())) > 1:
        sys.exit(f"found several providers, {providers}; expected one: set STREAMSPEC_NATIVE=0 or leave sides out")
    return [Arm("plain", made[0].session, False, sampling), *made]


def measure(sides: list[Arm], cases: list[BenchPrompt], limit: int, repeats: int) -> tuple[list[Row], int]:
    """The rows of all sides but the plain one, and the number of answers that differ from it."""
    seconds = {side.name: [0.0] * repeats for side in sides}
    steps, tokens = dict.fromkeys(seconds, 0), dict.fromkeys(seconds, 0)
    unequal = 0
    for side in sides:
        side.answer(cases[0].prompt(0, []), 16)
    for repeat in range(repeats):
        for number, case in enumerate(track(cases, f"pass {repeat + 1}/{repeats}", len(cases))):
            start, found = (repeat + number) % len(sides), {}
            for side in sides[start:] + sides[:start]:
                found[side.name] = answer = side.answer(case.prompt(0, []), limit)
                seconds[side.name][repeat] += answer.measure.decode
                steps[side.name] += answer.measure.steps + answer.measure.plain_steps
                tokens[side.name] += answer.measure.step_tokens + answer.measure.plain_steps
            unequal += sum(answer.token_ids != found["plain"].token_ids for answer in found.values())
    plain, first = seconds["plain"], seconds[sides[1].name]
    step = sum(plain) / steps["plain"]
    return [
        Row(
            side.name,
            tokens[side.name] / steps[side.name],
            sum(own) / steps[side.name] / step,
            [a / b for a, b in zip(plain, own, strict=True)],
            [a / b for a, b in zip(first, own, strict=True)],
        )
        for side in sides[1:]
        if (own := seconds[side.name])
    ], unequal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sides", nargs="+", metavar="SIDE")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, help="of every step's tree; default: as many as pay")
    parser.add_argument("--both", action="store_true", help="each side also with n-grams and recycled tokens")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    sampling = Sampling(temperature=arguments.temperature, top_p=arguments.top_p, seed=0)
    cases = read_cases(arguments.prompts, arguments.limit)
    sides = arms(arguments.sides, arguments.both, arguments.threads, sampling, arguments.rows)
    rows, unequal = measure(sides, cases, arguments.max_new_tokens, arguments.repeats)
    print(HEAD)
    for row in rows:
        print(
            f"| {row.side} | {row.tokens_per_step:.2f} | {row.step_over_plain:.2f} | {spread(row.speedup)} | "
            f"{spread(row.over_first)} |"
        )
    print(f"{unequal} answers differ from plain")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")
    sys.exit(bool(unequal))


def spread(ratios: list[float]) -> str:
    """Formats a median and its range."""
    return f"{median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"


if __name__ == "__main__":
    main()
