#!/usr/bin/env python3
"""Where early-exit pruning pays: `python benchmarks/pruning.py BUNDLE --prompts TASK.jsonl [--sizes 8 16 16:8 16:0.05 ...] [--limit 40]`.

A size is the rows of every draft, and behind a colon which of them go on above the early exit: at most so many, or those of
at least that chance. Every prompt is answered plainly and with every size in turn; all answers must be equal. Prints tokens
per step, rows that went on, time of a step and speed-up over plain decoding (decode time, medians over `--repeats`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from streamspec.examples import read_examples
from streamspec.runtime import Session, load
from streamspec.runtime.interface import Pruning, Verified

SIZES = ("4", "6", "8", "12", "16", "24", "12:8", "16:8", "16:10", "24:8", "24:12", "32:12", "16:0.1", "16:0.02", "24:0.05", "24:0.01")


class Counting:
    """An engine that counts the rows its last layer saw."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.rows, self.steps = engine, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def verify(self, *arguments: Any, **options: Any) -> Verified:
        result: Verified = self._engine.verify(*arguments, **options)
        if len(result.choices) > 1:
            self.rows, self.steps = self.rows + int(np.sum(result.choices >= 0)), self.steps + 1
        return result


def size_named(text: str) -> tuple[int, Pruning | None]:
    rows, _, kept = text.partition(":")
    if not kept:
        return int(rows), None
    return int(rows), Pruning(least=float(kept)) if "." in kept else Pruning(int(kept))


def answers(session: Session, prompts: Sequence[Any], sizes: Sequence[str], tokens: int) -> Iterator[tuple[str, Any, int, int]]:
    """(size, answer, rows that went on, steps) of every prompt with every size; "plain" first."""
    engine = session.engine
    for prompt in prompts:
        expected: list[int] = []
        for size in ("plain", *sizes):
            rows, pruning = size_named("1" if size == "plain" else size)
            counting = Counting(engine)
            session.engine, session.rows, session.pruning = counting, rows, pruning  # type: ignore[assignment]
            answer = session.generate(prompt, max_new_tokens=tokens)
            expected = expected or answer.token_ids
            if answer.token_ids != expected:
                raise SystemExit(f"{size} and plain decoding differ on {prompt!r:.80}")
            yield size, answer, counting.rows, counting.steps
    session.engine = engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    session = load(arguments.bundle, threads=arguments.threads, tree=max(size_named(s)[0] for s in arguments.sizes))
    prompts = [example.opening for example in read_examples(arguments.prompts, arguments.limit)]
    seconds: dict[str, list[float]] = {}
    counts: dict[str, np.ndarray] = {}
    for repeat in range(arguments.repeats):
        started = time.perf_counter()
        for size, answer, rows, steps in answers(session, prompts, arguments.sizes, arguments.max_new_tokens):
            stats = answer.stats
            seconds.setdefault(size, [0.0] * arguments.repeats)[repeat] += stats.decode_seconds
            found = np.array([stats.steps, stats.step_tokens, rows, steps, stats.steps + stats.plain_steps], float)
            counts[size] = counts.get(size, 0) + found
        print(f"# round {repeat + 1}: {time.perf_counter() - started:.0f} s", flush=True)
    print("| rows | go on | tau | step ms | speed-up (min..max) |\n|---|---|---|---|---|")
    for size, took in seconds.items():
        steps, tokens, rows, verified, calls = counts[size]
        ratios = [plain / own for plain, own in zip(seconds["plain"], took, strict=True)]
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f})"
        on, tau = (rows / verified, tokens / steps) if steps else (1, 1)
        print(f"| {size} | {on:.1f} | {tau:.2f} | {1e3 * sum(took) / calls:.2f} | {spread} |")


if __name__ == "__main__":
    main()
