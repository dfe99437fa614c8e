"""Checks at load that a provider computes a bundle right: a prompt, a draft tree after it, and the step after that;
where there is an early exit, a tree that is pruned there, and the step after that; and where a graph for capture draws
tokens itself, those of a tree. A graph that takes chains alone is compared with itself: a text in one call and in
several.

Some providers silently ignore the mask of a tree, its positions, or the tokens before it (docs/reference/providers.md).
The logits recorded in the bundle (`probe` in its manifest) say whether a prompt is right; the prompt's own rows then
say what the tree's must be, so nothing more need be recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamspec.bundle.manifest import Manifest
from streamspec.draft_tree import DraftTree
from streamspec.errors import BundleError
from streamspec.runtime.decoding.acceptance import accept
from streamspec.runtime.decoding.model_runner import DROPPED, ROOT_ONLY, Pruning, StepRequest, StepResult
from streamspec.runtime.engine.ort_runner import OrtRunner, causal_mask
from streamspec.runtime.sampling.sampling_params import AdjustedSampler, Sampling

TOLERANCE = 0.05  # of the largest logit recorded: instruction sets round differently, wrong ones are far off
# Root mean square of a tree's logits less those of the same rows in a chain, over the logits' standard deviation. The
# last bit of a sum makes int8 and int4 round other activations: SmolLM2 is then up to 0.11 off, and 0.38 or more where
# mask, positions or past are ignored. In fp32 the two are 0.0005 and 0.43 (docs/lab/decisions).
TREE_TOLERANCE = {"fp32": 0.01, "fp16": 0.05, "int8": 0.2, "int4": 0.2, "gguf": 0.2}
SINGLE = 2.0  # a row alone scatters more than several
# Of a text in parts: rows of each call, and how many of them are committed.
CHAIN_FIX = "export it in another precision or by another exporter"
CHAINS = (4, 4), (4, 2), (4, 3), (1, 1), (1, 1), (1, 1)
DEPTH = 6  # nodes of the tree's paths: with fewer, what is ignored tells too little
# Root mean square of a layer's keys or values less those of a chain, over how much they differ from row to row. Where
# `streams.ns` is wrong it is 0.96 or more, of SmolLM2 in int8 and of tiny models; else 0.
CACHE_TOLERANCE = {"fp32": 0.01, "fp16": 0.05, "int8": 0.3, "int4": 0.3, "gguf": 0.3}
# All of a sampler's parts at work. One draw in so many may fall on the border of two tokens, which rounding moves.
SAMPLED = Sampling(temperature=1.0, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.2, seed=0)
NEAR_DRAWS = 8


def check_numerics(runner: OrtRunner, manifest: Manifest) -> None:
    """Raises BundleError where the logits that `runner` computes for the recorded prompt are wrong; empties its
    cache.
    """
    probe = manifest.probe
    if not runner.trees:
        _check_chain(runner, manifest)
    if probe is None or len(probe.input_ids) < 2:
        return
    ids = list(probe.input_ids)
    chain = runner.score(ids)
    _check_prompt(chain, probe.choices, probe.top_logits, runner.provider)
    _check_tree(runner, manifest, ids, chain)
    check_pruning(runner, manifest)
    if runner.row_counts:
        _check_sampled(runner, ids)
    runner.reset()


def _check_chain(runner: OrtRunner, manifest: Manifest) -> None:
    """Raises BundleError where rows have other logits than in one call when the text is read in parts, some of them
    left out again, or when it is gone back to the middle of it; empties the cache."""
    length = min(sum(kept for _, kept in CHAINS), runner.context_length - CHAINS[0][0])
    ids = [(7919 * at + 13) % runner.vocab_size for at in range(length)]
    whole, at = runner.score(ids), 0
    spread, tolerance = float(_known(whole).std()), SINGLE * TREE_TOLERANCE[manifest.precision]
    runner.reset()
    for rows, kept in (*CHAINS, (2, 2)):
        if at + rows > length:
            at = length // 2
            runner.rewind(at)
        what = f"{rows} rows after {at} tokens"
        try:
            found = runner.forward(ids[at : at + rows], range(rows), causal_mask(rows))
        except BundleError as error:
            expected = "any number of rows after any number of tokens"
            raise BundleError(f"a graph that cannot read {what} ({error.found})", expected, CHAIN_FIX) from None
        _compare(found, whole[at : at + rows], spread, tolerance, runner.provider, what)
        runner.commit(range(kept))
        at += kept
    runner.reset()


def check_pruning(runner: OrtRunner, manifest: Manifest) -> None:
    """Raises BundleError where a step that drops rows at the early exit leaves other keys and values in a layer than
    the prompt read as one, or computes the next step otherwise. Of a bundle without an early exit nothing is asked; the
    cache is emptied.
    """
    probe, drafter = manifest.probe, manifest.streams
    if drafter is None or not drafter.pruning or probe is None or len(probe.input_ids) < 2 or runner.row_counts:
        return
    ids, what = list(probe.input_ids), "a draft tree pruned at the early exit"
    chain, whole = runner.score(ids), runner.snapshot()[1]
    tree, tokens, right = _branched(ids, 2 * DEPTH, manifest.model.vocab_size)
    runner.rewind(len(ids) - len(right))
    priors = np.array([0.0 if node in right else DROPPED for node in range(len(tree))], np.float32)
    choices = runner.verify(StepRequest(tokens, tree, pruning=Pruning(len(right)), priors=priors)).choices
    left = tuple(node for node, choice in enumerate(choices) if choice >= 0)
    if left != right:
        raise _wrong(runner.provider, what, f"rows {list(left)} left", f"rows {list(right)}")
    runner.commit(right[:-1])
    tolerance = CACHE_TOLERANCE[manifest.precision]
    for expected, found in zip(whole, runner.snapshot()[1], strict=True):
        off = _cache_error(expected[..., :-1, :], found, len(right) - 1)
        if not off <= tolerance:
            layer = drafter.pruned_from(manifest.model.layers)
            right_layers = f"at most {tolerance:.2g}, pruned from layer {layer} on as streams.ns and exit_layer say"
            raise _wrong(runner.provider, what, f"keys and values {off:.2g} off in a layer", right_layers)
    after = runner.forward(ids[-1:], [0], ROOT_ONLY.mask())
    tolerance = SINGLE * TREE_TOLERANCE[manifest.precision]
    _compare(after, chain[-1:], float(_known(chain).std()), tolerance, runner.provider, f"a step after {what}")
    runner.reset()


def _cache_error(expected: np.ndarray, found: np.ndarray, newest: int) -> float:
    """Returns the largest error of any layer's keys or values in the `newest` rows of both [layers, parts, 1, heads,
    rows, width], over their spread from row to row."""
    expected, found = expected.astype(np.float32), found.astype(np.float32)
    newest = min(newest, expected.shape[4], found.shape[4])
    error = np.square(expected[..., -newest:, :] - found[..., -newest:, :]).mean(axis=(2, 3, 4, 5))
    spread = expected.var(axis=4).mean(axis=(2, 3, 4))
    return float(np.sqrt(error / np.maximum(spread, 1e-30)).max(initial=0.0))


def _check_prompt(logits: np.ndarray, choices: Sequence[int], expected: Sequence[float], provider: str) -> None:
    """Compares `logits` [n, V] with what was recorded: the choice after every row and its logit, [n] each."""
    tolerance = TOLERANCE * max(1.0, max(abs(v) for v in expected))
    top = logits[np.arange(len(choices)), list(choices)]
    off = np.abs(top - expected)
    off[~np.isfinite(top)] = np.inf
    # A choice may flip where two logits nearly tie; then the expected choice is a close second.
    worst = float(np.maximum(off, logits.max(axis=1) - top).max())  # NaN where either has one
    if not worst <= tolerance:
        raise _wrong(provider, "a prompt", f"logits {worst:.2g} off", f"at most {tolerance:.2g}")


def _check_tree(runner: OrtRunner, manifest: Manifest, ids: list[int], chain: np.ndarray) -> None:
    """Runs the last tokens of the prompt once more as a branch of a tree, with another branch of other tokens.

    `chain` [n, V]: the prompt's logits. The prompt's rows are in the runner's cache.
    """
    rows = runner.rows or min((*runner.row_counts[-1:], 2 * DEPTH))  # all that a graph of one shape has
    tree, tokens, right = _branched(ids, rows, manifest.model.vocab_size)
    past = len(ids) - len(right)
    runner.rewind(past)
    logits = runner.forward(tokens, tree.depths, tree.mask())
    expected = np.empty_like(logits)
    expected[list(right)] = chain[past:]
    if len(tree) > 1:
        other = list(tree.path(len(tree) - 2))
        alone = runner.forward([tokens[node] for node in other], range(len(other)), causal_mask(len(other)))
        expected[other[1:]] = alone[1:]
    spread, tolerance = float(_known(chain).std()), TREE_TOLERANCE[manifest.precision]
    # The other nodes would be right without mask and positions.
    gapped = [node for node, depth in enumerate(tree.depths) if node != depth] or [0]
    _compare(logits[gapped], expected[gapped], spread, tolerance, runner.provider, "a draft tree")
    _check_step(runner, tokens, tree, expected, tolerance)
    if len(right) > 1:
        runner.commit(right[:-1])
        after = runner.forward(ids[-1:], [0], ROOT_ONLY.mask())
        _compare(after, chain[-1:], spread, SINGLE * tolerance, runner.provider, "a step after a draft tree")


def _check_sampled(runner: OrtRunner, ids: list[int]) -> None:
    """Draws the tokens of a tree, and compares with what the host would draw from the same logits."""
    what, vocab = "a sampled step", runner.vocab_size
    tree, tokens, right = _branched(ids, min(runner.row_counts[-1], 2 * DEPTH), vocab)
    prompt = ids[: len(ids) - len(right)]
    runner.rewind(0)
    runner.begin(prompt, SAMPLED, logits=True)
    runner.prefill(StepRequest(prompt))
    step = runner.verify(StepRequest(tokens, tree, runner.gamma > 0))
    assert step.logits is not None
    other = drawn_otherwise(prompt, tree, tokens, step.logits, step.choices)
    if len(other) > len(tree) // NEAR_DRAWS:
        raise _wrong(
            runner.provider, what, f"{len(other)} of {len(tree)} tokens drawn otherwise", "those of its logits"
        )
    _check_accepted(runner, tokens, tree, step, what)


def drawn_otherwise(
    prompt: Sequence[int], tree: DraftTree, tokens: Sequence[int], logits: np.ndarray, choices: Sequence[int]
) -> list[int]:
    """Returns the nodes of `tree` over `tokens` after which another token than one of `choices` is drawn as `SAMPLED`
    says from the `logits` [n, V], in double precision."""
    sampler = AdjustedSampler(SAMPLED, prompt)
    paths = [[tokens[at] for at in tree.path(node)] for node in range(len(tree))]
    return [node for node, path in enumerate(paths) if sampler.choose(logits[node], path) != choices[node]]


def _branched(ids: list[int], rows: int, vocab: int) -> tuple[DraftTree, list[int], tuple[int, ...]]:
    """Returns a tree of at most `rows` rows over the last of `ids`, its tokens, and its branch that holds them; the
    other holds other tokens."""
    tree = two_branches(min(DEPTH, len(ids), (rows + 1) // 2))
    right = tree.path(len(tree) - 1)
    past = len(ids) - len(right)
    return tree, [(ids[past + at] + at * (node not in right)) % vocab for node, at in enumerate(tree.depths)], right


def two_branches(depth: int) -> DraftTree:
    """Two paths of `depth` nodes that share the root, alternating: every node but the root and its first child is in a
    gapped slot.
    """
    parents = (0, *(max(0, node - 2) for node in range(1, 2 * depth - 1)))
    return DraftTree(parents, (0, *(int(node == 2) for node in range(1, 2 * depth - 1))))


def _check_step(runner: OrtRunner, tokens: list[int], tree: DraftTree, expected: np.ndarray, tolerance: float) -> None:
    """Checks what the step makes of these logits: the choice after every row, and the accepted node."""
    room = runner.length + tree.depth + 1 + runner.gamma < runner.context_length
    step = runner.verify(StepRequest(tokens, tree, runner.gamma > 0 and room))
    below = expected.max(axis=1) - expected[np.arange(len(tree)), step.choices]
    worst, limit = float(below.max()), tolerance * np.abs(_known(expected)).max()
    if not worst <= limit:
        raise _wrong(
            runner.provider,
            "a draft tree",
            f"choices whose logits are {worst:.2g} below the largest",
            f"at most {limit:.2g}",
        )
    _check_accepted(runner, tokens, tree, step, "a draft tree")


def _check_accepted(runner: OrtRunner, tokens: list[int], tree: DraftTree, step: StepResult, what: str) -> None:
    node, _ = accept(tree, tokens, step.choices)
    if step.accepted is not None and step.accepted != node:
        raise _wrong(
            runner.provider,
            what,
            f"node {step.accepted} accepted",
            f"node {node}, which its own choices imply",
        )


def _compare(
    logits: np.ndarray, expected: np.ndarray, spread: float, tolerance: float, provider: str, what: str
) -> None:
    difference = np.subtract(logits, expected, out=np.zeros_like(logits), where=logits != expected)
    off = float(np.sqrt(np.square(difference, dtype=np.float64).mean())) / max(spread, 1e-30)
    if not off <= tolerance:
        raise _wrong(
            provider, what, f"logits {off:.2g} of their spread off the same rows in a chain", f"at most {tolerance:.2g}"
        )


def _known(logits: np.ndarray) -> np.ndarray:
    """Returns the logits [..] of tokens that there are: those of others are minus infinity."""
    return logits[logits > -np.inf]


def _wrong(provider: str, what: str, found: str, expected: str) -> BundleError:
    who, fix = f"provider {provider}", "choose provider cpu, or update what brings this one"
    if provider == "cpu":
        who, fix = "this machine", "export for another precision or update onnxruntime"
    return BundleError(f"{who} computes {what} with {found}", expected, fix)
