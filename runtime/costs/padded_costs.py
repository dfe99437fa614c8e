"""Learns what steps cost whose calls are padded to one of few row counts: up to a count, every row is free.

A captured graph always runs the drafter, so that has no price of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from streamspec.runtime.costs.learned_costs import CostRecord, LearnedRowCosts


class PaddedRowCosts(LearnedRowCosts):
    """See `LearnedRowCosts`. `counts`: the row counts, rising, the first of them 1."""

    def __init__(
        self,
        counts: Sequence[int],
        rows: int,
        known: CostRecord | None = None,
        keep: Callable[[LearnedRowCosts, bool], None] | None = None,
    ) -> None:
        padded = [next(count for count in counts if count >= number) for number in range(1, rows + 1)]
        self._padded = np.minimum(padded, rows)
        super().__init__(rows, False, known, keep)

    def observe(self, rows: int, calls: float, seconds: float, cached: int) -> None:
        if 1 <= rows <= self.rows:
            super().observe(int(self._padded[rows - 1]), 0, seconds, cached)

    def _set(self, curve: np.ndarray, without_drafter: np.ndarray, price: float) -> None:
        at = self._padded - 1
        super()._set(curve[at], without_drafter[at], price)

    def _make(self) -> None:
        super()._make()
        at = self._padded - 1
        self._low, self._high = self._low[at], self._high[at]
