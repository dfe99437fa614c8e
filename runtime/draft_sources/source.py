"""Defines sources of drafts that cost no model call: a source looks up the end of the text and returns what may follow
as a tree of tokens. How often these come true is learned for each source by itself (`AcceptanceRates`).

tests/runtime/draft_sources/test_registry.py covers this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

# The drafter proposes nothing at this place, or the same token first, or another one.
KINDS = ("alone", "agrees", "differs")
ALONE, AGREES, DIFFERS = range(len(KINDS))
WEIGHT = 10.0  # observations that an assumption counts for
MEMORY = 200.0  # observations remembered
DRAFTER = 1  # the drafter's bit among the sources of a node
NO_CLAIM = -1  # level of a token that the source only passes through

Rates = tuple[float, float, float]  # of a token, by `KINDS`
NO_RATES: Rates = (0.0, 0.0, 0.0)  # of a token that no source claims


class Continuations(NamedTuple):
    """The continuations of a text by one source, as a tree: `tokens[i]` after node `parents[i]` < i (-1: after the
    text), siblings with distinct tokens. `levels[i]`: row of the source's acceptance rates; `NO_CLAIM` where others
    propose the token and the source only what follows it."""

    tokens: list[int]
    parents: list[int]
    levels: list[int]


class AcceptanceRates:
    """The shares of a source's tokens that come true if those before them did, by level and kind (`KINDS`): `assumed`
    [levels] at first, observed since. Outlives a text."""

    def __init__(self, assumed: Sequence[Rates]) -> None:
        self._hits = [[WEIGHT * rate for rate in rates] for rates in assumed]
        self._trials = [[WEIGHT] * len(rates) for rates in assumed]

    def of(self, level: int) -> Rates:
        hits, trials = self._hits[level], self._trials[level]
        return hits[0] / trials[0], hits[1] / trials[1], hits[2] / trials[2]

    def observe(self, level: int, kind: int, right: bool) -> None:
        hits, trials = self._hits[level], self._trials[level]
        fade = min(1.0, MEMORY / trials[kind])
        trials[kind] = trials[kind] * fade + 1
        hits[kind] = hits[kind] * fade + right


class TextIndex(Protocol):
    """A source's view of one text."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens to the text, the prompt first."""

    def find(self, limit: int) -> Continuations | None:
        """Returns what may follow the text, at most `limit` tokens deep; None for nothing."""


class Stems(NamedTuple):
    """The draft as it would be without this source: `tokens`, `parents` (indices of nodes),
    `probabilities` and `sources` (bits of those that propose it) of each node, the root first, the likeliest before
    others."""

    tokens: Sequence[int]
    parents: Sequence[int]
    probabilities: Sequence[float]
    sources: Sequence[int]


class LastingIndex(Protocol):
    """A source's memory of all texts of a session, which also learns from rows that were verified in vain."""

    def begin(self) -> None:
        """Begins a new text."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens to the text, the prompt first."""

    def graft(self, limit: int, stems: Stems, rates: AcceptanceRates) -> Continuations | None:
        """Returns what may follow the text or a node of `stems`, at most `limit` tokens deep; None for nothing."""

    def explore(self, limit: int) -> Continuations | None:
        """Returns what to verify for what it teaches, however unlikely, at most `limit` tokens deep; None for
        nothing."""

    def chosen(
        self, tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int], path: Sequence[int]
    ) -> None:
        """Learns what the model chose after each row of a draft, `tokens` and `parents` [n], whose root is the text's
        last token. `choices` [n]: -1 where a row was pruned. `path`: the rows accepted."""


@dataclass(frozen=True)
class DraftSource:
    """A source of drafts.

    - `name`; `assumed` [levels]: its acceptance rates before anything was observed.
    - `begin`: makes the index of a new text, None where it has nothing to look up. `lasting`: makes the index of a
      session.
    - `keep`: takes the tokens of an answer that has ended.
    - `explores`: it has rows verified for what they teach; at most one source of a session does.
    - `wakes`: it is asked while speculation pauses, too: what it proposes is likely enough to end the pause.
    - `fresh`: makes this source as it was before it saw a text. A source that remembers texts anywhere but in
      `lasting`, which each session makes anew, must have it.
    """

    name: str
    assumed: Sequence[Rates]
    begin: Callable[[], TextIndex | None] | None = None
    keep: Callable[[Sequence[int]], None] | None = None
    lasting: Callable[[], LastingIndex] | None = None
    explores: bool = False
    wakes: bool = False
    fresh: Callable[[], DraftSource] | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and self.fresh is None:
            raise TypeError(f"source {self.name!r} keeps answers and does not say how a fresh one is made")

    def unlearned(self) -> DraftSource:
        """Returns this source as it was when the bundle was loaded."""
        return self if self.fresh is None else self.fresh()


class Found(NamedTuple):
    """The continuations that a source found, its rates, and its `bit` in `CandidateTree.sources`."""

    continuations: Continuations
    rates: AcceptanceRates
    bit: int


class SourceCounts(NamedTuple):
    """Draft tokens that a source proposed among those verified, and how many of them came true."""

    drafted: int = 0
    accepted: int = 0


class CandidateTree(NamedTuple):
    """The continuations of all sources as one tree: `tokens`, `parents` [n] as in `Continuations`. `rates` [3 n]: how
    likely each token is if those before it came, for each of `KINDS`. `sources` [n]: the bits of those that propose
    it."""

    tokens: list[int]
    parents: list[int]
    rates: list[float]
    sources: list[int]


def merged(found: Sequence[Found]) -> CandidateTree | None:
    """Merges the continuations of all sources into one tree. A token that several sources propose gets the largest of
    their rates."""
    if not found:
        return None
    tokens, parents, sources = list[int](), list[int](), list[int]()
    rates, nodes = list[float](), dict[tuple[int, int], int]()
    for tree, known, bit in found:
        here = list[int]()
        by_level = {level: NO_RATES if level == NO_CLAIM else known.of(level) for level in set(tree.levels)}
        for token, parent, level in zip(*tree, strict=True):
            place = -1 if parent < 0 else here[parent], token
            node = nodes.get(place)
            if node is None:
                node = nodes[place] = len(tokens)
                tokens.append(token)
                parents.append(place[0])
                sources.append(0 if level == NO_CLAIM else bit)
                rates += by_level[level]
            else:
                sources[node] |= 0 if level == NO_CLAIM else bit
                rates[3 * node : 3 * node + 3] = map(max, rates[3 * node : 3 * node + 3], by_level[level])
            here.append(node)
    return CandidateTree(tokens, parents, rates, sources)


def observe(found: Sequence[Found], came: Sequence[int], firsts: Sequence[int | None]) -> None:
    """Learns from the tokens that `came`. `firsts`: the drafter's first candidate for each of them, None where it had
    none; shorter where it proposed nothing further."""
    for (tokens, parents, levels), rates, _ in found:
        here: int | None = -1
        for depth, token in enumerate(came):
            first = firsts[depth] if depth < len(firsts) else None
            siblings = [node for node, parent in enumerate(parents) if parent == here]
            here = None
            for node in siblings:
                kind = ALONE if first is None else AGREES if tokens[node] == first else DIFFERS
                if levels[node] != NO_CLAIM:
                    rates.observe(levels[node], kind, tokens[node] == token)
                if tokens[node] == token:
                    here = node
            if here is None:
                break
