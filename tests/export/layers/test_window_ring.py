"""Rows over a ring are those over a cache that keeps everything, and a tree's are those of chains, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streamspec.draft_tree import MASKED
from streamspec.export.runners.graph_runner import GraphRunner
from streamspec.runtime.tuning.self_test import two_branches
from streamspec.step_graph import EVERY_TOKEN, is_cache
from tests.support.tiny_exports import build, tiny_model

SLOTS, TOKENS = 128, 400  # of a window of 6


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_rows_over_a_ring(family: str, tmp_path: Path) -> None:
    built = build(tmp_path, tiny_model(family, max_position_embeddings=1024))
    ring, everything = (GraphRunner(built.session, TOKENS + 20) for _ in range(2))
    for value in built.session.get_inputs():
        if is_cache(value.name) and value.shape[2] != EVERY_TOKEN:
            ring.buffers[value.name] = ring.buffers[value.name][:, :, :SLOTS].copy()
    tokens = np.random.default_rng(0).integers(3, 90, TOKENS)
    for start in range(0, TOKENS - 30, 50):
        chunk = tokens[start : start + 50]
        for_ring, for_all = (steps.prefill(chunk, streams=3, forced_node=49) for steps in (ring, everything))
        for name in ("logits", "candidate_logits"):
            np.testing.assert_allclose(for_ring[name], for_all[name], atol=5e-5)
    tree = two_branches(9)  # deeper than the window, and its nodes lie further apart than their depths
    drafted = tokens[: len(tree)]
    depths, parents = np.asarray(tree.depths), np.asarray(tree.parents)
    logits, kept = (steps.step(drafted, depths, tree.mask(), parents=parents)["logits"] for steps in (ring, everything))
    np.testing.assert_allclose(logits, kept, atol=5e-5)
    for node in range(len(tree)):
        path = list(tree.path(node))
        causal = np.where(np.tri(len(path), dtype=bool), 0, MASKED)
        alone = ring.step(drafted[path], np.arange(len(path)), causal)["logits"][-1]
        np.testing.assert_array_equal(alone, logits[node])
