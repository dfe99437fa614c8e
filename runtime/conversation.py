"""Checks the messages of a chat and drops its oldest turns where they no longer fit. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamspec.errors import ConfigError, DataError

Message = Mapping[str, Any]
OVERFLOW = ("refuse", "forget")


def message(content: str | Message) -> dict[str, Any]:
    """The user's input as a message. Raises DataError for anything else."""
    if not isinstance(content, (str, Mapping)):
        raise DataError(
            f"a message of type {type(content).__name__}",
            "text, or an object with role and content",
            "correct the message",
        )
    return {"role": "user", "content": content} if isinstance(content, str) else dict(content)


def check_overflow(overflow: str) -> None:
    if overflow not in OVERFLOW:
        raise ConfigError(f"overflow {overflow!r}", " or ".join(OVERFLOW), "choose one of them")


def forget(messages: Sequence[Message], tokens: Callable[[Sequence[Message]], int], enough: int) -> list[Message]:
    """Drops the oldest turns until `tokens` of the rest are `enough` or fewer, or one turn is left. System messages
    stay. A turn begins with a user's message.
    """
    left = list(messages)
    while tokens(left) > enough:
        begins = [i for i, m in enumerate(left) if m.get("role") == "user"]
        if len(begins) < 2:
            break
        first, second = begins[:2]
        left = [m for i, m in enumerate(left) if not (first <= i < second) or m.get("role") == "system"]
    return left
