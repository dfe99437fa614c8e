"""Draft trees: the candidates that one step verifies together.

Node 0 is the root, a token already committed. A node's `rank` orders it among its siblings; of a drafter's candidate it
is the number among the drafter's at that depth. Parents come before children.
`streamspec.runtime.decoding.draft_tree_search` chooses a tree at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

MAX_GAMMA = 64  # draft tokens of one call
# Whose probability prunes rows of a tree: the early exit's, the drafter's, or (exit + 2 prior) / 3 of their logarithms
BOTH, EXIT, PRIOR = SCORES = "both", "exit", "prior"
PRIOR_WEIGHT = 2
MASKED = -1e4  # "may not see": finite, fits float16, and exp() of it is 0


def frozen(array: np.ndarray) -> np.ndarray:
    """Makes an array read-only and returns it."""
    array.flags.writeable = False
    return array


@dataclass(frozen=True)
class DraftTree:
    """`parents[i] < i` for every node but the root (whose parent is itself); siblings have distinct ranks.

    Raises ValueError otherwise; `streamspec.bundle.manifest` has checked trees from files before.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or len(self.parents) != len(self.ranks):
            raise ValueError(
                f"a tree needs a root and one rank per node, not {len(self.parents)} and {len(self.ranks)}"
            )
        if self.parents[0] != 0 or self.ranks[0] != 0:
            raise ValueError("node 0 is the root: its parent and rank are 0")
        for i, (parent, rank) in enumerate(zip(self.parents[1:], self.ranks[1:], strict=True), start=1):
            if not 0 <= parent < i:
                raise ValueError(f"node {i} has parent {parent}; parents come before children")
            if rank < 0:
                raise ValueError(f"node {i} has rank {rank}")
        if len(set(zip(self.parents[1:], self.ranks[1:], strict=True))) != len(self) - 1:
            raise ValueError("two children of one node have the same rank")

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of every node; the root's is 0."""
        out = [0]
        for parent in self.parents[1:]:
            out.append(out[parent] + 1)
        return tuple(out)

    @cached_property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return max(self.depths)

    @cached_property
    def parents_array(self) -> np.ndarray:
        """`parents` as int64 [n], read-only."""
        return frozen(np.array(self.parents, np.int64))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of every node, in node order."""
        out: list[list[int]] = [[] for _ in self.parents]
        for i, parent in enumerate(self.parents[1:], start=1):
            out[parent].append(i)
        return tuple(tuple(c) for c in out)

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root to `node`, both included."""
        out = [node]
        while out[-1] != 0:
            out.append(self.parents[out[-1]])
        return tuple(reversed(out))

    def ranks_to(self, node: int) -> tuple[int, ...]:
        """Returns the ranks along the path below the root: `node` is accepted only if all of these
        candidates are right."""
        return tuple(self.ranks[i] for i in self.path(node)[1:])

    @cached_property
    def ancestors(self) -> np.ndarray:
        """bool [n, n]: entry [i, j] says that j is i or one of its ancestors."""
        out = np.eye(len(self), dtype=bool)
        for i, parent in enumerate(self.parents[1:], start=1):
            out[i] |= out[parent]
        return out

    @cached_property
    def _mask(self) -> np.ndarray:
        return frozen(np.where(self.ancestors, np.float32(0), np.float32(MASKED)))

    def mask(self) -> np.ndarray:
        """float32 [n, n], read-only: 0 where row i may see row j (itself and its ancestors), -1e4 elsewhere."""
        return self._mask

    def depth_first(self) -> tuple[DraftTree, list[int]]:
        """Returns the same tree laid out depth-first, children in their present order, and each node's old number.

        With the most probable children first, the most probable path takes the first slots of the KV cache: accepting
        it copies nothing.
        """
        order: list[int] = []
        stack = [0]
        while stack:
            order.append(stack.pop())
            stack += reversed(self.children[order[-1]])
        slots = {node: slot for slot, node in enumerate(order)}
        parents, ranks = (tuple(slots[self.parents[i]] for i in order), tuple(self.ranks[i] for i in order))
        return DraftTree(parents, ranks), order

    @classmethod
    def from_nodes(cls, nodes: Sequence[Sequence[float]], n: int) -> DraftTree:
        """Makes a tree of the first `n` nodes (all, if there are fewer) of a list of `(parent, rank, probability)` in
        order of falling probability.
        """
        parents, ranks, _ = zip(*nodes[:n], strict=True)
        return cls(tuple(map(int, parents)), (0, *map(int, ranks[1:]))).depth_first()[0]


def chain(gamma: int) -> DraftTree:
    """Builds a tree of the first candidate of every depth, each below the one before: gamma + 1 nodes."""
    return DraftTree((0, *range(gamma)), (0,) * (gamma + 1))


def expected_tokens(nodes: Sequence[Sequence[float]], n: int) -> float:
    """Computes how many tokens a step with the first `n` nodes commits on average: one for each
    accepted node; the root's 1.0 stands for the token that the target adds."""
    return float(sum(node[2] for node in nodes[:n]))
