"""Decides how many tokens a second model drafts for a step: the theory's best gamma (`theory`), from how often its
drafts come true and what steps cost, both learned. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamspec.runtime.costs.row_costs import RowCosts

MOST = 16  # tokens drafted for a step
ASSUMED, WEIGHT = 0.7, 10.0  # share of drafts that come true, before any did; observations that this counts for
MEMORY = 200.0  # observations remembered


class DraftDepth:
    """One per session. `alpha`: the share of drafts that come true if those before them did."""

    def __init__(self) -> None:
        self._hits, self._trials = ASSUMED * WEIGHT, WEIGHT

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
        gammas = np.arange(1, most + 1)
        alpha = min(self.alpha, 0.999)
        tokens = (1 - alpha ** (gammas + 1)) / (1 - alpha)
        return 1 + int(np.argmax(tokens / (costs.without_drafter[1 : most + 1] + gammas * costs.price)))
