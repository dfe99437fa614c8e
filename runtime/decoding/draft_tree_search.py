"""Chooses what a step verifies: the likeliest continuations that the drafter and the text propose, as one tree.

Every node has the probability that all of its path comes true. The drafter's candidates for a depth carry
probabilities; what followed earlier in the text (n-grams) is a chain with probabilities of its own; where both propose
the same token, it is one node. The tree takes the likeliest node that can be reached, again and again, which is optimal
for any number of nodes as no child is likelier than its parent, and ends where another row costs more than it promises.
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

MAX_ROWS = 64  # of any draft, whatever is asked for: the cache has no room for thousands
# Factor of the drafter's logits to begin with: they are a little over-confident (docs/lab/decisions),
SHARPNESS = 1 / 1.2
MIN_SHARPNESS, MAX_SHARPNESS = 0.2, 2.0  # its bounds,
LEARNING_RATE = 0.003  # and how far a nat of error moves it

# Tokens, probabilities and logits (the largest 0) [C] of candidates, and the number of the first of them.
Candidates = tuple[np.ndarray, np.ndarray, np.ndarray, int]
_Key = tuple[int, int | None, float]  # depth, number of the candidate before, sharpness


class DraftProposal(ABC):
    """Holds the candidates of a drafter for the next `depths` tokens. Candidates of a depth are numbered;
    `conditional`: they depend on the candidate before them. Every result is cached."""

    def __init__(self, depths: int, conditional: bool) -> None:
        self.depths, self.conditional = depths, conditional
        self._computed: dict[_Key, Candidates | None] = {}
        self._ranked: dict[_Key, list[tuple[int, float, int]]] = {}

    @abstractmethod
    def probabilities(self, depth: int, parent: int | None, sharpness: float) -> Candidates | None:
        """Computes the candidates for `depth` after candidate `parent` of the depth before (None: another token came
        there). None where there are no candidates."""

    def after(self, depth: int, parent: int | None, sharpness: float = SHARPNESS) -> list[tuple[int, float, int]]:
        """Returns (token, probability, number) of the candidates for `depth`, likeliest first, as if no other token
        could come.
        """
        key = self._key(depth, parent, sharpness)
        if key not in self._ranked:
            self._ranked[key] = []
            if (candidates := self._candidates(key)) is not None:
                tokens, probabilities, _, first = candidates
                order = np.argsort(-probabilities, kind="stable")
                self._ranked[key] = list(
                    zip(tokens[order].tolist(), probabilities[order].tolist(), (first + order).tolist(), strict=True)
                )
        return self._ranked[key]

    def gradient(self, came: Sequence[int], sharpness: float) -> float:
        """Returns the derivative of the log-probability of the tokens that `came`, by the sharpness. A token that was
        not among the candidates counts as the least of them and ends the sum."""
        total, parent = 0.0, 0
        for depth, token in enumerate(came[: self.depths]):
            candidates = self._candidates(self._key(depth, parent, sharpness))
            if candidates is None:
                break
            tokens, probabilities, logits, first = candidates
            at = np.flatnonzero(tokens == token)
            total += float((logits[at[0]] if len(at) else logits.min()) - probabilities @ logits)
            if not len(at):
                break
            parent = first + int(at[0])
        return total

    def _key(self, depth: int, parent: int | None, sharpness: float) -> _Key:
        return depth, parent if self.conditional else None, sharpness

    def _candidates(self, key: _Key) -> Candidates | None:
        if key not in self._computed:
            self._computed[key] = self.probabilities(*key)
        return self._computed[key]


class IndependentProposal(DraftProposal):
    """Proposes each depth by itself: of streams or heads. `tokens` int64 [gamma, C]: row d holds candidates for the
    token at depth d + 1, best first; `logits` float32 [gamma, C]; `pairs` float32 [gamma, C, C] or None: what candidate
    u of the row before, if it comes true, adds to the logit of candidate v (row 0: the root, the same for every u)."""

    def __init__(self, tokens: np.ndarray, logits: np.ndarray, pairs: np.ndarray | None = None) -> None:
        super().__init__(len(tokens), pairs is not None)
        self.tokens, self.logits, self.pairs = tokens, logits, pairs

    def probabilities(self, depth: int, parent: int | None, sharpness: float) -> Candidates:
        logits = self.logits[depth]
        if self.pairs is not None and parent is not None:
            logits = logits + self.pairs[depth, parent]
        return self.tokens[depth], *_softmax(logits, sharpness), 0


class TreeProposal(DraftProposal):
    """Proposes depth by depth, of a draft layer, after the likeliest candidates of the depth before.

    `levels`: rows of candidates for each depth. `tokens` int64 [rows, C], `logits` float32 [rows, C]: of all levels,
    one after the other. `origins` int64 [rows]: the candidate that a row follows, numbered row x C + column within the
    level before.
    """

    def __init__(self, tokens: np.ndarray, logits: np.ndarray, origins: np.ndarray, levels: Sequence[int]) -> None:
        super().__init__(len(levels), True)
        self.tokens, self.logits = tokens, logits
        self._row: list[dict[int, int]] = []
        start = 0
        for depth, width in enumerate(levels):
            parents = origins[start : start + width].tolist() if depth else [0]
            self._row.append({origin: row for row, origin in enumerate(parents)})
            start += width
        self._starts = np.cumsum([0, *levels[:-1]]).tolist()

    def probabilities(self, depth: int, parent: int | None, sharpness: float) -> Candidates | None:
        row = None if parent is None else self._row[depth].get(parent)
        if row is None:
            return None
        at = self._starts[depth] + row
        return self.tokens[at], *_softmax(self.logits[at], sharpness), row * self.tokens.shape[1]


def _softmax(logits: np.ndarray, sharpness: float) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities [C], and the logits less their largest."""
    logits = logits - logits.max()
    weights = np.exp(sharpness * logits)
    return weights / weights.sum(), logits


