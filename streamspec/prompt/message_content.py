"""Reads the content of a chat's message in the shapes that OpenAI's API has for it. Tests:
tests/core/prompt/test_prompt_format.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamspec.errors import DataError


def text_of(content: Any, where: str, fix: str = "correct the messages") -> str | None:
    """Returns the text of a content: a string, null, or a list of parts of the types `text` and `refusal`, whose texts
    are joined. `where`: the message, for errors. Raises DataError for anything else, such as images."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise DataError(f"{where} with content of type {type(content).__name__}", "text, or a list of parts", fix)
    return "".join(_part(part, where, fix) for part in content)


def _part(part: Any, where: str, fix: str) -> str:
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    text = part.get(kind) if kind in ("text", "refusal") else None
    if not isinstance(text, str):
        raise DataError(f"{where} with {str(kind)[:40]}", "text: models here read text alone", fix)
    return text
