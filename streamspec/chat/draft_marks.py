"""Marks the drafted tokens in an answer as it comes: coloured, in brackets, or not at all."""

from __future__ import annotations

import os
import unicodedata
from typing import Any

from streamspec.errors import ConfigError
from streamspec.runtime.stream import Chunk
from streamspec.runtime.text.text_deltas import TextDelta, ThoughtDeltas

MARKS = {"colour": ("\x1b[1;32m", "\x1b[0m"), "brackets": ("[", "]"), "none": ("", "")}
AUTO = "auto"
SHOWN, FOLDED = "shown", "folded"  # thoughts


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
    """Turns chunks into text with marks. The text is the chunks' own; the tokens tell which characters were drafted.

    `thoughts`: "shown" writes what the model thinks before its answer, dimmed, "folded" a word in its place; only on a
    terminal.
    """

    def __init__(self, tokenizer: Any, marks: tuple[str, str], terminal: bool, thoughts: str = SHOWN) -> None:
        self._marks, self._deltas, self._terminal = marks, ThoughtDeltas(tokenizer), terminal
        self._thoughts, self._dim = thoughts, ("\x1b[2m", "\x1b[0m") if has_colour() else ("(", ")")
        self._open = self._thinking = False

    def push(self, chunk: Chunk) -> str:
        """Returns the chunk's thought and text as they are to be written."""
        _, text = self._deltas.push(chunk)
        thinks = self._terminal and bool(chunk.reasoning)
        out = self._think(thinks) if thinks and not self._thinking else ""
        if thinks and self._thoughts == SHOWN:
            out += harmless(chunk.reasoning)
        return out + "".join(map(self._marked, text))

    def finish(self) -> str:
        """Returns what ends an open mark."""
        return self._think(False).rstrip("\n") + self._switch(False)

    def _think(self, thinks: bool) -> str:
        if thinks == self._thinking:
            return ""
        self._thinking = thinks
        return self._dim[0] + "thinking" * (self._thoughts == FOLDED) if thinks else self._dim[1] + "\n\n"

    def _marked(self, piece: TextDelta) -> str:
        text = harmless(piece.text) if self._terminal else piece.text
        return self._think(False) + self._switch(piece.drafted) + text if text else ""

    def _switch(self, drafted: bool) -> str:
        if drafted == self._open:
            return ""
        self._open = drafted
        return self._marks[not drafted]
