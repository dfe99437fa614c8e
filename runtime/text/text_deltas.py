"""Cuts the shown text of an answer, and of its thought, by the tokens it came from, to mark those that were drafted.
Covered by tests/serve/test_api.py, tests/serve/api/test_thinking.py and tests/chat/test_draft_marks.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from streamspec.runtime.text.detokenize import Detokenizer, TokenDecoder, overlap

if TYPE_CHECKING:
    from streamspec.runtime.stream import Chunk


class TextDelta(NamedTuple):
    """Text that was added to an answer, and whether its tokens were drafted."""

    text: str
    drafted: bool


class TextDeltas:
    """Cuts the shown text of one answer by the tokens it came from.

    Text comes later than its tokens: half characters and what may begin a stop string are held back. Blanks that are
    not shown are left out; what no token spells, such as the line between two messages, belongs to the next one.
    """

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._held: deque[TextDelta] = deque()  # text of tokens that came but is not shown yet

    def push(self, tokens: Sequence[int], drafted: Sequence[bool], shown: str) -> list[TextDelta]:
        """Cuts `shown`, the text that became certain with these tokens, into pieces; joined, they
        equal `shown`."""
        for token, was in zip(tokens, drafted, strict=True):
            self._held.append(TextDelta(self._detokenizer.push(token), was))
        out = []
        while self._held and (shown or not self._held[0].text):
            text, was = self._held.popleft()
            at = 0
            if not shown.startswith(text[: len(shown)]):
                text = text.lstrip()
                at = shown.find(text) if text in shown else (len(shown) - overlap(shown, text)) % len(shown)
            end, left = at + len(text), len(shown) - at
            out.append(TextDelta(shown[:end], was))
            if len(text) > left:
                self._held.appendleft(TextDelta(text[left:], was))
            shown = shown[end:]
        if shown:  # the end of a character that never came whole
            out.append(TextDelta(shown, bool(drafted) and drafted[-1]))
        return out


class ThoughtDeltas:
    """Cuts the text of an answer and that of its thought, each with tokens of its own."""

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._thought, self._text = TextDeltas(tokenizer), TextDeltas(tokenizer)

    def push(self, chunk: Chunk) -> tuple[list[TextDelta], list[TextDelta]]:
        """Returns the pieces of `chunk.reasoning` and of `chunk.text`."""
        kinds = chunk.thought or [False] * len(chunk.token_ids)
        made = []
        for deltas, wanted, shown in ((self._thought, True, chunk.reasoning), (self._text, False, chunk.text)):
            at = [i for i, kind in enumerate(kinds) if kind is wanted]
            made.append(deltas.push([chunk.token_ids[i] for i in at], [chunk.drafted[i] for i in at], shown))
        return made[0], made[1]
