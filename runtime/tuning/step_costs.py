"""Measures the cost of a verification step on this machine and picks the tree size that pays most.

Measurements take under two seconds and are kept in the user's cache, keyed by processor, bundle, provider and threads.
`tune` takes its time over them.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from streamspec import paths as cache
from streamspec.atomic import write_text
from streamspec.bundle.manifest import Manifest
from streamspec.draft_tree import DraftTree, expected_tokens
from streamspec.errors import StreamspecError
from streamspec.json_fields import Fields, parse_json
from streamspec.runtime.decoding.model_runner import ROOT_ONLY
from streamspec.runtime.decoding.ngram import CONTINUATION
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.hardware.cpu import cpu_model
from streamspec.runtime.hardware.providers import import_onnxruntime

ROWS = (8, 4, 16, 2, 6, 12, 24, 32)  # most telling first: a slow model gets no further
BUDGET = 1.5  # seconds
ROUNDS = 8
ENOUGH = 3  # rounds that make a measurement worth keeping
CONTEXT = 64  # tokens in the cache while measuring
LOOKUP = tuple((max(0, i - 1), 0, 1.0) for i in range(CONTINUATION + 1))  # what n-grams alone draft: one chain
# Share of plain decoding's speed that a tree must promise: trees that grow step by step do better than promised, and
# the speculation controller bounds the loss.
GAIN = 0.9


@dataclass(frozen=True)
class Calibration:
    """`costs[rows]`: seconds of a step (host time included); rows 1 is a plain step. `rows`: the tree that pays most;
    for a bundle without streams, whose drafts are as long as the text makes them, the most rows measured."""

    costs: dict[int, float]
    expected: dict[int, float]  # tokens per step of a tree that is the same at every step, on validation data
    rows: int
    # probability below which a row of a draft is pruned at the early exit, as `tune` found it; 0: none is
    min_probability: float = 0.0

    def ratio(self, rows: int) -> float:
        """Cost of a step of `rows` rows over a plain step, interpolated between measured rows."""
        known = sorted(self.costs)
        return float(np.interp(rows, known, [self.costs[n] for n in known])) / self.costs[1]

    @cached_property
    def curve(self) -> np.ndarray:
        """Cost of a step of 1.. rows over a plain step, up to the most rows measured; never falling: what interferes
        only adds time, so no step costs more than one of more rows did."""
        ratios = np.array([self.ratio(n) for n in range(1, max(self.costs) + 1)])
        return np.maximum(np.minimum.accumulate(ratios[::-1])[::-1], 1.0)

    @property
    def reason(self) -> str:
        """Why these rows were chosen, in words."""
        trees = [n for n in self.costs if n > 1]
        if not trees:
            return "the bundle's trees have one row"
        best = max(trees, key=lambda n: self.expected[n] / self.costs[n])
        return (
            f"{self.expected[best]:.1f} tokens per step expected at {self.ratio(best):.1f}x step cost with {best} rows"
        )


def calibrated(runner: OrtRunner, manifest: Manifest, cache_dir: str | Path | None = None) -> Calibration:
    """Returns the cached calibration of this machine and bundle, or measures and caches one."""
    known = cached_calibration(runner.provider, runner.threads, manifest, cache_dir)
    if known is not None:
        return known
    nodes = _nodes(manifest)
    costs, complete = measure(runner, nodes)
    if complete:  # a machine busy with something else must not fix the choice for good
        save_costs(costs_file(runner.provider, runner.threads, manifest, cache_dir), costs)
    return _with_choice(costs, 0.0, manifest)


def cached_calibration(
    provider: str, threads: int, manifest: Manifest, cache_dir: str | Path | None = None
) -> Calibration | None:
    """The calibration measured on this machine before, with this ONNX Runtime; None where there is none."""
    known = _read(
        costs_file(provider, threads, manifest, cache_dir),
        _row_counts(manifest.static.rows if manifest.static else None, len(_nodes(manifest))),
    )
    return None if known is None else _with_choice(*known, manifest)


def _nodes(manifest: Manifest) -> Sequence[Sequence[float]]:
    return manifest.trees.nodes if manifest.trees is not None else LOOKUP


def _with_choice(costs: dict[int, float], min_probability: float, manifest: Manifest) -> Calibration:
    if manifest.trees is None:
        return Calibration(costs, {}, max(costs), min_probability)
    return replace(choose_rows(costs, manifest.trees.nodes), min_probability=min_probability)


def choose_rows(costs: dict[int, float], nodes: Sequence[Sequence[float]]) -> Calibration:
    """Picks the rows that maximise expected tokens per second; 1 (plain) where every tree is far from paying."""
    expected = {n: expected_tokens(nodes, n) for n in costs}
    best = max((n for n in costs if n > 1), key=lambda n: expected[n] / costs[n], default=1)
    return Calibration(costs, expected, best if expected[best] / costs[best] >= GAIN / costs[1] else 1)


def measure(
    runner: OrtRunner,
    nodes: Sequence[Sequence[float]],
    budget: float = BUDGET,
    context: int = CONTEXT,
    rounds: int = ROUNDS,
) -> tuple[dict[int, float], bool]:
    """Measures the seconds of a step for 1 row (plain) and the row counts of `ROWS` that the nodes reach; also returns
    whether all were measured well.

    Medians of interleaved rounds, so that a passing disturbance hits all alike. Row counts that the time budget does
    not reach are left out: large models measure few.
    """
    runner.model.settle()
    started = time.perf_counter()
    context = max(1, min(context, most_context(runner)))
    runner.reset()
    runner.prefill([1 % runner.vocab_size] * context, draft=False)
    counts = _row_counts(runner.rows, len(nodes))
    trees = {1: ROOT_ONLY} | {n: DraftTree.from_nodes(nodes, n) for n in counts if runner.rows is None}
    trees = {n: t for n, t in trees.items() if n == 1 or context + t.depth + runner.gamma < runner.context_length}
    samples: dict[int, list[float]] = {rows: [] for rows in trees}
    for _ in range(rounds + 1):
        for rows, tree in trees.items():
            measured = sum(map(bool, samples.values()))
            if time.perf_counter() - started < budget or measured < min(2, len(trees)):
                samples[rows].append(_time_step(runner, tree, context))
    runner.reset()
    # The first call of a shape warms up; where there was no time for a second one, it has to do.
    costs = {rows: statistics.median(seconds[1:] or seconds) for rows, seconds in sorted(samples.items()) if seconds}
    if runner.rows is not None:  # every step is the same call
        costs |= dict.fromkeys(counts, costs[1])
    return costs, min(map(len, samples.values())) > ENOUGH


def _time_step(runner: OrtRunner, tree: DraftTree, context: int) -> float:
    started, waited = time.perf_counter(), runner.waited_seconds  # queueing for the model is no part of a step
    runner.verify(np.arange(len(tree)) % runner.vocab_size, tree, draft=len(tree) > 1)
    runner.commit((0,))
    seconds = time.perf_counter() - started - (runner.waited_seconds - waited)
    runner.rewind(context)
    return seconds


def most_context(runner: OrtRunner) -> int:
    """Tokens in the cache that leave room for the largest tree measured."""
    return runner.context_length - (runner.rows or max(ROWS)) - runner.gamma - 1


def _row_counts(fixed: int | None, available: int) -> list[int]:
    """`fixed`: rows of every call, where the graph's shapes are."""
    if fixed is not None:
        return [min(fixed, available)]
    return [n for n in ROWS if n <= available]


