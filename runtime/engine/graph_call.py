"""Defines `GraphCall`, which binds a sequence's calls to a step graph, and what its implementations share.

`dynamic_call` is for graphs that take any number of rows, `padded_call` for those of fixed row counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from streamspec import step_graph as sg
from streamspec.bundle.manifest import Manifest
from streamspec.draft_tree import DraftTree, frozen
from streamspec.errors import BundleError
from streamspec.runtime.decoding.draft_proposal import DraftProposal, IndependentProposal, TreeProposal
from streamspec.runtime.decoding.model_runner import StepRequest, StepResult
from streamspec.runtime.engine.executor import GraphExecutor
from streamspec.runtime.kv_cache.host_cache import Cache
from streamspec.runtime.sampling.sampling_params import GREEDY, Sampling


class CallRows(NamedTuple):
    """The rows of one call: a chunk of a prompt, or a draft tree.

    `tokens`, `positions` [n]; `mask` float32 [n, n]: 0 where row i sees row j; `parents` int64: of each node;
    `logit_rows` int64 [r]: rows after which a token is chosen. `next_ids` int64 [n], of a prompt: the token after each
    row, -1 the one chosen. `tree`: the draft tree, None for a prompt.
    """

    tokens: Sequence[int]
    positions: Sequence[int] | np.ndarray
    mask: np.ndarray
    parents: np.ndarray
    logit_rows: np.ndarray
    next_ids: np.ndarray | None = None
    tree: DraftTree | None = None


class GraphCall(Protocol):
    """Binds the inputs, outputs and KV cache of one sequence to a step graph, and runs it."""

    @property
    def max_rows(self) -> int | None:
        """The number of rows of every call where the graph's shape is fixed; None: any number."""

    @property
    def prompt_rows(self) -> int | None:
        """The most rows of a prompt that a call should read; None: as many as memory has room for."""

    @property
    def together(self) -> int:
        """See `ModelRunner`."""

    def begin(self) -> None:
        """Begins a generation with the options in `SamplingState`."""

    def follow_cache(self) -> None:
        """Binds the cache again after its contents were replaced."""

    def run(self, rows: CallRows, request: StepRequest, forced_node: int = -1, shrink: bool = False) -> StepResult:
        """Runs the rows of `request`, and its drafter after row `forced_node`, or after the accepted one (-1).
        `shrink`: see `GraphExecutor.run`."""

    def logits(self, rows: CallRows) -> np.ndarray:
        """Runs the rows; returns the logits float32 [n, vocabulary] of each."""

    def commit(self, path: Sequence[int]) -> None:
        """Appends rows `path` of the last call to the committed ones of the cache."""


@lru_cache(maxsize=1024)
def counted(n: int) -> np.ndarray:
    """Returns int64 [n]: 0, 1, .. Read-only."""
    return frozen(np.arange(n))


@lru_cache(maxsize=1024)
def repeated(value: int, n: int = 1) -> np.ndarray:
    """Returns int64 [n] of one value. Read-only."""
    return frozen(np.full(n, value))


@dataclass(frozen=True)
class DrafterShape:
    """The shapes of what a drafter returns. `levels`: rows of each level of a draft layer, () for streams and heads.
    `exit_layer`: the first layer that pruned rows do not enter."""

    gamma: int = 0
    candidates: int = 0
    levels: tuple[int, ...] = ()
    bigram: bool = False
    exit_layer: int | None = None

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> DrafterShape:
        drafter = manifest.streams
        if drafter is None:
            return cls()
        exit_layer = drafter.pruned_from(manifest.model.layers)
        return cls(drafter.gamma, drafter.candidates, tuple(drafter.levels), drafter.bigram, exit_layer)

    def outputs(self, runs: bool = True) -> list[tuple[str, tuple[int, ...]]]:
        """Returns the names and shapes of the drafter's outputs in a call that `runs` it or not: the accepted node,
        candidates, their logits and, with a bigram, their pairs', of a draft layer their origins."""
        if not self.gamma:
            return []
        shape = (sum(self.levels) or self.gamma) if runs else 0, self.candidates
        out: list[tuple[str, tuple[int, ...]]] = [
            (sg.ACCEPTED_NODE, (1,)),
            (sg.CANDIDATES, shape),
            (sg.CANDIDATE_LOGITS, shape),
        ]
        if self.bigram:
            out.append((sg.PAIR_LOGITS, (*shape, self.candidates)))
        if self.levels:
            out.append((sg.ORIGINS, shape[:1]))
        return out

    def proposal(self, candidates: np.ndarray, scores: np.ndarray, *more: np.ndarray) -> DraftProposal:
        """Reads the outputs after the accepted node."""
        if self.levels:
            return TreeProposal(candidates, scores, more[-1], self.levels)
        return IndependentProposal(candidates, scores, *more)


class SamplingState:
    """The way in which the tokens of a generation are chosen. `seen` bool [vocabulary]: tokens of the text so far, kept
    only where they are penalised. `logits`: whether every call returns its logits."""

    def __init__(self, vocab_size: int) -> None:
        self.sampling, self.logits = GREEDY, False
        self.seen = np.zeros(vocab_size, np.bool_)

    def begin(self, sampling: Sampling, tokens: Sequence[int], logits: bool) -> None:
        """Begins a generation after `tokens`."""
        self.sampling, self.logits = sampling.for_answer(), logits
        self.seen[:] = False
        self.seen[tokens] = True

    def saw(self, tokens: Sequence[int]) -> None:
        """Adds committed tokens."""
        if self.sampling.uses_seen:
            self.seen[tokens] = True

    def uniforms(self, rows: CallRows) -> np.ndarray:
        """Returns float32 [r]: the numbers that the tokens after the `logit_rows` of `rows` are drawn with."""
        uniform, positions = self.sampling.uniform, rows.positions
        return np.array([uniform(int(positions[row]) + 1) for row in rows.logit_rows.tolist()], np.float32)


class CallContext(NamedTuple):
    """The parts that a sequence's calls work on. `adapter`: OrtValues by name of an input, bound to every call."""

    executor: GraphExecutor
    cache: Cache
    sampling_state: SamplingState
    drafter: DrafterShape
    adapter: Mapping[str, Any]


def checked_tokens(choices: np.ndarray, vocab_size: int) -> list[int]:
    """Returns the choices as tokens; those of rows after the first, the root, may be -1: these rows were pruned.

    Raises BundleError for anything else.
    """
    tokens: list[int] = choices.tolist()
    if tokens[0] < 0 or min(tokens) < -1 or max(tokens) >= vocab_size:
        raise BundleError(f"a graph that chose {tokens}", f"tokens 0..{vocab_size - 1}", "export the bundle again")
    return tokens
