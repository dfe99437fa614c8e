"""What a campaign has counted and found so far, in one file that is always whole."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streamspec.atomic import write_text

COUNTED = ("prompts", "tokens", "accepted", "shared_steps", "near_ties", "mismatches")


class Kept:
    """`counts`: of every arm, `COUNTED`; `sides`: of every bundle on a provider, the next prompt's number and the
    seconds spent; `found`: the mismatches."""

    def __init__(self, path: Path) -> None:
        self.path = path
        there = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.counts: dict[str, Counter[str]] = {name: Counter(one) for name, one in there.get("counts", {}).items()}
        self.sides: dict[str, dict[str, float]] = there.get("sides", {})
        self.found: list[dict[str, Any]] = there.get("found", [])

    def add(self, arm: tuple[str, ...], counts: dict[str, int]) -> None:
        """Adds to the counts of an arm: bundle, provider, name, greedy or sampled."""
        self.counts.setdefault(" | ".join(arm), Counter()).update(counts)

    def side(self, name: str) -> dict[str, float]:
        return self.sides.setdefault(name, {"next": 0, "seconds": 0.0})

    def write(self) -> None:
        whole = {"counts": self.counts, "sides": self.sides, "found": self.found}
        write_text(self.path, json.dumps(whole, indent=1))

    def rows(self, *columns: int) -> Iterator[tuple[tuple[str, ...], Counter[str]]]:
        """The counts, summed over all but these columns of (bundle, provider, arm, greedy or sampled)."""
        summed: dict[tuple[str, ...], Counter[str]] = {}
        for name, counts in self.counts.items():
            words = name.split(" | ")
            summed.setdefault(tuple(words[i] for i in columns), Counter()).update(counts)
        yield from sorted(summed.items())
