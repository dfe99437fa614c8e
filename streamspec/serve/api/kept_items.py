"""Keeps the items of the newest answers of `/v1/responses` in memory, so that a request may name them by their ids, as
clients do that take them to be stored. `tests/serve/api/test_responses.py` covers this file.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

MOST_ITEMS, MOST_TEXT = 1024, 1 << 21  # kept at once, and their characters as JSON


class KeptItems:
    """The newest items by id. Callable from any thread."""

    def __init__(self) -> None:
        self._items: dict[str, tuple[Mapping[str, Any], int]] = {}
        self._text = 0
        self._lock = threading.Lock()

    def add(self, items: Sequence[Mapping[str, Any]]) -> None:
        """Adds the items of an answer; the oldest give way."""
        with self._lock:
            for item in items:
                size = len(json.dumps(item))
                self._items[item["id"]] = item, size
                self._text += size
            while len(self._items) > MOST_ITEMS or self._text > MOST_TEXT:
                self._text -= self._items.pop(next(iter(self._items)))[1]

    def get(self, id: str) -> Mapping[str, Any] | None:
        """Returns an item; None where it is not kept."""
        with self._lock:
            return self._items.get(id, (None, 0))[0]
