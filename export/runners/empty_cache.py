"""Makes the caches that a graph takes. `tests/export/graphs/test_row_exactness.py` covers this file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from streamspec.export.ops.builder import Array
from streamspec.layer_cache import STATE_BLOCK, STATE_WINDOW
from streamspec.step_graph import is_cache, ring_symbol


def empty_cache(session: Any, capacity: int = 0) -> dict[str, Array]:
    """The cache that a graph takes, of zeros. `capacity`: its tokens, where the graph does not fix them."""
    cache = dict[str, Array]()
    for value in session.get_inputs():
        if is_cache(value.name):
            _, heads, slots, width = value.shape
            slots = slots if isinstance(slots, int) else slots_for(slots, capacity)
            dtype = np.float16 if value.type == "tensor(float16)" else np.float32
            cache[value.name] = np.zeros((1, heads, slots, width), dtype)
    return cache


def slots_for(symbol: int | str, capacity: int) -> int:
    """Slots of a layer's cache, whose dimension is called `symbol`, for `capacity` tokens: states take a whole ring."""
    return max(capacity, STATE_WINDOW + STATE_BLOCK) if symbol == ring_symbol(STATE_WINDOW) else capacity


def most_rows(symbols: Iterable[int | str]) -> int:
    """Rows of a call at most, where slots of caches are called so."""
    return STATE_BLOCK if ring_symbol(STATE_WINDOW) in symbols else 1 << 30
