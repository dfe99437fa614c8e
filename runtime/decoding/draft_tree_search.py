"""What a step verifies: the likeliest continuations that streams and text propose, as one tree.

Every node has the chance that all of its path comes true. Streams guess each place of the text independently and say
how sure they are; what followed earlier in the text is a chain with a chance of its own; where both say the same, it is
one node. The tree takes the likeliest node that can be reached, again and again, which is optimal for any number of
nodes as no child is likelier than its parent, and ends where another row costs more than it promises. Knows nothing
about models.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np

from streamspec.draft_tree import DraftTree
from streamspec.runtime.decoding.grammar_state import GrammarState, Path
from streamspec.runtime.decoding.ngram import NgramAcceptanceRates, NgramMatch

MOST_ROWS = 64  # of any draft, whatever is asked for: the cache has no room for thousands
SHARPNESS = (
    1 / 1.2
)  # factor of the streams' logits to begin with: they are a little too sure of themselves (docs/lab/decisions),
LEAST, MOST = 0.2, 2.0  # its bounds,
LEARNING = 0.003  # and what a nat of error moves it by

_Place = tuple[int, int | None, float]  # depth, number of the guess before, sharpness


class DraftProposal(ABC):
    """What a drafter proposes for the next `depths` places. Guesses for a place have numbers; `conditional`: they
    depend on the guess before them. What was asked for once is remembered."""

    def __init__(self, depths: int, conditional: bool) -> None:
        self.depths, self.conditional = depths, conditional
        self._found: dict[_Place, tuple[np.ndarray, np.ndarray, np.ndarray, int] | None] = {}
        self._listed: dict[_Place, list[tuple[int, float, int]]] = {}

    @abstractmethod
    def chances(
        self, depth: int, parent: int | None, sharpness: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, int] | None:
        """Tokens, chances and logits (the largest 0) [C] of the guesses for place `depth` behind guess `parent` of the
        place before (None: another token came true there), and the number of the first of them. None where nothing is
        guessed there."""

    def behind(self, depth: int, parent: int | None, sharpness: float = SHARPNESS) -> list[tuple[int, float, int]]:
        """(token, chance, number) of the guesses for place `depth`, likeliest first, as if no other token could
        come.
        """
        place = self._place(depth, parent, sharpness)
        if place not in self._listed:
            self._listed[place] = []
            if (found := self._at(place)) is not None:
                tokens, chances, _, first = found
                order = np.argsort(-chances, kind="stable")
                self._listed[place] = list(
                    zip(tokens[order].tolist(), chances[order].tolist(), (first + order).tolist(), strict=True)
                )
        return self._listed[place]

    def gradient(self, came: Sequence[int], sharpness: float) -> float:
        """Of the log chance of the tokens that `came`, by the sharpness. A token that was not among the guesses counts
        as the least of them and ends the sum."""
        total, parent = 0.0, 0
        for depth, token in enumerate(came[: self.depths]):
            found = self._at(self._place(depth, parent, sharpness))
            if found is None:
                break
            tokens, chances, logits, first = found
            at = np.flatnonzero(tokens == token)
            total += float((logits[at[0]] if len(at) else logits.min()) - chances @ logits)
            if not len(at):
                break
            parent = first + int(at[0])
        return total

    def _place(self, depth: int, parent: int | None, sharpness: float) -> _Place:
        return depth, parent if self.conditional else None, sharpness

    def _at(self, place: _Place) -> tuple[np.ndarray, np.ndarray, np.ndarray, int] | None:
        if place not in self._found:
            self._found[place] = self.chances(*place)
        return self._found[place]


class IndependentProposal(DraftProposal):
    """Of streams or heads, for each place by itself. `tokens` int64 [gamma, C]: row d holds guesses for the token d + 1
    places after the root, best first; `logits` float32 [gamma, C]; `pairs` float32 [gamma, C, C] or None: what guess u
    of the row before, if it comes true, adds to the logit of guess v (row 0: the root, the same for every u)."""

    def __init__(self, tokens: np.ndarray, logits: np.ndarray, pairs: np.ndarray | None = None) -> None:
        super().__init__(len(tokens), pairs is not None)
        self.tokens, self.logits, self.pairs = tokens, logits, pairs

    def chances(
        self, depth: int, parent: int | None, sharpness: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        logits = self.logits[depth]
        if self.pairs is not None and parent is not None:
            logits = logits + self.pairs[depth, parent]
        return self.tokens[depth], *_softmax(logits, sharpness), 0


class TreeProposal(DraftProposal):
    """Of a draft layer, place after place behind the likeliest guesses of the place before.

    `levels`: rows of guesses for each place. `tokens` int64 [rows, C], `logits` float32 [rows, C]: of all levels, one
    after the other. `origins` int64 [rows]: the guess a row stands behind, numbered row x C + place within the level
    before.
    """

    def __init__(self, tokens: np.ndarray, logits: np.ndarray, origins: np.ndarray, levels: Sequence[int]) -> None:
        super().__init__(len(levels), True)
        self.tokens, self.logits = tokens, logits
        self._row: list[dict[int, int]] = []
        start = 0
        for depth, wide in enumerate(levels):
            behind = origins[start : start + wide].tolist() if depth else [0]
            self._row.append({origin: row for row, origin in enumerate(behind)})
            start += wide
        self._starts = np.cumsum([0, *levels[:-1]]).tolist()

    def chances(
        self, depth: int, parent: int | None, sharpness: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, int] | None:
        row = None if parent is None else self._row[depth].get(parent)
        if row is None:
            return None
        at = self._starts[depth] + row
        return self.tokens[at], *_softmax(self.logits[at], sharpness), row * self.tokens.shape[1]


def _softmax(logits: np.ndarray, sharpness: float) -> tuple[np.ndarray, np.ndarray]:
    """Chances [C], and the logits less their largest."""
    logits = logits - logits.max()
    weights = np.exp(sharpness * logits)
    return weights / weights.sum(), logits


@dataclass
class DraftCalibration:
    """What drafts have been worth so far; outlives a text. `rates`: of continuations. `sharpness`: the factor of the
    streams' logits that makes tokens come as often as their chances say: smaller where the target samples than where it
    is greedy."""

    rates: NgramAcceptanceRates = field(default_factory=NgramAcceptanceRates)
    sharpness: float = SHARPNESS

    def observe(self, guesses: DraftProposal | None, found: NgramMatch | None, came: Sequence[int]) -> None:
        """Learns from the tokens that came after `guesses` and `found` had been made."""
        if found is not None:
            self._rate(guesses, found, came)
        if guesses is not None:
            moved = self.sharpness + LEARNING * guesses.gradient(came, self.sharpness)
            self.sharpness = min(max(moved, LEAST), MOST)

    def _rate(self, guesses: DraftProposal | None, found: NgramMatch, came: Iterable[int]) -> None:
        parent: int | None = 0
        for depth, (said, token) in enumerate(zip(found.tokens, came, strict=False)):
            kind = "alone"
            guessed = (
                guesses.behind(depth, parent, self.sharpness) if guesses is not None and depth < guesses.depths else []
            )
            if guessed:
                kind = "agrees" if said == guessed[0][0] else "differs"
                parent = next((number for guess, _, number in guessed if guess == said), None)
            self.rates.see(kind, found.match, said == token)
            if said != token:
                return


class Draft(NamedTuple):
    """`tokens` int64 [n] of the nodes of `tree` and their `chances` [n]; `expected`: tokens that verifying it brings on
    average.
    """

    tree: DraftTree
    tokens: np.ndarray
    chances: np.ndarray
    expected: float

    def pays(self, costs: np.ndarray) -> bool:
        """Whether it brings no fewer tokens per time than one row does. `costs` [rows]: time of a step with 1..
        rows.
        """
        return bool(self.expected * costs[0] >= costs[len(self.tree) - 1])


def draft(
    root: int,
    guesses: DraftProposal | None,
    found: NgramMatch | None,
    rows: int,
    costs: np.ndarray | None = None,
    sharpness: float = SHARPNESS,
    walk: GrammarState | None = None,
) -> Draft:
    """The best draft of at most `rows` nodes behind `root`.

    `costs` [rows]: time of a step with 1.. rows; the draft is as large as makes expected tokens per time largest, two
    nodes at least. Without costs it has as many nodes as there are guesses for, up to `rows`, and never more than
    `MOST_ROWS`. With a `walk` it holds only what the grammar allows, and what that forces is certain to come.
    """
    taken = _TreeSearch(guesses, found, sharpness, walk).take(root, min(rows, MOST_ROWS), costs)
    expected = np.cumsum([node.chance for node in taken])
    size = len(taken)
    if costs is not None and size > 2:
        size = 2 + int(np.argmax(expected[1:] / costs[1:size]))
    taken = taken[:size]
    tree, order = DraftTree(tuple(n.parent for n in taken), tuple(n.rank for n in taken)).depth_first()
    tokens, chances = (
        np.array([taken[i].token for i in order], dtype=np.int64),
        np.array([taken[i].chance for i in order]),
    )
    return Draft(tree, tokens, chances, float(expected[size - 1]))


class _Node(NamedTuple):
    """`parent`: its place among the nodes taken; `number`: the guess it is, None if none; `rank`: its place among the
    guesses behind its parent; `follows`: its path is the text's continuation so far; `path`: the tokens behind the
    root, where a grammar is followed."""

    chance: float
    parent: int
    depth: int
    token: int
    number: int | None
    rank: int
    follows: bool
    path: Path = ()


class _TreeSearch:
    def __init__(
        self,
        guesses: DraftProposal | None,
        found: NgramMatch | None,
        sharpness: float,
        walk: GrammarState | None = None,
    ) -> None:
        self._guesses, self._found, self._sharpness, self._walk = guesses, found, sharpness, walk
        self._lawful: dict[Path, list[tuple[int, float, int | None]]] = {}
        self._depths = 0 if guesses is None else guesses.depths
        self._heap: list[tuple[float, int, _Node]] = []
        self._age = count()

    def take(self, root: int, rows: int, costs: np.ndarray | None = None) -> list[_Node]:
        """At most `rows` nodes by falling chance, the root first; with `costs`, ends where no further ones could
        pay.
        """
        taken = [_Node(1.0, 0, 0, root, 0, 0, True)]
        expected, best = 1.0, 0.0  # tokens; the most per cost so far
        self._expand(taken[0], 0)
        while self._heap and len(taken) < rows:
            node = heapq.heappop(self._heap)[2]
            taken.append(node)
            if costs is not None:
                expected += node.chance
                best = max(best, expected / costs[len(taken) - 1])
                further = costs[len(taken) : rows]
                if np.all(expected + node.chance * np.arange(1, len(further) + 1) <= best * further):
                    break
            self._expand(node, len(taken) - 1)
            if not node.follows:
                self._guess(taken[node.parent], node.parent, node.rank + 1)
        return taken

    def _expand(self, node: _Node, slot: int) -> None:
        """Offers the children of a node that was taken: the continuation's token, and the first guess."""
        said, chance, rank = self._continued(node)
        if said is not None:
            guessed = self._guessed(node)
            number = guessed[rank][2] if rank < len(guessed) else None
            self._offer(node, _Node(node.chance * chance, slot, node.depth + 1, said, number, rank, True))
        self._guess(node, slot, 0)

    def _guess(self, parent: _Node, slot: int, rank: int) -> None:
        """Offers guess `rank` as a child of `parent`, or the next one where the continuation offers that already."""
        guessed = self._guessed(parent)
        said, claimed, known = self._continued(parent)
        rank += rank == known and said is not None
        if rank < len(guessed):
            token, chance, number = guessed[rank]
            if said is not None:  # what the continuation claims is lost to the others
                own = guessed[known][1] if known < len(guessed) else 0.0
                chance = min(1.0, chance * (1 - claimed) / max(1 - own, 1e-6))
            self._offer(parent, _Node(parent.chance * chance, slot, parent.depth + 1, token, number, rank, False))

    def _continued(self, node: _Node) -> tuple[int | None, float, int]:
        """The continuation's token behind `node`, or None; its chance; its rank among the guesses, their number if it
        is new.
        """
        depth, found = node.depth, self._found
        if found is None or not node.follows or depth >= len(found.tokens):
            return None, 0.0, 0
        said, guessed = found.tokens[depth], self._guessed(node)
        if self._walk is not None and not self._walk.allows(node.path, said):
            return None, 0.0, 0
        if not guessed:
            return said, found.chance["alone"], 0
        rank = next((i for i, guess in enumerate(guessed) if guess[0] == said), len(guessed))
        own = guessed[rank][1] if rank < len(guessed) else 0.0
        return said, max(own, found.chance["differs" if rank else "agrees"]), rank

    def _guessed(self, parent: _Node) -> Sequence[tuple[int, float, int | None]]:
        """Guesses for the place behind `parent`."""
        if self._walk is not None and parent.path in self._lawful:
            return self._lawful[parent.path]
        silent = self._guesses is None or parent.depth >= self._depths
        guessed = (
            []
            if silent or self._guesses is None
            else self._guesses.behind(parent.depth, parent.number, self._sharpness)
        )
        if self._walk is None:
            return guessed
        return self._lawful.setdefault(parent.path, self._walk.guesses(parent.path, guessed))

    def _offer(self, parent: _Node, node: _Node) -> None:
        if self._walk is not None:
            node = node._replace(path=(*parent.path, node.token))
        heapq.heappush(self._heap, (-node.chance, next(self._age), node))
