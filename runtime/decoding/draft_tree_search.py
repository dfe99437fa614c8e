"""Chooses what a step verifies: the likeliest continuations that the drafter and the text propose, as one tree.

Every node has the probability that all of its path comes true. The drafter's candidates for a depth carry
probabilities; what followed earlier in the text (n-grams) is a chain with probabilities of its own; where both propose
the same token, it is one node. The tree takes the likeliest node that can be reached, again and again, which is optimal
for any number of nodes as no child is likelier than its parent, and ends where another row costs more than it promises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate, count
from math import exp
from operator import mul
from typing import NamedTuple

import numpy as np

from streamspec.draft_tree import DraftTree
from streamspec.runtime.costs.row_costs import Trial
from streamspec.runtime.decoding.grammar_state import GrammarState, Path
from streamspec.runtime.decoding.ngram import NgramAcceptanceRates, NgramMatch

MAX_ROWS = 64  # of any draft, whatever is asked for: the cache has no room for thousands
# Factor of the drafter's logits to begin with: they are a little over-confident (docs/lab/decisions),
SHARPNESS = 1 / 1.2
MIN_SHARPNESS, MAX_SHARPNESS = 0.2, 2.0  # its bounds,
LEARNING_RATE = 0.003  # and how far a nat of error moves it

_Key = tuple[int, int | None, float]  # depth, number of the candidate before, sharpness


class _Scored(NamedTuple):
    """Candidates [C] after one token: `tokens`, `logits`, the number of the first of them; a probability is its
    weight's share. Lists: for so few numbers Python is faster than numpy."""

    tokens: list[int]
    logits: list[float]
    weights: list[float]
    share: float
    first: int


class DraftProposal(ABC):
    """Holds the candidates of a drafter for the next `depths` tokens. Candidates of a depth are numbered;
    `conditional`: they depend on the candidate before them. Every result is cached."""

    def __init__(self, tokens: np.ndarray, depths: int, conditional: bool) -> None:
        """`tokens` int64 [rows, C]: the candidates; copied."""
        self.depths, self.conditional = depths, conditional
        self._tokens: list[list[int]] = tokens.tolist()
        self._computed: dict[_Key, _Scored | None] = {}
        self._ranked: dict[_Key, list[tuple[int, float, int]]] = {}

    @abstractmethod
    def row(self, depth: int, parent: int | None) -> tuple[int, np.ndarray, int] | None:
        """The candidates for `depth` after candidate `parent` of the depth before (None: another token came there):
        their row in `tokens`, their logits [C], the number of the first of them. None where there are no candidates."""

    def after(self, depth: int, parent: int | None, sharpness: float = SHARPNESS) -> list[tuple[int, float, int]]:
        """Returns (token, probability, number) of the candidates for `depth`, likeliest first, as if no other token
        could come.
        """
        key = depth, parent if self.conditional else None, sharpness
        ranked = self._ranked.get(key)
        if ranked is None:
            ranked = self._ranked[key] = []
            if (scored := self._scored(key)) is not None:
                tokens, logits, weights, share, first = scored
                order = sorted(range(len(tokens)), key=logits.__getitem__, reverse=True)
                ranked += [(tokens[i], weights[i] * share, first + i) for i in order]
        return ranked

    def gradient(self, came: Sequence[int], sharpness: float) -> float:
        """Returns the derivative of the log-probability of the tokens that `came`, by the sharpness. A token that was
        not among the candidates counts as the least of them and ends the sum."""
        total, parent = 0.0, 0
        for depth, token in enumerate(came[: self.depths]):
            scored = self._scored((depth, parent if self.conditional else None, sharpness))
            if scored is None:
                break
            tokens, logits, weights, share, first = scored
            total -= sum(map(mul, weights, logits)) * share
            if token not in tokens:
                total += min(logits)
                break
            at = tokens.index(token)
            total += logits[at]
            parent = first + at
        return total

    def _scored(self, key: _Key) -> _Scored | None:
        if key in self._computed:
            return self._computed[key]
        depth, parent, sharpness = key
        scored, found = None, self.row(depth, parent)
        if found is not None:
            row, raw, first = found
            logits = raw.tolist()
            largest = max(logits)
            weights = [exp(sharpness * (logit - largest)) for logit in logits]
            scored = _Scored(self._tokens[row], logits, weights, 1 / sum(weights), first)
        self._computed[key] = scored
        return scored


