"""Compares a drafter's candidates with PyTorch, or where it has such a reference with numpy.

A reference computes the drafts at a few nodes of a tree first, so that the model need not be in memory with the graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from streamspec.draft_tree import DraftTree
from streamspec.export.ops.builder import Array
from streamspec.export.runners.graph_runner import AnyRunner, stepper
from streamspec.export.spec.draft_spec import DraftSpec
from streamspec.step_graph import CANDIDATE_LOGITS, CANDIDATES, ORIGINS

if TYPE_CHECKING:
    from torch import Tensor

    from streamspec.export.reference.pytorch_reference import ReferenceModel, ReferenceOutput


NODES = 4  # of a tree, beside which drafts are compared
LevelLogits = Callable[[list[list[int]]], Array]  # logits [paths, V] after paths of draft tokens, equally long
Compared = tuple[Array, Array, Array]  # of a row: candidates [C], the graph's logits [C], the reference's [V]


@dataclass(frozen=True)
class DraftedTree:
    """A tree of `drafted` tokens after `context`."""

    context: Array
    drafted: Array
    tree: DraftTree

    def samples(self) -> Iterator[tuple[int, int]]:
        """Yields a few nodes, and a token after each."""
        for node in np.linspace(0, len(self.tree) - 1, NODES, dtype=int):
            yield int(node), int(self.drafted[-1 - node])

    def step(self, steps: AnyRunner, **more: Any) -> dict[str, Array]:
        """The outputs of a call over the tree, with `more` inputs."""
        depths, parents = np.asarray(self.tree.depths), np.asarray(self.tree.parents)
        return steps.step(self.drafted, depths, self.tree.mask(), parents=parents, **more)


@dataclass(frozen=True)
class TreePass:
    """The reference's pass over context and tree, T rows in all. `output`: what its `states` give; `positions` int64
    [T]; `sees` bool [T, T]: which row attends to which."""

    output: Any
    positions: Array
    sees: Array


def proposable(logits: Array, spec: DraftSpec) -> Array:
    """Logits [.., V], minus infinity of tokens that the drafter may not propose."""
    if spec.draft_vocab is None:
        return logits
    return np.where(np.isin(np.arange(logits.shape[-1]), spec.draft_vocab), logits, -np.inf)


class ExpectedDrafts(ABC):
    """A reference's drafts at a few nodes of a tree."""

    @abstractmethod
    def compare(self, session: Any, steps: AnyRunner, case: DraftedTree) -> Iterator[Compared]:
        """Yields every row that the graph drafts at those nodes; `steps` has run the context."""


class DraftReference(ABC):
    """Runs a drafter in PyTorch or numpy."""

    @abstractmethod
    def expect(self, case: DraftedTree, main: TreePass) -> ExpectedDrafts:
        """The drafts to compare a graph with. They keep the model only where they depend on the graph's own."""


class ParallelReference(DraftReference):
    """A drafter whose logits depend on the accepted node alone."""

    def __init__(self, model: ReferenceModel, spec: DraftSpec) -> None:
        self.model, self.spec = model, spec

    @abstractmethod
    def logits(self, main: ReferenceOutput, positions: Array, sees: Array, row: int, root: int) -> Tensor:
        """[gamma, V] beside `row`, whose next token is `root`; without a bigram's share."""

    def expect(self, case: DraftedTree, main: TreePass) -> ExpectedDrafts:
        """Computes the logits at every sampled node at once; the model is not kept."""
        drafts = []
        for node, root in case.samples():
            row = len(case.context) + node
            logits = self.logits(main.output, main.positions, main.sees, row, root).numpy()
            drafts.append((node, root, logits))
        return ParallelDrafts(self.spec, drafts)


@dataclass(frozen=True)
class ParallelDrafts(ExpectedDrafts):
    """Drafts that no candidate changes. `drafts`: node, the token after it and the logits [gamma, V] there."""

    spec: DraftSpec
    drafts: list[tuple[int, int, Array]]

    def compare(self, session: Any, steps: AnyRunner, case: DraftedTree) -> Iterator[Compared]:
        for node, root, logits in self.drafts:
            out = case.step(steps, streams=self.spec.gamma, forced_node=node, forced_root=root)
            yield from zip(out[CANDIDATES], out[CANDIDATE_LOGITS], proposable(logits, self.spec), strict=True)


class LevelReference(DraftReference):
    """A drafter whose rows follow candidates of the rows before them, level by level. It is kept, as those are the
    graph's own."""

    spec: DraftSpec

    @abstractmethod
    def states(self, case: DraftedTree, main: TreePass) -> Any:
        """What `after` reads of the target, of all rows of context and tree."""

    @abstractmethod
    def after(self, text: Array, root: int, states: Any, rows: list[int]) -> LevelLogits:
        """Gives logits after draft tokens that follow `text`, the tokens of the `rows` of `states`, and `root`."""

    def expect(self, case: DraftedTree, main: TreePass) -> ExpectedDrafts:
        return _LevelDrafts(self, self.states(case, main))

    def drafts(self, text: Array, root: int, states: Any, rows: list[int], out: dict[str, Array]) -> Iterator[Compared]:
        """Yields every draft row in `out`, what the graph gives after `text` and `root`; of the logits of both the
        largest is 0."""
        logits_after, start = self.after(text, root, states, rows), 0
        for paths in _level_paths(self.spec.levels, out):
            level = slice(start, start := start + len(paths))
            ours, theirs = out[CANDIDATE_LOGITS][level], proposable(logits_after(paths), self.spec)
            both = (logits - logits.max(axis=1, keepdims=True) for logits in (ours, theirs))
            yield from zip(out[CANDIDATES][level], *both, strict=True)


@dataclass(frozen=True)
class _LevelDrafts(ExpectedDrafts):
    reference: LevelReference
    states: Any

    def compare(self, session: Any, steps: AnyRunner, case: DraftedTree) -> Iterator[Compared]:
        length = len(case.context)
        for path, root, out in drafted_after(session, case):
            rows = [*range(length), *(length + node for node in path)]
            text = np.concatenate([case.context, case.drafted[path]])
            yield from self.reference.drafts(text, root, self.states, rows, out)


def drafted_after(session: Any, case: DraftedTree) -> Iterator[tuple[list[int], int, dict[str, Array]]]:
    """Yields what a graph drafts at a few nodes of a tree: the path to the node, the token after it, the outputs."""
    tree, tokens, context = case.tree, case.drafted, case.context
    fresh = stepper(session, len(context) + len(tokens))
    fresh.prefill(context, next_ids=np.append(context[1:], tokens[0]))
    for node, root in case.samples():
        path = list(tree.path(node))
        following = np.full(len(tree), -1)
        following[path] = [*tokens[path[1:]], root]
        out = case.step(fresh, streams=1, forced_node=node, forced_root=root, next_ids=following)
        yield path, root, out


def _level_paths(levels: Sequence[int], out: dict[str, Array]) -> Iterator[list[list[int]]]:
    """Yields of each level the candidates that each of its rows follows."""
    paths: list[list[int]] = []
    start, candidates = 0, out[CANDIDATES].shape[1]
    for depth, count in enumerate(levels):
        before, paths = paths, []
        for origin in out[ORIGINS][start : start + count].tolist():
            parent, rank = divmod(origin, candidates)
            token = int(out[CANDIDATES][start - len(before) + parent, rank]) if depth else 0
            paths.append([*before[parent], token] if depth else [])
        yield paths
        start += count
