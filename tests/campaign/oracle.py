"""Drafts that are mostly right: plain's own answer, with other tokens in some places. Nearly every step takes several
rows and drops others, and a compared token costs a fraction of a plain one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from streamspec.runtime.draft_sources.source import Continuations, DraftSource, Rates, TextIndex

WRONG, BESIDE = 0.12, 0.5  # share of places with another token, and of these where the right one stands beside it
ASSUMED: tuple[Rates, ...] = ((0.9, 0.9, 0.9), (0.1, 0.1, 0.1))  # of right tokens, and of others


class Oracle:
    """`source`: to draft from; `know`: the next texts, prompts and their plain answers."""

    def __init__(self, vocabulary: int) -> None:
        self.source = DraftSource("oracle", ASSUMED, begin=self._begin)
        self._vocabulary, self._texts, self._seed = vocabulary, list[list[int]](), 0

    def know(self, seed: int, *texts: tuple[Sequence[int], Sequence[int]]) -> None:
        self._texts, self._seed = [[*prompt, *plain] for prompt, plain in texts], seed

    def _begin(self) -> TextIndex:
        return _Index(self._texts, self._vocabulary, Random(self._seed))


class _Index:
    def __init__(self, texts: list[list[int]], vocabulary: int, random: Random) -> None:
        self._texts, self._vocabulary, self._random, self._read = texts, vocabulary, random, list[int]()

    def extend(self, tokens: Iterable[int]) -> None:
        self._read += tokens

    def find(self, limit: int) -> Continuations | None:
        tokens, parents, levels, last = list[int](), list[int](), list[int](), -1
        at = len(self._read)
        text = next((text for text in self._texts if text[:at] == self._read), [])
        for right in text[at : at + limit]:
            wrong = self._random.random() < WRONG
            if wrong:
                tokens.append((right + self._random.randrange(1, self._vocabulary)) % self._vocabulary)
                parents.append(last)
                levels.append(1)
            if not wrong or self._random.random() < BESIDE:
                tokens.append(right)
                parents.append(last)
                levels.append(0)
            last = len(tokens) - 1
        return Continuations(tokens, parents, levels) if tokens else None