class IndependentProposal(DraftProposal):
    """Proposes each depth by itself: of streams or heads. `tokens` int64 [gamma, C]: row d holds candidates for the
    token at depth d + 1, best first; `logits` float32 [gamma, C]; `pairs` float32 [gamma, C, C] or None: what candidate
    u of the row before, if it comes true, adds to the logit of candidate v (row 0: the root, the same for every u)."""

    def __init__(self, tokens: np.ndarray, logits: np.ndarray, pairs: np.ndarray | None = None) -> None:
        super().__init__(tokens, len(tokens), pairs is not None)
        self.logits, self.pairs = logits, pairs

    def row(self, depth: int, parent: int | None) -> tuple[int, np.ndarray, int]:
        logits = self.logits[depth]
        if self.pairs is not None and parent is not None:
            logits = logits + self.pairs[depth, parent]
        return depth, logits, 0


class TreeProposal(DraftProposal):
    """Proposes depth by depth, of a draft layer, after the likeliest candidates of the depth before.

    `levels`: rows of candidates for each depth. `tokens` int64 [rows, C], `logits` float32 [rows, C]: of all levels,
    one after the other. `origins` int64 [rows]: the candidate that a row follows, numbered row x C + column within the
    level before.
    """

    def __init__(self, tokens: np.ndarray, logits: np.ndarray, origins: np.ndarray, levels: Sequence[int]) -> None:
        super().__init__(tokens, len(levels), True)
        self.logits = logits
        self._rows: list[dict[int, int]] = []
        start = 0
        for depth, width in enumerate(levels):
            parents = origins[start : start + width].tolist() if depth else [0]
            self._rows.append({origin: row for row, origin in enumerate(parents)})
            start += width
        self._starts = [0, *accumulate(levels[:-1])]

    def row(self, depth: int, parent: int | None) -> tuple[int, np.ndarray, int] | None:
        row = None if parent is None else self._rows[depth].get(parent)
        if row is None:
            return None
        at = self._starts[depth] + row
        return at, self.logits[at], row * self.logits.shape[1]


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
    trial: Trial | None = None,
) -> Draft:
    """Builds the best draft of at most `rows` nodes, `root` (the text's last token) included.

    `costs` [rows]: time of a step with 1.. rows; the draft is as large as makes expected tokens per time largest, two
    nodes at least. Without costs it has as many nodes as there are candidates for, up to `rows`, and never more than
    `MAX_ROWS`. With a `grammar_state` it holds only what the grammar allows, and what that forces is certain to come. A
    `trial` may make it larger or smaller, to learn what that costs.
    """
    search, most = _TreeSearch(proposal, match, sharpness, grammar_state), min(rows, MAX_ROWS)
    if costs is None or trial is None:
        nodes, expected = search.take(root, most, None if costs is None else costs.tolist())
    else:
        nodes, expected = search.attempt(root, most, costs, trial)
    tree, order = _laid_out(tuple([node.parent for node in nodes]), tuple([node.rank for node in nodes]))
    tokens, probabilities = (
        np.array([nodes[i].token for i in order], dtype=np.int64),
        np.array([nodes[i].probability for i in order]),
    )
    return Draft(tree, tokens, probabilities, expected)


