"""Decides step by step whether speculating pays, from a moving average of the accepted length and the measured step cost.

Pure arithmetic: knows nothing about models or clocks.
"""

from __future__ import annotations

SMOOTHING = 0.06  # weight of the newest step: an average over about 16 steps
PATIENCE = 12  # steps before an average is believed
FIRST_PAUSE, LONGEST_PAUSE = 32, 1024  # plain steps before speculation is tried again; doubles at every failure


class Governor:
    """`cost`: tree step time / plain step time. With None (unknown) speculation always stays on."""

    def __init__(self, cost: float | None) -> None:
        self.cost = cost
        self._average = cost or 1.0  # neutral: neither verdict without evidence
        self._seen = 0
        self._pause = FIRST_PAUSE
        self._resting = 0
        self._verdict = ""

    @property
    def on(self) -> bool:
        """Whether the next step should speculate."""
        return self._resting == 0

    @property
    def about_to_resume(self) -> bool:
        """True in the last plain step of a pause: it has to draft for the step after it."""
        return self._resting == 1

    def step(self, committed: int) -> None:
        """Reports a verification step that committed `committed` tokens."""
        if self.cost is None:
            return
        self._seen += 1
        self._average += max(SMOOTHING, 1 / (self._seen + 1)) * (committed - self._average)
        if self._seen < PATIENCE:
            return
        if self._average < self.cost:
            self._verdict = f"off (accepted {self._average:.1f} per step at {self.cost:.1f}x step cost)"
            self._resting, self._seen, self._average = self._pause, 0, self.cost
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        elif self._seen >= 4 * PATIENCE:
            self._pause = FIRST_PAUSE

    def plain_step(self) -> None:
        """Reports a plain step."""
        if self._resting:
            self._resting -= 1

    def describe(self, rows: int) -> str:
        """One phrase for the user."""
        if self.on or not self._verdict:
            return f"on ({rows} rows)" if self.cost is None else f"on ({rows} rows at {self.cost:.1f}x step cost)"
        return self._verdict
