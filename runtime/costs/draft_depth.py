"""Decides how many tokens a second model drafts for a step, and whether any: the theory's best gamma and its speed-up
(`theory`), from how often drafts come true and what steps cost, both learned; and when a draft ends before, as its
tokens are less sure than usual. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from streamspec.runtime.costs.row_costs import RowCosts
from streamspec.runtime.costs.theory import speedups

MAX_DEPTH = 16  # tokens drafted for a step
# Share of drafts that come true, before any did, also of a window's, which the target itself writes; observations that
# this counts for.
ASSUMED, ASSUMED_WINDOW, WEIGHT = 0.7, 0.9, 10.0
MEMORY = 200.0  # observations remembered
GAIN = 1.05  # speed-up that must be predicted for drafts to be made: costs and alpha are estimates


class EarlyEnd(NamedTuple):
    """Ends a draft before its last token, once the probability that all of it comes true is below `min_probability`.
    The probability of a token is the draft model's, its confidence, times `trust`, at most 1."""

    min_probability: float
    trust: float

    def probability(self, confidence: float) -> float:
        """Returns the probability that a token of this confidence comes true where those before it do."""
        return min(1.0, confidence * self.trust)


class DraftDepth:
    """One per session. `alpha`: the share of drafts that come true if those before them did. `trust`: that share over
    their mean confidence."""

    def __init__(self, assumed: float = ASSUMED) -> None:
        self._hits, self._trials = assumed * WEIGHT, WEIGHT
        self._right = self._hoped = assumed * WEIGHT  # of the drafts whose confidence is known

    @property
    def alpha(self) -> float:
        return self._hits / self._trials

    @property
    def trust(self) -> float:
        return self._right / self._hoped

    def observe(self, drafted: Sequence[int], came: Sequence[int], confidences: Sequence[float] = ()) -> None:
        """Learns from the tokens that `came` where these had been `drafted`, with these confidences if any."""
        for number, (draft, token) in enumerate(zip(drafted, came, strict=False)):
            fade = min(1.0, MEMORY / self._trials)
            self._trials = self._trials * fade + 1
            self._hits = self._hits * fade + (draft == token)
            if confidences:
                self._hoped = self._hoped * fade + confidences[number]
                self._right = self._right * fade + (draft == token)
            if draft != token:
                return

    def best(self, costs: RowCosts | None, rows: int) -> int:
        """Returns how many tokens to draft for steps of at most `rows` rows; without costs as many as have room."""
        max_depth = max(1, min(MAX_DEPTH, rows - 1))
        if costs is None:
            return max_depth
        return 1 + int(np.argmax(speedups(self.alpha, costs.without_drafter[: max_depth + 1], costs.price)))

    def early_end(self, costs: RowCosts | None, rows: int) -> EarlyEnd | None:
        """Returns when drafts for steps of at most `rows` rows end before `best`; None without costs.

        Another token pays while what it brings, the probability that all before it come true times alpha, is worth more
        than what its call and its row take, at the speed that the theory expects. Of tokens that are as sure as ever
        this ends drafts where the theory does. Draft & Verify (Zhang et al. 2023, arXiv 2309.08168) compares each
        token's confidence with a threshold that it moves towards a share of accepted tokens given beforehand; here it
        follows from what that share should be, and the probability is of the whole draft.
        """
        if costs is None:
            return None
        depth, verify = self.best(costs, rows), costs.without_drafter
        speed = max(1.0, float(speedups(self.alpha, verify[: depth + 1], costs.price)[-1]))
        row = float(verify[depth] - verify[depth - 1])
        return EarlyEnd(speed * (costs.price + row) / max(self.alpha, 0.001), self.trust)

    def pays(self, costs: RowCosts, rows: int) -> bool:
        """Tells whether the best depth makes steps of at most `rows` rows faster than plain ones, by `GAIN`."""
        max_depth = max(1, min(MAX_DEPTH, rows - 1))
        return bool(speedups(self.alpha, costs.without_drafter[: max_depth + 1], costs.price).max() > GAIN)