@lru_cache(maxsize=512)
def _laid_out(parents: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[DraftTree, list[int]]:
    """The tree depth-first, and each node's number before; trees come again, with their masks."""
    return DraftTree(parents, ranks).depth_first()


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


# What may follow a node taken: the candidates, the rank that the match has claimed (-1: none), and the factor that this
# leaves to the probabilities of the others.
_Children = tuple[Sequence[tuple[int, float, int | None]], int, float]


class _TreeSearch:
    def __init__(
        self,
        proposal: DraftProposal | None,
        match: NgramMatch | None,
        sharpness: float,
        grammar_state: GrammarState | None = None,
    ) -> None:
        self._proposal, self._match, self._sharpness, self._grammar_state = proposal, match, sharpness, grammar_state
        self._depths = 0 if proposal is None else proposal.depths
        self._heap: list[tuple[float, int, _Node]] = []
        self._age = count()
        self._taken: list[_Node] = []
        self._children: list[_Children] = []

    def take(self, root: int, rows: int, costs: list[float] | None = None) -> tuple[list[_Node], float]:
        """Takes at most `rows` nodes by falling probability, the root first; with `costs`, as many as make the tokens
        per time largest, two at least. Also returns the tokens that they bring."""
        taken, heap = self._taken, self._heap
        self._take(_Node(1.0, 0, 0, root, 0, 0, True))
        expected, best, size, brings = 1.0, 0.0, 1, 1.0
        while heap and len(taken) < rows:
            node = heappop(heap)[2]
            probability = node.probability
            expected += probability
            here = len(taken)
            if costs is None or expected / costs[here] > best or size == 1:
                size, brings = here + 1, expected
                best = expected / costs[here] if costs is not None else 0.0
            if costs is not None:
                most = (expected + probability * n > best * costs[here + n] for n in range(1, rows - here))
                if not any(most):  # no further nodes could pay
                    taken.append(node)
                    break
            self._take(node)
            if not node.follows:
                self._offer(node.parent, node.rank + 1)
        return taken[:size], brings

    def attempt(self, root: int, rows: int, costs: np.ndarray, trial: Trial) -> tuple[list[_Node], float]:
        """As `take`, but for as many nodes as the trial wants of those that could pay if it is right."""
        self.take(root, rows, trial.low.tolist())
        expected = np.cumsum([node.probability for node in self._taken])
        size = len(expected)
        if size > 2:
            size = trial.size(expected, costs, 2 + int(np.argmax(expected[1:] / costs[1:size])))
        return self._taken[:size], float(expected[size - 1])

    def _take(self, node: _Node) -> None:
        """Adds a node and offers its children: the match's token, and the first candidate."""
        index, children, claimed, factor = len(self._taken), self._candidates(node), -1, 1.0
        self._taken.append(node)
        matched = self._matched(node) if node.follows else None
        if matched is not None:
            claimed, number, own, kind = next(
                (rank, number, own, "differs" if rank else "agrees")
                for rank, (token, own, number) in enumerate([*children, (matched, 0.0, None)])
                if token == matched
            )
            assert self._match is not None
            probability = self._match.probability[kind if children else "alone"]
            probability = max(own, probability)
            factor = (1 - probability) / max(1 - own, 1e-6)  # what the match claims is lost to the others
            self._push(_Node(node.probability * probability, index, node.depth + 1, matched, number, claimed, True))
        self._children.append((children, claimed, factor))
        self._offer(index, 0)

    def _offer(self, parent: int, rank: int) -> None:
        """Offers candidate `rank` after a node taken, or the next one where the match offers that already."""
        children, claimed, factor = self._children[parent]
        rank += rank == claimed
        if rank < len(children):
            node, (token, probability, number) = self._taken[parent], children[rank]
            probability = node.probability * min(1.0, probability * factor)
            self._push(_Node(probability, parent, node.depth + 1, token, number, rank, False))

    def _matched(self, node: _Node) -> int | None:
        """Returns the match's token after `node`, which follows it."""
        if self._match is None or node.depth >= len(self._match.tokens):
            return None
        token = self._match.tokens[node.depth]
        if self._grammar_state is not None and not self._grammar_state.allows(node.path, token):
            return None
        return token

    def _candidates(self, parent: _Node) -> Sequence[tuple[int, float, int | None]]:
        """Returns the drafter's candidates after `parent`, those that the grammar allows."""
        candidates: list[tuple[int, float, int]] = (
            []
            if self._proposal is None or parent.depth >= self._depths
            else self._proposal.after(parent.depth, parent.number, self._sharpness)
        )
        return candidates if self._grammar_state is None else self._grammar_state.filter(parent.path, candidates)

    def _push(self, node: _Node) -> None:
        if self._grammar_state is not None:
            node = node._replace(path=(*self._taken[node.parent].path, node.token))
        heappush(self._heap, (-node.probability, next(self._age), node))
