"""Holds how a session decodes: the policy chosen when its bundle was loaded, and the state learned since."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from streamspec.runtime.decoding.draft_tree_search import DraftCalibration
from streamspec.runtime.decoding.drafter_gate import DrafterGate
from streamspec.runtime.decoding.model_runner import Pruning
from streamspec.runtime.decoding.speculation_controller import SpeculationController

PLAIN_REQUESTED = "asked for plain decoding"


@dataclass(frozen=True, eq=False)
class DecodingPolicy:
    """Says how one bundle or, where it is swappable, one of its adapters is decoded on this machine.

    `eos`: token ids that end a text. `rows`: most rows of a verification step, 1: plain, and `reason` why. `costs`
    [rows]: time of a step with 1.. rows over a plain step's; None (not measured): every step takes all rows. `ngram`:
    also draft what followed an earlier occurrence of the newest tokens. `pruning`: which rows go on above the early
    exit, None for all. `call_rows`: rows that every call of a static graph computes, however few are asked for; None
    for a dynamic one.
    """

    eos: Collection[int] = ()
    rows: int = 1
    costs: np.ndarray | None = None
    ngram: bool = True
    pruning: Pruning | None = None
    call_rows: int | None = None
    reason: str = PLAIN_REQUESTED

    def describe(self) -> str:
        """Says for the user whether speculation is on, and why not."""
        if self.rows == 1:
            return f"off ({self.reason})"
        return f"on ({self.rows} rows)" if self.costs is None else f"on (up to {self.rows} rows)"


class AdaptiveState:
    """Learns of a session's drafts while it runs, from answer to answer. `costs`: of its `DecodingPolicy`."""

    def __init__(self, costs: np.ndarray | None = None) -> None:
        self.controller, self.calibration = SpeculationController(), DraftCalibration()
        self.gate = None if costs is None or len(costs) < 2 else DrafterGate(costs)
