"""Decides at each step whether running the drafter pays, compared with n-gram drafts, which are free.

Where the drafter ran, what n-grams alone would have brought is known as well: the difference, in tokens at the rate at
which this session earns them, is remembered for a few steps. While it speaks against the drafter the gate is closed,
and opens for one step now and then to compare again. Pure arithmetic.
"""

from __future__ import annotations

import numpy as np

MEMORY = 16.0  # comparisons that count
PAUSE = 12  # steps without the drafter, then it runs once more
PRIOR = 0.2  # tokens a step that the drafter is believed to bring before it is known, in part at every new answer
RATE, WEIGHT = 1.3, 20.0  # tokens per plain step to begin with, and the plain steps that this counts for
FADE = 0.995  # of what came before, at every step


class DrafterGate:
    """Says whether the drafter runs; one per session. `costs` [rows]: time of a step with 1.. rows that also runs the
    drafter, over a plain step's; costs[0] is 1, the plain step.
    """

    def __init__(self, costs: np.ndarray) -> None:
        row = (costs[3] - costs[1]) / 2 if len(costs) > 3 else 0.0
        # of the drafter: how much a step of one row with it costs more than a plain one
        self.price = max(0.0, float(costs[1] - row - 1))
        self.without_drafter = np.maximum(costs - self.price, 1.0)  # a step with 1.. rows that does not run the drafter
        self._with_drafter = self.without_drafter + self.price
        self._advantage = PRIOR
        self._since = 0
        self._tokens, self._spent = RATE * WEIGHT, WEIGHT

    @property
    def open(self) -> bool:
        """Whether the drafter is to run in the next step."""
        return self._advantage > 0 or self._since >= PAUSE

    def costs(self, drafter: bool) -> np.ndarray:
        """Returns the cost [rows] of a step with 1.. rows, with or without the drafter."""
        return self._with_drafter if drafter else self.without_drafter

    def begin(self) -> None:
        """Begins a new answer."""
        self._advantage, self._since = (self._advantage + PRIOR) / 2, 0

    def step(self, tokens: int, rows: int, drafter: bool) -> None:
        """Reports a step."""
        self._tokens = FADE * self._tokens + tokens
        self._spent = FADE * self._spent + float(self.costs(drafter)[rows - 1])
        self._since = 0 if drafter else self._since + 1

    def compare(self, tokens: int, rows: int, ngram_tokens: int, ngram_rows: int) -> None:
        """Reports how many tokens a step drafted with the drafter brought, and n-grams alone would have."""
        rate = self._tokens / self._spent
        saved = float(self.without_drafter[rows - 1] - self.without_drafter[ngram_rows - 1] + self.price)
        self._advantage += (tokens - ngram_tokens - rate * saved - self._advantage) / MEMORY
