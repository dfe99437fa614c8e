"""Chooses what a step verifies: the likeliest continuations that the drafter and the text propose, as one tree.

Every node has the probability that all of its path comes true. The drafter's candidates for a depth carry
probabilities; what the other sources propose (`runtime.draft_sources`) is a tree with probabilities of its own; where
both propose the same token, it is one node. The tree takes the likeliest node that can be reached, again and again,
which is optimal for any number of nodes as no child is likelier than its parent, and ends where another row costs more
than it promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import numpy as np

from streamspec.draft_tree import DraftTree
from streamspec.runtime.costs.row_costs import Trial
from streamspec.runtime.decoding.draft_proposal import SHARPNESS, DraftProposal
from streamspec.runtime.draft_sources.source import (
    AGREES,
    ALONE,
    DIFFERS,
    DRAFTER,
    AcceptanceRates,
    CandidateTree,
    Continuations,
    DraftSource,
    Found,
    LastingIndex,
    observe,
)
from streamspec.runtime.sampling.grammar_state import GrammarState, Path

OFF, ROOT = -1, 0  # where a node stands in the candidate tree of the sources: not in it, before its nodes, or 1 + node
MAX_ROWS = 64  # of any draft, whatever is asked for: the cache has no room for thousands
MIN_SHARPNESS, MAX_SHARPNESS = 0.2, 2.0  # of the factor of the drafter's logits,
LEARNING_RATE = 0.003  # and how far a nat of error moves it


class Taken(NamedTuple):
    """Nodes that a search took, the likeliest first: `tokens`, `parents` (indices of nodes), `ranks` (among the
    candidates after the parent), `sources` (bits of those that propose it) and `probabilities`, [n] each. The first
    `size` of them pay most and bring `expected` tokens."""

    tokens: list[int]
    parents: list[int]
    ranks: list[int]
    sources: list[int]
    probabilities: list[float]
    size: int
    expected: float

    def pays(self, costs: np.ndarray) -> bool:
        """See `Draft.pays`."""
        return self.expected * costs.item(0) >= costs.item(self.size - 1)

    def follow(self, came: Sequence[int]) -> int:
        """Counts the tokens that `came` after the root before one that the draft lacks."""
        nodes, at = {(self.parents[i], self.tokens[i]): i for i in range(1, self.size)}, 0
        for depth, token in enumerate(came):
            at = nodes.get((at, token), 0)
            if not at:
                return depth
        return len(came)


class DraftSearch:
    """Chooses drafts and compares them with what came. The native library's is a faster equivalent."""

    chain = False  # True: only the likeliest node after each one taken

    def take(
        self,
        root: int,
        proposal: DraftProposal | None,
        source_tree: CandidateTree | None,
        rows: int,
        costs: np.ndarray | None,
        sharpness: float,
        grammar_state: GrammarState | None = None,
    ) -> Taken:
        """Takes at most `rows` nodes by falling probability, the root first; with `costs`, as many as make the tokens
        per time largest, two at least. With a `grammar_state` it takes only what the grammar allows, and what that
        forces is certain to come."""
        search = _TreeSearch(proposal, source_tree, sharpness, grammar_state, self.chain)
        nodes, size, expected = search.take(root, rows, None if costs is None else costs.tolist())
        columns = [node.token for node in nodes], [node.parent for node in nodes], [node.rank for node in nodes]
        return Taken(*columns, search.sources(), [node.probability for node in nodes], size, expected)

    def compare(self, proposal: DraftProposal, came: Sequence[int], sharpness: float) -> tuple[float, list[int | None]]:
        """Returns the derivative of the log-probability of the tokens that `came`, by the sharpness; and for each of
        them, up to the proposal's depths, its first candidate (None: it has none)."""
        firsts = list[int | None]()
        parent: int | None = 0
        for depth, token in enumerate(came[: proposal.depths]):
            candidates = proposal.after(depth, parent, sharpness)
            firsts.append(candidates[0][0] if candidates else None)
            if candidates:
                parent = next((number for candidate, _, number in candidates if candidate == token), None)
        return proposal.gradient(came, sharpness), firsts


PYTHON_SEARCH, CHAIN_SEARCH = DraftSearch(), DraftSearch()
CHAIN_SEARCH.chain = True  # the likeliest path alone, for graphs whose rows see all rows before them


