"""Chooses the KV rows that move when a draft is accepted: those of the accepted path close up to the committed ones.

`host_cache` moves them in numpy arrays, `device_cache` with `compact.onnx` (export/graphs/device_cache_graph.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def compaction(path: Sequence[int], length: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The cache rows that must move so that the accepted `path` follows the `length` committed rows without gaps.

    Node i's row was written at `length + i`. Returns (sources, targets), int64 [k], or None where the path already lies
    in the first slots. Targets never exceed their sources and both ascend, so copying in order is safe.
    """
    moved = [(node, slot) for slot, node in enumerate(path) if node != slot]
    if not moved:
        return None
    sources, targets = np.asarray(moved, dtype=np.int64).T + length
    return sources, targets
