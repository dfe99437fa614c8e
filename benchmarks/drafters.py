#!/usr/bin/env python3
"""Measures several drafters of one target, prompt by prompt in turns:
`python benchmarks/drafters.py SIDE SIDE ... --prompts TASK.jsonl [--rows 16] [--both] [--json FILE]`.

A side is a bundle, or BUNDLE:OPTION,.. with options of `load`: `e2e-int8:ngram,recycling`, `e2e-target-int8:lookahead`,
`target:draft=small`. Sources of drafts that it does not name are off. `--both` measures each side again with n-grams
and recycled tokens, with the bundle's store of answers, and with its graph of fewer layers as the drafter, where it has
them. Drafters measured one after the other meet different loads of a shared machine, so a few per cent between them
mean nothing. Here each prompt is answered plainly and by every side, in an order that changes.
Prints one row each: tokens per step, decode time of a step over a plain step's, what the theory predicts, speed-up over
plain, and speed over the first side's (medians over `--repeats`, with minimum and maximum). The prediction
(`streamspec/bench/predicted_speedup.py`) has alpha and gamma from the drafts of the run, and costs as learned in it.
`--rows` gives all sides steps of one size. All answers must be equal. `--json` keeps the rows.
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
from streamspec.bench.predicted_speedup import Prediction, predict
from streamspec.bench.prompts import BenchPrompt, read_cases
from streamspec.bundle.model_section import SHORT
from streamspec.progress import track
from streamspec.runtime import LoadOptions, Session, load
from streamspec.runtime.costs.learned_costs import CONTEXT
from streamspec.runtime.decoding.stats import Stats
from streamspec.runtime.draft_sources.registry import SOURCES
from streamspec.runtime.options import SELF
from streamspec.runtime.sampling.sampling_params import Sampling

TEXT_SOURCES = {"ngram": True, "recycling": True}  # that need neither training nor a file
HEAD = (
    "| drafter | tokens per step | step over plain step | alpha, gamma | verifying, drafting, in plain steps | "
    "predicted | speed-up | faster than the first |\n|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Row:
    """What was measured of a side: tokens and steps are of all repetitions, ratios one for each."""

    side: str
    tokens_per_step: float
    step_over_plain: float
    theory: Prediction | None
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


def variants(session: Session, both: bool) -> dict[str, dict[str, Any]]:
    """Options beside a side's own, by what is added to its name."""
    manifest = session.manifest
    found: dict[str, dict[str, Any]] = {"": {}, " + text": TEXT_SOURCES}
    found |= {" + store": {"store": True}} if manifest.store else {}
    found |= {" + fewer layers": {"draft": SELF}} if SHORT in manifest.files else {}
    return found if both else {"": {}}


def arms(texts: list[str], both: bool, threads: int | None, sampling: Sampling, rows: int | None) -> list[Arm]:
    """The plain side, over the first bundle, and the arms of each side."""
    made = []
    for text in texts:
        bundle, _, options = text.partition(":")
        given, name = load_options(options), Path(bundle).name + (f":{options}" if options else "")
        opened = load(bundle, threads=threads, **given)
        for more, chosen in variants(opened, both).items():
            session = load(bundle, threads=threads, **given | chosen) if more else opened
            made.append(Arm(name + more, session, True, sampling, rows))
    providers = {arm.name: arm.session.provider.name for arm in made}
    if len(set(providers.values())) > 1:
        sys.exit(f"found several providers, {providers}; expected one: add :provider=cpu, or leave sides out")
    return [Arm("plain", made[0].session, False, sampling), *made]


def teach(side: Arm, plain: Stats, own: Stats) -> None:
    """Tells the costs of a side with a forced number of rows, which learn nothing else, what its steps took."""
    costs, drafts, step = side.session.policy.costs, own.drafts, plain.decode_seconds / max(plain.plain_steps, 1)
    if costs is not None and drafts.steps:
        costs.observe(1, 0, step, CONTEXT)
        seconds = (own.decode_seconds - own.plain_steps * step) / drafts.steps
        costs.observe(round(drafts.rows / drafts.steps), drafts.calls / drafts.steps, seconds, CONTEXT)


def measure(sides: list[Arm], cases: list[BenchPrompt], limit: int, repeats: int) -> tuple[list[Row], int]:
    """The rows of all sides but the plain one, and the number of answers that differ from it."""
    every: dict[str, list[list[Stats]]] = {side.name: [[] for _ in range(repeats)] for side in sides}
    unequal = 0
    for side in sides:
        side.answer(cases[0].prompt(0, []), 16)
    for repeat in range(repeats):
        for side in sides:
            side.begin_pass()
        for number, case in enumerate(track(cases, f"pass {repeat + 1}/{repeats}", len(cases))):
            start, found = (repeat + number) % len(sides), {}
            for side in sides[start:] + sides[:start]:
                found[side.name] = answer = side.answer(case.prompt(0, []), limit)
                every[side.name][repeat].append(answer.stats)
            unequal += sum(answer.token_ids != found["plain"].token_ids for answer in found.values())
            for side in sides:
                if side.rows is not None:
                    teach(side, found["plain"].stats, found[side.name].stats)
    seconds = {name: [sum(m.decode_seconds for m in one) for one in passes] for name, passes in every.items()}
    plain, first = seconds["plain"], seconds[sides[1].name]
    step = sum(plain) / sum(m.plain_steps for one in every["plain"] for m in one)
    rows = []
    for side in sides[1:]:
        own, all_of = seconds[side.name], [m for one in every[side.name] for m in one]
        steps, policy = sum(m.steps + m.plain_steps for m in all_of), side.session.policy
        rows.append(
            Row(
                side.name,
                sum(m.step_tokens + m.plain_steps for m in all_of) / steps,
                sum(own) / steps / step,
                predict([(m.drafts, m.plain_steps) for m in all_of], policy.costs, policy.max_draft_tokens),
                [a / b for a, b in zip(plain, own, strict=True)],
                [a / b for a, b in zip(first, own, strict=True)],
            )
        )
    return rows, unequal


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
            f"| {row.side} | {row.tokens_per_step:.2f} | {row.step_over_plain:.2f} | {theory(row.theory)} | "
            f"{spread(row.speedup)} | {spread(row.over_first)} |"
        )
    print(f"{unequal} answers differ from plain")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")
    sys.exit(bool(unequal))


def theory(found: Prediction | None) -> str:
    """Three cells: alpha and gamma, costs, the speed-up."""
    if found is None:
        return "- | - | -"
    return f"{found.alpha:.2f}, {found.gamma:.1f} | {found.verify:.2f}, {found.draft:.2f} | {found.speedup:.2f}"


def spread(ratios: list[float]) -> str:
    """Formats a median and its range."""
    return f"{median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"


if __name__ == "__main__":
    main()
