"""Finds the probability below which pruning at the early exit pays here, and by which score, on
validation prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from streamspec.bench.figures import Report, Spread
from streamspec.bench.measure import bench
from streamspec.draft_tree import BOTH, EXIT
from streamspec.runtime.decoding.model_runner import Pruning
from streamspec.runtime.options import LoadOptions

PROBABILITIES = (0.01, 0.03, 0.1, 0.3)
TRIED = tuple(Pruning(None, probability, score) for score in (BOTH, EXIT) for probability in PROBABILITIES)
REPEATS = 3


def find_pruning(
    bundle: str | Path,
    prompts: str | Path,
    limit: int,
    max_new_tokens: int,
    options: LoadOptions,
) -> tuple[Report, Pruning]:
    """Runs speculation without pruning and with each of `TRIED`, interleaved.

    Returns the report and the fastest of them; `Pruning()` where none beats speculation without pruning even in its
    slowest repetition. `options`: of `load`, whose session must not prune already. Raises what `bench` does.
    """
    report = bench(bundle, prompts, limit, max_new_tokens, REPEATS, prune=TRIED, options=options)
    return report, best(report.speculative.speedup, [arm.speedup for arm in report.rows])


def best(without: Spread, tried: Sequence[Spread], pruning: Sequence[Pruning] = TRIED) -> Pruning:
    """Returns the pruning with the highest median speed-up over plain decoding, or none."""
    speedup, chosen = max(zip(tried, pruning, strict=True), key=lambda pair: pair[0].median)
    return chosen if speedup.low > without.median else Pruning()
