#!/usr/bin/env python3
"""Measures the cost of running streams after the prompt:
`python benchmarks/first_token.py BUNDLE --prompts F.jsonl [--limit 30]`.

Each prompt is answered with and without them, in turn, from an empty cache; answers must be the same. Ratios are of
sums over all prompts: median over the repetitions with minimum and maximum.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from streamspec.bench.prompts import read_cases
from streamspec.progress import track
from streamspec.runtime import load
from streamspec.runtime import session as session_module
from streamspec.runtime.decoding.loop import SpeculativeDecoder
from streamspec.runtime.decoding.planner import Planner
from streamspec.runtime.decoding.step_plan import DrafterPlan

PARTS = {
    "first token": ("prefill_seconds",),
    "decoding": ("decode_seconds",),
    "whole answers": ("prefill_seconds", "decode_seconds"),
}


class LatePlanner(Planner):
    """Drafts nothing after the prompt."""

    def prompt(self, tokens: int) -> DrafterPlan:
        return super().prompt(tokens)._replace(runs=False)


class Late(SpeculativeDecoder):
    """Drafts nothing after the prompt."""

    def planner(self) -> Planner:
        return LatePlanner(self.runner, self.policy, self.adaptive, self.grammar, self.rows, self.clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    session = load(arguments.bundle, threads=arguments.threads)
    prompts = [case.turns[0] for case in read_cases(arguments.prompts, arguments.limit)]
    sides = {"with": SpeculativeDecoder, "without": Late}
    spent = {(side, part): [0.0] * arguments.repeats for side in sides for part in PARTS}
    for repeat in track(range(arguments.repeats), "repetitions", arguments.repeats):
        for number, prompt in enumerate(prompts):
            answers = []
            for side in list(sides) if (number + repeat) % 2 else reversed(sides):
                session.forget()
                session_module.SpeculativeDecoder = sides[side]  # type: ignore[misc]
                answers.append(session.generate(prompt, max_new_tokens=arguments.max_new_tokens))
                for part, fields in PARTS.items():
                    spent[side, part][repeat] += sum(getattr(answers[-1].stats, name) for name in fields)
            if answers[0].token_ids != answers[1].token_ids:
                raise SystemExit(f"prompt {number}: the answers differ")
    for part in PARTS:
        ratios = [without / with_ for without, with_ in zip(spent["without", part], spent["with", part], strict=True)]
        each = {side: 1e3 * median(spent[side, part]) / len(prompts) for side in sides}
        print(
            f"{part}: {each['with']:.1f} ms with, {each['without']:.1f} without, ratio {median(ratios):.3f} "
            f"({min(ratios):.3f}..{max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