@dataclass
class DraftCalibration:
    """Learns from draft to draft how often candidates come true; outlives a text. `sharpness`: the factor of the
    drafter's logits that makes tokens come as often as their probabilities say: smaller where the target samples than
    where it is greedy. `rates`: of each source, by its name; `lasting`: the indexes of those that last."""

    sharpness: float = SHARPNESS
    rates: dict[str, AcceptanceRates] = field(default_factory=dict)
    lasting: dict[str, LastingIndex] = field(default_factory=dict)

    def rates_of(self, source: DraftSource) -> AcceptanceRates:
        """Returns the rates of a source, assumed where nothing was observed."""
        return self.rates.setdefault(source.name, AcceptanceRates(source.assumed))

    def lasting_index(self, source: DraftSource) -> LastingIndex | None:
        """Returns the index that a source keeps from text to text, at the beginning of a new one; None where it keeps
        none."""
        if source.lasting is None:
            return None
        if source.name not in self.lasting:
            self.lasting[source.name] = source.lasting()
        self.lasting[source.name].begin()
        return self.lasting[source.name]

    def observe(
        self,
        proposal: DraftProposal | None,
        found: Sequence[Found],
        came: Sequence[int],
        search: DraftSearch = PYTHON_SEARCH,
    ) -> None:
        """Learns from the tokens that `came` where `proposal` and what the sources `found` had been drafted from."""
        firsts = list[int | None]()
        if proposal is not None:
            gradient, firsts = search.compare(proposal, came, self.sharpness)
            moved = self.sharpness + LEARNING_RATE * gradient
            self.sharpness = min(max(moved, MIN_SHARPNESS), MAX_SHARPNESS)
        observe(found, came, firsts)


class Draft(NamedTuple):
    """Draft tokens as a tree: `tokens` [n] of the nodes of `tree`, their `probabilities` and `sources` (bits) [n];
    `expected`: tokens that verifying it brings on average.
    """

    tree: DraftTree
    tokens: list[int]
    probabilities: list[float]
    sources: list[int]
    expected: float

    def pays(self, costs: np.ndarray) -> bool:
        """Tells whether the draft brings no fewer tokens per time than one row does. `costs` [rows]: time of a step
        with 1.. rows."""
        return self.expected * costs.item(0) >= costs.item(len(self.tree) - 1)

    def down_to(self, depth: int) -> Draft:
        """Returns the draft without its nodes below `depth`."""
        tree = self.tree
        if tree.depth <= depth:
            return self
        kept = [node for node, at in enumerate(tree.depths) if at <= max(depth, 0)]
        cut = DraftTree(tuple(kept.index(tree.parents[i]) for i in kept), tuple(tree.ranks[i] for i in kept))
        probabilities = [self.probabilities[i] for i in kept]
        tokens, sources = [self.tokens[i] for i in kept], [self.sources[i] for i in kept]
        return Draft(cut, tokens, probabilities, sources, sum(probabilities))


def build_draft_tree(
    root: int,
    proposal: DraftProposal | None,
    source_tree: CandidateTree | None,
    rows: int,
    costs: np.ndarray | None = None,
    sharpness: float = SHARPNESS,
    grammar_state: GrammarState | None = None,
    trial: Trial | None = None,
    search: DraftSearch = PYTHON_SEARCH,
) -> Draft:
    """Builds the best draft of at most `rows` nodes, `root` (the text's last token) included.

    `costs` [rows]: time of a step with 1.. rows; the draft is as large as makes expected tokens per time largest, two
    nodes at least. Without costs it has as many nodes as there are candidates for, up to `rows`, and never more than
    `MAX_ROWS`. With a `grammar_state` it holds only what the grammar allows, and what that forces is certain to come. A
    `trial` may make it larger or smaller, to learn what that costs.
    """
    most, priced = min(rows, MAX_ROWS), costs if costs is None or trial is None else trial.low
    taken = search.take(root, proposal, source_tree, most, priced, sharpness, grammar_state)
    size, expected = taken.size, taken.expected
    if trial is not None and costs is not None:  # as many nodes as it wants of those that could pay if it is right
        sums = np.cumsum(taken.probabilities)
        size = len(sums)
        if size > 2:
            size = trial.size(sums, costs, 2 + int(np.argmax(sums[1:] / costs[1:size])))
        expected = float(sums[size - 1])
    tree, order = _laid_out(tuple(taken.parents[:size]), tuple(taken.ranks[:size]))
    tokens, probabilities = [taken.tokens[i] for i in order], [taken.probabilities[i] for i in order]
    return Draft(tree, tokens, probabilities, [taken.sources[i] for i in order], expected)


def with_rows(draft: Draft, rows: Continuations, bit: int) -> Draft:
    """Returns the draft with the nodes of `rows` that it lacks after its own, as improbable ones of source `bit`."""
    tokens, parents, ranks = list(draft.tokens), list(draft.tree.parents), list(draft.tree.ranks)
    nodes = {(parents[node], token): node for node, token in enumerate(tokens) if node}
    here, unused = list[int](), max(ranks) + 1
    for token, parent in zip(rows.tokens, rows.parents, strict=True):
        place = here[parent] if parent >= 0 else 0, token
        node = nodes.setdefault(place, len(tokens))
        if node == len(tokens):
            tokens.append(token)
            parents.append(place[0])
            ranks.append(unused + node)
        here.append(node)
    more = len(tokens) - len(draft.tokens)
    probabilities, sources = [*draft.probabilities, *[0.0] * more], [*draft.sources, *[bit] * more]
    return Draft(DraftTree(tuple(parents), tuple(ranks)), tokens, probabilities, sources, draft.expected)


