"""Finds the probability below which pruning at the early exit pays on this machine, on validation prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from streamspec.bench.figures import Report, Spread
from streamspec.bench.measure import bench

PROBABILITIES = (0.01, 0.03, 0.1, 0.3)
REPEATS = 3


def find_min_probability(
    bundle: str | Path,
    prompts: str | Path,
    limit: int,
    max_new_tokens: int,
    threads: int | None = None,
    provider: str = "auto",
    adapter: str | None = None,
) -> tuple[Report, float]:
    """Runs speculation without pruning and at each of `PROBABILITIES`, interleaved.

    Returns the report and the fastest of them: 0 where none beats speculation without pruning even in its slowest
    repetition. The bundle's session must not prune already. Raises what `bench` does.
    """
    report = bench(
        bundle,
        prompts,
        limit,
        max_new_tokens,
        REPEATS,
        prune=PROBABILITIES,
        threads=threads,
        provider=provider,
        adapter=adapter,
    )
    return report, best_probability(report.speculative.speedup, [one.speedup for one in report.rows])


def best_probability(without: Spread, tried: Sequence[Spread], probabilities: Sequence[float] = PROBABILITIES) -> float:
    """Returns the probability with the highest median speed-up over plain decoding, or 0."""
    best, probability = max(zip(tried, probabilities, strict=True), key=lambda pair: pair[0].median)
    return probability if best.low > without.median else 0.0
