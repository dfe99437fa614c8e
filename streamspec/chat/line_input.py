"""Reads what the user types, a line at a time: on a terminal with readline where Python has it, else from a pipe.

Covered by tests/chat/test_terminal.py, which types into a pseudo terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from streamspec.errors import ConfigError

PROMPT = "> "


class LineInput:
    """Reads lines of stdin. `complete`: the possible ends of the last word of a line's beginning, for the Tab key."""

    def __init__(self, terminal: bool, complete: Callable[[str], list[str]]) -> None:
        self._terminal = terminal
        if terminal:
            edit_lines(complete)

    def read(self) -> str:
        """Returns the next line without its newline. Raises EOFError at the end, ConfigError for what is no text."""
        try:
            if self._terminal:
                return input(PROMPT)
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise ConfigError(f"a line that is no text ({error.reason})", error.encoding, "convert it") from None
        if not line:
            raise EOFError
        return line.removesuffix("\n")


def edit_lines(complete: Callable[[str], list[str]]) -> None:
    """Sets up readline where this Python has it: arrows, history of this conversation, Tab."""
    try:
        import readline
    except ImportError:  # Windows, whose console edits lines itself
        return

    def completer(start: str, number: int) -> str | None:
        completions = complete(readline.get_line_buffer()[: readline.get_endidx()])
        return completions[number] if number < len(completions) else None

    readline.set_completer(completer)
    readline.set_completer_delims(" ")
    libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
