"""Whose probability prunes rows: what the graph is given makes its score of both the one that was asked for."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from streamspec.errors import ConfigError
from streamspec.runtime.decoding.model_runner import Pruning
from tests.export.layers.test_early_exit_pruning import DRAFT, PRIORS, TREE, path_scores, pruned, run

LIMITS = [(None, 0.2), (4, 0.0), (3, 0.3), (100, 0.05)]


@pytest.mark.parametrize("score", ["exit", "prior", "both"])
@pytest.mark.parametrize(("rows", "least"), LIMITS)
def test_rows_are_kept_by_the_score_that_was_asked_for(
    score: str, rows: int | None, least: float, tmp_path: Path
) -> None:
    built, pruning = pruned(tmp_path), Pruning(rows, least, score)
    priors = PRIORS.astype(np.float32)
    for node, parent in enumerate(TREE.parents):  # no node is more probable than its parent
        priors[node] = min(priors[node], priors[parent])
    priors[0] = 0
    both = path_scores(built)
    exits = 3 * both - 2 * PRIORS
    wanted = {"exit": exits, "prior": priors.astype(float), "both": (exits + 2 * priors) / 3}[score]
    bound = math.log(max(least, 1e-30))
    kept = np.sort([row for row in np.argsort(-wanted, kind="stable")[:rows] if wanted[row] >= bound])
    out, _ = run(built, TREE, DRAFT, rows or len(TREE), pruning.asked(priors), keep_above=pruning.lowest)
    np.testing.assert_array_equal(np.flatnonzero(out["choices"] >= 0), kept)


def test_a_score_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="'best'; expected both or exit or prior"):
        Pruning(score="best")
