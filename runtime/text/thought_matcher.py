"""Follows an answer through its thought, for decoding under a grammar: the grammar begins after the thought, and a
budget ends the thought. `tests/runtime/text/test_thought.py` covers this file.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from streamspec.runtime.sampling.grammar_state import Matcher
from streamspec.runtime.text.thought import AFTER, BEFORE, WITHIN, Place, Thought


class _At(NamedTuple):
    """After some tokens. `begun`: tokens of the beginnings that are still possible, BEFORE; `forced`: those of the end
    tag that the budget has brought; `inner`: tokens that the inner grammar has, `said` of them in messages before."""

    place: Place
    begun: tuple[int, ...] = ()
    forced: int = 0
    inner: int = 0
    said: int = 0


class ThoughtMatcher:
    """A `Matcher` of a thought and what comes after it.

    The thought has at most `budget` tokens, then its end tag is the only continuation; None: any number. After it comes
    what `inner` allows, without other thoughts; None: anything. Where something is asked of the answer, a text cannot
    end in a thought, unless it `may_end`: what is no thought, but text that a grammar may follow.
    """

    def __init__(
        self,
        thought: Thought,
        place: Place,
        size: int,
        budget: int | None,
        inner: Matcher | None = None,
        may_end: bool = False,
        headed: bool = False,
    ) -> None:
        """`place`: where the answer begins. `size`: of the vocabulary. `headed`: `inner` has messages' heads, too."""
        self._thought, self._size, self._budget = thought, size, budget
        self._inner, self._may_end = inner, may_end or inner is None
        self._free = inner is None
        self._heads = () if headed else thought.heads[:1]  # what `inner` follows
        self._headed = headed  # another thought may follow a message
        self._path = [_At(place)]

    def allowed(self) -> tuple[np.ndarray, bool]:
        at = self._path[-1]
        phase = at.place.phase
        if phase == WITHIN:
            if self._over(at):
                return self._only(self._thought.end[at.forced % len(self._thought.end)]), False
            mask = np.ones(self._size, np.bool_)
            if not self._free:
                mask[self._thought.beyond(at.place.held)] = False
            return mask, self._may_end
        if phase == BEFORE and not self._free:
            mask, ends = self._beginnings(at)
        else:
            mask, ends = (np.ones(self._size, np.bool_), True) if self._inner is None else self._inner.allowed()
        if phase == AFTER and not self._free and self._thought.again is not None:
            mask[self._thought.again] = False
        if phase == BEFORE and self._thought.heads and self._over(at):
            mask[self._thought.thinking(at.place.held)] = False
        return mask, ends

    def consume(self, token: int) -> bool:
        at = self._path[-1]
        phase = at.place.phase
        if phase == BEFORE and not self._free:
            after = self._begin(at, token)
        elif phase == AFTER and not self._free:
            after = None if token == self._thought.again else self._follow(at, token)
        else:
            place, rest = self._thought.step(at.place, token)
            forced = at.forced + self._over(at) if phase == place.phase == WITHIN else 0
            wrong = rest and (rest.strip() or self._may_end) and not self._free
            after = None if wrong else at._replace(place=place, forced=forced)
        if after is not None:
            self._path.append(after)
        return after is not None

    def back(self, tokens: int) -> None:
        at, *gone = self._path[len(self._path) - tokens - 1 :]
        del self._path[len(self._path) - tokens :]
        if self._inner is not None and gone:
            least = min(one.inner for one in (at, *gone))
            self._inner.back(gone[-1].inner - least)
            for token in at.begun[least - at.said : at.inner - at.said]:  # that the beginning of a thought took away
                self._inner.consume(token)

    def _over(self, at: _At) -> bool:
        return self._budget is not None and at.place.inside - at.forced >= self._budget

    def _only(self, token: int) -> np.ndarray:
        return np.arange(self._size) == token

    def _follow(self, at: _At, token: int) -> _At | None:
        """Takes a token of the answer."""
        assert self._inner is not None
        place, rest = at.place._replace(phase=AFTER), None
        if self._headed:
            place, rest = self._thought.step(place, token)
        if rest or not self._headed:
            place = Place(AFTER, inside=place.inside)
        said = at.inner + 1 if place.phase == BEFORE else at.said
        after = at._replace(place=place, begun=(), inner=at.inner + 1, said=said)
        return after if self._inner.consume(token) else None

    # ---- before a thought that may come: its tag, or what is asked of the answer

    @cached_property
    def _ways(self) -> dict[tuple[int, ...], int]:
        """The tokens with which an answer may begin, and its phase after them; beside what `inner` allows."""
        return {self._thought.begin: WITHIN, **dict.fromkeys(self._heads, AFTER)}

    def _inner_begins(self, at: _At) -> Matcher | None:
        """Returns the inner grammar where the answer may be without a thought; it then has the tokens `begun` too."""
        return self._inner if not self._heads and at.inner - at.said == len(at.begun) else None

    def _beginnings(self, at: _At) -> tuple[np.ndarray, bool]:
        inner = self._inner_begins(at)
        mask, ends = (np.zeros(self._size, np.bool_), False) if inner is None else inner.allowed()
        for way in self._ways:
            if way[: len(at.begun)] == at.begun:
                mask[way[len(at.begun)]] = True
        return mask, ends

    def _begin(self, at: _At, token: int) -> _At | None:
        inner, begun = self._inner_begins(at), (*at.begun, token)
        thinks = any(way[: len(begun)] == begun for way in self._ways)
        if begun not in self._ways and inner is not None and inner.allowed()[0][token]:
            if not thinks:
                return self._follow(at, token)
            held = at.place.held + self._thought.bytes_of(token)
            taken = at._replace(place=at.place._replace(held=held), begun=begun, inner=at.inner + 1)
            return taken if inner.consume(token) else None
        if self._inner is not None and at.inner > at.said and thinks:
            self._inner.back(at.inner - at.said)
        if begun in self._ways:
            return _At(Place(self._ways[begun], inside=at.place.inside), inner=at.said, said=at.said)
        held = at.place.held + self._thought.bytes_of(token)
        return at._replace(place=at.place._replace(held=held), begun=begun, inner=at.said) if thinks else None
