"""The slash commands of a conversation in the terminal: one row each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

from streamspec.chat.draft_marks import FOLDED, SHOWN, harmless
from streamspec.errors import ConfigError, StreamspecError, meant
from streamspec.option_fields import converted
from streamspec.prompt.message_content import text_of
from streamspec.runtime.options import EFFORTS
from streamspec.runtime.sampling.sampling_params import Sampling

if TYPE_CHECKING:
    from streamspec.chat.terminal import TerminalChat

NO_ADAPTER = "none"
DEFAULT = "default"  # the effort that the chat template gives a model
SAMPLING = [one.name for one in fields(Sampling) if one.metadata.get("flag", "") is not None]  # those with a flag


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


def model(chat: TerminalChat, argument: str) -> None:
    """Goes on with another bundle, or base, which reads the messages anew. The present one is unloaded first, as both
    may not fit into memory; after a fault it is loaded again when it is used next, and nothing else has changed.
    """
    from streamspec.library.base_bundle import bundle_of
    from streamspec.library.installed import cached, in_lines, in_rows, installed
    from streamspec.prompt.turn_end import unended_turn_of

    if not argument:
        chat.say(f"model: {chat.model}")
        for line in in_lines(in_rows(installed(), cached())):
            chat.say(line)
        return
    if chat.load is None:
        raise ConfigError(f"/model {argument}", "a chat that can load another", "begin one with it")
    folder, before = bundle_of(os.path.expanduser(argument), say=chat.say, to_load=False), chat.session
    before.unload()
    session = chat.load(folder)
    try:
        session.encode([*before.messages, {"role": "user", "content": "?"}])
    except StreamspecError:  # what its template refuses changes nothing
        session.close()
        raise
    session.messages, chat.session = before.messages, session
    before.close()
    if note := unended_turn_of(session):
        chat.say(note)
    chat.say(f"model: {chat.model}; {chat.sampling.in_words}; {len(session.messages)} messages are read anew")


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


def regenerate(chat: TerminalChat, argument: str) -> None:
    """Answers the last message anew. The old answer stays where there is no new one."""
    session = chat.session
    before, asked = session.messages, last_asked(chat)
    session.messages = left = before[:asked]
    try:
        chat.answer(before[asked])
    finally:
        if session.messages is left:
            session.messages = before


def undo(chat: TerminalChat, argument: str) -> None:
    asked = last_asked(chat)
    text = harmless((text_of(chat.session.messages[asked]["content"], "a message") or "").split("\n")[0])
    chat.session.messages = chat.session.messages[:asked]
    chat.say(f"taken back: {text[:60]}")


def last_asked(chat: TerminalChat) -> int:
    """Returns the place of the newest question in the messages. Raises ConfigError where there is none."""
    places = [place for place, message in enumerate(chat.session.messages) if message.get("role") == "user"]
    if not places:
        raise ConfigError("a conversation without a message", "one at least", "write one")
    return places[-1]


def set_sampling(chat: TerminalChat, argument: str) -> None:
    """Sets a field of the sampling; without a value, it is the model's again. Without a name, shows it."""
    name, _, text = argument.partition(" ")
    field = name.replace("-", "_")
    if name and field not in SAMPLING:
        raise ConfigError(f"/set {name}", " or ".join(SAMPLING), f"correct the name{meant(field, SAMPLING)}")
    given = {one: value for one, value in chat.given.items() if one != field}
    if text:
        given[field] = converted(field, text.strip(), get_type_hints(Sampling)[field])
    chat.session.sampling.changed(**given)  # a fault leaves everything as it was
    chat.given = given
    chat.say(f"sampling: {chat.sampling.in_words}")


def think(chat: TerminalChat, argument: str) -> None:
    """Sets how long the model thinks from the next answer on; without an effort, shows thoughts or folds them."""
    if argument:
        chat.options = replace(chat.options, reasoning_effort=None if argument == DEFAULT else argument)
    else:
        chat.thoughts = FOLDED if chat.thoughts == SHOWN else SHOWN
    chat.say(f"thoughts: {chat.thoughts}, effort: {chat.options.reasoning_effort or 'as the model is used to'}")


def show_help(chat: TerminalChat, argument: str) -> None:
    for name, command in COMMANDS.items():
        chat.say(f"{f'/{name} {command.argument}'.strip():<16}{command.help}")
    chat.say('A line that begins with // is a message that begins with /. """ begins and ends one of several lines.')
    chat.say("Ctrl-C stops an answer, Ctrl-D ends.")


def leave(chat: TerminalChat, argument: str) -> None:
    chat.ended = True


COMMANDS: dict[str, SlashCommand] = {
    "save": SlashCommand(save, "FILE", "save the conversation, with its keys and values"),
    "load": SlashCommand(load, "FILE", "go on with a saved one"),
    "system": SlashCommand(system, "TEXT", "set the system message; without text: remove it"),
    "adapter": SlashCommand(adapter, "NAME", "switch the adapter of a swappable bundle; none: the base"),
    "model": SlashCommand(model, "NAME", "go on with another bundle or base; without a name: show what there is"),
    "stats": SlashCommand(stats, "", "what the last answer took"),
    "regen": SlashCommand(regenerate, "", "answer the last message anew"),
    "undo": SlashCommand(undo, "", "take the last message and its answer back"),
    "set": SlashCommand(
        set_sampling, "NAME VALUE", "set the temperature, top_k, ...; without a value: the model's own"
    ),
    "think": SlashCommand(
        think, "EFFORT", "think so long: none to high, or default; without an effort: show thoughts or fold them"
    ),
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


def bundle_names() -> list[str]:
    from streamspec.library.installed import installed_names

    return installed_names()


def complete(chat: TerminalChat, start: str) -> list[str]:
    """Returns the possible ends of the last word of a line that begins with `start`."""
    if not start.startswith("/"):
        return []
    name, space, word = start.partition(" ")
    if not space:
        return [f"/{choice}" for choice in COMMANDS if f"/{choice}".startswith(name)]
    known: dict[str, Callable[[], Iterable[str]]] = {
        "/adapter": lambda: chat.session.adapters,
        "/model": bundle_names,
        "/set": lambda: SAMPLING,
        "/think": lambda: [*EFFORTS, DEFAULT],
    }
    return [choice for choice in known.get(name, list)() if choice.startswith(word)]
