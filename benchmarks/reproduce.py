#!/usr/bin/env python3
"""Reproduces every table of docs/lab/benchmarks:
`python benchmarks/reproduce.py --data DIR [--work DIR] [--adapters DIR] [--only PART ...] [--all] [--list]`.

`DIR` holds `e2e/` and `wikisql/` with train, dev and test files (prompt/completion rows; test rows may have
`references`), `spec_bench/question.jsonl`, train.jsonl of `gsm8k/` and `spider/`, and `books/train.jsonl.gz`. The
commands are in `results.toml`, a part for each group of tables; each is printed before it runs, and what it prints is
kept in WORK/logs. A result that is there is not made again, a training that was interrupted goes on. Without `--only`
or `--all`: the parts that take at most two hours. A command that fails does not stop those after it; the exit code is
then 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
TASKS = ("e2e", "wikisql")
ON_REQUEST = 2  # hours; longer parts are run when they are asked for
LAST = ("training.json", "manifest.json")  # the file that an adapter or a bundle gets last


@dataclass(frozen=True)
class Part:
    """Tables of `page`, the `commands` that make them, and the `hours` of two cores that these take."""

    page: str
    about: str
    hours: float
    commands: str
    needs: str = ""


@dataclass(frozen=True)
class Command:
    """A program and its options, and the `result` that makes running it unnecessary."""

    words: tuple[str, ...]
    result: str | None = None

    @property
    def line(self) -> str:
        return shlex.join(self.words)

    def arguments(self) -> list[str]:
        """What is executed: this Python in the place of `python` and `streamspec`."""
        program = self.words[0]
        options = [one for word in self.words[1:] for one in (sorted(glob(word)) or [word] if "*" in word else [word])]
        resume = options[:1] == ["train"] and self.result is not None and Path(self.result).exists()
        module = ["-P", "-m", "streamspec"] if program == "streamspec" else []
        return [sys.executable, *module, *options, *(["--resume"] if resume else [])]


def read_parts(file: Path = HERE / "results.toml") -> dict[str, Part]:
    """Reads the parts, the words in capitals replaced but for DATA, ADAPTERS, BENCHMARKS and TASK."""
    read = tomllib.loads(file.read_text(encoding="utf-8"))
    words = re.compile(rf"\b({'|'.join(read['words'])})\b")

    def spelled(text: str) -> str:
        return words.sub(lambda found: read["words"][found[0]], text)

    return {name: Part(**part | {"commands": spelled(part["commands"])}) for name, part in read["parts"].items()}


def commands(part: Part) -> Iterator[Command]:
    """The commands of a part, those with TASK once for each task."""
    for line in part.commands.strip().splitlines():
        for task in TASKS if "TASK" in line else ("",):
            result, _, command = line.replace("TASK", task).rpartition(" <- ")
            yield Command(tuple(shlex.split(command)), result or None)


def finished(result: Path) -> bool:
    """Whether a file exists, or the last file of an adapter or a bundle."""
    return result.is_file() or any((result / last).exists() for last in LAST)


def run(command: Command, log: Path) -> bool:
    """Runs one command, showing and keeping what it prints; returns whether it went well."""
    if command.result is not None and finished(Path(command.result)):
        print(f"# {command.result} is there already", flush=True)
        return True
    print(f"$ {command.line}", flush=True)
    began = time.monotonic()
    with log.open("a", encoding="utf-8") as kept:
        kept.write(f"$ {command.line}\n")
        process = subprocess.Popen(command.arguments(), stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            kept.write(line)
        code = process.wait()
        print(f"# {(time.monotonic() - began) / 60:.1f} minutes, exit code {code}", flush=True)
        kept.write(f"# exit code {code}\n")
    return code == 0


def link(name: str, target: Path) -> None:
    """Makes `name` in this folder a link to `target`, in the place of an earlier one."""
    path = Path(name)
    if path.is_symlink():
        path.unlink()
    path.symlink_to(target, target_is_directory=True)


def main() -> None:
    parts = read_parts()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("benchmarks-work"))
    parser.add_argument("--adapters", type=Path, default=HERE / "adapters", help="holds e2e, wikisql and chat")
    parser.add_argument("--only", nargs="+", choices=parts, metavar="PART")
    parser.add_argument("--all", action="store_true", help="parts that take hours as well")
    parser.add_argument("--list", action="store_true", help="show the parts and end")
    arguments = parser.parse_args()
    if arguments.list:
        for name, part in parts.items():
            needs = f"; needs {part.needs}" if part.needs else ""
            print(f"{name:<14} {part.page}.md, {part.hours:g} h: {part.about}{needs}")
        return
    if arguments.data is None or not (arguments.data / "e2e" / "test.jsonl").exists():
        parser.error(f"found no e2e/test.jsonl in --data {arguments.data}; expected the folder of all data sets")
    if find_spec("streamspec") is None:  # a checkout beside an installation would lack the native operators
        parser.error('found no streamspec in this Python; run: pip install ".[all]"')
    chosen = arguments.only or [name for name, part in parts.items() if arguments.all or part.hours <= ON_REQUEST]
    data, adapters = arguments.data.resolve(), arguments.adapters.resolve()
    (arguments.work / "logs").mkdir(parents=True, exist_ok=True)
    os.chdir(arguments.work)
    for name, target in (("DATA", data), ("ADAPTERS", adapters), ("BENCHMARKS", HERE)):
        link(name, target)
    failed = [
        (name, command.line)
        for name in chosen
        for command in commands(parts[name])
        if not run(command, Path("logs") / f"{name}.txt")
    ]
    for name, line in failed:
        print(f"failed, of {name}: {line}", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
