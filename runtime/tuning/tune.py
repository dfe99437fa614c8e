"""Measures step costs at leisure, as `streamspec tune` does; later loads on this machine use the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from streamspec.bundle.manifest import Manifest
from streamspec.errors import ConfigError
from streamspec.runtime.costs.learned_costs import CONTEXT, CostRecord
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.tuning.cost_file import costs_file, read_record, save_record
from streamspec.runtime.tuning.step_costs import Calibration, calibrated, choose_rows, measure, most_context

BUDGET = 12.0  # seconds per context length
ROUNDS = 40
CONTEXTS = (CONTEXT, 512)  # tokens in the cache while measuring


def tune(runner: OrtRunner, manifest: Manifest, contexts: Sequence[int] | None = None) -> dict[int, Calibration]:
    """Measures thoroughly, with each number of `contexts` tokens in the cache (default: `CONTEXTS`, as far as the
    model's reaches). Costs with the first of `CONTEXTS` are cached, which a record is of.

    Raises ConfigError for a bundle without draft trees or a context the model does not have.
    """
    if manifest.trees is None:
        raise ConfigError(
            "a bundle without a drafter",
            "a bundle with draft trees to choose from",
            "export an adapter with streams or heads",
        )
    nodes, calibrations, max_context = manifest.trees.nodes, {}, most_context(runner)
    contexts = contexts or sorted({min(context, max_context) for context in CONTEXTS})
    for context in contexts:
        if not 1 <= context <= max_context:
            raise ConfigError(
                f"{context} tokens of context",
                f"a context of {runner.context_length} with room for drafts",
                "correct it",
            )
        costs, _ = measure(runner, nodes, BUDGET, context, ROUNDS)
        calibrations[context] = choose_rows(costs, nodes)
    kept = min(CONTEXTS[0], max_context)
    costs = calibrations[kept].costs if kept in calibrations else measure(runner, nodes, BUDGET, kept, ROUNDS)[0]
    save_record(costs_file(runner.provider, runner.threads, manifest, None), CostRecord(costs))
    return calibrations


def keep_min_probability(runner: OrtRunner, manifest: Manifest, min_probability: float, score: str) -> None:
    """Saves with the calibration that sessions prune rows whose probability by `score` is below `min_probability`."""
    file = costs_file(runner.provider, runner.threads, manifest, None)
    known = read_record(file) or CostRecord(calibrated(runner, manifest, None).costs)
    save_record(file, replace(known, min_probability=min_probability, score=score))
