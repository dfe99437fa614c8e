"""Decodes token ids to text piece by piece: never half a character, never the beginning of a stop string.

Works for byte-level BPE and for sentencepiece-like vocabularies with byte fallback. The pieces joined are the decoding
of all ids at once, so long as a byte-fallback model spells valid UTF-8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from streamspec.runtime.text.stop_strings import StopStrings

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
