"""Turns rows of data into examples, by their columns: TRL's four shapes, Alpaca's, ShareGPT's, and turns of a dialogue.

Every error names the file and the line. Tests: tests/core/data/test_examples.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from streamspec.data.json_files import MEND, Row
from streamspec.data.messages import Message, checked_messages, checked_tools, spoken, written
from streamspec.data.sources import DataSource, sources
from streamspec.errors import DataError

TEXT_OPENING = 400  # characters of a `text` row that serve as its prompt, at most half of it


@dataclass(frozen=True)
class Example:
    """One row. `prompt` and `completion` are strings or message lists; `text` rows have an empty prompt. A
    conversation without an answer at its end has no completion.
    """

    shape: str  # "text" | "messages" | "strings" | "message_lists" | "turns"
    prompt: str | list[Message]
    completion: str | list[Message] | None
    references: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    where: str = "a row"  # file and line, for messages
    tools: list[dict[str, Any]] | None = None  # JSON schemas of functions, as chat templates take them

    @property
    def opening(self) -> str | list[Message]:
        """The text that a model continues: the prompt, or the beginning of a `text` row."""
        if self.shape != "text":
            return self.prompt
        text = str(self.completion)
        return text[: min(TEXT_OPENING, len(text) // 2)]


Read = Callable[[Row, str], Example]


@dataclass(frozen=True)
class DataShape:
    """A shape of rows: the columns that tell it, further ones it reads, and how a row becomes an example."""

    needs: Mapping[str, type | tuple[type, ...]]
    reads: tuple[str, ...]
    read: Read
    shown: str  # in messages


def read_examples(path: str | Path, limit: int | None = None) -> list[Example]:
    """Reads all rows (at most `limit`). Raises DataError on missing, empty, malformed or mixed data."""
    examples = list(islice(iterate_examples(path), limit))
    if not examples:
        raise DataError(f"{path} holds no rows", "JSON lines, one object a line", "check the file")
    return examples


def iterate_examples(
    data: Sequence[str | Path] | str | Path, columns: Mapping[str, str] | None = None
) -> Iterator[Example]:
    """Yields the rows of all that `data` names, one at a time. `columns`: what the columns of the data are called, by
    the names that this module knows. Raises DataError as soon as a row is malformed or of another shape than those
    before it in its file.
    """
    for source in sources(data):
        yield from _examples(source, columns)


def sample_examples(
    data: Sequence[str | Path] | str | Path, columns: Mapping[str, str] | None = None, count: int = 200
) -> list[Example]:
    """The first `count` rows of each file or dataset. Raises DataError for one that has none."""
    examples = []
    for source in sources(data):
        some = list(islice(_examples(source, columns), count))
        if not some:
            raise DataError(f"{source.name} holds no rows", "JSON lines, one object a line", "check the file")
        examples += some
    return examples


def _examples(source: DataSource, columns: Mapping[str, str] | None) -> Iterator[Example]:
    shape: str | None = None
    for row, where in source.rows():
        example = replace(_example(_renamed(row, columns, where), where), where=where)
        if shape not in (None, example.shape):
            raise DataError(
                f"{where} has the shape `{example.shape}` after rows of `{shape}`",
                "one shape in a file",
                "split the file by shape",
            )
        shape = example.shape
        yield example


def _renamed(row: Row, columns: Mapping[str, str] | None, where: str) -> Row:
    if not columns:
        return row
    missing = [name for name in columns.values() if name not in row]
    if missing:
        raise DataError(f"{where}: no column {', '.join(missing)}", " or ".join(map(str, row)), "change --columns")
    others = {name: value for name, value in row.items() if name not in columns and name not in columns.values()}
    return others | {known: row[name] for known, name in columns.items()}


def _example(row: Row, where: str) -> Example:
    row = {name: _parsed(name, value, where) for name, value in row.items() if value is not None}
    references = row.setdefault("references", [])
    if not isinstance(references, list) or not all(isinstance(r, str) for r in references):
        raise DataError(f"{where}: references are no list of strings", "a list of accepted answers", MEND)
    for shape in SHAPES:
        if all(isinstance(row.get(name), type_) for name, type_ in shape.needs.items()):
            example = shape.read(row, where)
            extra = {name: row[name] for name in ("category", "question_id") if name in row}
            return replace(example, references=references, extra=extra | example.extra)
    raise DataError(
        f"{where}: columns {sorted(set(row) - {'references'})}",
        "; ".join(dict.fromkeys(shape.shown for shape in SHAPES)),
        "rename the columns, or name them: --columns prompt=NAME,completion=NAME",
    )


def _parsed(name: str, value: Any, where: str) -> Any:
    """JSON inside a cell of CSV or Parquet, in columns that hold lists."""
    if name not in JSON_COLUMNS or not isinstance(value, str):
        return value
    try:
        return json.loads(value or "[]")
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {name} is no JSON: {error}", "a JSON list", MEND) from None


def _turns(row: Row, where: str) -> Example:
    turns = row["turns"]
    if not turns or not all(isinstance(turn, str) for turn in turns):
        raise DataError(f"{where}: turns are no list of strings", "what is said in each turn", MEND)
    return Example("turns", turns[0], None, extra={"turns": turns})


def _text(row: Row, where: str) -> Example:
    return Example("text", "", row["text"])


def _conversation(messages: list[Message], row: Row, where: str) -> Example:
    tools = checked_tools(row.get("tools"), where)
    if messages[-1]["role"] != "assistant":
        return Example("messages", messages, None, tools=tools)
    return Example("messages", messages[:-1], messages[-1:], tools=tools)


def _messages(row: Row, where: str) -> Example:
    return _conversation(checked_messages(row["messages"], where), row, where)


def _sharegpt(row: Row, where: str) -> Example:
    opening = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return _conversation(opening + spoken(row["conversations"], where), row, where)


def _strings(row: Row, where: str) -> Example:
    if not isinstance(row.get("completion", ""), str):
        raise DataError(f"{where}: a completion that is no text", "text, as its prompt is", MEND)
    return Example("strings", row["prompt"], row.get("completion"))


def _message_lists(row: Row, where: str) -> Example:
    answer = checked_messages(row["completion"], where) if "completion" in row else None
    prompt = checked_messages(row["prompt"], where)
    return Example("message_lists", prompt, answer, tools=checked_tools(row.get("tools"), where))


def _alpaca(row: Row, where: str) -> Example:
    messages = [written("system", row["system"])] if row.get("system") else []
    for pair in row.get("history") or []:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise DataError(f"{where}: history is no list of pairs", "[[instruction, output], ...]", MEND)
        messages += [written("user", pair[0]), written("assistant", pair[1])]
    parts = [part for part in (row["instruction"], row.get("input")) if part]
    if not all(isinstance(part, str) for part in parts):
        raise DataError(f"{where}: an input that is no text", "text", MEND)
    messages.append(written("user", "\n\n".join(parts)))
    return Example("message_lists", messages, [written("assistant", row["output"])])


SHAPES = (  # a row has the first shape whose columns it has
    DataShape({"turns": list}, (), _turns, "`turns` (bench only)"),
    DataShape({"text": str}, (), _text, "`text`"),
    DataShape({"messages": (list, dict)}, ("tools",), _messages, "`messages`"),
    DataShape({"conversations": list}, ("tools", "system"), _sharegpt, "`conversations` (ShareGPT)"),
    DataShape({"prompt": str}, ("completion",), _strings, "`prompt` + `completion` as strings or as message lists"),
    DataShape(
        {"prompt": list},
        ("completion", "tools"),
        _message_lists,
        "`prompt` + `completion` as strings or as message lists",
    ),
    DataShape(
        {"instruction": str, "output": str},
        ("input", "system", "history"),
        _alpaca,
        "`instruction` + `output` (Alpaca)",
    ),
)
JSON_COLUMNS = {"messages", "conversations", "tools", "turns", "references", "history"}
COLUMNS = sorted({name for shape in SHAPES for name in (*shape.needs, *shape.reads)})  # that --columns may name
