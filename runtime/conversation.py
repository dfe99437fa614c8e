"""The turns of a chat: what is forgotten where they no longer fit. Pure functions over messages; knows nothing about
models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamspec.errors import ConfigError, DataError

Message = Mapping[str, Any]
OVERFLOW = ("refuse", "forget")


def message(said: str | Message) -> dict[str, Any]:
    """What the user said, as a message. Raises DataError for what is none."""
    if not isinstance(said, (str, Mapping)):
        raise DataError(
            f"a message of type {type(said).__name__}",
            "text, or an object with role and content",
            "correct the message",
        )
    return {"role": "user", "content": said} if isinstance(said, str) else dict(said)


def check_overflow(overflow: str) -> None:
    if overflow not in OVERFLOW:
        raise ConfigError(f"overflow {overflow!r}", " or ".join(OVERFLOW), "choose one of them")


def forget(messages: Sequence[Message], tokens: Callable[[Sequence[Message]], int], enough: int) -> list[Message]:
    """The messages without their oldest turns: `tokens` of what is left are `enough` or fewer, or one turn is left.
    System messages stay.

    A turn begins with a user's message.
    """
    left = list(messages)
    while tokens(left) > enough:
        begins = [i for i, m in enumerate(left) if m.get("role") == "user"]
        if len(begins) < 2:
            break
        first, second = begins[:2]
        left = [m for i, m in enumerate(left) if not (first <= i < second) or m.get("role") == "system"]
    return left