@dataclass
class DraftCalibration:
    """Learns from draft to draft how often candidates come true; outlives a text. `rates`: of n-gram matches.
    `sharpness`: the factor of the drafter's logits that makes tokens come as often as their probabilities say: smaller
    where the target samples than where it is greedy."""

    rates: NgramAcceptanceRates = field(default_factory=NgramAcceptanceRates)
    sharpness: float = SHARPNESS

    def observe(self, proposal: DraftProposal | None, match: NgramMatch | None, came: Sequence[int]) -> None:
        """Learns from the tokens that `came` where `proposal` and `match` had been drafted from."""
        if match is not None:
            self._rate(proposal, match, came)
        if proposal is not None:
            moved = self.sharpness + LEARNING_RATE * proposal.gradient(came, self.sharpness)
            self.sharpness = min(max(moved, MIN_SHARPNESS), MAX_SHARPNESS)

    def _rate(self, proposal: DraftProposal | None, match: NgramMatch, came: Iterable[int]) -> None:
        parent: int | None = 0
        for depth, (drafted, token) in enumerate(zip(match.tokens, came, strict=False)):
            kind = "alone"
            candidates = (
                proposal.after(depth, parent, self.sharpness)
                if proposal is not None and depth < proposal.depths
                else []
            )
            if candidates:
                kind = "agrees" if drafted == candidates[0][0] else "differs"
                parent = next((number for candidate, _, number in candidates if candidate == drafted), None)
            self.rates.observe(kind, match.length, drafted == token)
            if drafted != token:
                return


class Draft(NamedTuple):
    """Draft tokens as a tree: `tokens` int64 [n] of the nodes of `tree` and their `probabilities` [n]; `expected`:
    tokens that verifying it brings on average.
    """

    tree: DraftTree
    tokens: np.ndarray
    probabilities: np.ndarray
    expected: float

    def pays(self, costs: np.ndarray) -> bool:
        """Whether it brings no fewer tokens per time than one row does. `costs` [rows]: time of a step with 1..
        rows.
        """
        return bool(self.expected * costs[0] >= costs[len(self.tree) - 1])


def build_draft_tree(
    root: int,
    proposal: DraftProposal | None,
    match: NgramMatch | None,
    rows: int,
    costs: np.ndarray | None = None,
    sharpness: float = SHARPNESS,
    grammar_state: GrammarState | None = None,
) -> Draft:
    """Builds the best draft of at most `rows` nodes, `root` (the text's last token) included.

    `costs` [rows]: time of a step with 1.. rows; the draft is as large as makes expected tokens per time largest, two
    nodes at least. Without costs it has as many nodes as there are candidates for, up to `rows`, and never more than
    `MAX_ROWS`. With a `grammar_state` it holds only what the grammar allows, and what that forces is certain to come.
    """
    nodes = _TreeSearch(proposal, match, sharpness, grammar_state).take(root, min(rows, MAX_ROWS), costs)
    expected = np.cumsum([node.probability for node in nodes])
    size = len(nodes)
    if costs is not None and size > 2:
        size = 2 + int(np.argmax(expected[1:] / costs[1:size]))
    nodes = nodes[:size]
    tree, order = DraftTree(tuple(n.parent for n in nodes), tuple(n.rank for n in nodes)).depth_first()
    tokens, probabilities = (
        np.array([nodes[i].token for i in order], dtype=np.int64),
        np.array([nodes[i].probability for i in order]),
    )
    return Draft(tree, tokens, probabilities, float(expected[size - 1]))


