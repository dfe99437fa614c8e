"""What a step verifies: the likeliest continuations that streams and text propose, as one tree.

Every node has the chance that all of its path comes true. Streams guess each place of the text independently and say how sure
they are; what followed earlier in the text is a chain with a chance of its own; where both say the same, it is one node. The
tree takes the likeliest node that can be reached, again and again, which is optimal for any number of nodes as no child is
likelier than its parent, and ends where another row costs more than it promises. Knows nothing about models.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

import numpy as np

from streamspec.runtime.ngram import Continuation, Rates
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
        self._found = found
        self._heap: list[tuple[float, int, _Node]] = []
        self._age = count()

    def take(self, root: int, rows: int) -> list[_Node]:
        """At most `rows` nodes by falling chance, the root first."""
        taken = [_Node(1.0, 0, 0, 0, root, True)]
        self._expand(taken[0], 0)
        while self._heap and len(taken) < rows:
            node = heapq.heappop(self._heap)[2]
            taken.append(node)
            self._expand(node, len(taken) - 1)
            if not node.follows:
                self._guess(taken[node.parent], node.parent, node.rank + 1)
        return taken

    def _expand(self, node: _Node, slot: int) -> None:
        """Offers the children of a node that was taken: the continuation's token, and the first guess."""
        said, chance, rank = self._continued(node)
        if said is not None:
            self._offer(_Node(node.chance * chance, slot, node.depth + 1, rank, said, True))
        self._guess(node, slot, 0)

    def _guess(self, parent: _Node, slot: int, rank: int) -> None:
        """Offers guess number `rank` as a child of `parent`, or the next one where the continuation offers that already."""
        depth = parent.depth
        if depth >= len(self._tokens):
            return
        said, chance, known = self._continued(parent)
        rank += rank == known and said is not None
        if rank < len(self._tokens[depth]):
            share = self._chances[depth][rank]
            if said is not None:  # what the continuation claims is lost to the others
                own = self._chances[depth][known] if known < len(self._tokens[depth]) else 0.0
                share *= (1 - chance) / max(1 - own, 1e-6)
            self._offer(_Node(parent.chance * min(share, 1.0), slot, depth + 1, rank, self._tokens[depth][rank], False))

    def _continued(self, node: _Node) -> tuple[int | None, float, int]:
        """The continuation's token behind `node`, or None; its chance; its rank among the guesses, their number if it is new."""
        depth, found = node.depth, self._found
        if found is None or not node.follows or depth >= len(found.tokens):
            return None, 0.0, 0
        said = found.tokens[depth]
        if depth >= len(self._tokens):
            return said, found.chance["alone"], 0
        guessed = self._tokens[depth]
        rank = guessed.index(said) if said in guessed else len(guessed)
        own = self._chances[depth][rank] if rank < len(guessed) else 0.0
        return said, max(own, found.chance["differs" if rank else "agrees"]), rank

    def _offer(self, node: _Node) -> None:
        heapq.heappush(self._heap, (-node.chance, next(self._age), node))


def observe(rates: Rates, guesses: Guesses | None, found: Continuation, came: Iterable[int]) -> None:
    """Learns how often continuations come true from the tokens that came after `guesses` and `found` had been made."""
    for depth, (said, token) in enumerate(zip(found.tokens, came, strict=False)):
        if guesses is None or depth >= len(guesses.tokens):
            kind = "alone"
        else:
            kind = "agrees" if said == guesses.tokens[depth, 0] else "differs"
        rates.see(kind, found.match, said == token)
        if said != token:
            return
