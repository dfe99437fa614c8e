"""What a step verifies: the drafter's tree, and a continuation found in the text as a branch of it, in a fixed number of rows.

Nodes of both kinds compete by the probability that their whole path comes true; where they say the same, they are one node.
The streams' probabilities come from validation data, the continuation's from the text itself. Knows nothing about models.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import NamedTuple

import numpy as np

from streamspec.runtime.decoding import propose
from streamspec.runtime.ngram import Continuation
from streamspec.trees import DraftTree


def draft(
    tree: DraftTree, root: int, candidates: np.ndarray, found: Continuation | None
) -> tuple[DraftTree, np.ndarray]:
    """What to verify behind `root`: a tree of as many nodes as `tree`, and its tokens int64 [n].

    `candidates` [gamma, C] as in `decoding.propose`. Where nothing was `found`, or nothing that a node of the tree is not
    likelier than, or the tree's chances are not known, that is the tree itself.
    """
    if found is None or not tree.chances or found.chance <= min(tree.chances):
        return tree, propose(tree, root, candidates)
    return _Merge(tree, candidates, found).run(root)


class _Merge:
    """Takes the likeliest node that can be reached, again and again: optimal, as no child is likelier than its parent."""

    def __init__(self, tree: DraftTree, candidates: np.ndarray, found: Continuation) -> None:
        self.tree, self.candidates, self.found = tree, candidates, found
        self._heap: list[tuple[float, int, _Node]] = []
        self._age = count()

    def run(self, root: int) -> tuple[DraftTree, np.ndarray]:
        taken = [_Node(1.0, 0, 0, root, 0, 0, True)]
        self._reach(0, taken[0])
        while self._heap and len(taken) < len(self.tree):
            taken.append(heapq.heappop(self._heap)[2])
            self._reach(len(taken) - 1, taken[-1])
        tree = DraftTree(tuple(n.parent for n in taken), tuple(n.rank for n in taken), tuple(n.chance for n in taken))
        merged, order = tree.depth_first()
        return merged, np.array([taken[i].token for i in order], dtype=np.int64)

    def _reach(self, slot: int, at: _Node) -> None:
        """Puts the children of the node in `slot` on the heap; a child that both propose is one node."""
        tokens, depth = self.found.tokens, at.depth
        said = tokens[depth] if at.follows and depth < len(tokens) else None
        chance = self.found.chance ** (depth + 1)
        for child in self.tree.children[at.node] if at.node is not None else ():
            rank, own = self.tree.ranks[child], self.tree.chances[child]
            token = int(self.candidates[depth, rank])
            both = token == said
            self._push(_Node(max(own, chance) if both else own, slot, rank, token, depth + 1, child, both))
            said = None if both else said
        if said is not None:
            self._push(_Node(chance, slot, self.candidates.shape[1], said, depth + 1, None, True))

    def _push(self, node: _Node) -> None:
        heapq.heappush(self._heap, (-node.chance, next(self._age), node))


class _Node(NamedTuple):
    """`node`: the tree's, or None; `follows`: the path so far is the continuation's."""

    chance: float
    parent: int
    rank: int
    token: int
    depth: int
    node: int | None
    follows: bool
