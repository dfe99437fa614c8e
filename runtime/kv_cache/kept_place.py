"""Remembers what the rings of a cache held at a place that the sequence may go back to: the end of a prompt.

The next prompt of a conversation may leave an answer's thought out, or have other tokens of the answer. By then the
rings have gone round, and without what they held the whole text would be read again.

Covered by tests/runtime/kv_cache/test_layout.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from streamspec.runtime.kv_cache.layout import CacheGroup

# Tokens before the end of a prompt that can be gone back to as well: templates end a prompt with tokens, such as an
# empty thought, that earlier turns do not have. Fewer than any ring has beyond its window.
REACH = 32
PLACES = 2  # of a sequence at most: the end of the user's turn, and of the last prompt within it


class KeptPlace:
    """The first `length` tokens of a text, and at least the first `lowest`. `rows`: of each ring, from number
    `first(window)` on [.., rows, width], once they had to be copied."""

    def __init__(self, length: int) -> None:
        self.length, self.lowest = length, max(0, length - REACH)
        self.rows: Sequence[np.ndarray] | None = None

    def first(self, window: int) -> int:
        """Returns the number of the first row that a ring of this window needs."""
        return max(0, self.lowest + 1 - window)

    def numbers(self, window: int) -> np.ndarray:
        """Returns the numbers of the rows that a ring of this window needs, ascending."""
        return np.arange(self.first(window), self.length)

    def reached(self, length: int) -> int:
        """Returns how many of the first `length` tokens it can go back to; 0: none."""
        reached = min(length, self.length)
        return reached if self.rows is not None and self.lowest <= reached else 0


def kept_bytes(group: CacheGroup, context: int) -> int:
    """Returns the most bytes that the places of a sequence of `context` tokens take of a group of layers."""
    window = group.cache.window
    if window is None or group.cache.slots(context) >= context:
        return 0
    return group.bytes(PLACES * (window + REACH))
