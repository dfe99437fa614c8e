"""Drafts from a store of answers (retrieval, REST: arXiv 2311.08252): proposes what followed in other texts where they
stood as this one does.

The end of the text is looked up in a suffix array: all places of the store where the same tokens stand are neighbours
there, in the order of what follows. A sample of them, evenly spaced, makes a tree of continuations with their shares.
Of the matches the longest with at least `ENOUGH` places is taken: how often each token followed says more than a longer
match with few places (docs/lab/decisions). Costs no model call.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from operator import itemgetter
from typing import Protocol

import numpy as np

from streamspec.runtime.draft_sources.source import Continuations, DraftSource, Rates

LONGEST = 8  # tokens of the text's end that are looked up
ENOUGH = 8  # places of a match, where a shorter one has as many
SAMPLE = 32  # places that are looked at,
CONTINUATION = 16  # tokens after each of them,
NODES = 24  # most tokens proposed,
MIN_SHARE = 0.06  # and the share of the sample that a path has at least
# What a token's acceptance depends on: the places that its predecessor was seen at (1, 2-3, 4-15, more), and the share
# of them that it follows, up to these bounds. Where there is one place, the length of all that agrees before the token.
PLACES, SHARES, LENGTHS = (2, 4, 16), (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95), (4, 8)
# Acceptance at first, where no drafter proposes anything; from WikiSQL, E2E and DialogSum (docs/lab/decisions).
ALONE = (
    (0.40, 0.47, 0.55),
    (0.10, 0.10, 0.10, 0.12, 0.20, 0.35, 0.75, 0.78),
    (0.04, 0.05, 0.10, 0.15, 0.30, 0.55, 0.80, 0.92),
    (0.03, 0.07, 0.14, 0.26, 0.48, 0.68, 0.90, 0.98),
)
STARTS = (0, 3, 11, 19)  # levels of `ALONE`'s rows


def _rates(alone: float) -> Rates:
    """Returns the rates of a token: a drafter that agrees is mostly right, one that differs halves the store's rate."""
    return alone, max(alone, 0.9), alone / 2


ASSUMED = tuple(_rates(rate) for row in ALONE for rate in row)


