"""The slash commands of a conversation in the terminal: one row each."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from streamspec.errors import ConfigError, meant

if TYPE_CHECKING:
    from streamspec.chat.terminal import TerminalChat

NO_ADAPTER = "none"


@dataclass(frozen=True)
class SlashCommand:
    """`run(chat, argument)`; `argument` names what follows the command, empty where nothing may."""

    run: Callable[[TerminalChat, str], None]
    argument: str
    help: str


def save(chat: TerminalChat, argument: str) -> None:
    """Saves the conversation. Refuses to replace a file that this conversation did not write or read."""
    path = Path(os.path.expanduser(named(argument, "/save", "a file")))
    if path.exists() and path.resolve() not in chat.files:
        raise ConfigError(f"{path} exists", "a new file", "choose another name")
    chat.session.save(path)
    chat.files.add(path.resolve())
    chat.say(f"saved {len(chat.session.messages)} messages to {path}")


def load(chat: TerminalChat, argument: str) -> None:
    path = Path(os.path.expanduser(named(argument, "/load", "a file of /save")))
    chat.session.restore(path)
    chat.files.add(path.resolve())
    chat.say(f"{len(chat.session.messages)} messages from {path}, {len(chat.session.cached_tokens)} tokens")


def system(chat: TerminalChat, argument: str) -> None:
    """Replaces the system message; the turns stay. A message that the template refuses changes nothing."""
    session = chat.session
    turns = [m for m in session.messages if m.get("role") != "system"]
    head = [{"role": "system", "content": argument}] if argument else []
    session.encode([*head, *turns, {"role": "user", "content": "?"}])
    session.messages = [*head, *turns]
    chat.say("system message set" if argument else "no system message")


def adapter(chat: TerminalChat, argument: str) -> None:
    session = chat.session
    if argument:
        session.swap(None if argument == NO_ADAPTER and NO_ADAPTER not in session.adapters else argument)
    known = ", ".join(session.adapters) or "none"
    chat.say(f"adapter: {session.adapter or NO_ADAPTER}; in the bundle: {known}")


def stats(chat: TerminalChat, argument: str) -> None:
    session = chat.session
    chat.say(str(chat.last) if chat.last else "no answer yet")
    chat.say(
        f"{len(session.messages)} messages; {len(session.cached_tokens)} of {session.context_length} tokens; "
        f"provider: {session.provider}; speculation: {session.speculation}"
    )


def new(chat: TerminalChat, argument: str) -> None:
    head = [m for m in chat.session.messages if m.get("role") == "system"]
    chat.session.forget()
    chat.session.messages = head
    chat.say("a new conversation")


def show_help(chat: TerminalChat, argument: str) -> None:
    for name, command in COMMANDS.items():
        chat.say(f"{f'/{name} {command.argument}'.strip():<16}{command.help}")
    chat.say("A line that begins with // is a message that begins with /. Ctrl-C stops an answer, Ctrl-D ends.")


def leave(chat: TerminalChat, argument: str) -> None:
    chat.ended = True


COMMANDS: dict[str, SlashCommand] = {
    "save": SlashCommand(save, "FILE", "save the conversation, with its keys and values"),
    "load": SlashCommand(load, "FILE", "go on with a saved one"),
    "system": SlashCommand(system, "TEXT", "set the system message; without text: remove it"),
    "adapter": SlashCommand(adapter, "NAME", "switch the adapter of a swappable bundle; none: the base"),
    "stats": SlashCommand(stats, "", "what the last answer took"),
    "new": SlashCommand(new, "", "begin a new conversation"),
    "help": SlashCommand(show_help, "", "show this"),
    "quit": SlashCommand(leave, "", "end"),
}


def run_command(chat: TerminalChat, line: str) -> None:
    """Runs the line `/name argument`. Raises StreamspecError: ConfigError for a command that does not exist."""
    name, _, argument = line.removeprefix("/").partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        fix = f"see /help, or begin a message with //{meant(name, COMMANDS)}"
        raise ConfigError(f"no command /{name}", ", ".join(f"/{known}" for known in COMMANDS), fix)
    if argument.strip() and not command.argument:
        raise ConfigError(f"/{name} {argument.strip()}", f"/{name} alone", "leave the rest out")
    command.run(chat, argument.strip())


def named(argument: str, command: str, what: str) -> str:
    if not argument:
        raise ConfigError(f"{command} without a name", f"{command} and {what}", "name it")
    return argument


def complete(chat: TerminalChat, start: str) -> list[str]:
    """Returns the possible ends of the last word of a line that begins with `start`."""
    if not start.startswith("/"):
        return []
    name, space, word = start.partition(" ")
    if not space:
        return [f"/{choice}" for choice in COMMANDS if f"/{choice}".startswith(name)]
    return [choice for choice in chat.session.adapters if name == "/adapter" and choice.startswith(word)]
