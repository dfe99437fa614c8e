"""Holds how a session decodes: the policy chosen when its bundle was loaded, and the state learned since."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from streamspec.runtime.costs.draft_depth import ASSUMED, ASSUMED_WINDOW, DraftDepth
from streamspec.runtime.costs.drafter_gate import DrafterGate, ExplorationGate
from streamspec.runtime.costs.row_costs import RowCosts
from streamspec.runtime.costs.speculation_controller import SpeculationController
from streamspec.runtime.decoding.draft_tree_search import PYTHON_SEARCH, DraftCalibration, DraftSearch
from streamspec.runtime.decoding.model_runner import Pruning
from streamspec.runtime.draft_sources.ngram import NGRAM
from streamspec.runtime.draft_sources.source import DraftSource

PLAIN_REQUESTED = "asked for plain decoding"


@dataclass(frozen=True, eq=False)
class DecodingPolicy:
    """Says how one bundle or, where it is swappable, one of its adapters is decoded on this machine.

    `eos`: token ids that end a text. `rows`: most rows of a verification step, 1: plain, and `reason` why. `costs`: of
    steps by their rows, shared by all sessions; None (of no account): every step takes all rows. `sources`: of drafts,
    beside the drafter. `pruning`: which rows go on above the early exit, None for all. `call_rows`: rows that every
    call of a static graph computes, however few are asked for; None for a dynamic one. `expected` [rows]: tokens per
    step that trees of 1.. rows brought on validation data, if there was any. `search`: chooses the drafts.
    `max_draft_tokens`: most that a second model drafts for a step; 0: there is none. `window`: tokens that the model's
    own cache is cut to for drafting, in the place of a second one; 0: it is not.
    """

    eos: Collection[int] = ()
    rows: int = 1
    costs: RowCosts | None = None
    sources: tuple[DraftSource, ...] = (NGRAM,)
    pruning: Pruning | None = None
    call_rows: int | None = None
    reason: str = PLAIN_REQUESTED
    expected: np.ndarray | None = None
    search: DraftSearch = PYTHON_SEARCH
    max_draft_tokens: int = 0
    window: int = 0

    def with_sources(self, more: tuple[DraftSource, ...]) -> DecodingPolicy:
        """Returns this policy with further sources."""
        return replace(self, sources=self.sources + more) if more else self

    def unlearned(self) -> DecodingPolicy:
        """Returns this policy with sources that know no answer given since the bundle was loaded. With it and a new
        `AdaptiveState` a session decodes as in a new process: it knows what steps cost here and nothing of texts."""
        return replace(self, sources=tuple(source.unlearned() for source in self.sources))

    def describe(self) -> str:
        """Says for the user whether speculation is on, and why not."""
        if self.rows == 1:
            return f"off ({self.reason})"
        return f"on ({self.rows} rows)" if self.costs is None else f"on (up to {self.rows} rows)"


class AdaptiveState:
    """Learns of a session's drafts while it runs, from answer to answer, beginning as its `policy` says."""

    def __init__(self, policy: DecodingPolicy | None = None) -> None:
        costs = None if policy is None else policy.costs
        self.controller, self.calibration = SpeculationController(), DraftCalibration()
        self.depth = DraftDepth(ASSUMED_WINDOW if policy is not None and policy.window else ASSUMED)
        self.exploration = ExplorationGate()
        self.gate = None if costs is None or len(costs.curve) < 2 else DrafterGate(costs)
        if policy is not None and costs is not None and costs.sure and policy.expected is not None:
            self.controller.expect(*_best(policy.expected, costs.curve))


def _best(expected: np.ndarray, costs: np.ndarray) -> tuple[float, float]:
    """Returns the tokens per step of the tree that pays most, and its cost."""
    rows = min(len(expected), len(costs))
    best = 1 + int(np.argmax(expected[1:rows] / costs[1:rows])) if rows > 1 else 0
    return float(expected[best]), float(costs[best])
