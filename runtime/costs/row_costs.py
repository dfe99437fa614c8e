"""Defines the cost of a step by its number of rows, over a plain step: a fixed curve, and the interface of all
curves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(eq=False)
class Trial:
    """Bounds of uncertain costs, with which one draft may be made to learn what its rows cost.

    `low`, `high` [rows]: time of a step with 1.. rows over a plain step's, as it well may be. `allowed`: plain steps
    that the draft may be slower than the best one if `high` is true. `loss`: plain steps that it may be slower, which
    `size` sets and the planner reports (`RowCosts.tried`).
    """

    low: np.ndarray
    high: np.ndarray
    allowed: float
    loss: float = 0.0

    def size(self, expected: np.ndarray, costs: np.ndarray, best: int) -> int:
        """Returns the rows of the draft to make: the best ones if costs are as low as they may be, or `best`, which the
        `costs` [rows] speak for, where others may lose too much; sets `loss`. `expected` [n]: tokens that
        drafts of 1.. rows bring."""
        size = 2 + int(np.argmax(expected[1:] / self.low[1 : len(expected)]))
        loss = float(self.high[size - 1] - expected[size - 1] * costs[best - 1] / expected[best - 1])
        if size == best or loss > self.allowed:
            return best
        self.loss = max(loss, 0.0)
        return size


class RowCosts:
    """Costs of steps by their rows that stay as they are. `curve` [rows]: time of a step with 1.. rows that also runs
    the drafter, over a plain step's; curve[0] is 1, the plain step.

    - `without_drafter`, `with_drafter` [rows]: a step with 1.. rows that does or does not run it.
    - `price`: how much more the drafter makes a step take, in plain steps; of a second model, each call of it.
    """

    def __init__(self, curve: np.ndarray) -> None:
        row = (curve[3] - curve[1]) / 2 if len(curve) > 3 else 0.0
        price = max(0.0, float(curve[1] - row - 1)) if len(curve) > 1 else 0.0
        self._set(curve, np.maximum(curve - price, 1.0), price)

    def _set(self, curve: np.ndarray, without_drafter: np.ndarray, price: float) -> None:
        self.curve, self.without_drafter, self.price = curve, without_drafter, price
        self.with_drafter = without_drafter + price

    def with_calls(self, calls: float) -> np.ndarray:
        """Returns the cost [rows] of steps in which the drafter takes so many calls: 0 or 1, or of a second model one
        for each token that it drafts."""
        if calls in (0, 1):
            return self.with_drafter if calls else self.without_drafter
        return self.without_drafter + calls * self.price

    def shared(self, sequences: int) -> np.ndarray:
        """Returns the cost of a call in which each of so many sequences has 1.. rows, without the drafter, over a call
        in which each has one; at least [1]."""
        together = self.without_drafter[sequences - 1 :: sequences]
        return np.asarray(together / together[0]) if len(together) else np.ones(1)

    def verify(self, rows: float) -> float:
        """Returns the plain steps that a step of so many rows, also a mean of several, takes without the drafter."""
        return float(np.interp(rows, np.arange(1, len(self.without_drafter) + 1), self.without_drafter))

    def at(self, cached: int) -> tuple[np.ndarray, float]:
        """`without_drafter` and `price` with so many tokens in the cache."""
        return self.without_drafter, self.price

    def apart(self) -> RowCosts:
        """Costs that begin with what is known of these, learn by themselves and are kept nowhere."""
        return self

    def begin(self, cached: int = 0) -> None:
        """Begins an answer, after a prompt of `cached` tokens."""

    def observe(self, rows: int, calls: float, seconds: float, cached: int, later: bool = False) -> None:
        """Reports the time of a step of `rows` rows with `cached` tokens in the cache and so many calls of the drafter
        (`with_calls`). `later`: no cost is asked for before the next step has been reported."""

    @property
    def plain_due(self) -> bool:
        """Tells whether nothing is known before a plain step was timed."""
        return False

    def trial(self, calls: float) -> Trial | None:
        """Returns what the next step may try in order to learn, with so many calls of the drafter; None for nothing."""
        return None

    def tried(self, loss: float) -> None:
        """Reports that a step tried something that may lose this many plain steps."""

    def end(self, closing: bool = False) -> None:
        """Ends an answer or, `closing`, a session."""

    @property
    def sure(self) -> bool:
        """Tells whether they are more than a first assumption."""
        return True

    def describe(self) -> str:
        """Says for the user what steps cost."""
        return "known beforehand"
