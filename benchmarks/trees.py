#!/usr/bin/env python3
"""Compares shapes of draft trees:
`python benchmarks/trees.py BUNDLE --prompts TASK.jsonl [--trees 8 16 16:8 16:0.05 16f 2x3 ...] [--limit 40]`.

    16       the 16 most probable nodes of each step (`runtime/decoding/draft_tree_search.py`); with a bigram, children
             depend on their parent
    16:8     with an early exit: the best 8 of these rows continue above it
    16:0.05  with an early exit: the rows of at least that probability continue
    16f      one tree of 16 rows for all steps, the most probable nodes of validation data (Medusa's sparse tree);
             children depend on their parent
    2x3      the papers' full tree: every combination of the 2 best candidates of 3 streams
    2x3c     the same, and children depend on their parent

Every prompt is answered plainly and with every tree in turn; all answers must be equal. Prints rows above the exit,
tokens per step, time of a step over a plain step's, and speed-up over plain decoding (decode time, medians over
`--repeats`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from streamspec.bundle.manifest import DraftTreeInfo
from streamspec.data import read_examples
from streamspec.draft_tree import DraftTree
from streamspec.runtime import Session, load
from streamspec.runtime.decoding.draft_tree_search import Draft
from streamspec.runtime.decoding.loop import SpeculativeDecoder
from streamspec.runtime.decoding.model_runner import Pruning, StepRequest, StepResult
from streamspec.runtime.decoding.planner import Planner
from streamspec.runtime.decoding.policy import DecodingPolicy
from streamspec.runtime.decoding.step_plan import StepPlan
from streamspec.runtime.options import GenerationOptions
from streamspec.runtime.sampling.grammar_state import GrammarState

TREES = (
    *("4", "8", "12", "16", "24", "12:8", "16:8", "24:12", "16:0.05"),
    *("8f", "16f", "24f", "1x3", "2x2", "2x3", "3x2", "4x2", "2x3c"),
)
MOST = 64  # rows of any tree


class Counting:
    """Counts the rows that the last layer of a runner has seen."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.rows, self.steps = engine, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def verify(self, request: StepRequest) -> StepResult:
        result = self._engine.verify(request)
        if len(result.choices) > 1:
            self.rows, self.steps = self.rows + sum(token >= 0 for token in result.choices), self.steps + 1
        return result


class FixedTreePlanner(Planner):
    """Drafts the same tree in every step (`FixedTree`)."""

    tree: DraftTree
    depends: bool

    def _likeliest(self, plan: StepPlan, room: int, rows: int, spare: int) -> Draft | None:
        proposal, tree = plan.proposal, self.tree
        if proposal is None or tree.depth > min(room, proposal.depths):
            return None
        after = cache(proposal.after)
        tokens, numbers = [plan.draft.tokens[0]], [0]
        for parent, depth, rank in list(zip(tree.parents, tree.depths, tree.ranks, strict=True))[1:]:
            found = after(depth - 1, numbers[parent] if self.depends else None)
            token, _, number = found[rank] if rank < len(found) else (-1, 0.0, -1)  # no token: never accepted
            tokens.append(token)
            numbers.append(number)
        return Draft(tree, tokens, [1.0] * len(tree), [0] * len(tree), 1.0)


class FixedTree(SpeculativeDecoder):
    """Drafts the same tree in every step.

    `depends`: a node's rank counts the candidates after its parent, else all candidates of its depth.
    """

    tree: DraftTree
    depends: bool

    def planner(self, grammar: GrammarState | None) -> Planner:
        planner = FixedTreePlanner(self.runner, self.policy, self.adaptive, grammar, self.rows, self.clock)
        planner.tree = self.tree
        planner.depends = self.depends
        return planner


