#!/usr/bin/env python3
"""Replays answers through the decoder with and without token recycling:
`python benchmarks/recycling.py BUNDLE --prompts F.jsonl [--limit 65] [--price 0.4] [--costs 1:1,8:1.15,...]`.

Every prompt is answered once by plain steps, and what the drafter proposes after each token is kept; of a file with
categories each gets as many. Then the decoder itself drafts and accepts, n-grams (n), recycling (r) and the drafter (d)
together, and the record says what the model chooses. Time is counted from `--costs`, steps by their rows over a plain
step, and `--price`, what the drafter adds; so other work on the machine changes nothing. Rows that would not have been
accepted have no record: recycling learns nothing from them, and is a little better than said here. Prints tokens per
step and per plain-step time, by category.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from streamspec.bench.prompts import BenchPrompt, read_cases
from streamspec.runtime import Session, load
from streamspec.runtime.costs.row_costs import RowCosts
from streamspec.runtime.decoding.draft_proposal import DraftProposal
from streamspec.runtime.decoding.draft_tree_search import PYTHON_SEARCH
from streamspec.runtime.decoding.loop import SpeculativeDecoder
from streamspec.runtime.decoding.model_runner import StepRequest, StepResult
from streamspec.runtime.decoding.policy import AdaptiveState, DecodingPolicy
from streamspec.runtime.draft_sources.ngram import NGRAM
from streamspec.runtime.draft_sources.recycling import RECYCLING
from streamspec.runtime.hardware import native_search
from streamspec.runtime.options import GenerationOptions

ARMS = ("n", "r", "nr", "d", "dn", "dnr")
COSTS = "1:1,2:1.02,4:1.06,8:1.15,12:1.36,16:1.58"  # SmolLM2, int8, native operators with AVX-512 VNNI, two threads
ROWS = 16


@dataclass
class Recorded:
    """One answer: `proposals[i]` follows token i of it, None without a drafter."""

    category: str
    prompt: list[int]
    answer: list[int]
    proposals: list[DraftProposal | None]


def recorded(session: Session, case: BenchPrompt, limit: int) -> list[Recorded]:
    """All turns of a case, as far as they fit."""
    runner, eos, answers, out = session.runner, session.manifest.model.eos_token_ids, list[str](), list[Recorded]()
    for turn in range(len(case.turns)):
        prompt = list(session.encode(case.prompt(turn, answers)))
        if len(prompt) + limit + 2 * ROWS > session.context_length:
            break
        known = runner.begin(prompt)
        result = runner.prefill(StepRequest(prompt[known:], run_drafter=runner.gamma > 0))
        one = Recorded(case.category or "all prompts", prompt, [int(result.choices[0])], [result.proposal])
        while one.answer[-1] not in eos and len(one.answer) < limit:
            result = runner.verify(StepRequest(one.answer[-1:], run_drafter=runner.gamma > 0))
            runner.commit((0,))
            one.answer.append(int(result.choices[0]))
            one.proposals.append(result.proposal)
        answers.append(session.tokenizer.decode(one.answer, skip_special_tokens=True))
        out.append(one)
    return out


class Replay:
    """A runner over a record; -1 is chosen after rows that it does not know."""

    context_length, graph_seconds, waited_seconds = 1 << 20, 0.0, 0.0

    def __init__(self, record: Recorded, drafter: bool, costs: RowCosts) -> None:
        self.record, self.costs, self.gamma = record, costs, int(drafter)
        self.length, self.rows, self.steps, self.cost = 0, 0, 0, 0.0

    def begin(self, *_: Any) -> int:
        return 0

    def prefill(self, request: StepRequest, progress: Any = None) -> StepResult:
        self.length = len(request.tokens)
        return StepResult(self.record.answer[:1], None, self.record.proposals[0] if request.run_drafter else None)

    def verify(self, request: StepRequest) -> StepResult:
        tokens, tree, draft = request.tokens, request.tree, request.run_drafter
        rest = self.record.answer[self.length - len(self.record.prompt) :]
        known, choices, accepted = list[bool](), list[int](), 0
        for node, (token, depth) in enumerate(zip(tokens, tree.depths, strict=True)):
            follows = node == 0 or known[tree.parents[node]]
            known.append(follows and depth + 1 < len(rest) and token == rest[depth])
            choices.append(rest[depth + 1] if known[node] else -1)
            accepted = max(accepted, depth * known[node])
        curve = self.costs.with_drafter if draft else self.costs.without_drafter
        self.rows, self.steps, self.cost = self.rows + len(tokens), self.steps + 1, self.cost + curve[len(tokens) - 1]
        at = len(self.record.answer) - len(rest) + accepted + 1
        return StepResult(choices, None, self.record.proposals[at] if draft else None)

    def commit(self, path: Sequence[int]) -> None:
        self.length += len(path)


class CountedTime(SpeculativeDecoder):
    """Its clock goes by the costs of steps."""

    def clock(self) -> float:
        runner: Any = self.runner
        return float(runner.cost) / 100


def costs_of(text: str, price: float, rows: int = ROWS) -> RowCosts:
    """The curve of `rows` through points such as `1:1,8:1.15`."""
    points = np.array([pair.split(":") for pair in text.split(",")], float)
    costs, curve = RowCosts(np.ones(1)), np.interp(np.arange(1, rows + 1), *points.T)
    costs._set(curve + price * (np.arange(rows) > 0), curve, price)
    return costs


def replayed(records: Sequence[Recorded], arm: str, costs: RowCosts, limit: int) -> dict[str, np.ndarray]:
    """By category and for all: tokens, time, steps, rows, and seconds of the host."""
    sources = tuple(source for letter, source in (("n", NGRAM), ("r", RECYCLING)) if letter in arm)
    policy = DecodingPolicy((), ROWS, costs, sources, search=native_search.find() or PYTHON_SEARCH)
    adaptive, counts = AdaptiveState(policy), defaultdict[str, np.ndarray](lambda: np.zeros(5))
    for number, record in enumerate(records):
        runner: Any = Replay(record, "d" in arm, costs)
        eos = record.answer[-1:] if len(record.answer) < limit else []
        options, began = GenerationOptions(max_new_tokens=limit), time.thread_time()
        decoder = CountedTime(runner, options, replace(policy, eos=eos), adaptive)
        if [token for done in decoder.run(record.prompt) for token in done.tokens] != record.answer:
            raise SystemExit(f"answer {number} differs")
        found = [len(record.answer) - 1, runner.cost, runner.steps, runner.rows, time.thread_time() - began]
        for name in ("all", "second half" if 2 * number >= len(records) else "first half", record.category):
            counts[name] = counts[name] + found
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=65)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--costs", default=COSTS)
    parser.add_argument("--price", type=float, default=0.4)
    arguments = parser.parse_args()
    session = load(arguments.bundle, threads=1, tree=2)
    cases = read_cases(arguments.prompts)
    random.Random(0).shuffle(cases)
    categories = sorted({case.category or "" for case in cases})
    share = max(1, arguments.limit // len(categories))
    cases = [case for name in categories for case in [one for one in cases if (one.category or "") == name][:share]]
    random.Random(1).shuffle(cases)
    records = [one for case in cases for one in recorded(session, case, arguments.max_new_tokens)]
    arms = {arm: costs_of(arguments.costs, arguments.price * ("d" in arm)) for arm in ARMS}
    if not session.runner.gamma:
        arms = {arm: costs for arm, costs in arms.items() if "d" not in arm}
    counts = {arm: replayed(records, arm, costs, arguments.max_new_tokens) for arm, costs in arms.items()}
    print("| | " + " | ".join(counts) + " |\n" + "|---" * (len(counts) + 1) + "|")
    for name in counts["n"]:
        cells = (
            f"{tokens / steps:.2f}, {tokens / cost:.2f}"
            for tokens, cost, steps, *_ in (c[name] for c in counts.values())
        )
        print(f"| {name} | " + " | ".join(cells) + " |")
    rows, host = (
        [f"{c['all'][i] / c['all'][2] * factor:.1f}" for c in counts.values()] for i, factor in ((3, 1), (4, 1e6))
    )
    print(f"| rows of a step | {' | '.join(rows)} |\n| host, us a step | {' | '.join(host)} |")


if __name__ == "__main__":
    main()
