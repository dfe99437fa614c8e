"""Decides how a loaded bundle, or one of its adapters, is decoded on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamspec.bundle.manifest import Manifest
from streamspec.runtime.decoding.model_runner import Pruning
from streamspec.runtime.decoding.policy import PLAIN_REQUESTED, DecodingPolicy
from streamspec.runtime.options import LoadOptions

if TYPE_CHECKING:
    from streamspec.runtime.engine.ort_runner import OrtRunner


def choose_policy(runner: OrtRunner, manifest: Manifest, options: LoadOptions) -> DecodingPolicy:
    """Measures what steps cost, unless that is known, and chooses by it."""
    from streamspec.runtime.tuning.step_costs import calibrated

    rows, costs = 1, None
    reason = PLAIN_REQUESTED if manifest.streams is not None else "the bundle has no streams"
    pruning = options.pruning if manifest.streams is not None and manifest.streams.pruning else None
    if (manifest.trees is not None or options.ngram) and options.tree not in ("plain", 1):
        if isinstance(options.tree, int):
            rows = min(options.tree, runner.rows or options.tree)
        else:
            calibration = calibrated(runner, manifest, options.cache_dir)
            rows, costs = max(calibration.costs) if calibration.rows > 1 else 1, calibration.curve
            reason = calibration.reason if rows == 1 and manifest.streams is not None else reason
            if calibration.min_probability and pruning is None:
                pruning = Pruning(min_probability=calibration.min_probability)
    call_rows = manifest.static.rows if manifest.static else None
    return DecodingPolicy(manifest.model.eos_token_ids, rows, costs, options.ngram, pruning, call_rows, reason)