def cartesian(k: int, gamma: int) -> DraftTree:
    """Builds the papers' full tree: every combination of `k` candidates at each of `gamma` depths,
    1 + k + k^2 + ... nodes."""
    paths: list[tuple[int, ...]] = [()]
    for depth in range(1, gamma + 1):
        paths += product(range(k), repeat=depth)
    paths.sort()  # lexicographic order is depth-first, first candidates first
    index = {path: i for i, path in enumerate(paths)}
    parents = tuple(index[path[:-1]] if path else 0 for path in paths)
    return DraftTree(parents, tuple(path[-1] if path else 0 for path in paths))


def decoder_of(
    name: str, runner: Any, limit: int, policy: DecodingPolicy, trees: DraftTreeInfo | None
) -> SpeculativeDecoder:
    """Returns the decoder for the tree called `name`, of at most `limit` tokens."""
    options = GenerationOptions(max_new_tokens=limit)
    if name == "plain":
        return SpeculativeDecoder(runner, options, policy)
    if "x" in name or name.endswith("f"):
        fixed = FixedTree(runner, options, replace(policy, rows=MOST))
        fixed.depends = name.endswith(("f", "c"))
        if "x" in name:
            fixed.tree = cartesian(*map(int, name.rstrip("c").split("x")))
        else:
            assert trees is not None
            fixed.tree = trees.tree(int(name[:-1]))
        return fixed
    rows, _, kept = name.partition(":")
    policy = replace(policy, rows=int(rows))
    if kept:
        pruning = Pruning(min_probability=float(kept)) if "." in kept else Pruning(int(kept))
        policy = replace(policy, pruning=pruning)
    return SpeculativeDecoder(runner, options, policy)


def answers(
    session: Session, prompts: Sequence[Any], trees: Sequence[str], tokens: int
) -> Iterator[tuple[str, SpeculativeDecoder, Counting]]:
    """Yields every prompt with every tree, "plain" first."""
    for prompt in prompts:
        expected: list[int] = []
        for name in ("plain", *trees):
            engine = Counting(session.runner)
            decoder = decoder_of(
                name,
                engine,
                tokens,
                DecodingPolicy(session.manifest.model.eos_token_ids, sources=()),
                session.manifest.trees,
            )
            found = [token for done in decoder.run(session.encode(prompt)) for token in done.tokens]
            expected = expected or found
            if found != expected:
                raise SystemExit(f"{name} and plain decoding differ on {prompt!r:.80}")
            yield name, decoder, engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--trees", nargs="+", default=TREES)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    session = load(arguments.bundle, threads=arguments.threads, tree=2)
    if not (session.manifest.streams and session.manifest.streams.pruning):
        arguments.trees = [name for name in arguments.trees if ":" not in name]  # there is no early exit
    prompts = [example.opening for example in read_examples(arguments.prompts, arguments.limit)]
    seconds: dict[str, list[float]] = {}
    counts: dict[str, np.ndarray] = {}
    for repeat in range(arguments.repeats):
        started = time.perf_counter()
        for name, decoder, engine in answers(session, prompts, arguments.trees, arguments.max_new_tokens):
            stats = decoder.stats
            seconds.setdefault(name, [0.0] * arguments.repeats)[repeat] += stats.decode_seconds
            found = np.array(
                [stats.steps, stats.step_tokens, engine.rows, engine.steps, stats.steps + stats.plain_steps], float
            )
            counts[name] = counts.get(name, 0) + found
        print(f"# round {repeat + 1}: {time.perf_counter() - started:.0f} s", flush=True)
    per_call = {name: sum(took) / counts[name][4] for name, took in seconds.items()}
    print("| tree | go on | tau | step over plain step | speed-up (min..max) |\n|---|---|---|---|---|")
    for name, took in seconds.items():
        steps, tokens, rows, verified, _ = counts[name]
        ratios = [plain / own for plain, own in zip(seconds["plain"], took, strict=True)]
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f})"
        on, tau = (rows / verified, tokens / steps) if steps else (1, 1)
        print(f"| {name} | {on:.1f} | {tau:.2f} | {per_call[name] / per_call['plain']:.2f} | {spread} |")


if __name__ == "__main__":
    main()
