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


def runs(path: Sequence[int], length: int) -> list[tuple[int, int, int]]:
    """The same moves as runs (source, target, rows) of neighbouring rows: an accepted path has one or two."""
    out: list[tuple[int, int, int]] = []
    if path and path[-1] == len(path) - 1:
        return out
    for slot, node in enumerate(path):
        if node == slot:
            continue
        if out and out[-1][0] + out[-1][2] == length + node:
            source, target, rows = out[-1]
            out[-1] = source, target, rows + 1
        else:
            out.append((length + node, length + slot, 1))
    return out