@lru_cache(maxsize=512)
def _laid_out(parents: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[DraftTree, list[int]]:
    """Returns the tree depth-first, and each node's number before; trees come again, with their masks."""
    return DraftTree(parents, ranks).depth_first()


class _Node(NamedTuple):
    """`parent`: its index among the nodes taken; `number`: of its candidate, None if none; `rank`: among the candidates
    after its parent; `at`: where it stands in the candidate tree (`OFF`, `ROOT`); `path`: the tokens after the root,
    where a grammar is followed."""

    probability: float
    parent: int
    depth: int
    token: int
    number: int | None
    rank: int
    at: int
    path: Path = ()


class _Claim(NamedTuple):
    """A token of the candidate tree after a node. `own`: the probability that the drafter gives it; `claimed`: whether
    another source says how likely it is."""

    token: int
    number: int | None
    rank: int
    own: float
    probability: float
    at: int
    claimed: bool


# What may follow a node taken: the candidates, the ranks that other sources have claimed, and the factor that this
# leaves to the probabilities of the others.
_Children = tuple[Sequence[tuple[int, float, int | None]], Sequence[int], float]


class _TreeSearch:
    def __init__(
        self,
        proposal: DraftProposal | None,
        source_tree: CandidateTree | None,
        sharpness: float,
        grammar_state: GrammarState | None = None,
        chain: bool = False,
    ) -> None:
        self._proposal, self._source_tree = proposal, source_tree
        self._sharpness, self._grammar_state = sharpness, grammar_state
        self._chain = chain
        self._depths = 0 if proposal is None else proposal.depths
        self._heap: list[tuple[float, int, _Node]] = []
        self._age = count()
        self._taken: list[_Node] = []
        self._children: list[_Children] = []
        parents = [] if source_tree is None else source_tree.parents
        self._following: list[list[int]] = [[] for _ in range(len(parents) + 1)]  # nodes of `source_tree` by `_Node.at`
        for node, parent in enumerate(parents):
            self._following[parent + 1].append(node)

    def take(self, root: int, rows: int, costs: list[float] | None = None) -> tuple[list[_Node], int, float]:
        """See `DraftSearch`: the nodes taken, how many of them pay most, and the tokens that these bring."""
        taken, heap = self._taken, self._heap
        self._take(_Node(1.0, 0, 0, root, 0, 0, ROOT))
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
            if self._chain:
                heap.clear()
            self._take(node)
            if node.at == OFF and not self._chain:
                self._offer(node.parent, node.rank + 1)
        return taken, size, brings

    def sources(self) -> list[int]:
        """Returns the bits of the sources that propose each node taken; none for the root."""
        masks = [] if self._source_tree is None else self._source_tree.sources
        return [0] + [
            (DRAFTER if node.number is not None else 0) | (masks[node.at - 1] if node.at > ROOT else 0)
            for node in self._taken[1:]
        ]

    def _take(self, node: _Node) -> None:
        """Adds a node and offers its children: what other sources claim, and the first candidate."""
        index, children = len(self._taken), self._candidates(node)
        self._taken.append(node)
        claims = self._claims(node, children) if node.at != OFF else []
        claimed = own = 0.0
        for claim in claims:
            if claim.claimed:
                claimed += claim.probability
                own += claim.own
        scale = 1 / claimed if claimed > 1 else 1.0
        factor = max(0.0, 1 - claimed * scale) / max(1 - own, 1e-6) if claimed else 1.0  # what is left to the others
        for claim in claims:
            share = claim.probability * scale if claim.claimed else min(1.0, claim.own * factor)
            if share > 0:
                probability = node.probability * share
                self._push(_Node(probability, index, node.depth + 1, claim.token, claim.number, claim.rank, claim.at))
        self._children.append((children, [claim.rank for claim in claims], factor))
        self._offer(index, 0)

    def _offer(self, parent: int, rank: int) -> None:
        """Offers candidate `rank` after a node taken, or the next one that no other source offers already."""
        children, claimed, factor = self._children[parent]
        while rank in claimed:
            rank += 1
        if rank < len(children):
            node, (token, probability, number) = self._taken[parent], children[rank]
            probability = node.probability * min(1.0, probability * factor)
            self._push(_Node(probability, parent, node.depth + 1, token, number, rank, OFF))

    def _claims(self, node: _Node, children: Sequence[tuple[int, float, int | None]]) -> list[_Claim]:
        """Returns what other sources propose after `node`: those of the drafter's candidates, and tokens that are none,
        with ranks after theirs."""
        claims, unknown, source_tree = list[_Claim](), len(children), self._source_tree
        for following in self._following[node.at] if source_tree is not None else ():
            assert source_tree is not None
            token = source_tree.tokens[following]
            if self._grammar_state is not None and not self._grammar_state.allows(node.path, token):
                continue
            rank = next((rank for rank, child in enumerate(children) if child[0] == token), -1)
            _, own, number = children[rank] if rank >= 0 else (token, 0.0, None)
            kind = (DIFFERS if rank else AGREES) if children else ALONE
            rate, place = source_tree.rates[3 * following + kind], rank if rank >= 0 else unknown
            claims.append(_Claim(token, number, place, own, max(own, rate), following + 1, rate > 0))
            unknown += rank < 0
        return claims

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
