"""Drafts by token recycling (arXiv 2408.08696): proposes what the model chose after the same one or two tokens before,
in any row that it verified, taken or not, in this text or an earlier one of the session.

The paper keeps the likeliest tokens of every row. Here the newest distinct choices are kept: they need no output of the
step graph that verification lacks, and bring as much (docs/lab/decisions).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import numpy as np

from streamspec.runtime.draft_sources.source import (
    ALONE,
    DRAFTER,
    NO_CLAIM,
    AcceptanceRates,
    Continuations,
    DraftSource,
    Rates,
    Stems,
)

ROWS = 1 << 16  # of a table; tokens that share a row spoil candidates, never answers
CHOICES = 3  # choices of a row, the newest first
BYTES = 2 * ROWS * CHOICES * 4  # of both tables, in memory once they were written
OFFERED = 4  # tokens after a node: those after its two last tokens, then others after its last one
ADDED = 12  # nodes beyond those that other sources propose
MIN_PROBABILITY = 0.05  # probability of such a node: a row that comes true more rarely never pays
DEPTH = 16  # tokens after the text

# Levels: a candidate's place among those offered, by the table of the first of them; the second half where another
# source proposes another token. Assumed rates by `source.KINDS`, smoothed by hand from Spec-Bench (docs/lab/decisions).
_PAIR: tuple[Rates, ...] = ((0.35, 0.90, 0.10), (0.12, 0.80, 0.05), (0.08, 0.70, 0.04), (0.05, 0.70, 0.03))
_SINGLE: tuple[Rates, ...] = ((0.25, 0.90, 0.06), (0.10, 0.80, 0.04), (0.06, 0.70, 0.03), (0.05, 0.70, 0.03))
_OTHERS: tuple[Rates, ...] = tuple((alone / 2, agrees, differs) for alone, agrees, differs in (*_PAIR, *_SINGLE))
ASSUMED: tuple[Rates, ...] = (*_PAIR, *_SINGLE, *_OTHERS)
RIVALLED = len(_OTHERS)  # its first level


class RecyclingTable:
    """The newest `CHOICES` distinct choices after a token and after two, kept from text to text."""

    def __init__(self) -> None:
        # Token + 1, 0 for none. The system gives pages of zeros as they are written.
        self._pairs = np.zeros(ROWS * CHOICES, np.int32).data
        self._singles = np.zeros(ROWS * CHOICES, np.int32).data
        self._before = self._last = 0  # tokens of the text

    def begin(self) -> None:
        self._before = self._last = 0

    def extend(self, tokens: Iterable[int]) -> None:
        self._before, self._last = [self._before, self._last, *tokens][-2:]

    def chosen(
        self, tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int], path: Sequence[int]
    ) -> None:
        taken = set(path)
        others = [node for node in range(len(tokens)) if node not in taken]
        for node in (*others, *path):  # what came is the newest
            if choices[node] >= 0:
                before, choice = tokens[parents[node]] if node else self._before, choices[node] + 1
                _keep(self._pairs, _pair(before, tokens[node]), choice)
                _keep(self._singles, _single(tokens[node]), choice)

    def explore(self, limit: int) -> None: ...

    def candidates(self, before: int, token: int) -> tuple[list[int], int]:
        """Returns what was chosen after the two tokens, then what else after the last, and the level of the first."""
        at = _pair(before, token)
        found = [choice - 1 for choice in self._pairs[at : at + CHOICES].tolist() if choice]
        level = 0 if found else len(_PAIR)
        at = _single(token)
        found += [
            choice - 1 for choice in self._singles[at : at + CHOICES].tolist() if choice and choice - 1 not in found
        ]
        return found[:OFFERED], level

    def graft(self, limit: int, stems: Stems, rates: AcceptanceRates) -> Continuations | None:
        """See `LastingIndex`. Leaves what another source proposes to it, and adds nothing where the drafter proposes,
        whose tokens it confirms."""
        tokens, parents, probabilities = list(stems.tokens), list(stems.parents), list(stems.probabilities)
        befores = [self._before, *(tokens[parent] for parent in parents[1:])]
        count, levels, depths, bits = len(tokens), [NO_CLAIM] * len(tokens), [0] * len(tokens), [0] * len(tokens)
        known: dict[tuple[int, int], int] = {}  # parent, token -> node of the stems
        for node in range(1, count):
            parent = parents[node]
            known[parent, tokens[node]], depths[node] = node, depths[parent] + 1
            bits[parent] |= stems.sources[node]  # of what is proposed after it
        alone = [rates.of(level)[ALONE] for level in range(len(ASSUMED))]
        offers: list[tuple[float, int, int, int, int]] = []  # -probability, age, token, parent, level
        deepest, min_probability, claimed = min(limit, DEPTH), MIN_PROBABILITY / max(alone), False

        def expand(node: int) -> None:
            """Offers what may follow a node; claims the tokens of it that the drafter proposes."""
            nonlocal claimed
            among, probability = bits[node] if node < count else 0, probabilities[node]
            if depths[node] >= deepest or (probability < min_probability and not among):
                return
            found, level = self.candidates(befores[node], tokens[node])
            level += RIVALLED if among & ~DRAFTER else 0
            for token in found:
                child = known.get((node, token)) if among else None
                if child is not None and not stems.sources[child] & ~DRAFTER:
                    levels[child], claimed = level, True
                elif child is None and not among & DRAFTER:
                    likely = probability * alone[level]
                    # All that may follow the text is offered, so that its rates stay known.
                    if likely >= MIN_PROBABILITY or node == 0:
                        heappush(offers, (-likely, len(offers), token, node, level))
                level += 1

        for node in range(count):
            expand(node)
        while offers and len(tokens) < count + ADDED:
            probability, _, token, parent, level = heappop(offers)
            tokens.append(token)
            parents.append(parent)
            probabilities.append(-probability)
            befores.append(tokens[parent])
            levels.append(level)
            depths.append(depths[parent] + 1)
            expand(len(tokens) - 1)
        if not claimed and len(tokens) == count:
            return None
        return Continuations(tokens[1:], [parent - 1 for parent in parents[1:]], levels[1:])


def _pair(before: int, token: int) -> int:
    return (before * 40_503 + token) % ROWS * CHOICES


def _single(token: int) -> int:
    return token % ROWS * CHOICES


def _keep(table: memoryview[int], at: int, choice: int) -> None:
    """Puts a choice first in the row that begins at `at`."""
    newest = table[at]
    if newest == choice:
        return
    second = table[at + 1]
    table[at], table[at + 1] = choice, newest
    if second != choice:
        table[at + 2] = second


RECYCLING = DraftSource("recycling", ASSUMED, lasting=RecyclingTable)
