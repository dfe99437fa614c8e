"""The minutes of a whole command: what is left of them, the share of a stage, and how fast this machine works.

Tested by tests/adapters/runs/test_budget.py. Free of torch.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from streamspec.atomic import write_text
from streamspec.errors import AdapterError

SAVE_EVERY = 5.0  # seconds between two notes of the time used
UNMEASURED = 0.1  # share of the budget kept for the last validation while its speed is not known
MOST_KEPT = 0.25  # share of the budget that is kept for it at most
SPARE = 1.15  # measured work may take this much longer
SHORT = 15.0  # minutes: in a shorter command what comes before the first step is cut
WRITING = 0.02, 2.0  # share of the budget kept for writing the adapter, and seconds at most
ANSWERS, RANKED, DESCRIBED, TEXTS = "answers", "ranks", "statistics", "validation texts"  # work whose speed is measured


@dataclass(frozen=True)
class Deadline:
    """A moment `at` on the clock `now`, both in seconds; infinite without a limit."""

    at: float
    now: Callable[[], float]

    def left(self) -> float:
        """Returns the seconds left, negative once it is over, infinite without a limit."""
        return self.at - self.now()

    def before(self, seconds: float) -> Deadline:
        """Returns the moment `seconds` before this one."""
        return Deadline(self.at - seconds, self.now)

    def over(self, ahead: float = 0.0) -> bool:
        """Tells whether the time is over, or will be in `ahead` seconds."""
        return self.left() <= ahead


ENDLESS = Deadline(math.inf, time.monotonic)


class Speeds:
    """Measures how long each kind of work takes on this machine under its present load."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[float, float]] = {}  # kind -> units, seconds

    def measured(self, kind: str, units: float, seconds: float) -> None:
        """Adds a measurement: `units` of work of this kind took `seconds`."""
        done, took = self.seen.get(kind, (0.0, 0.0))
        self.seen[kind] = (done + units, took + seconds)

    def forget(self, *kinds: str) -> None:
        """Drops the measurements of these kinds, whose work has become another."""
        for kind in kinds:
            self.seen.pop(kind, None)

    def cost(self, kind: str, units: float) -> float | None:
        """Seconds that `units` of work of this kind take; None where none was measured."""
        done, took = self.seen.get(kind, (0.0, 0.0)) if units else (1.0, 0.0)
        return units * took / done if done else None


class TimeBudget:
    """Seconds of a command by the clock `now`, earlier attempts of a resumed run included. `minutes` None: no limit.

    `spent`: seconds that this attempt had used before. The time used is kept in `file`, so that it counts after a crash
    too.
    """

    def __init__(self, minutes: float | None, now: Callable[[], float] = time.monotonic, spent: float = 0.0) -> None:
        self.minutes, self.now = minutes, now
        self.began, self.before = now() - spent, 0.0
        self.speeds = Speeds()
        self.file: Path | None = None
        self.saved = -math.inf

    def __enter__(self) -> TimeBudget:
        return self

    def __exit__(self, *_: object) -> None:
        self.note(0)

    def elapsed(self) -> float:
        """Returns the seconds used so far, all attempts together."""
        return self.before + self.now() - self.began

    def until(self, share: float = 1.0, kept: float = 0.0, of_left: float = 0.0) -> Deadline:
        """The moment when `share` of the whole command's time but for `kept` seconds is over, or `of_left` of what is
        left of it where that is later."""
        if self.minutes is None:
            return Deadline(math.inf, self.now)
        total, elapsed = max(60 * self.minutes - kept, 0.0), self.elapsed()
        return Deadline(self.now() + max(total * share - elapsed, (total - elapsed) * of_left), self.now)

    @property
    def short(self) -> bool:
        """Tells whether the command has less than `SHORT` minutes."""
        return self.minutes is not None and self.minutes < SHORT

    def if_short(self, share: float) -> Deadline:
        """The moment when `share` of the time left is over in a command of less than `SHORT` minutes; else never."""
        return Deadline(self.now() + max(self.until().left(), 0.0) * share if self.short else math.inf, self.now)

    def until_done(self, kind: str, work: dict[str, float]) -> Deadline:
        """The moment when this kind of `work`, units by kind, is to be over so that there is time for the others: the
        time left is divided as they are measured to take it.
        """
        end = self.until(kept=self.writing())
        costs = {name: self.speeds.cost(name, units) for name, units in work.items()}
        known = [cost for cost in costs.values() if cost is not None]
        share = (costs[kind] or 0.0) / max(sum(known), 1e-9) if len(known) == len(work) else 1 / len(work)
        return end if math.isinf(end.at) else Deadline(end.now() + max(end.left(), 0.0) * share, end.now)

    def keep(self, file: Path, resume: bool) -> None:
        """Notes the time used in `file` from now on; where the run is resumed, with what is noted there. Raises
        AdapterError for a damaged file.
        """
        if resume and file.exists():
            try:
                self.before = float(json.loads(file.read_text(encoding="utf-8"))["seconds"])
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise AdapterError(f"{file}: {error}", "the time used by a run", "remove the file") from None
        self.file = file
        self.note(0)

    def note(self, every: float = SAVE_EVERY) -> None:
        """Writes the time used, if that was not done in the last `every` seconds."""
        if self.file is None or self.now() - self.saved < every:
            return
        self.saved = self.now()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.file, json.dumps({"seconds": round(self.elapsed(), 2)}))

    def writing(self) -> float:
        """Seconds to keep for the files of the adapter."""
        share, max_seconds = WRITING
        return 0.0 if self.minutes is None else min(60 * self.minutes * share, max_seconds)

    def reserve(self, work: dict[str, float]) -> float:
        """Seconds to keep for `work`, units by kind, and for the files: as measured, within `MOST_KEPT` of all."""
        if self.minutes is None:
            return 0.0
        costs = [self.speeds.cost(kind, units) for kind, units in work.items()]
        known = sum(cost for cost in costs if cost is not None) * SPARE
        unknown = 60 * self.minutes * UNMEASURED if None in costs else 0.0
        return min(max(known, unknown) + self.writing(), 60 * self.minutes * MOST_KEPT)
