"""Decodes token ids to text piece by piece: never half a character, never the beginning of a stop string.

Works for byte-level BPE and for sentencepiece-like vocabularies with byte fallback. The pieces joined are the decoding
of all ids at once, so long as a byte-fallback model spells valid UTF-8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

WINDOW = 6  # tokens that the window grows to before it starts anew: each is looked up again, mostly in cold caches
BROKEN = "\ufffd"  # in the place of bytes that are no character


class TokenDecoder(Protocol):
    """The part of `tokenizers.Tokenizer` that is needed."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class ShowingSpecials:
    """A `TokenDecoder` that shows some special tokens, as they are written."""

    def __init__(self, tokenizer: Any, shown: Sequence[int]) -> None:
        self._tokenizer, self._shown = tokenizer, {token: str(tokenizer.id_to_token(token)) for token in shown}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of tokens, those between two shown ones together."""
        text, begin = "", 0
        for at in [i for i, token in enumerate(ids) if token in self._shown]:
            text += self._tokenizer.decode(ids[begin:at], skip_special_tokens) + self._shown[ids[at]]
            begin = at + 1
        return text + str(self._tokenizer.decode(ids[begin:], skip_special_tokens))


class Detokenizer:
    """Incremental decoding.

    A token's text depends on its neighbours (leading spaces, bytes of one character), so each new piece is the
    difference between decoding a short window without and with the new tokens. The window starts where a piece did,
    where the text was whole, at least one piece back.
    """

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._window = self._read = 0  # ids before _read are shown; decoding starts at _window
        self._shown = ""  # decoding of ids[_window:_read]

    @property
    def held(self) -> str:
        """The text after what was shown: not certain yet, since a character at its end is incomplete."""
        return self._text(self._window, len(self._ids))[len(self._shown) :]

    def push(self, *tokens: int) -> str:
        """Returns the text that became certain with `tokens`: all but a character that is incomplete at their end."""
        before = len(self._ids)
        self._ids += tokens
        text = self._text(self._window, len(self._ids))
        if not text.endswith(BROKEN):
            return self._advance(text, len(self._ids))
        for end in range(len(self._ids) - 1, before, -1):  # what is whole is not to wait for the next call
            text = self._text(self._window, end)
            if not text.endswith(BROKEN):
                return self._advance(text, end)
        return ""

    def finish(self) -> str:
        """Returns the rest at the end, incomplete characters as the replacement character."""
        return self._advance(self._text(self._window, len(self._ids)), len(self._ids))

    def _advance(self, text: str, end: int) -> str:
        """`text`: of ids[_window:end]."""
        piece = text[len(self._shown) :]
        if not piece:
            return ""
        begin, self._read, self._shown = self._read, end, text
        if end - self._window > WINDOW:
            self._window = begin
            self._shown = self._text(begin, end)
        return piece

    def _text(self, begin: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[begin:end], skip_special_tokens=True)


class TextStream:
    """Turns tokens into text that may be shown, up to a stop string."""

    def __init__(self, tokenizer: TokenDecoder, stops: Sequence[str] = ()) -> None:
        self._detokenizer, self._stops = Detokenizer(tokenizer), StopStrings(stops)
        self.blank = False  # whether all so far was blank, and is to be left out

    def push(self, tokens: Sequence[int]) -> tuple[int, str, bool]:
        """Returns how many of the tokens count, the text that may be shown, and whether a stop string ended with the
        last that counts."""
        if not self._stops.stops:
            return len(tokens), self.push_text(self._detokenizer.push(*tokens))[0], False
        shown = ""
        for count, token in enumerate(tokens, start=1):
            piece, stopped = self.push_text(self._detokenizer.push(token))
            shown += piece
            if stopped:
                return count, shown, True
        return len(tokens), shown, False

    def push_text(self, text: str) -> tuple[str, bool]:
        """Returns what may be shown after `text`, and whether a stop string ended in it."""
        if self.blank:
            text = text.lstrip()
            self.blank = not text
        return self._stops.push(text)

    def finish(self) -> tuple[str, bool]:
        """Returns the rest; an incomplete character's replacement can still complete a stop string."""
        shown, stopped = self.push_text(self._detokenizer.finish())
        return (shown, True) if stopped else (shown + self._stops.finish(), False)


class StopStrings:
    """Finds the first stop string in text that arrives in pieces; the text in front of it is let through.

    The stop string that *ends* first wins (the longest of those that end together), so the result does not depend on
    how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = [s for s in stops if s]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, whether there was a stop string). Text that may begin a stop string is held back."""
        if not self.stops:
            return text, False
        self._held += text
        ends = [(at + len(stop), at) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if ends:
            shown, self._held = self._held[: min(ends)[1]], ""
            return shown, True
        keep = max((overlap(self._held, stop) for stop in self.stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def finish(self) -> str:
        """Returns held-back text, once nothing can follow any more."""
        shown, self._held = self._held, ""
        return shown


def overlap(text: str, stop: str) -> int:
    """Returns the length of the longest proper prefix of `stop` that `text` ends with."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
