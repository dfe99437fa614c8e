"""Decides at each step whether running the drafter pays, compared with the draft sources alone, which call no model.

Where the drafter ran, what these alone would have brought is known as well: the difference, in tokens at the rate at
which this session earns them, is remembered for a few steps. While it speaks against the drafter the gate is closed,
and opens for one step now and then to compare again.
"""

from __future__ import annotations

import numpy as np

from streamspec.runtime.costs.row_costs import RowCosts

MEMORY = 16.0  # comparisons that count
PAUSE = 12  # steps without the drafter, then it runs once more
PRIOR = 0.2  # tokens a step that the drafter is believed to bring before it is known, in part at every new answer
RATE, WEIGHT = 1.3, 20.0  # tokens per plain step to begin with, and the plain steps that this counts for
FADE = 0.995  # of what came before, at every step
# Of exploring rows: steps that count, tokens a step that they are believed to bring, and steps without them.
EXPLORED_MEMORY, EXPLORED_PRIOR, EXPLORED_PAUSE = 32.0, 0.2, 256


class DrafterGate:
    """Says whether the drafter runs; one per session. `costs`: of steps by their rows."""

    def __init__(self, costs: RowCosts) -> None:
        self._costs = costs
        self._advantage = PRIOR
        self._since = 0
        self._tokens, self._spent = RATE * WEIGHT, WEIGHT

    @property
    def open(self) -> bool:
        """Tells whether the drafter is to run in the next step."""
        return self._advantage > 0 or self.due

    @property
    def due(self) -> bool:
        """Tells whether the drafter did not run for so long that it is to run once, whatever is known of it."""
        return self._since >= PAUSE

    def costs(self, calls: float) -> np.ndarray:
        """Returns the cost [rows] of a step with 1.. rows, in which the drafter takes so many calls."""
        return self._costs.with_calls(calls)

    def begin(self) -> None:
        """Begins a new answer."""
        self._advantage, self._since = (self._advantage + PRIOR) / 2, 0

    def step(self, tokens: int, rows: int, calls: float) -> None:
        """Reports a step, with the drafter's calls in it."""
        self._tokens = FADE * self._tokens + tokens
        self._spent = FADE * self._spent + self.costs(calls).item(rows - 1)
        self._since = 0 if calls else self._since + 1

    def compare(self, tokens: int, rows: int, source_tokens: int, source_rows: int, calls: float = 1) -> None:
        """Reports how many tokens a step drafted with `calls` of the drafter brought, and what the sources alone would
        have."""
        rate, without = self._tokens / self._spent, self._costs.without_drafter
        saved = without.item(rows - 1) - without.item(source_rows - 1) + calls * self._costs.price
        self._advantage += (tokens - source_tokens - rate * saved - self._advantage) / MEMORY


class ExplorationGate:
    """Decides whether rows that teach a source (`LastingIndex.explore`) pay: what it alone brought lately against what
    they cost, in tokens at the rate at which this session earns them. One per session."""

    def __init__(self) -> None:
        self._advantage, self._since = EXPLORED_PRIOR, 0
        self._tokens, self._spent = RATE * WEIGHT, WEIGHT

    @property
    def open(self) -> bool:
        """Tells whether the next step is to have such rows."""
        return self._advantage > 0

    def step(self, tokens: int, cost: float, brought: int, extra: float) -> None:
        """Reports a step that brought so many `tokens` at the `cost` of plain steps, `brought` of them by the source
        alone, `extra` of it for the rows."""
        self._tokens, self._spent = FADE * self._tokens + tokens, FADE * self._spent + cost
        if self.open:
            worth = brought - extra * self._tokens / self._spent
            self._advantage += (worth - self._advantage) / EXPLORED_MEMORY
            self._since = 0
        else:
            self._since += 1
            if self._since >= EXPLORED_PAUSE:
                self._advantage = EXPLORED_PRIOR
