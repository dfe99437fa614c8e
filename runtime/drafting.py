"""What a step verifies: the likeliest continuations that streams and text propose, as one tree.

Every node has the chance that all of its path comes true. Streams guess each place of the text independently and say how sure
they are; what followed earlier in the text is a chain with a chance of its own; where both say the same, it is one node. The
tree takes the likeliest node that can be reached, again and again, which is optimal for any number of nodes as no child is
likelier than its parent, and ends where another row costs more than it promises. Knows nothing about models.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import NamedTuple

import numpy as np

from streamspec.runtime.ngram import Continuation
from streamspec.trees import DraftTree

GUESS_TEMPERATURE = 1.2  # streams are a little too sure of themselves (docs/decisions.md)


class Guesses(NamedTuple):
    """What the streams propose. `tokens` int64 [gamma, C]: row d holds the guesses for the token d + 1 places after the root,
    best first; `chances` float32 [gamma, C]: that a guess is right where the path before it is."""

    tokens: np.ndarray
    chances: np.ndarray

    @classmethod
    def from_logits(cls, tokens: np.ndarray, logits: np.ndarray) -> Guesses:
        """Chances from the logits of the guesses alone, as if no other token could come."""
        weights = np.exp((logits - logits[:, :1]) / GUESS_TEMPERATURE)
        return cls(tokens, weights / weights.sum(axis=1, keepdims=True))


class Draft(NamedTuple):
    """`tokens` int64 [n] of the nodes of `tree`; `expected`: tokens that verifying it brings on average."""

    tree: DraftTree
    tokens: np.ndarray
    expected: float


def draft(
    root: int, guesses: Guesses | None, found: Continuation | None, rows: int, costs: np.ndarray | None = None
) -> Draft:
    """The best draft of at most `rows` nodes behind `root`.

    `costs` [rows]: time of a step with 1.. rows; the draft is as large as makes expected tokens per time largest, two nodes at
    least. Without costs it has as many nodes as there are guesses for, up to `rows`.
    """
    taken = _Search(guesses, found).take(root, rows)
    expected = np.cumsum([node.chance for node in taken])
    size = len(taken)
    if costs is not None and size > 2:
        size = 2 + int(np.argmax(expected[1:] / costs[1:size]))
    taken = taken[:size]
    tree, order = DraftTree(tuple(n.parent for n in taken), tuple(n.rank for n in taken)).depth_first()
    return Draft(tree, np.array([taken[i].token for i in order], dtype=np.int64), float(expected[size - 1]))


class _Node(NamedTuple):
    """`parent`: its place among the nodes taken; `follows`: its path is the text's continuation so far."""

    chance: float
    parent: int
    depth: int
    rank: int
    token: int
    follows: bool


class _Search:
    def __init__(self, guesses: Guesses | None, found: Continuation | None) -> None:
        self._tokens: list[list[int]] = guesses.tokens.tolist() if guesses is not None else []
        self._chances: list[list[float]] = guesses.chances.tolist() if guesses is not None else []
        self._said: tuple[int, ...] = found.tokens if found is not None else ()
        self._trust = found.chance if found is not None else 0.0
        self._heap: list[tuple[float, int, _Node]] = []
        self._age = count()

    def take(self, root: int, rows: int) -> list[_Node]:
        """At most `rows` nodes by falling chance, the root first."""
        taken = [_Node(1.0, 0, 0, 0, root, True)]
        self._expand(taken, 0)
        while self._heap and len(taken) < rows:
            node = heapq.heappop(self._heap)[2]
            taken.append(node)
            self._expand(taken, len(taken) - 1)
            self._next_guess(taken, node)
        return taken

    def _expand(self, taken: list[_Node], slot: int) -> None:
        """Offers the children of a node that was taken: the continuation's token, and the first guess."""
        node = taken[slot]
        depth = node.depth
        said = self._said[depth] if node.follows and depth < len(self._said) else None
        guessed = self._tokens[depth] if depth < len(self._tokens) else []
        if said is not None:
            chance, rank = self._trust, len(guessed)
            if said in guessed:
                rank = guessed.index(said)
                chance = max(chance, self._chances[depth][rank])
            self._offer(_Node(node.chance * chance, slot, depth + 1, rank, said, True))
        self._guess(node, slot, 0)

    def _next_guess(self, taken: list[_Node], node: _Node) -> None:
        """Offers the guess after `node`, under the same parent."""
        if not node.follows:
            self._guess(taken[node.parent], node.parent, node.rank + 1)

    def _guess(self, parent: _Node, slot: int, rank: int) -> None:
        depth = parent.depth
        if depth >= len(self._tokens):
            return
        guessed = self._tokens[depth]
        if parent.follows and depth < len(self._said) and rank < len(guessed) and guessed[rank] == self._said[depth]:
            rank += 1  # offered already, as the continuation's
        if rank < len(guessed):
            self._offer(_Node(parent.chance * self._chances[depth][rank], slot, depth + 1, rank, guessed[rank], False))

    def _offer(self, node: _Node) -> None:
        heapq.heappush(self._heap, (-node.chance, next(self._age), node))
