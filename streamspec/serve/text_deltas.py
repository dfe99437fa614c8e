"""Cuts shown text by the tokens it came from, so that a page can colour drafted tokens.

Text comes later than its tokens: half characters and what may begin a stop string are held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from streamspec.runtime.text.detokenize import Detokenizer, TokenDecoder


class TextDelta(NamedTuple):
    """Text that was added to an answer, and whether its tokens were drafted."""

    text: str
    drafted: bool


class TextDeltas:
    """Cuts the text of one answer."""

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._held: deque[TextDelta] = deque()  # text of tokens that came but is not shown yet

    def push(self, tokens: Sequence[int], drafted: Sequence[bool], shown: str) -> list[TextDelta]:
        """Cuts `shown`, the text that became certain with these tokens, into pieces; joined, they
        equal `shown`."""
        for token, was in zip(tokens, drafted, strict=True):
            self._held.append(TextDelta(self._detokenizer.push(token), was))
        out, left = [], len(shown)
        while self._held and (left or not self._held[0].text):
            text, was = self._held.popleft()
            out.append(TextDelta(text[:left], was))
            if len(text) > left:
                self._held.appendleft(TextDelta(text[left:], was))
            left -= min(left, len(text))
        if left:  # the end of a character that never came whole
            out.append(TextDelta(shown[-left:], bool(drafted) and drafted[-1]))
        return out
