"""Decodes token ids to text piece by piece: never half a character, never the beginning of a stop string.

Works for byte-level BPE and for sentencepiece-like vocabularies with byte fallback. The pieces joined are the decoding
of all ids at once, so long as a byte-fallback model spells valid UTF-8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_BROKEN = "\ufffd"


class TokenDecoder(Protocol):
    """The part of `tokenizers.Tokenizer` that is needed."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """Incremental decoding.

    A token's text depends on its neighbours (leading spaces, bytes of one character), so each new piece is the
    difference between decoding a short window without and with the new tokens. The window starts where the last but one
    piece did, where the text was whole.
    """

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._window = self._read = 0  # ids before _read are shown; decoding starts at _window
        self._shown = ""  # decoding of ids[_window:_read]

    def push(self, token: int) -> str:
        """Returns the text that became certain with `token`: empty while a character is incomplete."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids[self._window :], skip_special_tokens=True)
        if text.endswith(_BROKEN) or len(text) <= len(self._shown):
            return ""
        return self._advance(text)

    def finish(self) -> str:
        """Returns the rest at the end, incomplete characters as the replacement character."""
        return self._advance(self._tokenizer.decode(self._ids[self._window :], skip_special_tokens=True))

    def _advance(self, text: str) -> str:
        piece = text[len(self._shown) :]
        self._window, self._read = self._read, len(self._ids)
        self._shown = self._tokenizer.decode(self._ids[self._window : self._read], skip_special_tokens=True)
        return piece


class StopStrings:
    """Finds the first stop string in text that arrives in pieces; the text in front of it is let through.

    The stop string that *ends* first wins (the longest of those that end together), so the result does not depend on
    how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, whether there was a stop string). Text that may begin a stop string is held back."""
        if not self._stops:
            return text, False
        self._held += text
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            shown, self._held = self._held[: min(ends)[1]], ""
            return shown, True
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def finish(self) -> str:
        """Returns held-back text, once nothing can follow any more."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class TextStream:
    """Tokens in, showable text out: detokenizer and stop strings in one."""

    def __init__(self, tokenizer: TokenDecoder, stops: Sequence[str] = ()) -> None:
        self._detokenizer, self._stops = Detokenizer(tokenizer), StopStrings(stops)

    def push(self, token: int) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string ended with this token)."""
        return self._stops.push(self._detokenizer.push(token))

    def finish(self) -> tuple[str, bool]:
        """Returns the rest; an incomplete character's replacement can still complete a stop string."""
        shown, stopped = self._stops.push(self._detokenizer.finish())
        return (shown, True) if stopped else (shown + self._stops.finish(), False)
