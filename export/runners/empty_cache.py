"""Makes the caches that a graph takes. `tests/export/graphs/test_row_exactness.py` covers this file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from streamspec.export.ops.builder import Array
from streamspec.layer_cache import STATE_BLOCK, STATE_WINDOW
from streamspec.step_graph import is_cache, ring_symbol

RING = ring_symbol(STATE_WINDOW)  # slots of layers with a recurrent state


def empty_cache(inputs: Iterable[Any], capacity: int = 0) -> dict[str, Array]:
    """The cache among the `inputs` of a graph, of zeros. `capacity`: its tokens, where the graph does not fix them;
    states take a whole ring."""
    cache = dict[str, Array]()
    for value in inputs:
        if is_cache(value.name):
            _, heads, slots, width = value.shape
            if not isinstance(slots, int):
                slots = max(capacity, STATE_WINDOW + STATE_BLOCK) if slots == RING else capacity
            dtype = np.float16 if value.type == "tensor(float16)" else np.float32
            cache[value.name] = np.zeros((1, heads, slots, width), dtype)
    return cache


def most_rows(inputs: Iterable[Any]) -> int:
    """Rows of a call at most, of a graph with these `inputs`."""
    return STATE_BLOCK if any(is_cache(value.name) and value.shape[2] == RING for value in inputs) else 1 << 30
