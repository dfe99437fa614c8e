"""Drafts by n-grams (prompt lookup): proposes the tokens that followed the last time the text's newest tokens occurred.

`NgramIndex` indexes one text, prompt included, and grows with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from streamspec.runtime.draft_sources.source import Continuations, DraftSource

LONGEST = 4  # tokens of a key; longer matches are told apart by looking back
MEASURED = 8  # match lengths from here on count as one
CONTINUATION = 16  # tokens offered
# How often the next token of a continuation is right, by match length, before anything was observed: where the drafter
# proposes nothing, the same, and something else. Smoothed by hand from WikiSQL (docs/lab/decisions).
ASSUMED = (
    (0.0, 0.0, 0.0),
    (0.20, 0.90, 0.10),
    (0.45, 0.95, 0.25),
    (0.60, 0.95, 0.30),
    (0.65, 0.95, 0.25),
    (0.70, 0.95, 0.25),
    (0.75, 0.95, 0.25),
    (0.80, 0.95, 0.25),
    (0.80, 0.95, 0.25),
)


class NgramIndex:
    """Indexes the `text` so far; `find` looks its end up."""

    def __init__(self) -> None:
        self.text: list[int] = []
        # n-gram -> where its latest occurrence but the newest was followed
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens to the text. An n-gram enters the index once a token follows it."""
        for token in tokens:
            end = len(self.text)
            for n in range(1, min(LONGEST, end) + 1):
                self._after[tuple(self.text[end - n :])] = end
            self.text.append(int(token))

    def find(self, limit: int = CONTINUATION) -> Continuations | None:
        """Returns at most `limit` tokens that followed the latest of the longest matches, as a chain whose level is the
        length of the match; None where the newest token is new.
        """
        for n in range(min(LONGEST, len(self.text)), 0, -1):
            at = self._after.get(tuple(self.text[-n:]))
            if at is not None:
                tokens = self.text[at : at + min(limit, CONTINUATION)]
                return Continuations(tokens, list(range(-1, len(tokens) - 1)), [self._match_length(at)] * len(tokens))
        return None

    def _match_length(self, at: int) -> int:
        """Counts how many tokens before `at` equal the end of the text, up to `MEASURED`."""
        length = 0
        while length < at and length < MEASURED and self.text[at - 1 - length] == self.text[-1 - length]:
            length += 1
        return length


NGRAM = DraftSource("n-grams", ASSUMED, NgramIndex)
