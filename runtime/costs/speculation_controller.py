"""Decides step by step whether speculating pays, by a budget of the plain steps it has gained or lost.

A verification step that commits `c` tokens at the cost of `k` plain steps adds `c - k`. Speculation goes on while the
budget is positive and pauses when it is spent; every plain step refills a little, which is what the next attempt may
lose. So all attempts together cost at most the initial budget, `REFILL` of the time, and `FRESH_START` steps an answer,
whatever the text. Sources that wake speculation, such as a predicted output, draft in a pause, too: what they gain ends
it, and what they lose is an account's of their own, `WAKING` steps an answer, after which they rest as the others do.

Costs are estimates (`row_costs`), so steps of both kinds are timed, too: while speculating a plain step is taken now
and then just to be timed, and what verification steps really cost corrects `k`.
"""

from __future__ import annotations

import statistics
from collections import deque

START = 1.5  # plain steps to begin with
MAX_BUDGET = 8.0  # the most that gains are remembered for: a turn for the worse is noticed soon
REFILL = 0.015  # of a plain step, for every plain step
FRESH_START = 0.5  # plain steps that a new answer adds, since another text may go better
WAKING = 4.0  # plain steps that an answer may lose on drafts in a pause
# verification steps that bring one token each, the worst case, for which the budget must suffice before a new attempt
# (or be full)
ATTEMPT = 3.0
PROBES = (32, 40, 48)  # verification steps after which a plain step is timed,
PROBE_EVERY = 256  # and the distance of all further ones
TIMED, ENOUGH = 9, 3  # steps of each kind whose median counts; plain ones it takes
MARGIN = 1.1  # gain of verification steps over plain ones that is no accident of timing
# Share of plain decoding's speed that trees must promise: those that grow step by step do better than promised.
HOPELESS = 0.9
SMOOTHING = 0.06  # weight of the newest step in the average that is shown


class SpeculationController:
    """Switches speculation on and off; one per session: the budget is carried from answer to answer."""

    def __init__(self) -> None:
        self.on = True
        self._budget = START
        self._waking = WAKING
        self._committed = self._cost = 0.0  # of a verification step, lately
        self._estimated_cost = 0.0  # that cost as estimated alone, when speculation was last switched off
        self._drafter = 0.0  # what it last added to a plain step
        self._averaged = 0
        self._reason_off = ""
        self._steps, self._probed = 0, 0
        self._per_cost: deque[float] = deque(maxlen=TIMED)  # seconds of verification steps over their estimated cost
        self._plain: deque[float] = deque(maxlen=TIMED)  # seconds of plain steps

    @property
    def probe_due(self) -> bool:
        """Tells whether the next step is to be a plain one, to be timed."""
        further = len(PROBES)
        due = (
            PROBES[self._probed] if self._probed < further else PROBES[-1] + PROBE_EVERY * (self._probed - further + 1)
        )
        return self.on and self._steps >= due

    @property
    def may_wake(self) -> bool:
        """Tells whether sources may be asked in a pause that their drafts would end."""
        return self._waking > 0

    @property
    def correction(self) -> float:
        """Ratio of the measured to the estimated cost of verification steps."""
        if not self._per_cost or len(self._plain) < ENOUGH:
            return 1.0
        return statistics.median(self._per_cost) / statistics.median(self._plain)

    @property
    def about_to_resume(self) -> bool:
        """Tells whether this is the last plain step of a pause, which has to draft for the step after it."""
        return not self.on and self._budget + REFILL >= self._needed

    @property
    def _needed(self) -> float:
        """Budget for a new attempt."""
        return min(MAX_BUDGET, max(REFILL, ATTEMPT * max(self._cost - 1, self._drafter)))

    def expect(self, committed: float, cost: float) -> None:
        """Says before the first answer what a step will commit, and at which cost: where that is far from paying, the
        first attempt waits until plain steps have earned it."""
        if committed < HOPELESS * cost:
            self._budget, self.on = 0.0, False
            self._committed, self._cost, self._estimated_cost = committed, cost, cost
            self._reason_off = f"off ({committed:.1f} tokens per step expected at {cost:.1f}x step cost)"

    def begin(self) -> None:
        """Begins a new answer."""
        self._waking = WAKING
        self._add(FRESH_START)

    def step(self, committed: int, cost: float | None, seconds: float | None = None) -> None:
        """Reports a verification step: the tokens it committed, its estimated time over a plain step's, and its time
        here. Without a cost, nothing is counted."""
        if cost is None:
            return
        if seconds is not None:
            self._per_cost.append(seconds / cost)
        cost *= self.correction
        gained = committed - cost
        if not self.on:
            self._waking = min(WAKING, self._waking + gained)
            if gained > 0:
                self._add(gained)
            return
        self._steps += 1
        self._averaged += 1
        weight = max(SMOOTHING, 1 / self._averaged)
        self._committed += weight * (committed - self._committed)
        self._cost += weight * (cost - self._cost)
        self._gain(gained)

    def plain_step(self, seconds: float | None = None, drafter: float = 0.0) -> None:
        """Reports a plain step, and its time where it did nothing else. `drafter`: plain steps by which the drafter at
        its end made it longer, for a draft that is still to come or did not pay."""
        if self.probe_due:
            self._probed += 1
        if seconds is not None:
            self._plain.append(seconds)
        if not self.on:
            if len(self._plain) >= ENOUGH:
                self._cost = self._estimated_cost * self.correction
                if self._committed > MARGIN * self._cost:  # it had been paying all along
                    self._budget = max(self._budget, self._needed)
            self._add(REFILL)
        if drafter:
            self._drafter = drafter
            self._gain(-drafter)

    def describe(self, rows: int) -> str:
        """Says in one phrase for the user whether speculation is on."""
        if self.on or not self._reason_off:
            return (
                f"on (up to {rows} rows)" if not self._cost else f"on (up to {rows} rows, {self._cost:.1f}x step cost)"
            )
        return self._reason_off

    def _gain(self, steps: float) -> None:
        """Books what speculation has gained, and pauses it where the budget is spent."""
        self._add(steps)
        if self._budget <= 0:
            self.on = False
            accepted = f"accepted {self._committed:.1f} per step at {self._cost:.1f}x step cost"
            self._reason_off = f"off ({accepted if self._cost else 'no draft paid'})"
            self._averaged = 0
            self._estimated_cost = self._cost / self.correction
            self._plain.clear()  # those of a while ago may have been timed on a machine less busy

    def _add(self, steps: float) -> None:
        self._budget = min(MAX_BUDGET, self._budget + steps)
        if not self.on and self._budget >= self._needed:
            self.on = True
