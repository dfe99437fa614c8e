"""How a bundle is decoded in this session: what was asked for, what this machine's costs make of it, what was learnt
since.

Everything here belongs to one bundle or, where it is swappable, to one of its adapters. Knows nothing about text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from streamspec.bundle.manifest import Manifest
from streamspec.runtime.decoding.draft_tree_search import DraftCalibration
from streamspec.runtime.decoding.drafter_gate import DrafterGate
from streamspec.runtime.decoding.model_runner import Pruning
from streamspec.runtime.decoding.speculation_controller import SpeculationController

if TYPE_CHECKING:
    from streamspec.runtime.engine.runner import OrtRunner
    from streamspec.runtime.tuning.calibration import Calibration


class AdaptiveState:
    """What a session learns of its drafts while it runs, from answer to answer."""

    def __init__(self, calibration: Calibration | None) -> None:
        self.governor, self.experience = SpeculationController(), DraftCalibration()
        self.worth = DrafterGate(calibration.curve) if calibration and len(calibration.curve) > 1 else None


@dataclass(frozen=True)
class LoadPolicy:
    """See `streamspec.runtime.load`."""

    tree: int | str = "auto"
    ngram: bool = True
    pruning: Pruning | None = None
    cache_dir: str | Path | None = None


@dataclass(frozen=True)
class DecodingPolicy:
    """`rows`: most rows of a verification step, 1: plain. With a `calibration` each step has as many as pay. `adapter`:
    what a user calls it.
    """

    manifest: Manifest
    rows: int
    calibration: Calibration | None
    pruning: Pruning | None
    learnt: AdaptiveState
    adapter: str | None = None


def settle(engine: OrtRunner, manifest: Manifest, asked: LoadPolicy, adapter: str | None = None) -> DecodingPolicy:
    """Measures what steps cost, unless that is known, and chooses by it."""
    from streamspec.runtime.tuning.calibration import calibrated

    rows, calibration = 1, None
    pruning = asked.pruning if manifest.streams is not None and manifest.streams.pruning else None
    if (manifest.trees is not None or asked.ngram) and asked.tree not in ("plain", 1):
        if isinstance(asked.tree, int):
            rows = min(asked.tree, engine.rows or asked.tree)
        else:
            calibration = calibrated(engine, manifest, asked.cache_dir)
            rows = max(calibration.costs) if calibration.rows > 1 else 1
            if calibration.least and pruning is None:
                pruning = Pruning(least=calibration.least)
    return DecodingPolicy(manifest, rows, calibration, pruning, AdaptiveState(calibration), adapter)
