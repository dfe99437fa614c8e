"""Measures the cost of a verification step on this machine and picks the tree size that pays most.

For the choice between providers, where there are several, in half a second each; and for `tune`, which takes its
time. Kept in the user's cache (`cost_file`); what answers teach later is added there (`runtime.costs`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from streamspec.bundle.manifest import Manifest
from streamspec.draft_tree import DraftTree, expected_tokens
from streamspec.runtime.costs.learned_costs import CONTEXT, CostRecord
from streamspec.runtime.costs.speculation_controller import HOPELESS
from streamspec.runtime.decoding.model_runner import ROOT_ONLY, StepRequest
from streamspec.runtime.draft_sources.ngram import CONTINUATION
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.tuning.cost_file import costs_file, read_record, save_record

ROWS = (8, 4, 16, 2, 6, 12, 24, 32, 48, 64)  # most telling first: a slow model gets no further
FEW = ROWS[:3]  # tell providers apart
BUDGET = 0.5  # seconds
ROUNDS = 8
SLOWER, LONGEST = 10, 5.0  # times the budget and seconds, at most, where enough rounds take longer than that
ENOUGH = 3  # rounds that make a measurement worth keeping
LOOKUP = tuple((max(0, i - 1), 0, 1.0) for i in range(CONTINUATION + 1))  # the chain that n-grams alone draft


@dataclass(frozen=True)
class Calibration:
    """`costs[rows]`: seconds of a step (host time included); rows 1 is a plain step. `rows`: the tree that pays most;
    for a bundle without streams, whose drafts are as long as the text makes them, the most rows measured."""

    costs: dict[int, float]
    expected: dict[int, float]  # tokens per step of a tree that is the same at every step, on validation data
    rows: int

    def ratio(self, rows: int) -> float:
        """Cost of a step of `rows` rows over a plain step, interpolated between measured rows."""
        known = sorted(self.costs)
        return float(np.interp(rows, known, [self.costs[n] for n in known])) / self.costs[1]

    @property
    def reason(self) -> str:
        """The reason for choosing these rows, in words."""
        trees = [n for n in self.costs if n > 1]
        if not trees:
            return "the bundle's trees have one row"
        best = max(trees, key=lambda n: self.expected[n] / self.costs[n])
        return (
            f"{self.expected[best]:.1f} tokens per step expected at {self.ratio(best):.1f}x step cost with {best} rows"
        )


def calibrated(runner: OrtRunner, manifest: Manifest, cache_dir: str | Path | None) -> Calibration:
    """Returns the cached calibration of this machine and bundle, or measures and caches one."""
    known = cached_calibration(runner.provider, runner.threads, manifest, cache_dir)
    if known is not None:
        return known
    nodes = manifest.trees.nodes if manifest.trees is not None else LOOKUP
    costs, complete = measure(runner, nodes, rows=FEW)
    if complete:  # a machine busy with something else must not fix the choice for good
        save_record(costs_file(runner.provider, runner.threads, manifest, cache_dir), CostRecord(costs))
    return _with_choice(CostRecord(costs), manifest)


def cached_calibration(
    provider: str, threads: int, manifest: Manifest, cache_dir: str | Path | None
) -> Calibration | None:
    """Returns what was measured or learned on this machine before, with this ONNX Runtime; None where nothing was."""
    known = read_record(costs_file(provider, threads, manifest, cache_dir))
    return None if known is None else _with_choice(known, manifest)


def _with_choice(known: CostRecord, manifest: Manifest) -> Calibration:
    costs = dict(known.seconds)
    return Calibration(costs, {}, max(costs)) if manifest.trees is None else choose_rows(costs, manifest.trees.nodes)


def choose_rows(costs: dict[int, float], nodes: Sequence[Sequence[float]]) -> Calibration:
    """Picks the rows that maximise expected tokens per second; 1 (plain) where every tree is far from paying."""
    expected = {n: expected_tokens(nodes, n) for n in costs}
    best = max((n for n in costs if n > 1), key=lambda n: expected[n] / costs[n], default=1)
    return Calibration(costs, expected, best if expected[best] / costs[best] >= HOPELESS / costs[1] else 1)


def measure(
    runner: OrtRunner,
    nodes: Sequence[Sequence[float]],
    budget: float = BUDGET,
    context: int = CONTEXT,
    rounds: int = ROUNDS,
    rows: Sequence[int] = ROWS,
) -> tuple[dict[int, float], bool]:
    """Measures the seconds of a step for 1 row (plain) and those of the row counts `rows` that the nodes reach; also
    returns whether all were measured well.

    Medians of interleaved rounds. Row counts that the time budget does not reach are left out.
    """
    runner.model.settle()
    context = max(1, min(context, most_context(runner)))
    runner.reset()
    runner.prefill(StepRequest([1 % runner.vocab_size] * context))
    counts = _row_counts(runner, len(nodes), rows)
    trees = {1: ROOT_ONLY} | {n: DraftTree.from_nodes(nodes, n) for n in counts if runner.rows is None}
    trees = {n: t for n, t in trees.items() if n == 1 or context + t.depth + runner.gamma < runner.context_length}
    samples: dict[int, list[float]] = {count: [] for count in trees}
    started = time.perf_counter()  # the prompt is no part of it
    for turn in range(rounds + 1):
        for count, tree in trees.items():
            measured = sum(map(bool, samples.values()))
            if turn and not samples[count]:
                continue  # begun in the first round or not at all
            if time.perf_counter() - started < budget or measured < min(2, len(trees)):
                samples[count].append(_time_step(runner, tree, context))
        if not turn:  # a slow model gets the time for enough rounds
            budget = max(budget, min(SLOWER * budget, LONGEST, (ENOUGH + 2) * (time.perf_counter() - started)))
    runner.reset()
    # The first call of a shape warms up; where there was no time for a second one, it has to do.
    costs = {count: statistics.median(seconds[1:] or seconds) for count, seconds in sorted(samples.items()) if seconds}
    if runner.rows is not None:  # every step is the same call
        costs |= dict.fromkeys(counts, costs[1])
    return costs, min(len(seconds) for seconds in samples.values() if seconds) > ENOUGH


def _row_counts(runner: OrtRunner, most: int, rows: Sequence[int]) -> list[int]:
    """Returns the row counts of at most `most` rows to measure: of `rows`, or those that the graph's calls have."""
    if runner.row_counts:  # calls are padded to these
        return sorted({min(count, most) for count in runner.row_counts[1:]} - {1})
    return [min(runner.rows, most)] if runner.rows is not None else [count for count in rows if count <= most]


def _time_step(runner: OrtRunner, tree: DraftTree, context: int) -> float:
    started, waited = time.perf_counter(), runner.waited_seconds  # queueing for the model is no part of a step
    runner.verify(StepRequest([node % runner.vocab_size for node in range(len(tree))], tree, len(tree) > 1))
    runner.commit((0,))
    seconds = time.perf_counter() - started - (runner.waited_seconds - waited)
    runner.rewind(context)
    return seconds


def most_context(runner: OrtRunner) -> int:
    """Returns the most tokens in the cache that leave room for the largest tree measured."""
    return runner.context_length - (runner.rows or max(ROWS)) - runner.gamma - 1
