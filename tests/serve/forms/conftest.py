"""Servers of toy models that think, answer and call a tool, and what they say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.conftest import Running
from tests.support.thinking_sessions import thinking

CALL = '{"name": "get_weather", "arguments": {"place": "Oslo", "unit": "C"}}'
WEATHER = {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "Oslo"]}, "unit": {"enum": ["C", "F"]}},
    "required": ["place", "unit"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def talking() -> Iterator[Running]:
    """Thinks "Rome?" and says "Oslo, END."."""
    running = Running(thinking("<think>\nRome?\n</think>\n\nOslo, END."))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def calling() -> Iterator[Running]:
    """Thinks "Rome?", says "I look." and calls a tool."""
    running = Running(thinking(f"<think>\nRome?\n</think>\n\nI look.<call>{CALL}"))
    yield running
    running.stop()
