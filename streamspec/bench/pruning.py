"""Below which chance pruning at the early exit pays on this machine, judged on validation prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from streamspec.bench.report import Report, Spread
from streamspec.bench.runner import bench

CHANCES = (0.01, 0.03, 0.1, 0.3)
REPEATS = 3


def find_least(
    bundle: str | Path,
    prompts: str | Path,
    limit: int,
    max_new_tokens: int,
    threads: int | None = None,
    provider: str = "auto",
    adapter: str | None = None,
) -> tuple[Report, float]:
    """Speculation without pruning and at each of `CHANCES`, interleaved; the fastest chance, or 0 where no chance's
    slowest repetition beats what goes without. The bundle's session must not prune already. Raises what `bench`
    does."""
    report = bench(
        bundle,
        prompts,
        limit,
        max_new_tokens,
        REPEATS,
        prune=CHANCES,
        threads=threads,
        provider=provider,
        adapter=adapter,
    )
    return report, best_chance(report.speculative.speedup, [one.speedup for one in report.rows])


def best_chance(without: Spread, tried: Sequence[Spread], chances: Sequence[float] = CHANCES) -> float:
    """The chance with the highest median speed-up over plain decoding, or 0."""
    best, chance = max(zip(tried, chances, strict=True), key=lambda pair: pair[0].median)
    return chance if best.low > without.median else 0.0
