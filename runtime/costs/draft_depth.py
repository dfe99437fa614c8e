"""Decides how many tokens a second model drafts for a step, and whether any: the theory's best gamma and its speed-up
(`theory`), from how often drafts come true and what steps cost, both learned. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamspec.runtime.costs.row_costs import RowCosts

MOST = 16  # tokens drafted for a step
# Share of drafts that come true, before any did, also of a window's, which the target itself writes; observations that
# this counts for.
ASSUMED, ASSUMED_WINDOW, WEIGHT = 0.7, 0.9, 10.0
MEMORY = 200.0  # observations remembered
GAIN = 1.05  # speed-up that must be predicted for drafts to be made: costs and alpha are estimates


class DraftDepth:
    """One per session. `alpha`: the share of drafts that come true if those before them did."""

    def __init__(self, assumed: float = ASSUMED) -> None:
        self._hits, self._trials = assumed * WEIGHT, WEIGHT

    @property
    def alpha(self) -> float:
        return self._hits / self._trials

    def observe(self, drafted: Sequence[int], came: Sequence[int]) -> None:
        """Learns from the tokens that `came` where these had been `drafted`."""
        for draft, token in zip(drafted, came, strict=False):
            fade = min(1.0, MEMORY / self._trials)
            self._trials = self._trials * fade + 1
            self._hits = self._hits * fade + (draft == token)
            if draft != token:
                return

    def best(self, costs: RowCosts | None, rows: int) -> int:
        """How many tokens to draft for steps of at most `rows` rows; without costs as many as there is room for."""
        most = max(1, min(MOST, rows - 1))
        if costs is None:
            return most
        return 1 + int(np.argmax(speedups(self.alpha, costs.without_drafter[: most + 1], costs.price)))

    def pays(self, costs: RowCosts, rows: int) -> bool:
        """Whether the best depth makes steps of at most `rows` rows faster than plain ones, by `GAIN`."""
        most = max(1, min(MOST, rows - 1))
        return bool(speedups(self.alpha, costs.without_drafter[: most + 1], costs.price).max() > GAIN)


def speedups(alpha: float, verify: np.ndarray, price: float) -> np.ndarray:
    """Speed over plain decoding's [n - 1] of drafts of 1, 2, .. tokens (`theory.expected_speedup`). `verify` [n]: plain
    steps that a step of 1, 2, .. rows takes; `price`: those of a draft token."""
    gammas, alpha = np.arange(1, len(verify)), min(alpha, 0.999)
    return (1 - alpha ** (gammas + 1)) / (1 - alpha) / (verify[1:] + gammas * price)