class AnswerStore:
    """Texts of any number, one after the other. `tokens` [n], each text ended by `separator`; `order` [n]: their suffix
    array. For any number of threads."""

    def __init__(self, tokens: np.ndarray, order: np.ndarray, separator: int) -> None:
        self.separator = separator
        self._tokens, self._order = array("I"), array("I")  # slices of these compare faster than numpy's
        self._tokens.frombytes(tokens.astype(np.uintc).tobytes())
        self._order.frombytes(order.astype(np.uintc).tobytes())

    def __len__(self) -> int:
        return len(self._tokens)

    def find(self, texts: Sequence[Sequence[int]], limit: int) -> Continuations | None:
        """Returns what followed the end of one of `texts`, the first with the longest match, at most `limit` tokens
        deep; None where the last token of all is new."""
        length, first, last = max((self._match(text[-LONGEST:]) for text in texts), key=itemgetter(0))
        if not length:
            return None
        places = last - first
        step, count = (places / SAMPLE, SAMPLE) if places > SAMPLE else (1.0, places)
        depth = min(limit, CONTINUATION)
        begins = [self._order[first + int((i + 0.5) * step)] + length for i in range(count)]
        rows = [self._tokens[begin : begin + depth] for begin in begins]
        return self._tree(rows, length, places / count)

    def _match(self, text: Sequence[int]) -> tuple[int, int, int]:
        """Returns the length of the longest end of `text` that stands at `ENOUGH` places, or else at any, and where in
        the suffix array; 0: of none."""
        found = self._longest(text, ENOUGH)
        return found if found[0] else self._longest(text, 1)

    def _longest(self, text: Sequence[int], places: int) -> tuple[int, int, int]:
        """Returns the same as `_match` for ends that stand at so many `places`."""
        low, high, found = 1, len(text), (0, 0, 0)
        while low <= high:  # a shorter end stands wherever a longer one does
            length = (low + high) // 2
            first, last = self._places(text[len(text) - length :])
            if last - first >= places:
                found, low = (length, first, last), length + 1
            else:
                high = length - 1
        return found

    def _places(self, key: Sequence[int]) -> tuple[int, int]:
        """Returns the range of the suffix array where `key` stands."""
        tokens, order, size, tokens_of_key = self._tokens, self._order, len(key), array("I", key)

        def at(place: int) -> array[int]:
            return tokens[place : place + size]

        first = bisect_left(order, tokens_of_key, key=at)
        if first == len(order) or at(order[first]) != tokens_of_key:
            return first, first
        return first, bisect_right(order, tokens_of_key, first, key=at)

    def _tree(self, rows: list[array[int]], length: int, weight: float) -> Continuations:
        """Makes a tree of `rows`, what followed at places that each stand for `weight` of them, in order; likeliest
        paths first."""
        tokens, parents, levels = list[int](), list[int](), list[int]()
        least = MIN_SHARE * len(rows)
        # By falling number of rows: begin and end of those that go on alike, their node, the depth of what follows.
        waiting = [(-len(rows), 0, -1, len(rows), 0)]
        while waiting and len(tokens) < NODES:
            _, begin, parent, end, depth = heappop(waiting)
            at = begin
            while at < end and len(tokens) < NODES:
                if depth >= len(rows[at]):
                    at += 1
                    continue
                token, group = rows[at][depth], at
                while at < end and len(rows[at]) > depth and rows[at][depth] == token:
                    at += 1
                if at - group < least:
                    continue
                tokens.append(token)
                parents.append(parent)
                levels.append(_level(length + depth, (at - group) / (end - begin), (end - begin) * weight))
                if token != self.separator:
                    heappush(waiting, (group - at, group, len(tokens) - 1, at, depth + 1))
        return Continuations(tokens, parents, levels)


def _level(length: int, share: float, places: float) -> int:
    """Row of `ASSUMED` for a token that follows this `share` of so many places, with `length` tokens before it that
    agree."""
    row = bisect_right(PLACES, places)
    return STARTS[row] + (bisect_right(SHARES, share) if row else bisect_right(LENGTHS, length))


class StoreIndex:
    """Looks one text up in a store: the answer as if it began there, and what is before it."""

    def __init__(self, store: AnswerStore) -> None:
        self._store = store
        self._prompt: list[int] | None = None
        self._answer = [store.separator]

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens: first those of the prompt, of which the last ones count, then those of the answer."""
        if self._prompt is None:
            self._prompt = list(tokens)[-LONGEST:]
        else:
            self._answer += tokens

    def find(self, limit: int) -> Continuations | None:
        """Returns what followed in the store: after the beginning of an answer, or where that is longer known, after
        the prompt's end and the answer."""
        texts = [self._answer]
        if len(self._answer) < LONGEST and self._prompt:
            texts.append([*self._prompt, *self._answer[1:]])
        return self._store.find(texts, limit)


class GrowingStore(Protocol):
    """Answers so far. `store`: of them, None at first."""

    @property
    def store(self) -> AnswerStore | None: ...

    def add(self, answer: Sequence[int]) -> None: ...

    def as_loaded(self) -> GrowingStore:
        """Returns a store of the answers that this one began with, which grows by itself."""


def past_source(past: GrowingStore) -> DraftSource:
    """Makes a source of the answers given so far."""

    def begin() -> StoreIndex | None:
        return None if past.store is None else StoreIndex(past.store)

    return DraftSource("past answers", ASSUMED, begin, past.add, fresh=lambda: past_source(past.as_loaded()))


def store_source(store: AnswerStore) -> DraftSource:
    """Makes a source of a bundle's store."""
    return DraftSource("store", ASSUMED, lambda: StoreIndex(store))
