"""What a campaign has counted and found so far, in one file that is always whole."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import streamspec.runtime
from streamspec.atomic import write_text

COUNTED = ("prompts", "tokens", "accepted", "shared_steps", "near_ties", "mismatches")
PLAIN = "plain"  # in place of an arm: the answers that all arms are compared with
BORDERS = (640, 2048, 8192, 16384, 32768)  # of the depths that tokens are counted by: prompt and answer before them
NO_DECODING = {"adapters", "chat", "cli", "demo", "export", "serve"}  # parts of the package that no answer comes from


class Kept:
    """`counts`: of every arm, `COUNTED`, and tokens by depth; `sides`: of every bundle on a provider at a revision, how
    far it came and the seconds spent; `found`: the mismatches."""

    def __init__(self, path: Path) -> None:
        self.path = path
        there = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.counts: dict[str, Counter[str]] = {name: Counter(one) for name, one in there.get("counts", {}).items()}
        self.sides: dict[str, dict[str, Any]] = there.get("sides", {})
        self.found: list[dict[str, Any]] = there.get("found", [])

    def add(self, arm: tuple[str, ...], counts: dict[str, int], depth: int = 0) -> None:
        """Adds to the counts of an arm: bundle, provider, name, greedy or sampled, revision. `depth`: tokens before the
        answer."""
        own, end = self.counts.setdefault(" | ".join(arm), Counter()), depth + counts["tokens"]
        own.update(counts)
        for lower, upper in zip((0, *BORDERS), BORDERS, strict=False):
            own[f"to {upper}"] += max(0, min(end, upper) - max(depth, lower))

    def side(self, name: str, first: int = 0, deep: int = 0) -> dict[str, Any]:
        """How far a side came; a new one begins with the prompt of the number `first`, and with the book `deep`."""
        side = self.sides.setdefault(name, {"next": first, "seconds": 0.0})
        side.setdefault("deep", deep)
        return side

    def write(self) -> None:
        whole = {"counts": self.counts, "sides": self.sides, "found": self.found}
        write_text(self.path, json.dumps(whole, indent=1))

    def rows(self, *columns: int, plain: bool = False) -> Iterator[tuple[tuple[str, ...], Counter[str]]]:
        """The counts of all arms, or `plain` ones, summed over all but these columns of (bundle, provider, arm, greedy
        or sampled, revision)."""
        summed: dict[tuple[str, ...], Counter[str]] = {}
        for name, counts in self.counts.items():
            words = name.split(" | ")
            if plain == (words[2] == PLAIN):
                summed.setdefault(tuple(words[i] for i in columns), Counter()).update(counts)
        yield from sorted(summed.items())


@cache
def _runtime() -> bytes:
    """Hashes the parts of the package that answers come from, native library included."""
    digest = hashlib.sha256()
    for root in (Path(streamspec.__file__).parent, Path(streamspec.runtime.__file__).parent):
        for file in sorted(root.rglob("*")):
            if file.suffix in (".py", ".so", ".pyd", ".dylib") and NO_DECODING.isdisjoint(file.relative_to(root).parts):
                digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.digest()


def revision(bundle: Path) -> str:
    """Names the runtime and the bundle's files, whose hashes its manifest holds."""
    return hashlib.sha256(_runtime() + (bundle / "manifest.json").read_bytes()).hexdigest()[:10]
