"""A bundle of a tiny model whose chat template writes calls of tools, and a server of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamspec.runtime import load
from tests.serve.conftest import Running
from tests.support.served_bundles import calling_bundle

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather now.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Rome", "Oslo"]}, "unit": {"$ref": "#/$defs/unit"}},
            "required": ["place", "unit"],
            "additionalProperties": False,
            "$defs": {"unit": {"enum": ["C", "F"]}},
        },
        "strict": True,
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="session")
def tool_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calling_bundle(tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="session")
def tool_server(tool_bundle: Path) -> Iterator[Running]:
    running = Running(load(tool_bundle, threads=1, tree=8))
    yield running
    running.stop()
