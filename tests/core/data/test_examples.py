"""Shapes of rows: what each becomes, what a message keeps, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamspec.data import Example, iterate_examples
from streamspec.errors import DataError

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"x": 1}}}


def one(tmp_path: Path, row: dict[str, Any], **columns: str) -> Example:
    (tmp_path / "d.jsonl").write_text(json.dumps(row))
    (example,) = iterate_examples(tmp_path / "d.jsonl", columns)
    return example


def test_sharegpt_becomes_messages(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    example = one(tmp_path, {"system": "s", "conversations": turns, "id": 7})
    assert example.shape == "messages"
    assert (example.prompt, example.completion) == ([{"role": "system", "content": "s"}, USER], [ANSWER])
    assert one(tmp_path, {"conversations": [USER, ANSWER]}).completion == [ANSWER]  # as some write there


def test_sharegpt_calls_become_tool_calls(tmp_path: Path) -> None:
    turns = [
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "b"},
    ]
    example = one(tmp_path, {"conversations": turns, "tools": json.dumps([TOOL])})
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert example.prompt[1:] == [  # type: ignore[index]
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    assert example.tools == [TOOL]


def test_alpaca_becomes_a_conversation(tmp_path: Path) -> None:
    example = one(tmp_path, {"instruction": "Add", "input": "1 2", "output": "3", "history": [["a", "b"]]})
    assert example.prompt == [USER, ANSWER, {"role": "user", "content": "Add\n\n1 2"}]
    assert example.completion == [{"role": "assistant", "content": "3"}]
    assert one(tmp_path, {"instruction": "a", "input": "", "output": "b"}).prompt == [USER]


def test_columns_are_renamed(tmp_path: Path) -> None:
    row = {"question": "a", "answer": "b", "prompt": "other"}
    example = one(tmp_path, row, prompt="question", completion="answer")
    assert (example.prompt, example.completion) == ("a", "b")
    with pytest.raises(DataError, match="no column missing; expected question or answer or prompt"):
        one(tmp_path, row, prompt="missing")


def test_messages_keep_what_templates_read(tmp_path: Path) -> None:
    calling = {"role": "assistant", "content": None, "tool_calls": [CALL], "audio": None}
    result = {"role": "tool", "name": "f", "tool_call_id": "1", "content": "2"}
    example = one(tmp_path, {"messages": [USER, calling, result, ANSWER | {"reasoning_content": "r"}], "tools": [TOOL]})
    assert example.prompt == [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, result]
    assert example.completion == [ANSWER | {"reasoning_content": "r"}] and example.tools == [TOOL]


def test_a_null_content_without_calls_is_empty(tmp_path: Path) -> None:
    example = one(tmp_path, {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]})
    assert example.completion == [{"role": "assistant", "content": ""}]


def test_parts_of_text_are_joined_and_images_refused_by_name(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image_url": None}]
    example = one(tmp_path, {"messages": [{"role": "user", "content": parts}, ANSWER]})
    assert example.prompt == [{"role": "user", "content": "ab"}]
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(DataError, match="line 1: a message with image_url"):
        one(tmp_path, {"messages": [{"role": "user", "content": [*parts, image]}, ANSWER]})


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]}, "without a name"),
        ({"messages": [USER, ANSWER], "tools": [{"parameters": {}}]}, "tools are no list of functions"),
        ({"messages": "[{", "tools": None}, "messages is no JSON"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "a turn from 'narrator'.*human"),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, "without a name"),
        ({"prompt": "a", "completion": [ANSWER]}, "a completion that is no text"),
        ({"instruction": "a", "input": 1, "output": "b"}, "an input that is no text"),
        ({"question": "a"}, "--columns prompt=NAME"),
    ],
)
def test_rows_of_no_shape_are_refused_by_name(row: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=says) as error:
        one(tmp_path, row)
    assert "line 1" in str(error.value) and "\n" not in str(error.value)
