"""Defines the result of a comparison. The tests of `proof` cover this module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Check:
    """A comparison. `compared`: how many `unit`s; `different`: how many of them differ, in any bit or token; `first`:
    where the first difference is, '' where there is none; `largest`: difference of a logit, None where no logits were
    compared. `note`: what else is to be known, such as why nothing was compared."""

    name: str
    unit: str
    compared: int = 0
    different: int = 0
    first: str = ""
    largest: float | None = None
    note: str = ""

    def add(self, compared: int, different: int, where: str) -> None:
        """Counts a further comparison."""
        self.compared += compared
        self.different += different
        if different and not self.first:
            self.first = where
