"""Pruning inside the graph: what goes on is what the early exit likes best, and then all is as if only that had been
drafted.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from streamspec.draft_tree import DraftTree
from streamspec.export.reference.pytorch_reference import ReferenceModel
from streamspec.export.reference.reference import tree_rows
from streamspec.export.validate.parity import sample_tree
from streamspec.export.weights.model_spec import describe
from tests.support.near_families import VARIED
from tests.support.tiny_exports import LAYERS, VOCAB, Built, build, tiny_model, tiny_streams

RNG = np.random.default_rng(2)
CONTEXT = RNG.integers(3, VOCAB, 11)
TREE = sample_tree(12, gamma=3, seed=3)
DRAFT = RNG.integers(3, 20, len(TREE))  # so few tokens that some occur twice
PRIORS = -RNG.random(len(TREE)) * np.asarray(TREE.depths)
FIRST = LAYERS - 2


def pruned(
    folder: Path, family: str = "llama", tied: bool = True, kind: str = "fp32", layer: int | None = None
) -> Built:
    model = tiny_model(family, tied)
    streams = tiny_streams(describe(model), pruning=4)
    assert streams.pruning is not None
    return build(folder, model, replace(streams, pruning=replace(streams.pruning, layer=layer)), kind)


def run(
    built: Built, tree: DraftTree, tokens: np.ndarray, keep: int, priors: np.ndarray, **options: float
) -> tuple[dict, np.ndarray]:
    """(outputs, cache) of a step over the tree after CONTEXT."""
    stepper = built.stepper()
    stepper.prefill(CONTEXT, forced_node=len(CONTEXT) - 1)
    out = stepper.step(
        tokens,
        np.asarray(tree.depths),
        tree.mask(),
        parents=np.asarray(tree.parents),
        keep_rows=keep,
        priors=priors,
        streams=3,
        **options,
    )
    buffers = list(stepper.buffers.values())
    alike = len({buffer.shape for buffer in buffers}) == 1
    return out, np.stack(buffers).reshape(-1, 2, *buffers[0].shape) if alike else None


def path_scores(built: Built) -> np.ndarray:
    """The slow way: scores of the nodes, from the definition."""
    reference = ReferenceModel(built.model, built.streams)
    entry = reference.states(*tree_rows(CONTEXT, DRAFT, TREE)).entry[0].numpy()[len(CONTEXT) :]
    unit = entry / np.sqrt((entry**2).mean(1, keepdims=True))
    spec = built.streams.pruning
    state = reference.decoder.finish(torch.as_tensor(unit + unit @ spec.down.T @ spec.up.T))
    distinct = sorted(set(DRAFT.tolist()))
    logits = reference.decoder.logits(state)[:, distinct].log_softmax(-1).numpy()
    out = np.zeros(len(TREE))
    for node in range(1, len(TREE)):
        parent = TREE.parents[node]
        out[node] = out[parent] + logits[parent, distinct.index(int(DRAFT[node]))]
    return (out + 2 * PRIORS) / 3


def branch(tree: DraftTree, kept: np.ndarray) -> DraftTree:
    """The tree of the surviving rows alone."""
    number = {int(node): i for i, node in enumerate(kept)}
    return DraftTree(tuple(number[tree.parents[i]] for i in kept), tuple(tree.ranks[i] for i in kept))


@pytest.mark.parametrize(
    ("family", "tied", "keep"),
    [(f, True, 5) for f in VARIED] + [("llama", t, k) for t in (True, False) for k in (1, 5, 11) if not t or k != 5],
)
def test_the_likeliest_rows_go_on(family: str, tied: bool, keep: int, tmp_path: Path) -> None:
    built = pruned(tmp_path, family, tied)
    out, _ = run(built, TREE, DRAFT, keep, PRIORS)
    expected = np.sort(np.argsort(-path_scores(built), kind="stable")[:keep])
    np.testing.assert_array_equal(np.flatnonzero(out["choices"] >= 0), expected)
    assert len(out["logits"]) == keep


@pytest.mark.parametrize("rows", [3, 100])
def test_rows_below_the_least_score_go_no_further(rows: int, tmp_path: Path) -> None:
    built = pruned(tmp_path)
    scores = path_scores(built)
    least = float(np.sort(scores)[-6:-4].mean())  # five are above it
    out, _ = run(built, TREE, DRAFT, rows, PRIORS, keep_above=least)
    kept = np.flatnonzero(out["choices"] >= 0)
    assert len(kept) == min(rows, 5) and (scores[kept] >= least).all()


@pytest.mark.parametrize("kind", ["fp32", "int8"])
@pytest.mark.parametrize("keep", [1, 4, 7])
def test_a_pruned_step_is_the_step_of_the_smaller_tree(kind: str, keep: int, tmp_path: Path) -> None:
    check_smaller_tree(pruned(tmp_path, kind=kind), kind, keep, FIRST)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma4_text", "lfm2"])
def test_rows_pruned_below_the_streams_are_in_no_layer_above(family: str, tmp_path: Path) -> None:
    check_smaller_tree(pruned(tmp_path, family, layer=1), "fp32", 5, 1)


def check_smaller_tree(built: Built, kind: str, keep: int, first: int) -> None:
    """A step whose rows are pruned at the input of layer `first` against that of the tree of those left."""
    out, cache = run(built, TREE, DRAFT, keep, PRIORS)
    kept = np.flatnonzero(out["choices"] >= 0)
    small, its_cache = run(built, branch(TREE, kept), DRAFT[kept], len(kept), np.zeros(len(kept)))
    np.testing.assert_array_equal(out["choices"][kept], small["choices"])
    np.testing.assert_allclose(out["logits"], small["logits"], atol=1e-4 if kind == "fp32" else 0.2)
    assert out["accepted_node"][0] == kept[small["accepted_node"][0]]
    np.testing.assert_array_equal(out["candidates"], small["candidates"])
    start, length = len(CONTEXT), len(CONTEXT) + len(kept)
    close = 1e-5 if kind == "fp32" else 0.05
    if cache is None or its_cache is None:  # layers differ
        return
    np.testing.assert_allclose(cache[first:, ..., start:length, :], its_cache[first:, ..., start:length, :], atol=close)
    below = cache[:first, ..., start + kept, :]
    np.testing.assert_allclose(below, its_cache[:first, ..., start:length, :], atol=close)


def test_without_pruning_the_step_is_as_it_was(tmp_path: Path) -> None:
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    plain = build(tmp_path / "without", tiny_model())
    for keep in (len(TREE), 1000):
        ours, cache = run(pruned(tmp_path / "with"), TREE, DRAFT, keep, PRIORS)
        theirs, its_cache = run(plain, TREE, DRAFT, keep, PRIORS)
        for name in ("choices", "logits", "accepted_node", "candidates", "candidate_logits"):
            np.testing.assert_array_equal(ours[name], theirs[name])
        np.testing.assert_array_equal(cache, its_cache)
