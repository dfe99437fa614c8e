"""The file that keeps answers: written as they come, read by a run that goes on.

Tests: tests/adapters/answers/test_self_distillation.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamspec.adapters.distributed import processes
from streamspec.atomic import write_text
from streamspec.errors import DataError

Answered = list[tuple[list[int], list[int]]]  # prompts with their answers


class CompletionFile:
    """Answers by prompt, kept in a JSON lines file: first the settings that made them, then one line per answer,
    written as they come.

    A line cut off by a killed process is dropped. Raises DataError where other settings made the answers.
    """

    def __init__(self, path: Path, made_by: dict[str, Any], before: dict[str, Any] | None = None) -> None:
        """`before`: what older versions wrote for the same settings."""
        self.path, self.known = path, dict[tuple[int, ...], list[int]]()
        try:
            content = path.read_text(encoding="utf-8") if path.exists() else ""
            lines = content.splitlines()
            rows = [row for row in map(_parsed, lines) if row is not None]
            self.known = {tuple(row["prompt"]): list(row["answer"]) for row in rows[1:]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}: {type(error).__name__} {error}", "a file of answers", "name another file"
            ) from None
        if rows and rows[0] == before:
            rows[0], content = made_by, ""  # to be written anew
        if rows and rows[0] != made_by:
            raise DataError(
                f"{path}: answers of {_short(rows[0], made_by)}",
                _short(made_by, rows[0]),
                "name another file, or remove this one",
            )
        self.known = processes.from_first(self.known)  # the first may add answers before another has read the file
        whole = len(rows) == len(lines) and content.endswith("\n")
        if processes.is_first() and not whole:  # another run may add to a whole one at this moment
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, "".join(json.dumps(row) + "\n" for row in rows or [made_by]))

    def add_new(self, found: Answered) -> None:
        """Adds those answers whose prompts have none."""
        new = [(prompt, answer) for prompt, answer in found if tuple(prompt) not in self.known]
        self.add([prompt for prompt, _ in new], [answer for _, answer in new])

    def add(self, prompts: list[list[int]], answers: list[list[int]]) -> None:
        """Adds the answers to these prompts, in memory and, on the first process, to the file."""
        self.known |= {tuple(p): a for p, a in zip(prompts, answers, strict=True)}
        if not processes.is_first():
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(
                json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in zip(prompts, answers, strict=True)
            )


def _short(row: dict[str, Any], other: dict[str, Any]) -> str:
    """What is not so in `other`."""
    apart = [key for key in row | other if row.get(key) != other.get(key)]
    return ", ".join(f"{key} {str(row.get(key))[:24]}" for key in apart)


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def up_to_end(answer: list[int], ends: Sequence[int]) -> list[int]:
    """The answer up to the first of `ends`: files of answers may come from runs that knew fewer."""
    stop = next((i for i, token in enumerate(answer, start=1) if token in ends), len(answer))
    return answer[:stop]


def answered(prompts: list[list[int]], known: dict[tuple[int, ...], list[int]]) -> Answered:
    """The prompts that have an answer, with it."""
    return [(p, known[tuple(p)]) for p in prompts if tuple(p) in known]
