"""Reads the commands that a page of docs/lab/benchmarks shows, to compare them with those that are run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOTS = "..."
# Options whose values are files and folders, which pages name as they like.
FILES = {
    "--adapter",
    "--also",
    "--answers",
    "--base",
    "--books",
    "--data",
    "--draft",
    "--json",
    "--kept",
    "--out",
    "--prompts",
}
FILES |= {"--save-outputs", "--store", "--target-adapter", "--val", "--work"}
PROGRAM = re.compile(r"^([A-Z_]+=\S+ )?(python (-m tests|benchmarks/)|streamspec )")
BRACKETS = re.compile(r"\[([^][]*)\]")


@dataclass(frozen=True)
class Shown:
    """A command as a page shows it: a program, the options it has, those it may have (in brackets), and whether there
    may be `more` (three dots)."""

    program: tuple[str, ...]
    options: frozenset[tuple[str, ...]]
    may: frozenset[tuple[str, ...]] = frozenset()
    more: bool = False

    def is_of(self, run: Shown) -> bool:
        """Whether `run` is this command. A value in capitals is any."""
        known = self.options | self.may
        given = all(any(same(shown, option) for option in run.options) for shown in self.options)
        return (
            self.program == run.program
            and given
            and (self.more or all(any(same(shown, option) for shown in known) for option in run.options))
        )


def same(shown: tuple[str, ...], run: tuple[str, ...]) -> bool:
    """Whether an option is the one shown. Files are any, as is a value in capitals; dots stand for more values."""
    if shown[0] != run[0] or shown[0] in FILES:
        return shown[0] == run[0]
    if shown[-1] == DOTS:
        shown = shown[:-1]
        run = run[: len(shown)]
    return len(shown) == len(run) and all(a == b or a.isupper() for a, b in zip(shown, run, strict=True))


def read_shown(words: list[str]) -> Shown:
    """Reads a command's words. One without any is mentioned only, with whichever options."""
    program = program_of(words)
    more = len(words) == 2 or words[2] == DOTS
    return Shown(program, options_in(words), more=more)


def program_of(words: list[str]) -> tuple[str, ...]:
    """`streamspec` or a script's name, and the subcommand, if it has any."""
    if words[0] == "streamspec":
        return tuple(words[:2])
    if words[1] == "-m":
        return (words[2],)
    script = ROOT / "benchmarks" / Path(words[1]).name
    first = [word for word in words[2:3] if word[0] != "-" and f'"{word}"' in script.read_text(encoding="utf-8")]
    return script.name, *first


def options_in(words: list[str]) -> frozenset[tuple[str, ...]]:
    """Each option with its values."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            found.append([word])
        elif found:
            found[-1].append(word)
    return frozenset(map(tuple, found))


def shown_on(page: str) -> Iterator[tuple[str, Shown]]:
    """The commands of a page: lines of its blocks, and what it quotes."""
    blocks = re.findall(r"^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    prose = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    lines += [" ".join(one.split()) for one in re.findall(r"`([^`]+)`", prose)]
    for line in lines:
        if PROGRAM.match(line) and "reproduce.py" not in line:
            yield line, shown_in(re.sub(r"^[A-Z_]+=\S+ ", "", line))


def shown_in(line: str) -> Shown:
    """Reads a line in which brackets hold what may be there."""
    may = frozenset[tuple[str, ...]]()
    while found := BRACKETS.search(line):
        for choice in found[1].split("|"):
            may |= options_in(shlex.split(choice))
        line = line[: found.start()] + line[found.end() :]
    return replace(read_shown(shlex.split(line)), may=may)
