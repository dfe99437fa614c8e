"""Scores answers: exact match and ROUGE against references, and whether two systems really differ.

Exact match ignores differences in white space only. ROUGE is the F-measure of the rouge-score package without stemming,
the best over the references.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from streamspec.bench.prompts import BenchPrompt
from streamspec.errors import DataError

METRICS = ("em", "rouge1", "rouge2", "rougeL")
RESAMPLES = 10_000
LOOP = 4  # tokens


def score(answer: str, references: Sequence[str]) -> dict[str, float]:
    """Metrics of one answer, each 0..1, the best over `references` (at least one)."""
    best = {"em": float(any(_words(answer) == _words(reference) for reference in references))}
    for reference in references:
        for name, value in _rouge().score(reference, answer).items():
            best[name] = max(best.get(name, 0.0), float(value.fmeasure))
    return best


def loops(tokens: Sequence[int]) -> bool:
    """Whether an answer goes round in circles: of its runs of four tokens fewer than half are distinct."""
    runs = [tuple(tokens[i : i + LOOP]) for i in range(len(tokens) - LOOP + 1)]
    return 2 * len(set(runs)) < len(runs)


def mean_scores(scores: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over answers; empty where nothing was scored."""
    return {name: float(np.mean([s[name] for s in scores])) for name in METRICS} if scores else {}


@dataclass(frozen=True)
class Interval:
    """A mean difference and the bootstrap interval around it."""

    difference: float
    low: float
    high: float


def paired_bootstrap(a: Sequence[float], b: Sequence[float], level: float = 0.95, seed: int = 0) -> Interval:
    """Interval of mean(b) - mean(a) where a[i] and b[i] belong to the same prompt: prompts are resampled, not
    answers.
    """
    differences = np.asarray(b, dtype=np.float64) - np.asarray(a, dtype=np.float64)
    count = len(differences)
    generator = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    block = max(1, 4_000_000 // count)  # bounds the index table to some 32 MB
    for start in range(0, RESAMPLES, block):
        rows = min(block, RESAMPLES - start)
        means[start : start + rows] = differences[generator.integers(0, count, (rows, count))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(differences.mean()), float(low), float(high))


def compare(file_a: str | Path, file_b: str | Path, side: str = "plain", side_b: str | None = None) -> dict[str, Any]:
    """Compares the quality of the answers in two files of `bench --save-outputs`, by paired bootstrap.

    - `side`: the answers to score: `plain`, `speculative`, or the path of a bundle named with `--also`.
    - `side_b`: the same for the second file, if it differs.

    Returns the mean of each score and the interval of the difference b - a over the prompts. Raises DataError for files
    on different prompts.
    """
    rows_a, rows_b = _scored(file_a, side), _scored(file_b, side_b or side)
    if [r["prompt"] for r in rows_a] != [r["prompt"] for r in rows_b]:
        raise DataError(
            f"{file_a} has {len(rows_a)} scored prompts and {file_b} {len(rows_b)}, not the same ones",
            "outputs on the same prompts",
            "run bench on the same file with the same --limit",
        )
    equal = sum(a["text"] == b["text"] for a, b in zip(rows_a, rows_b, strict=True))
    result: dict[str, Any] = {"prompts": len(rows_a), "side": side, "side_b": side_b or side, "equal": equal}
    for metric in METRICS:
        a, b = ([row["scores"][metric] for row in rows] for rows in (rows_a, rows_b))
        interval = paired_bootstrap(a, b)
        result[metric] = {"a": float(np.mean(a)), "b": float(np.mean(b)), **vars(interval)}
    return result


def _scored(path: str | Path, side: str) -> list[dict[str, Any]]:
    """The rows that have scores. Raises DataError for other files."""
    try:
        lines = Path(path).read_text(encoding="utf-8").rstrip("\n").split("\n")  # JSON may hold other ends of lines
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {error}", "a file written by bench --save-outputs", "check the path") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if row["scores"]:
                rows.append({"prompt": row["prompt"], "text": row[side], "scores": row["scores"][side]})
        except (ValueError, KeyError, TypeError) as error:
            fault = f"{path}, line {number}: {type(error).__name__} {error}"
            raise DataError(fault, "a row written by bench --save-outputs", "run bench again") from None
    if not rows:
        raise DataError(
            f"{path} holds no scored answers", "answers to prompts with references", "run bench on such a file"
        )
    return rows


def check_packages(cases: Sequence[BenchPrompt]) -> None:
    """Raises ModuleNotFoundError for packages that the report takes, before anything is measured."""
    if sys.platform == "win32":
        import psutil  # noqa: F401
    if any(case.references for case in cases):
        _rouge()


def _words(text: str) -> str:
    return " ".join(text.split())


@lru_cache(maxsize=1)
def _rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([m for m in METRICS if m != "em"], use_stemmer=False)