def costs_file(provider: str, threads: int, manifest: Manifest, cache_dir: str | Path | None) -> Path:
    """The file that keeps the calibration of this machine and bundle."""
    parts = [cpu_model(), manifest.to_json(), provider, str(threads), import_onnxruntime().__version__]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return Path(cache_dir or cache.cache_dir()) / "calibration" / f"{key[:32]}.json"


def save_costs(file: Path, costs: dict[int, float], min_probability: float = 0.0) -> None:
    """Saves a calibration; a folder that cannot be written only means measuring again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(
            file,
            json.dumps({"format_version": 1, "costs": {str(n): c for n, c in costs.items()}, "least": min_probability}),
        )
    except OSError:
        pass


def _read(file: Path, rows: Sequence[int]) -> tuple[dict[int, float], float] | None:
    """Costs and `min_probability` from the cache; None where there are none or they make no sense."""
    try:
        raw = Fields(parse_json(file.read_bytes(), file.name), file.name)
        raw.integer("format_version", 1, 1)
        costs = Fields(raw.raw("costs"), "costs")
        seconds = {int(n): costs.number(n, 1e-7, 1e4) for n in costs.values if int(n) in (1, *rows)}
        min_probability = raw.number("least", 0.0, 1.0)
    except (OSError, ValueError, StreamspecError):
        return None
    return (seconds, min_probability) if 1 in seconds else None
