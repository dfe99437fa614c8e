"""Compares speculative output with plain output, token for token, and judges the differences.

Two kernels may sum the same numbers in another order. Where the two best tokens are closer together than that, either
is right: a near-tie. The comparison then goes on from plain's choice. Any other difference is a mismatch: a bug. A
`TieBreaker` asks the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class TieBreaker(Protocol):
    """Decides whether a difference is a near-tie. `prompt` and `prefix` are token ids."""

    def margin(self, prompt: Sequence[int], prefix: Sequence[int]) -> float:
        """Plain's logit difference between its two best tokens after prompt + prefix."""

    def tolerance(self) -> float:
        """Largest margin that counts as a near-tie."""

    def speculate(self, prompt: Sequence[int], prefix: Sequence[int], limit: int) -> list[int]:
        """Speculative continuation of prompt + prefix, at most `limit` tokens."""


@dataclass(frozen=True)
class Agreement:
    """`identical`: equal without looking twice. A mismatch ends the comparison of its prompt, so it is 0 or 1."""

    near_ties: int = 0
    mismatches: int = 0
    margins: tuple[float, ...] = ()

    @property
    def identical(self) -> bool:
        """Whether no token differs."""
        return not self.near_ties and not self.mismatches


def compare_outputs(
    prompt: Sequence[int], plain: Sequence[int], other: Sequence[int], tie_breaker: TieBreaker
) -> Agreement:
    """Compares `other` with `plain`, both continuations of `prompt`; after a near-tie, plain's tokens are fed again."""
    margins: list[float] = []
    compared = 0  # tokens of plain that are settled
    while (at := first_difference(plain[compared:], other)) is not None:
        at += compared
        if at >= len(plain) or at - compared >= len(other):  # one of them just stops: no near-tie explains that
            return Agreement(len(margins), 1, tuple(margins))
        margin = tie_breaker.margin(prompt, plain[:at])
        if margin > tie_breaker.tolerance():
            return Agreement(len(margins), 1, (*margins, margin))
        margins.append(margin)
        compared = at + 1
        if compared == len(plain):
            break
        other = tie_breaker.speculate(prompt, plain[:compared], len(plain) - compared)
    return Agreement(len(margins), 0, tuple(margins))


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter length where one is a prefix of the other, None where
    equal.
    """
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))
