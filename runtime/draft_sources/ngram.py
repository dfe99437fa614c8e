"""Drafts by n-grams (prompt lookup): proposes the tokens that followed the last time the text's newest tokens occurred.

`NgramIndex` holds one text, prompt included, and grows with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from streamspec.runtime.draft_sources.source import Continuations, DraftSource

LONGEST = 4  # tokens of a key; longer matches are told apart by looking back
MEASURED = 8  # match lengths from here on count as one
CODES = 0x110000  # characters; tokens that share one spoil candidates, never answers
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
    """Holds the `text` so far; `find` looks its end up.

    It searches a string with a character for each token: a hash table of all n-grams takes 2 us a token to make, before
    the first draft of a long prompt, and a search in 8,000 tokens 2 us.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._characters = ""

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens to the text."""
        begin = len(self.text)
        self.text += map(int, tokens)
        self._characters += "".join([chr(token % CODES) for token in self.text[begin:]])

    def find(self, limit: int = CONTINUATION) -> Continuations | None:
        """Returns at most `limit` tokens that followed the latest of the longest matches, as a chain whose level is the
        length of the match; None where the newest token is new.
        """
        for n in range(min(LONGEST, len(self.text)), 0, -1):
            found = self._characters.rfind(self._characters[-n:], 0, -1)  # where a token follows
            if found >= 0:
                at = found + n
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
