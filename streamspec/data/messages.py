"""Checks the messages of a conversation and the tools it may call, and reads ShareGPT's words for them.

A message keeps what it holds (`name`, `tool_calls`, `tool_call_id`, ...): chat templates read it. Tests:
tests/core/data/test_examples.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from streamspec.data.json_files import MEND
from streamspec.errors import DataError
from streamspec.prompt.message_content import text_of

Message = dict[str, Any]
SPEAKERS = {  # ShareGPT's `from`: the role
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "function_call",
}


def written(role: str, content: str) -> Message:
    """A message of text."""
    return {"role": role, "content": content}


def checked_messages(value: Any, where: str) -> list[Message]:
    """A list of messages with text alone as their content, null only where a message calls tools. Raises DataError."""
    good = isinstance(value, list) and value and all(_is_message(m) for m in value)
    if not good:
        raise DataError(f"{where}: not a list of messages", 'a list of {"role": ..., "content": ...}', MEND)
    return [_message(m, where) for m in value]


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    return isinstance(message.get("content"), (str, list)) or (
        message.get("content") is None and ("content" in message or bool(message.get("tool_calls")))
    )


def _message(message: Message, where: str) -> Message:
    fields = {name: value for name, value in message.items() if value is not None and value != []}
    calls = fields.get("tool_calls")
    if calls is not None:
        _check_calls(calls, where)
    content = text_of(message.get("content"), f"{where}: a message", "drop the line")
    return fields | {"content": content if calls is not None else content or ""}


def _check_calls(calls: Any, where: str) -> None:
    good = isinstance(calls, list) and all(isinstance(call, dict) and called(call) for call in calls)
    if not good:
        raise DataError(
            f"{where}: tool_calls without a name", '[{"function": {"name": ..., "arguments": {...}}}]', MEND
        )


def called(call: Mapping[str, Any]) -> str:
    """Returns the name of the function in a tool call or in a tool's schema; "" without one."""
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def checked_tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """The tools of a row, None without any. Raises DataError unless each is an object that names a function."""
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) and called(tool) for tool in value):
        raise DataError(
            f"{where}: tools are no list of functions", '[{"type": "function", "function": {"name": ...}}]', MEND
        )
    return value


def spoken(value: Any, where: str) -> list[Message]:
    """Reads the messages of ShareGPT's `conversations`: `from` and `value`, or `role` and
    `content`, as some write there."""
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: conversations without turns", '[{"from": "human", "value": ...}, ...]', MEND)
    if all(isinstance(turn, dict) and "from" not in turn for turn in value):
        return checked_messages(value, where)
    messages = []
    for turn in value:
        speaker = turn.get("from") if isinstance(turn, dict) else None
        if not isinstance(speaker, str) or speaker not in SPEAKERS or not isinstance(turn.get("value"), str):
            raise DataError(f"{where}: a turn from {speaker!r} of no known kind", ", ".join(SPEAKERS), MEND)
        role = SPEAKERS[speaker]
        messages.append(_calling(turn["value"], where) if role == "function_call" else written(role, turn["value"]))
    return messages


def _calling(text: str, where: str) -> Message:
    """Reads a turn with the JSON text of one call, or of several."""
    try:
        calls = json.loads(text)
    except (ValueError, RecursionError):
        calls = None
    calls = calls if isinstance(calls, list) else [calls]
    _check_calls([call or {} for call in calls], where)
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": c} for c in calls]}
