"""Drafts by n-grams (prompt lookup): proposes the tokens that followed the last time the text's newest tokens occurred.

`NgramIndex` indexes one text, prompt included, and grows with it; `NgramAcceptanceRates`, how often such a continuation
comes true, outlive the text. Costs no model call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

LONGEST = 4  # tokens of a key; longer matches are told apart by looking back
MEASURED = 8  # match lengths from here on count as one
CONTINUATION = 16  # tokens offered
# How often the next token of a continuation is right, by match length, before anything was observed: where the drafter
# proposes something else, where it proposes the same, and where it proposes nothing. Smoothed by hand from WikiSQL
# (docs/lab/decisions).
ASSUMED = {
    "differs": (0.0, 0.10, 0.25, 0.30, 0.25, 0.25, 0.25, 0.25, 0.25),
    "agrees": (0.0, 0.90, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95),
    "alone": (0.0, 0.20, 0.45, 0.60, 0.65, 0.70, 0.75, 0.80, 0.80),
}
WEIGHT = 10.0  # observations that the assumption counts for
MEMORY = 200.0  # observations remembered


@dataclass
class NgramAcceptanceRates:
    """Rates by kind of agreement and match length: assumed at first, observed since."""

    trials: dict[str, list[float]] = field(default_factory=lambda: {k: [WEIGHT] * len(v) for k, v in ASSUMED.items()})
    hits: dict[str, list[float]] = field(
        default_factory=lambda: {k: [WEIGHT * p for p in v] for k, v in ASSUMED.items()}
    )

    def of(self, kind: str, match: int) -> float:
        return self.hits[kind][match] / self.trials[kind][match]

    def observe(self, kind: str, match: int, right: bool) -> None:
        trials, hits = self.trials[kind], self.hits[kind]
        fade = min(1.0, MEMORY / trials[match])
        trials[match] = trials[match] * fade + 1
        hits[match] = hits[match] * fade + right


@dataclass(frozen=True)
class NgramMatch:
    """`tokens` may come next. `length`: how many tokens agreed. `probability[kind]` of each token, if those before it
    came.
    """

    tokens: tuple[int, ...]
    length: int
    probability: dict[str, float]


class NgramIndex:
    """Indexes the `text` so far; `find` looks its end up."""

    def __init__(self, rates: NgramAcceptanceRates | None = None) -> None:
        self.text: list[int] = []
        self.rates = rates or NgramAcceptanceRates()
        # n-gram -> where its latest occurrence but the newest was followed
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens to the text. An n-gram enters the index once a token follows it."""
        for token in tokens:
            end = len(self.text)
            for n in range(1, min(LONGEST, end) + 1):
                self._after[tuple(self.text[end - n :])] = end
            self.text.append(int(token))

    def find(self, limit: int = CONTINUATION) -> NgramMatch | None:
        """Returns at most `limit` tokens that followed the latest of the longest matches; None where the newest token
        is new.
        """
        for n in range(min(LONGEST, len(self.text)), 0, -1):
            at = self._after.get(tuple(self.text[-n:]))
            if at is not None:
                length = self._match_length(at)
                probability = {kind: self.rates.of(kind, length) for kind in ASSUMED}
                return NgramMatch(tuple(self.text[at : at + min(limit, CONTINUATION)]), length, probability)
        return None

    def _match_length(self, at: int) -> int:
        """Counts how many tokens before `at` equal the end of the text, up to `MEASURED`."""
        length = 0
        while length < at and length < MEASURED and self.text[at - 1 - length] == self.text[-1 - length]:
            length += 1
        return length
