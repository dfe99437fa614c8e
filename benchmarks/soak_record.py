"""What a soak of the server found so far, over all its pieces: `benchmarks/soak.py` keeps it in a file and tells it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from streamspec.atomic import write_text

Answers = list[list[Any]]  # of each its text, the names and arguments of its calls, and why it ended


@dataclass
class Life:
    """Of one server: `rests` have the requests before each, MB, threads and open files; `highest`: bytes of its own."""

    pid: int
    created: float
    url: str
    requests: int = 0
    seconds: float = 0.0
    rests: list[tuple[int, float, int, int]] = field(default_factory=list)
    highest: int = 0
    shared_steps: int = 0
    ended: str = ""


@dataclass
class Kept:
    """What all pieces have found. `want`: answers by model, form and chat, None for what has to be refused; `firsts`:
    ms to the first token of each stream, by model."""

    bundles: list[str]
    tokens: int
    want: dict[str, Answers | None] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    firsts: dict[str, list[float]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    cap: int | None = None

    @classmethod
    def read(cls, file: Path) -> Kept:
        values = json.loads(file.read_text(encoding="utf-8"))
        return cls(**values | {"lives": [Life(**life) for life in values["lives"]]})

    def write(self, file: Path) -> None:
        write_text(file, json.dumps(asdict(self)))


def slope(lives: list[Life]) -> float:
    """MB at rest per 1,000 requests, of all servers' second halves together, each around its own mean."""
    above = below = 0.0
    for life in lives:
        rests = np.array([rest[:2] for rest in life.rests[len(life.rests) // 2 :]], float).reshape(-1, 2)
        if len(rests) > 1:
            requests, memory = (rests - rests.mean(axis=0)).T
            above, below = above + float(requests @ memory), below + float(requests @ requests)
    return 1000 * above / below if below else float("nan")


def _kinds(counts: Counter[str], what: str) -> str:
    """How many were `what`, and in which ways."""
    ways = {done.removeprefix(what): count for done, count in sorted(counts.items()) if done.startswith(what)}
    return f"{sum(ways.values())}: " + ", ".join(f"{count} {way}" for way, count in ways.items())


def report(kept: Kept) -> None:
    counts, lives = Counter(kept.counts), kept.lives
    rows = {"pieces": f"{len(lives)}: " + "; ".join(life.ended for life in lives)}
    rows["minutes, requests"] = f"{sum(life.seconds for life in lives) / 60:.1f}, {counts.total()}"
    rows["answered, equal to a session's"] = _kinds(counts, "answered ")
    rows["left by the client"] = _kinds(counts, "left ")
    rows["wrong, refused"] = f"{counts['wrong']}"
    rows["steps in shared calls"] = f"{sum(life.shared_steps for life in lives)}"
    for model, firsts in sorted(kept.firsts.items()):
        p50, p99 = np.percentile(firsts, (50, 99))
        rows[f"first token of {model}, ms: p50, p99"] = f"{p50:.0f}, {p99:.0f} ({len(firsts)} streams)"
    if kept.cap:
        capped = max(life.highest for life in lives) / kept.cap
        rows["memory of its own, most"] = f"{100 * capped:.0f} % of a cap of {kept.cap / 1e6:.0f} MB"
    first_last = [f"{life.rests[0][1]:.1f} to {life.rests[-1][1]:.1f}" for life in lives if life.rests]
    rows["MB at rest"] = f"{'; '.join(first_last)}; {slope(lives):+.2f} per 1,000 requests of the second halves"
    files = [rest[2:] for life in lives for rest in life.rests]
    if files:
        rows["threads, open files at rest, most"] = f"{max(t for t, _ in files)}, {max(f for _, f in files)}"
    rows["faults"] = "; ".join([f"{len(kept.faults)}", *kept.faults[:5]])
    for name, value in rows.items():
        print(f"| {name} | {value} |", flush=True)
