"""The n-gram drafter (prompt lookup): what followed the last time the text's newest tokens stood there.

An index of one text, prompt included, that grows with it, and an estimate of how often such a continuation comes true, by the
length of the match. Costs no model call. Knows nothing about trees or models.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LONGEST = 4  # tokens of a key; longer matches are told apart by looking back
MEASURED = 12  # match lengths from here on count as one
CONTINUATION = 16  # tokens offered
# Trials and hits assumed before any were seen, by match length: an early opinion that some 8 observations outweigh.
TRIALS = 8.0
FIRST_OPINION = (0.0, 0.15, 0.35, 0.5, 0.6, 0.65, 0.7, 0.75, 0.75, 0.8, 0.8, 0.8, 0.85)


@dataclass(frozen=True)
class Continuation:
    """`tokens` may come next, each with probability `chance` if those before it did. `match`: tokens that agreed."""

    tokens: tuple[int, ...]
    match: int
    chance: float


class NgramIndex:
    """`text` so far; `find` looks its end up, `observe` says what really followed."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> where its latest occurrence but the newest was followed
        self._trials = [TRIALS] * (MEASURED + 1)
        self._hits = [TRIALS * chance for chance in FIRST_OPINION]

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens to the text. An n-gram enters the index once a token follows it."""
        for token in tokens:
            end = len(self.text)
            for n in range(1, min(LONGEST, end) + 1):
                self._after[tuple(self.text[end - n :])] = end
            self.text.append(int(token))

    def find(self, limit: int = CONTINUATION) -> Continuation | None:
        """At most `limit` tokens that followed the latest of the longest matches; None where the newest token is new."""
        for n in range(min(LONGEST, len(self.text)), 0, -1):
            at = self._after.get(tuple(self.text[-n:]))
            if at is not None:
                match = min(self._match(at), MEASURED)
                chance = self._hits[match] / self._trials[match]
                return Continuation(tuple(self.text[at : at + min(limit, CONTINUATION)]), match, chance)
        return None

    def observe(self, offered: Continuation, came: Iterable[int]) -> None:
        """Learns from the tokens that really came after `offered` was found."""
        for wanted, token in zip(offered.tokens, came, strict=False):
            self._trials[offered.match] += 1
            if wanted != token:
                return
            self._hits[offered.match] += 1

    def _match(self, at: int) -> int:
        """How many tokens before `at` equal the end of the text."""
        length = 0
        while length < at and length < MEASURED and self.text[at - 1 - length] == self.text[-1 - length]:
            length += 1
        return length
