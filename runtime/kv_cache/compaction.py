"""Chooses the KV rows that move when a draft is accepted: those of the accepted path close up to the committed ones.

`host_cache` moves them in numpy arrays, `device_cache` with `compact.onnx` (export/graphs/device_cache_graph.py).
"""

from __future__ import annotations

from collections.abc import Sequence


def runs(path: Sequence[int], length: int) -> list[tuple[int, int, int]]:
    """Returns the moves that close the accepted `path` up to the `length` committed rows, as runs (source, target,
    rows) of neighbouring cache rows: one or two, none where the path already lies in the first slots.

    Node i's row was written at `length + i`. Both ascend, no target beyond its source: copying in order is safe.
    """
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