class _Node(NamedTuple):
    """`parent`: its index among the nodes taken; `number`: of its candidate, None if none; `rank`: among the candidates
    after its parent; `follows`: its path is the n-gram match so far; `path`: the tokens after the root, where a grammar
    is followed."""

    probability: float
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
        proposal: DraftProposal | None,
        match: NgramMatch | None,
        sharpness: float,
        grammar_state: GrammarState | None = None,
    ) -> None:
        self._proposal, self._match, self._sharpness, self._grammar_state = proposal, match, sharpness, grammar_state
        self._allowed: dict[Path, list[tuple[int, float, int | None]]] = {}
        self._depths = 0 if proposal is None else proposal.depths
        self._heap: list[tuple[float, int, _Node]] = []
        self._age = count()

    def take(self, root: int, rows: int, costs: np.ndarray | None = None) -> list[_Node]:
        """Takes at most `rows` nodes by falling probability, the root first; with `costs`, ends where no further ones
        could pay.
        """
        taken = [_Node(1.0, 0, 0, root, 0, 0, True)]
        expected, best = 1.0, 0.0  # tokens; the most per cost so far
        self._expand(taken[0], 0)
        while self._heap and len(taken) < rows:
            node = heapq.heappop(self._heap)[2]
            taken.append(node)
            if costs is not None:
                expected += node.probability
                best = max(best, expected / costs[len(taken) - 1])
                further = costs[len(taken) : rows]
                if np.all(expected + node.probability * np.arange(1, len(further) + 1) <= best * further):
                    break
            self._expand(node, len(taken) - 1)
            if not node.follows:
                self._offer_candidate(taken[node.parent], node.parent, node.rank + 1)
        return taken

    def _expand(self, node: _Node, index: int) -> None:
        """Offers the children of a node that was taken: the match's token, and the first candidate."""
        token, probability, rank = self._matched(node)
        if token is not None:
            candidates = self._candidates(node)
            number = candidates[rank][2] if rank < len(candidates) else None
            self._offer(node, _Node(node.probability * probability, index, node.depth + 1, token, number, rank, True))
        self._offer_candidate(node, index, 0)

    def _offer_candidate(self, parent: _Node, index: int, rank: int) -> None:
        """Offers candidate `rank` as a child of `parent`, or the next one where the match offers that already."""
        candidates = self._candidates(parent)
        matched, claimed, matched_rank = self._matched(parent)
        rank += rank == matched_rank and matched is not None
        if rank < len(candidates):
            token, probability, number = candidates[rank]
            if matched is not None:  # what the match claims is lost to the others
                own = candidates[matched_rank][1] if matched_rank < len(candidates) else 0.0
                probability = min(1.0, probability * (1 - claimed) / max(1 - own, 1e-6))
            child = _Node(parent.probability * probability, index, parent.depth + 1, token, number, rank, False)
            self._offer(parent, child)

    def _matched(self, node: _Node) -> tuple[int | None, float, int]:
        """Returns the match's token after `node`, or None; its probability; its rank among the candidates, their number
        if it is new.
        """
        depth, match = node.depth, self._match
        if match is None or not node.follows or depth >= len(match.tokens):
            return None, 0.0, 0
        token, candidates = match.tokens[depth], self._candidates(node)
        if self._grammar_state is not None and not self._grammar_state.allows(node.path, token):
            return None, 0.0, 0
        if not candidates:
            return token, match.probability["alone"], 0
        rank = next((i for i, candidate in enumerate(candidates) if candidate[0] == token), len(candidates))
        own = candidates[rank][1] if rank < len(candidates) else 0.0
        return token, max(own, match.probability["differs" if rank else "agrees"]), rank

    def _candidates(self, parent: _Node) -> Sequence[tuple[int, float, int | None]]:
        """Returns the drafter's candidates after `parent`, those that the grammar allows."""
        if self._grammar_state is not None and parent.path in self._allowed:
            return self._allowed[parent.path]
        candidates = (
            []
            if self._proposal is None or parent.depth >= self._depths
            else self._proposal.after(parent.depth, parent.number, self._sharpness)
        )
        if self._grammar_state is None:
            return candidates
        return self._allowed.setdefault(parent.path, self._grammar_state.filter(parent.path, candidates))

    def _offer(self, parent: _Node, node: _Node) -> None:
        if self._grammar_state is not None:
            node = node._replace(path=(*parent.path, node.token))
        heapq.heappush(self._heap, (-node.probability, next(self._age), node))
