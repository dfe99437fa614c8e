"""Marks the drafted tokens in an answer as it comes: coloured, in brackets, or not at all."""

from __future__ import annotations

import os
import unicodedata
from typing import Any

from streamspec.errors import ConfigError
from streamspec.runtime.stream import Chunk
from streamspec.runtime.text.detokenize import Detokenizer

MARKS = {"colour": ("\x1b[1;32m", "\x1b[0m"), "brackets": ("[", "]"), "none": ("", "")}
AUTO = "auto"


def choose_marks(name: str, terminal: bool) -> tuple[str, str]:
    """Returns the beginning and the end of a drafted piece. `auto`: colour on a terminal that has
    it, brackets on others, nothing in a pipe. Raises ConfigError for an unknown name."""
    if name != AUTO and name not in MARKS:
        raise ConfigError(f"marks {name!r}", f"{AUTO}, {', '.join(MARKS)}", "choose one of them")
    if name != AUTO:
        return MARKS[name]
    return MARKS["none"] if not terminal else MARKS["colour" if has_colour() else "brackets"]


def has_colour() -> bool:
    """Whether a terminal's user wants colours (https://no-color.org) and it can draw them."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def harmless(text: str) -> str:
    """Replaces control characters other than newlines and tabs: a model must not steer the terminal."""
    return "".join("\ufffd" if c not in "\n\t" and unicodedata.category(c) == "Cc" else c for c in text)


class MarkedText:
    """Turns chunks into text with marks. The text is the chunks' own; the tokens tell which characters were drafted."""

    def __init__(self, tokenizer: Any, marks: tuple[str, str], terminal: bool) -> None:
        self._begin, self._end = marks
        self._pieces, self._terminal = Detokenizer(tokenizer), terminal
        self._drafted: list[bool] = []  # of characters that no chunk has shown yet
        self._open = False

    def push(self, chunk: Chunk) -> str:
        """Returns the chunk's text as it is to be written."""
        for token, drafted in zip(chunk.token_ids, chunk.drafted, strict=True):
            self._drafted += [drafted] * len(self._pieces.push(token))
        flags, self._drafted = self._drafted[: len(chunk.text)], self._drafted[len(chunk.text) :]
        flags += [False] * (len(chunk.text) - len(flags))
        out = ""
        for character, drafted in zip(harmless(chunk.text) if self._terminal else chunk.text, flags, strict=True):
            out += self._switch(drafted) + character
        return out

    def finish(self) -> str:
        """Returns what ends an open mark."""
        return self._switch(False)

    def _switch(self, drafted: bool) -> str:
        if drafted == self._open:
            return ""
        self._open = drafted
        return self._begin if drafted else self._end
