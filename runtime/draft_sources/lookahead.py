"""Drafts by lookahead decoding (Fu et al. 2024, arXiv 2402.02057): proposes n-grams that the model wrote itself, in
rows that run several places ahead of the text.

The window has columns. Column i begins `i` places after the text's last token with a tentative token; what the model
chooses after a column is its next token in the next step (Jacobi iteration, Santilli et al. 2023, arXiv 2305.10427).
Columns stand on tokens that are mostly wrong, yet the n-grams that they form often come later on. The window is part of
the draft tree: a chain of the columns' first tokens, the rest of each column after its own. Its rows are verified for
what they teach.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from streamspec.runtime.draft_sources.source import (
    NO_CLAIM,
    AcceptanceRates,
    Continuations,
    DraftSource,
    Rates,
    Stems,
)

WINDOW = 4  # columns (the paper's W),
NGRAM = 3  # tokens of an n-gram (N), the one that it is looked up by included,
NGRAMS = 4  # and n-grams kept of each first token (G), the newest first
ROWS = 1 << 15  # of the pool; tokens that share a row spoil candidates, never answers
BYTES = ROWS * NGRAMS * (NGRAM - 1) * 4  # of the pool, in memory once it was written
STRIDE = 31  # tokens of the prompt between two first tokens of columns

# Levels: the n-gram's place among those kept, then the depth. Assumed rates by `source.KINDS`.
ASSUMED: tuple[Rates, ...] = tuple(
    (alone, 0.9, alone / 3) for first in (0.30, 0.12, 0.08, 0.05) for alone in (first, 0.6)
)


class LookaheadPool:
    """The n-grams of all texts of a session, by their first token, and the window ahead of this one."""

    def __init__(self) -> None:
        # Token + 1, 0 for none. The system gives pages of zeros as they are written.
        self._pool = np.zeros(ROWS * NGRAMS * (NGRAM - 1), np.int32).data
        self.begin()

    def begin(self) -> None:
        self._prompt: list[int] = []
        self._columns: list[list[int]] = []
        self._last = self._drawn = 0

    def extend(self, tokens: Iterable[int]) -> None:
        text = list(tokens)
        self._prompt = self._prompt or text
        self._last = text[-1]

    def graft(self, limit: int, stems: Stems, rates: AcceptanceRates) -> Continuations | None:
        """See `LastingIndex`. What it knows follows the text."""
        nodes, levels = dict[tuple[int, int], int](), list[int]()
        for place, found in enumerate(self.after(self._last)):
            node = -1
            for depth, token in enumerate(found[:limit]):
                if (node, token) not in nodes:
                    levels.append(place * (NGRAM - 1) + depth)
                node = nodes.setdefault((node, token), len(nodes))
        return Continuations([token for _, token in nodes], [parent for parent, _ in nodes], levels) if nodes else None

    def explore(self, limit: int) -> Continuations | None:
        """See `LastingIndex`: the window."""
        if not self._columns:
            self._columns = [[self._tentative()] for _ in range(WINDOW)]
        if limit < WINDOW + NGRAM:
            return None
        nodes = dict[tuple[int, int], int]()
        begins = -1
        for i, column in enumerate(self._columns):
            if i:
                begins = nodes.setdefault((begins, column[0]), len(nodes))
            node = begins
            for token in column[1:]:
                node = nodes.setdefault((node, token), len(nodes))
        tokens, parents = [token for _, token in nodes], [parent for parent, _ in nodes]
        return Continuations(tokens, parents, [NO_CLAIM] * len(nodes))

    def chosen(
        self, tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int], path: Sequence[int]
    ) -> None:
        """Adds what was chosen after each column to it, and what this completes to the pool. Columns move on with the
        text; a step that did not verify the window leaves it as it is."""
        children = {(parents[node], tokens[node]): node for node in range(len(tokens) - 1, 0, -1)}
        begins: int | None = 0
        moved: dict[int, list[int]] = {}
        for i, column in enumerate(self._columns):
            begins = begins if not i or begins is None else children.get((begins, column[0]))
            node = begins
            for token in column[1:]:
                node = None if node is None else children.get((node, token))
            if node is None or choices[node] < 0:
                continue
            grown = [column[0] if i else tokens[0], *column[1:], choices[node]]
            if len(grown) == NGRAM:
                if i or choices[0] == grown[1]:  # what follows the text is known now
                    self._keep(grown)
                moved[i] = grown[1:]
            elif i:
                moved.setdefault(i - 1, grown)
        if moved:
            self._columns = [moved.get(i) or [self._tentative()] for i in range(WINDOW)]

    def after(self, token: int) -> list[list[int]]:
        """Returns the tokens that followed `token` in the stored n-grams, the newest first."""
        at, size = token % ROWS * NGRAMS * (NGRAM - 1), NGRAM - 1
        rows = (self._pool[at + size * i : at + size * (i + 1)].tolist() for i in range(NGRAMS))
        return [[token - 1 for token in row] for row in rows if row[0]]

    def _keep(self, ngram: Sequence[int]) -> None:
        """Puts an n-gram first among those of its first token."""
        newest, known = list(ngram[1:]), self.after(ngram[0])
        at = ngram[0] % ROWS * NGRAMS * (NGRAM - 1)
        for row in [newest, *(row for row in known if row != newest)][:NGRAMS]:
            for token in row:
                self._pool[at] = token + 1
                at += 1

    def _tentative(self) -> int:
        """Returns a token of the prompt."""
        self._drawn += STRIDE
        return self._prompt[self._drawn % len(self._prompt)] if self._prompt else 0


LOOKAHEAD = DraftSource("lookahead", ASSUMED, lasting=LookaheadPool, explores=True)
