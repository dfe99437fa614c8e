"""Holds what a drafter proposes for the next tokens: candidates for each depth, and how likely each of them is.

tests/runtime/decoding/test_draft_tree_search.py covers this module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, lru_cache, reduce
from itertools import accumulate
from math import exp
from operator import add, mul
from typing import NamedTuple

import numpy as np

# Factor of the drafter's logits to begin with: they are a little over-confident (docs/lab/decisions)
SHARPNESS = 1 / 1.2

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
    `conditional`: they depend on the candidate before them. Every result is cached. `tokens` int64 [rows, C], `logits`
    float32 [rows, C] and `more`, of one kind of proposals, as bytes, and their `shape` as int64: depths, C, 1 where it
    is of a draft layer, and that one's levels."""

    def __init__(
        self,
        tokens: np.ndarray,
        logits: np.ndarray,
        more: np.ndarray | None,
        depths: int,
        levels: tuple[int, ...] = (),
    ) -> None:
        """Copies the arrays. Raises ValueError for shapes that do not fit: a library reads them unchecked."""
        rows = sum(levels) if levels else depths
        numbers = 0 if more is None else rows if levels else tokens.size * tokens.shape[1]
        if (
            not tokens.size
            or logits.shape != tokens.shape
            or len(tokens) < rows
            or (more is not None and more.size < numbers)
        ):
            raise ValueError(f"tokens {tokens.shape}, logits {logits.shape}, {numbers} numbers more")
        self.depths, self.conditional, self.width = depths, more is not None, tokens.shape[1]
        self.tokens, self.logits = held(tokens, np.int64), held(logits, np.float32)
        self.more = None if more is None else held(more, np.int64 if levels else np.float32)
        self.shape = _shape(depths, self.width, levels)
        self.confidences: Sequence[float] = ()  # a second model's own probability of each of `firsts`, if it is known
        self._computed: dict[_Key, _Scored | None] = {}
        self._ranked: dict[_Key, list[tuple[int, float, int]]] = {}

    @cached_property
    def _tokens(self) -> list[list[int]]:
        rows: list[list[int]] = np.frombuffer(self.tokens, np.int64).reshape(-1, self.width).tolist()
        return rows

    @cached_property
    def firsts(self) -> list[int]:
        """The first candidate of each depth, where those before it came true."""
        rows = (self.row(depth, 0) for depth in range(self.depths))
        return [self._tokens[row[0]][0] for row in rows if row is not None]

    @cached_property
    def _logits(self) -> np.ndarray:
        return np.frombuffer(self.logits, np.float32).reshape(-1, self.width)

    @abstractmethod
    def row(self, depth: int, parent: int | None) -> tuple[int, np.ndarray, int] | None:
        """Returns the candidates for `depth` after candidate `parent` of the depth before (None: another token came
        there): their row in `tokens`, their logits [C], the number of the first of them. None where there are no
        candidates."""

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
            total -= reduce(add, map(mul, weights, logits)) * share
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
            scored = _Scored(self._tokens[row], logits, weights, 1 / reduce(add, weights), first)
        self._computed[key] = scored
        return scored


class IndependentProposal(DraftProposal):
    """Proposes each depth by itself: of streams or heads. `tokens` int64 [gamma, C]: row d holds candidates for the
    token at depth d + 1, best first; `logits` float32 [gamma, C]; `pairs` float32 [gamma, C, C] or None: what candidate
    u of the row before, if it comes true, adds to the logit of candidate v (row 0: the root, the same for every u)."""

    def __init__(self, tokens: np.ndarray, logits: np.ndarray, pairs: np.ndarray | None = None) -> None:
        super().__init__(tokens, logits, pairs, len(tokens))

    @cached_property
    def _pairs(self) -> np.ndarray | None:
        return None if self.more is None else np.frombuffer(self.more, np.float32).reshape(-1, self.width, self.width)

    def row(self, depth: int, parent: int | None) -> tuple[int, np.ndarray, int]:
        logits = self._logits[depth]
        if self._pairs is not None and parent is not None:
            logits = logits + self._pairs[depth, parent]
        return depth, logits, 0


class TreeProposal(DraftProposal):
    """Proposes depth by depth, of a draft layer, after the likeliest candidates of the depth before.

    `levels`: rows of candidates for each depth. `tokens` int64 [rows, C], `logits` float32 [rows, C]: of all levels,
    one after the other. `origins` int64 [rows]: the candidate that a row follows, numbered row x C + column within the
    level before.
    """

    def __init__(self, tokens: np.ndarray, logits: np.ndarray, origins: np.ndarray, levels: Sequence[int]) -> None:
        super().__init__(tokens, logits, origins, len(levels), tuple(levels))
        self._levels = levels

    @cached_property
    def _rows(self) -> list[tuple[int, dict[int, int]]]:
        """The first row of each depth, and its rows by their origins."""
        origins: list[int] = np.frombuffer(self.more or b"", np.int64).tolist()
        starts = accumulate(self._levels, initial=0)
        return [
            (start, {origin: row for row, origin in enumerate(origins[start : start + width] if depth else [0])})
            for depth, (start, width) in enumerate(zip(starts, self._levels, strict=False))
        ]

    def row(self, depth: int, parent: int | None) -> tuple[int, np.ndarray, int] | None:
        start, rows = self._rows[depth]
        row = None if parent is None else rows.get(parent)
        return None if row is None else (start + row, self._logits[start + row], row * self.width)


def held(array: np.ndarray, kind: type[np.generic]) -> bytes:
    """Returns a copy of numbers of this kind; a library takes bytes as they are."""
    return (array if array.dtype.type is kind else array.astype(kind)).tobytes()


@lru_cache(maxsize=64)
def _shape(depths: int, width: int, levels: tuple[int, ...]) -> bytes:
    return np.array([depths, width, bool(levels), *levels], np.int64).tobytes()
