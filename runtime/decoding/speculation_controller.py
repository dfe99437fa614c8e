"""Decides step by step whether speculating pays: an account of the plain steps it has gained or lost.

A verification step that commits `c` tokens at the cost of `k` plain steps books `c - k`. Speculation goes on while the
account is positive and pauses when it is spent; every plain step pays a little back, which is what the next attempt may
lose. So all attempts together cost at most the first deposit, `PAYBACK` of the time, and `FRESH_START` steps an answer,
whatever the text.

Costs come from a calibration, which another process may have disturbed. So steps of both kinds are timed as they go:
while speculating a plain step is taken now and then just to be timed, and what verification steps really cost corrects
`k`. Pure arithmetic: knows nothing about models or clocks.
"""

from __future__ import annotations

import statistics
from collections import deque

DEPOSIT = (
    8.0  # plain steps to begin with, and the most that gains are remembered for: a turn for the worse is noticed soon
)
PAYBACK = 0.015  # of a plain step, for every plain step
FRESH_START = 0.5  # plain steps that a new answer adds: another text, another chance
# verification steps that bring one token each, the worst case, for which there must be funds before a new attempt (or
# all that the account holds)
ATTEMPT = 3.0
LOOKS = (32, 40, 48)  # verification steps after which a plain step is timed,
LOOK_EVERY = 256  # and the distance of all further ones
TIMED, ENOUGH = 9, 3  # steps of each kind whose median counts; plain ones it takes
MARGIN = 1.1  # gain of verification steps over plain ones that is no accident of timing
SMOOTHING = 0.06  # weight of the newest step in the average that is shown


class SpeculationController:
    """One per session: the account is carried from answer to answer."""

    def __init__(self) -> None:
        self.on = True
        self._account = DEPOSIT
        self._committed = self._cost = 0.0  # of a verification step, lately
        self._believed = 0.0  # that cost by calibration alone, when speculation was last switched off
        self._seen = 0
        self._verdict = ""
        self._steps, self._looked = 0, 0
        self._per_cost: deque[float] = deque(maxlen=TIMED)  # seconds of verification steps over their calibrated cost
        self._plain: deque[float] = deque(maxlen=TIMED)  # seconds of plain steps

    @property
    def looks(self) -> bool:
        """True where the next step is to be a plain one, to be timed."""
        further = len(LOOKS)
        due = LOOKS[self._looked] if self._looked < further else LOOKS[-1] + LOOK_EVERY * (self._looked - further + 1)
        return self.on and self._steps >= due

    @property
    def correction(self) -> float:
        """What verification steps cost over what their calibration says."""
        if not self._per_cost or len(self._plain) < ENOUGH:
            return 1.0
        return statistics.median(self._per_cost) / statistics.median(self._plain)

    @property
    def about_to_resume(self) -> bool:
        """True in the last plain step of a pause: it has to draft for the step after it."""
        return not self.on and self._account + PAYBACK >= self._funds

    @property
    def _funds(self) -> float:
        return min(DEPOSIT, max(PAYBACK, ATTEMPT * (self._cost - 1)))

    def begin(self) -> None:
        """A new answer."""
        self._book(FRESH_START)

    def step(self, committed: int, cost: float | None, seconds: float | None = None) -> None:
        """Reports a verification step: the tokens it committed, its time over a plain step's by calibration, and its
        time here. Without a cost, nothing is booked."""
        if cost is None:
            return
        if seconds is not None:
            self._per_cost.append(seconds / cost)
        cost *= self.correction
        self._steps += 1
        self._seen += 1
        weight = max(SMOOTHING, 1 / self._seen)
        self._committed += weight * (committed - self._committed)
        self._cost += weight * (cost - self._cost)
        self._book(committed - cost)
        if self._account <= 0:
            self.on = False
            self._verdict = f"off (accepted {self._committed:.1f} per step at {self._cost:.1f}x step cost)"
            self._seen = 0
            self._believed = self._cost / self.correction
            self._plain.clear()  # those of a while ago may have been timed on a machine less busy

    def plain_step(self, seconds: float | None = None) -> None:
        """Reports a plain step, and its time where it did nothing else."""
        if self.looks:
            self._looked += 1
        if seconds is not None:
            self._plain.append(seconds)
        if self.on:
            return
        if len(self._plain) >= ENOUGH:
            self._cost = self._believed * self.correction
            if self._committed > MARGIN * self._cost:  # it had been paying all along
                self._account = DEPOSIT
        self._book(PAYBACK)

    def describe(self, rows: int) -> str:
        """One phrase for the user."""
        if self.on or not self._verdict:
            return (
                f"on (up to {rows} rows)" if not self._cost else f"on (up to {rows} rows, {self._cost:.1f}x step cost)"
            )
        return self._verdict

    def _book(self, steps: float) -> None:
        self._account = min(DEPOSIT, self._account + steps)
        if not self.on and self._account >= self._funds:
            self.on = True
