"""Chooses what a step verifies: the likeliest continuations that the drafter and the text propose, as one tree.

Every node has the probability that all of its path comes true. The drafter's candidates for a depth carry
probabilities; what followed earlier in the text (n-grams) is a chain with probabilities of its own; where both propose
the same token, it is one node. The tree takes the likeliest node that can be reached, again and again, which is optimal
for any number of nodes as no child is likelier than its parent, and ends where another row costs more than it promises.

`PythonSearch` says what is computed; the native library computes the same, where it is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np

from streamspec.draft_tree import DraftTree
from streamspec.runtime.costs.row_costs import Trial
from streamspec.runtime.decoding.draft_proposal import SHARPNESS, DraftProposal
from streamspec.runtime.decoding.grammar_state import GrammarState, Path
from streamspec.runtime.decoding.ngram import NgramAcceptanceRates, NgramMatch

MAX_ROWS = 64  # of any draft, whatever is asked for: the cache has no room for thousands
MIN_SHARPNESS, MAX_SHARPNESS = 0.2, 2.0  # of the factor of the drafter's logits,
LEARNING_RATE = 0.003  # and how far a nat of error moves it


class Taken(NamedTuple):
    """Nodes that a search took, the likeliest first: `tokens`, `parents` (indices of nodes), `ranks` (among the
    candidates after the parent) and `probabilities`, [n] each. The first `size` of them pay most and bring `expected`
    tokens."""

    tokens: list[int]
    parents: list[int]
    ranks: list[int]
    probabilities: list[float]
    size: int
    expected: float


class DraftSearch(Protocol):
    """Chooses drafts and compares them with what came."""

    def take(
        self,
        root: int,
        proposal: DraftProposal | None,
        match: NgramMatch | None,
        rows: int,
        costs: np.ndarray | None,
        sharpness: float,
    ) -> Taken:
        """Takes at most `rows` nodes by falling probability, the root first; with `costs`, as many as make the tokens
        per time largest, two at least."""

    def compare(
        self, proposal: DraftProposal | None, match: NgramMatch | None, came: Sequence[int], sharpness: float
    ) -> tuple[float, list[str]]:
        """Returns the derivative of the log-probability of the tokens that `came`, by the sharpness; and for each token
        of `match`, up to the first that did not come, how it stood to the drafter (`ngram.ASSUMED`)."""


@dataclass
class DraftCalibration:
    """Learns from draft to draft how often candidates come true; outlives a text. `rates`: of n-gram matches.
    `sharpness`: the factor of the drafter's logits that makes tokens come as often as their probabilities say: smaller
    where the target samples than where it is greedy."""

    rates: NgramAcceptanceRates = field(default_factory=NgramAcceptanceRates)
    sharpness: float = SHARPNESS

    def observe(
        self,
        proposal: DraftProposal | None,
        match: NgramMatch | None,
        came: Sequence[int],
        search: DraftSearch | None = None,
    ) -> None:
        """Learns from the tokens that `came` where `proposal` and `match` had been drafted from."""
        if proposal is None and match is None:
            return
        gradient, kinds = (search or PYTHON_SEARCH).compare(proposal, match, came, self.sharpness)
        if match is not None:
            for kind, drafted, token in zip(kinds, match.tokens, came, strict=False):
                self.rates.observe(kind, match.length, drafted == token)
        if proposal is not None:
            moved = self.sharpness + LEARNING_RATE * gradient
            self.sharpness = min(max(moved, MIN_SHARPNESS), MAX_SHARPNESS)


class PythonSearch:
    """See `DraftSearch`."""

    def take(
        self,
        root: int,
        proposal: DraftProposal | None,
        match: NgramMatch | None,
        rows: int,
        costs: np.ndarray | None,
        sharpness: float,
        grammar_state: GrammarState | None = None,
    ) -> Taken:
        """With a `grammar_state` it takes only what the grammar allows, and what that forces is certain to come."""
        search = _TreeSearch(proposal, match, sharpness, grammar_state)
        nodes, size, expected = search.take(root, rows, None if costs is None else costs.tolist())
        columns = [node.token for node in nodes], [node.parent for node in nodes], [node.rank for node in nodes]
        return Taken(*columns, [node.probability for node in nodes], size, expected)

    def compare(
        self, proposal: DraftProposal | None, match: NgramMatch | None, came: Sequence[int], sharpness: float
    ) -> tuple[float, list[str]]:
        kinds = [] if match is None else self._kinds(proposal, match, came, sharpness)
        return 0.0 if proposal is None else proposal.gradient(came, sharpness), kinds

    def _kinds(
        self, proposal: DraftProposal | None, match: NgramMatch, came: Sequence[int], sharpness: float
    ) -> list[str]:
        kinds = list[str]()
        parent: int | None = 0
        for depth, (drafted, token) in enumerate(zip(match.tokens, came, strict=False)):
            kind = "alone"
            candidates = (
                proposal.after(depth, parent, sharpness) if proposal is not None and depth < proposal.depths else []
            )
            if candidates:
                kind = "agrees" if drafted == candidates[0][0] else "differs"
                parent = next((number for candidate, _, number in candidates if candidate == drafted), None)
            kinds.append(kind)
            if drafted != token:
                break
        return kinds


PYTHON_SEARCH = PythonSearch()


class Draft(NamedTuple):
    """Draft tokens as a tree: `tokens` [n] of the nodes of `tree` and their `probabilities` [n]; `expected`:
    tokens that verifying it brings on average.
    """

    tree: DraftTree
    tokens: list[int]
    probabilities: list[float]
    expected: float

    def pays(self, costs: np.ndarray) -> bool:
        """Whether it brings no fewer tokens per time than one row does. `costs` [rows]: time of a step with 1..
        rows.
        """
        return self.expected * costs.item(0) >= costs.item(len(self.tree) - 1)


def build_draft_tree(
    root: int,
    proposal: DraftProposal | None,
    match: NgramMatch | None,
    rows: int,
    costs: np.ndarray | None = None,
    sharpness: float = SHARPNESS,
    grammar_state: GrammarState | None = None,
    trial: Trial | None = None,
    search: DraftSearch | None = None,
) -> Draft:
    """Builds the best draft of at most `rows` nodes, `root` (the text's last token) included.

    `costs` [rows]: time of a step with 1.. rows; the draft is as large as makes expected tokens per time largest, two
    nodes at least. Without costs it has as many nodes as there are candidates for, up to `rows`, and never more than
    `MAX_ROWS`. With a `grammar_state` it holds only what the grammar allows, and what that forces is certain to come. A
    `trial` may make it larger or smaller, to learn what that costs.
    """
    most, priced = min(rows, MAX_ROWS), costs if costs is None or trial is None else trial.low
    if search is None or grammar_state is not None:
        taken = PYTHON_SEARCH.take(root, proposal, match, most, priced, sharpness, grammar_state)
    else:
        taken = search.take(root, proposal, match, most, priced, sharpness)
    size, expected = taken.size, taken.expected
    if trial is not None and costs is not None:  # as many nodes as it wants of those that could pay if it is right
        sums = np.cumsum(taken.probabilities)
        size = len(sums)
        if size > 2:
            size = trial.size(sums, costs, 2 + int(np.argmax(sums[1:] / costs[1:size])))
        expected = float(sums[size - 1])
    tree, order = _laid_out(tuple(taken.parents[:size]), tuple(taken.ranks[:size]))
    return Draft(tree, [taken.tokens[i] for i in order], [taken.probabilities[i] for i in order], expected)


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

    def take(self, root: int, rows: int, costs: list[float] | None = None) -> tuple[list[_Node], int, float]:
        """See `DraftSearch`: the nodes taken, how many of them pay most, and the tokens that these bring."""
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
        return taken, size, brings

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
