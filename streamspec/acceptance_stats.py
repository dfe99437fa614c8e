"""Builds draft trees from acceptance statistics: the ranks that a drafter gave the tokens that really came.

`ranks[c][t][j-1]` is the rank that stream j, run at position t of completion c, gave the token j positions after the
root; -1 where that token was not among the candidates, -2 where the completion had ended. The root at position t is
token t of the completion.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from streamspec.atomic import write_text
from streamspec.draft_tree import MAX_GAMMA, DraftTree
from streamspec.errors import AdapterError

MISSED, ENDED = -1, -2
MAX_RANK_LIMIT = 1024

Ranks = Sequence[Sequence[Sequence[int]]]
Node = tuple[int, int, float]


@dataclass(frozen=True)
class Acceptance:
    """The content of `acceptance.json`: `gamma` streams, `max_rank` candidates each, `ranks` as described above."""

    gamma: int
    max_rank: int
    ranks: list[list[list[int]]]

    def save(self, path: str | Path) -> None:
        """Writes the file atomically."""
        write_text(path, json.dumps({"gamma": self.gamma, "max_rank": self.max_rank, "ranks": self.ranks}))

    @classmethod
    def load(cls, path: str | Path) -> Acceptance:
        """Reads the file. Raises AdapterError for anything malformed."""
        path = Path(path)
        fix = "train the adapter again or restore the file"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            gamma, max_rank, ranks = raw["gamma"], raw["max_rank"], raw["ranks"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise AdapterError(
                f"{path}: {type(error).__name__} {error}", "JSON with gamma, max_rank and ranks", fix
            ) from None
        for name, value, high in (("gamma", gamma, MAX_GAMMA), ("max_rank", max_rank, MAX_RANK_LIMIT)):
            if type(value) is not int or not 1 <= value <= high:
                raise AdapterError(f"{path}: {name} is {value!r}", f"a whole number 1..{high}", fix)
        if not isinstance(ranks, list):
            raise AdapterError(f"{path}: ranks is no list", "a list per completion", fix)
        for c, completion in enumerate(ranks):
            if not _well_formed(completion, gamma, max_rank):
                expected = f"rows of {gamma} whole numbers {ENDED}..{max_rank - 1}"
                raise AdapterError(f"{path}: completion {c} is malformed", expected, fix)
        return cls(gamma, max_rank, ranks)


def node_order(ranks: Ranks, gamma: int, max_nodes: int = 64) -> list[Node]:
    """Orders nodes `(parent, rank, probability)` by falling probability; the first n are the best tree of n rows.

    Probability is the share of steps in which the whole path from the root was accepted. A child's path extends its
    parent's, so it is never more probable: taking the most probable reachable node again and again is optimal for every
    n. A path cut off by the completion's end counts as rejected. Positions whose root is the last token start no step
    and do not count. Nodes that were never accepted are left out.
    """
    steps = _steps(ranks, gamma)
    total = len(steps)
    nodes: list[Node] = [(0, 0, 1.0)]
    if total == 0:
        return nodes
    heap: list[tuple[int, int, int, int, np.ndarray]] = []
    order = 0

    def push_children(node: int, depth: int, matching: np.ndarray) -> None:
        nonlocal order
        if depth >= gamma:
            return
        column = steps[matching, depth]
        counts = np.bincount(column[column >= 0])
        for rank in np.flatnonzero(counts):
            # Ties: shallow before deep, then the order of discovery, so the result depends on nothing else.
            heapq.heappush(heap, (-int(counts[rank]), depth + 1, order, int(rank), matching[column == rank]))
            parents[order] = node
            order += 1

    parents: dict[int, int] = {}
    push_children(0, 0, np.arange(total))
    while heap and len(nodes) < max_nodes:
        count, depth, number, rank, matching = heapq.heappop(heap)
        nodes.append((parents[number], rank, -count / total))
        push_children(len(nodes) - 1, depth, matching)
    return nodes


def simulated_tau(ranks: Ranks, tree: DraftTree) -> float:
    """Accepted length if every completion were decoded with `tree`: tokens committed / steps, pooled.

    At root t the deepest matching path, of length d, is accepted and d + 1 tokens are committed, fewer where the
    completion ends. Returns 1.0 where no step was possible.
    """
    paths = {tree.ranks_to(i) for i in range(len(tree))}
    tokens = steps = 0
    for completion in ranks:
        last = _last_tokens(completion)
        t = 0
        while t < len(completion) - 1:
            if t == last[t]:  # the root is a last token: nothing to draft
                t += 1
                continue
            committed = min(_accepted(completion[t], paths) + 1, last[t] - t)
            tokens, steps = tokens + committed, steps + 1
            t += committed
    return tokens / steps if steps else 1.0


def per_stream_accuracy(ranks: Ranks) -> list[float]:
    """Returns the share of positions where the first candidate of stream j was right, j = 1..gamma,
    among those with a token."""
    rows = _flat(ranks, max((len(row) for completion in ranks for row in completion), default=0))
    came = (rows != ENDED).sum(axis=0)
    return ((rows == 0).sum(axis=0) / np.maximum(came, 1)).tolist()


def _accepted(row: Sequence[int], paths: set[tuple[int, ...]]) -> int:
    """Length of the longest prefix of `row` that is a path of the tree."""
    depth = 0
    while depth < len(row) and row[depth] >= 0 and tuple(row[: depth + 1]) in paths:
        depth += 1
    return depth


def _last_tokens(completion: Sequence[Sequence[int]]) -> list[int]:
    """Returns, for each position, the position of its answer's last token (a conversation holds
    several answers)."""
    out = [len(completion) - 1] * len(completion)
    for t in range(len(completion) - 2, -1, -1):
        out[t] = t if completion[t][0] == ENDED else out[t + 1]
    return out


def _steps(ranks: Ranks, gamma: int) -> np.ndarray:
    """int [steps, gamma]: ranks at the positions where a step can start."""
    rows = _flat(ranks, gamma)
    return rows[rows[:, 0] != ENDED] if gamma else rows


def _flat(ranks: Ranks, gamma: int) -> np.ndarray:
    rows = [row[:gamma] for completion in ranks for row in completion]
    return np.asarray(rows, dtype=np.int64).reshape(len(rows), gamma)


def _well_formed(completion: object, gamma: int, max_rank: int) -> bool:
    return isinstance(completion, list) and all(
        isinstance(row, list)
        and len(row) == gamma
        and all(type(v) is int and ENDED <= v < max_rank for v in row)
        and all(b == ENDED for a, b in pairwise(row) if a == ENDED)
        for row in completion
    )
