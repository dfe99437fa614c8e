#!/usr/bin/env python3
"""Counts what lookahead decoding brings, without a clock:
`python benchmarks/lookahead.py BUNDLE --prompts F.jsonl [--limit 20] [--price 0.4] [--costs 1:1,8:1.15,...]`.

The decoder answers with n-grams (n), recycling (r), lookahead (l) and the drafter (d) together. The model runs; time
is counted from `--costs`, steps by their rows over a plain step, and `--price`, what the drafter adds; so other work on
the machine changes nothing. `L`: lookahead whose rows are never left out. Every answer is compared with plain
decoding's. Prints tokens per step, tokens per plain-step time, rows of a step and tokens that lookahead proposed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recycling import CountedTime, costs_of

from streamspec.bench.prompts import read_cases
from streamspec.runtime import Session, load
from streamspec.runtime.costs.drafter_gate import ExplorationGate
from streamspec.runtime.costs.row_costs import RowCosts
from streamspec.runtime.decoding.draft_tree_search import PYTHON_SEARCH
from streamspec.runtime.decoding.loop import SpeculativeDecoder
from streamspec.runtime.decoding.model_runner import StepRequest, StepResult
from streamspec.runtime.decoding.policy import AdaptiveState, DecodingPolicy
from streamspec.runtime.draft_sources.lookahead import LOOKAHEAD
from streamspec.runtime.draft_sources.ngram import NGRAM
from streamspec.runtime.draft_sources.recycling import RECYCLING
from streamspec.runtime.hardware import native_search
from streamspec.runtime.options import GenerationOptions

ARMS = ("l", "L", "n", "nl", "nL", "nr", "nrl", "nrL", "dnr", "dnrl", "dnrL")
COSTS = "1:1,2:1.02,4:1.06,8:1.15,12:1.36,16:1.58,32:2.9"  # SmolLM2, int8, native operators, two threads
ROWS = 32


class Always(ExplorationGate):
    """Never leaves lookahead's rows out."""

    open = True


class CountedRunner:
    """A session's runner that adds up what its steps cost by `costs`."""

    def __init__(self, runner: Any, costs: RowCosts, drafter: bool) -> None:
        self._runner, self._costs, self.gamma = runner, costs, runner.gamma * drafter
        self.cost, self.rows = 0.0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def verify(self, request: StepRequest) -> StepResult:
        rows = len(request.tokens)
        curve = self._costs.with_drafter if request.run_drafter else self._costs.without_drafter
        self.cost, self.rows = self.cost + curve[rows - 1], self.rows + rows
        return self._runner.verify(request)


def answered(session: Session, prompts: Sequence[list[int]], plain: Sequence[list[int]], arm: str, options: Any) -> str:
    """One cell of the table: all prompts answered by the sources of `arm`."""
    known = {"n": NGRAM, "r": RECYCLING, "l": LOOKAHEAD, "L": LOOKAHEAD}
    costs = costs_of(options.costs, options.price * ("d" in arm), ROWS)
    sources = tuple(source for letter, source in known.items() if letter in arm)
    eos = session.manifest.model.eos_token_ids
    policy = DecodingPolicy(eos, ROWS, costs, sources, search=native_search.find() or PYTHON_SEARCH)
    adaptive, runner = AdaptiveState(policy), CountedRunner(session.runner, costs, "d" in arm)
    if "L" in arm:
        adaptive.exploration = Always()
    tokens = steps = drafted = accepted = 0
    for number, prompt in enumerate(prompts):
        one: Any = runner
        decoder = CountedTime(one, GenerationOptions(max_new_tokens=options.max_new_tokens), replace(policy), adaptive)
        answer = [token for done in decoder.run(prompt) for token in done.tokens]
        if answer != plain[number]:
            raise SystemExit(f"answer {number} of {arm} differs from plain decoding")
        tokens += len(answer) - 1
        steps += decoder.stats.steps + decoder.stats.plain_steps
        if found := decoder.stats.sources.get("lookahead"):
            drafted, accepted = drafted + found.drafted, accepted + found.accepted
    shares = f"{accepted} of {drafted}" if "l" in arm.lower() else ""
    return f"{tokens / steps:.2f} | {tokens / runner.cost:.2f} | {runner.rows / steps:.1f} | {shares}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--costs", default=COSTS)
    parser.add_argument("--price", type=float, default=0.4)
    parser.add_argument("--arms", nargs="+", default=ARMS)
    options = parser.parse_args()
    session = load(options.bundle, threads=1, tree=2)
    cases = read_cases(options.prompts)
    cases = cases[:: max(1, len(cases) // options.limit)][: options.limit]
    prompts = [list(session.encode(case.prompt(0, []))) for case in cases]
    plain = []
    for prompt in prompts:
        decoder = SpeculativeDecoder(
            session.runner,
            GenerationOptions(max_new_tokens=options.max_new_tokens, speculate=False),
            DecodingPolicy(session.manifest.model.eos_token_ids),
        )
        plain.append([token for done in decoder.run(prompt) for token in done.tokens])
    print("| sources | tokens a step | per plain-step time | rows | lookahead's accepted |\n|---|---|---|---|---|")
    for arm in options.arms:
        if "d" not in arm or session.runner.gamma:
            print(f"| {arm} | {answered(session, prompts, plain, arm, options)} |", flush=True)


if __name__ == "__main__":
    main()
