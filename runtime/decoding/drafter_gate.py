"""Decides step by step whether streams are worth their time beside what n-grams of the text propose for nothing.

Where streams ran, what n-grams alone would have brought is known as well: the difference, in tokens at the rate at
which this session earns them, is remembered for a few steps. While it speaks against the streams they are left out, and
asked again now and then. Pure arithmetic: knows nothing about models, trees or clocks.
"""

from __future__ import annotations

import numpy as np

MEMORY = 16.0  # comparisons that count
PAUSE = 12  # steps without streams, then they run once more
PRIOR = 0.2  # tokens a step that streams are believed to bring before they are known, in part at every new answer
RATE, WEIGHT = 1.3, 20.0  # tokens per plain step to begin with, and the plain steps that this counts for
FADE = 0.995  # of what came before, at every step


class DrafterGate:
    """One per session. `costs` [rows]: time of a step with 1.. rows and streams behind it, over a plain step's;
    costs[0] is 1, the plain step.
    """

    def __init__(self, costs: np.ndarray) -> None:
        row = (costs[3] - costs[1]) / 2 if len(costs) > 3 else 0.0
        self.price = max(
            0.0, float(costs[1] - row - 1)
        )  # of the streams: what a step of one row with them costs more than a plain one
        self.without = np.maximum(costs - self.price, 1.0)  # a step with 1.. rows and no streams behind it
        self._beside = self.without + self.price
        self._advantage = PRIOR
        self._since = 0
        self._tokens, self._spent = RATE * WEIGHT, WEIGHT

    @property
    def wanted(self) -> bool:
        """Whether streams are to run behind the next step."""
        return self._advantage > 0 or self._since >= PAUSE

    def costs(self, streams: bool) -> np.ndarray:
        """Of a step with 1.. rows, with or without streams behind it."""
        return self._beside if streams else self.without

    def begin(self) -> None:
        """A new answer."""
        self._advantage, self._since = (self._advantage + PRIOR) / 2, 0

    def step(self, tokens: int, rows: int, streams: bool) -> None:
        """Reports a step."""
        self._tokens = FADE * self._tokens + tokens
        self._spent = FADE * self._spent + float(self.costs(streams)[rows - 1])
        self._since = 0 if streams else self._since + 1

    def compare(self, tokens: int, rows: int, alone: int, alone_rows: int) -> None:
        """Reports what a step drafted with streams brought, and what n-grams alone would have."""
        rate = self._tokens / self._spent
        saved = float(self.without[rows - 1] - self.without[alone_rows - 1] + self.price)
        self._advantage += (tokens - alone - rate * saved - self._advantage) / MEMORY
