"""Reads task data: JSON lines in the four TRL shapes, detected by their columns. Used by training and `bench`.

Every error names the file and the line. Tests: tests/adapters/training/test_data.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from streamspec.errors import DataError

Message = dict[str, str]
TEXT_OPENING = 400  # characters of a `text` row that serve as its prompt, at most half of it
MAX_LINE = 16 << 20  # characters
SHAPES = (
    "`text`; `messages`; `prompt` + `completion` as strings; `prompt` + `completion` as message lists; `turns` "
    "(bench only)"
)


@dataclass(frozen=True)
class Example:
    """One row. `prompt` and `completion` are strings or message lists; `text` rows have an empty prompt."""

    shape: str  # "text" | "messages" | "strings" | "message_lists" | "turns"
    prompt: str | list[Message]
    completion: str | list[Message] | None
    references: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    where: str = "a row"  # file and line, for messages

    @property
    def opening(self) -> str | list[Message]:
        """The text that a model continues: the prompt, or the beginning of a `text` row."""
        if self.shape != "text":
            return self.prompt
        text = str(self.completion)
        return text[: min(TEXT_OPENING, len(text) // 2)]


def read_examples(path: str | Path, limit: int | None = None) -> list[Example]:
    """Reads all rows (at most `limit`). Raises DataError on a missing, empty, malformed or mixed file."""
    path = Path(path)
    examples: list[Example] = []
    for example in _parse(path):
        if examples and example.shape != examples[0].shape:
            raise DataError(
                f"{example.where} has the shape `{example.shape}` after rows of `{examples[0].shape}`",
                "one shape in a file",
                "split the file by shape",
            )
        examples.append(example)
        if limit is not None and len(examples) >= limit:
            break
    if not examples:
        raise DataError(f"{path} holds no rows", "JSON lines, one object a line", "check the file")
    return examples


def _parse(path: Path) -> Iterator[Example]:
    try:
        file = path.open(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", "a readable JSONL file", "check the path") from None
    with file:
        number = 0
        try:
            while line := file.readline(MAX_LINE + 1):
                number += 1
                if len(line) > MAX_LINE:
                    raise DataError(
                        f"{path}, line {number}: more than {MAX_LINE} characters",
                        "one JSON object a line",
                        "check the file",
                    )
                if line.strip():
                    where = f"{path}, line {number}"
                    yield replace(_example(_object(line, path, number), where), where=where)
        except UnicodeDecodeError:
            raise DataError(f"{path}, after line {number}: not UTF-8", "UTF-8 text", "re-encode the file") from None


def _object(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", error)  # JSON's own errors count lines anew
        raise DataError(f"{path}, line {number}: {reason}", "one JSON object a line", "mend or drop the line") from None
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        raise DataError(
            f"{path}, line {number}: half of a surrogate pair, or nested too deep",
            "text that UTF-8 can hold",
            "mend or drop the line",
        ) from None
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number}: {type(row).__name__}", "a JSON object", "mend or drop the line")
    return row


def _example(row: dict[str, Any], where: str) -> Example:
    references = row.get("references") or []
    if not isinstance(references, list) or not all(isinstance(r, str) for r in references):
        raise DataError(
            f"{where}: references are no list of strings", "a list of accepted answers", "mend or drop the line"
        )
    extra: dict[str, Any] = {k: row[k] for k in ("category", "question_id") if k in row}
    if isinstance(row.get("turns"), list) and row["turns"]:
        turns = row["turns"]
        if not all(isinstance(turn, str) for turn in turns):
            raise DataError(
                f"{where}: turns are no list of strings", "what is said in each turn", "mend or drop the line"
            )
        return Example("turns", turns[0], None, references, extra | {"turns": turns})
    if isinstance(row.get("text"), str):
        return Example("text", "", row["text"])
    if "messages" in row:
        messages = _messages(row["messages"], where)
        if messages[-1]["role"] != "assistant":
            return Example("messages", messages, None, references, extra)
        return Example("messages", messages[:-1], messages[-1:], references, extra)
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, str) and (completion is None or isinstance(completion, str)):
        return Example("strings", prompt, completion, references, extra)
    if isinstance(prompt, list) and (completion is None or isinstance(completion, list)):
        answer = None if completion is None else _messages(completion, where)
        return Example("message_lists", _messages(prompt, where), answer, references, extra)
    raise DataError(f"{where}: columns {sorted(row)}", SHAPES, "rename the columns")


def _messages(value: Any, where: str) -> list[Message]:
    good = (
        isinstance(value, list)
        and value
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
        )
    )
    if not good:
        raise DataError(
            f"{where}: not a list of messages", 'a list of {"role": ..., "content": ...}', "mend or drop the line"
        )
    return [{"role": m["role"], "content": m["content"]} for m in value]
