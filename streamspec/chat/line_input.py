"""Reads what the user types, a line or a block of lines at a time: on a terminal with readline where Python has it,
else from a pipe.

Covered by tests/chat/test_terminal.py, which types into a pseudo terminal.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable

from streamspec.errors import ConfigError

PROMPT, MORE = "> ", ". "
BLOCK = '"""'  # begins and ends a message of several lines
COMMAND = re.compile(r"/[a-z]+ ")


class LineInput:
    """Reads lines and blocks of stdin. `complete`: the possible ends of a line's last word, for the Tab key."""

    def __init__(self, terminal: bool, complete: Callable[[str], list[str]]) -> None:
        self._terminal = terminal
        if terminal:
            edit_lines(complete)

    def read(self) -> str:
        """Returns the next line without its newline, or a whole block; a block or a paste that begins with a slash gets
        a second one, as a message. A paste is one line, whatever it holds. Raises EOFError at the end, ConfigError for
        what is no text and for a block without an end.
        """
        line = self._line(PROMPT)
        if "\n" in line:  # a paste, unless it follows a command that was typed
            return f"/{line}" if line.startswith("/") and not COMMAND.match(line) else line
        if not line.startswith(BLOCK):
            return line
        lines = [line.removeprefix(BLOCK)]
        while not lines[-1].rstrip().endswith(BLOCK):
            try:
                lines.append(self._line(MORE))
            except EOFError:
                raise ConfigError(f"a message that begins with {BLOCK}", f"{BLOCK} at its end", "end it") from None
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        text = "\n".join(lines).strip("\n")
        return f"/{text}" if text.startswith("/") else text

    def _line(self, prompt: str) -> str:
        try:
            if self._terminal:
                return input(prompt)
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise ConfigError(f"a line that is no text ({error.reason})", error.encoding, "convert it") from None
        if not line:
            raise EOFError
        return line.removesuffix("\n").removesuffix("\r")  # files of Windows in a pipe


def edit_lines(complete: Callable[[str], list[str]]) -> None:
    """Sets up readline where this Python has it: arrows, history of this conversation, Tab, pastes as one line."""
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
    if not libedit and os.environ.get("TERM") != "dumb":  # which have no such thing
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
