"""How a call of a captured step graph is packed: one array of whole numbers goes in, where tokens are sampled a small
one of float32 beside it, and one comes back.

A captured CUDA graph reads and writes the same addresses at every run, so each call costs one small copy there and one
back. `docs/guides/cuda-graphs.md` describes the graph.

The cache has `margin` slots in front, which no row sees: token t lies in slot `margin` + t. A call first moves the rows
of the path that was accepted before, then writes its own: `margin` moved or unmoved rows end where its own begin, so
that both are one block of neighbouring slots however short the sequence is.

    call    int64 [n, COLUMNS + margin + n], a row for each row of the call:
            its token, position, parent's number and own number, and the token after it, -1: the one chosen; the
            numbers of `Numbers`, in row 0 alone; the slots `sources` that the `margin` slots in front of the new rows
            are filled from, in row 0 alone; and 1 where the row sees row j, itself or an ancestor, 0 elsewhere
    draw    float32 [1 + s, DRAW_COLUMNS], s = n or, where nothing is sampled, 0: the `DRAW_INPUTS`;
            then of each row its number and its uniform number
    result  float32 [n + 1 + 2 m C (+ m C C) (+ m)]: the choice after each row; with a drafter the accepted node, and
            its candidates [m, C], their logits [m, C] and, with a bigram, their pairs' logits [m, C, C], of a draft
            layer the origins of its rows [m]

Tokens are whole numbers below 2**24, so float32 holds them. A choice of -1 - token is `unsure`: the graph drew this
token from the likeliest ones that it sorts, and the threshold of top-k or top-p lies outside of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from streamspec.step_graph import DRAW_INPUTS, RAW_LOGITS, STATIC, GraphFeatures, is_cache, outputs

TOKEN, POSITION, PARENT, NUMBER, NEXT, PAST, NODE, ROOT, COLUMNS = range(9)
DRAW_COLUMNS = len(DRAW_INPUTS)
MOST_TOKENS, MOST_ROWS = 1 << 24, 64  # of a vocabulary, of a call


@dataclass(frozen=True)
class CallSizes:
    """The fixed sizes of a captured graph. `rows`: rows of its calls, ascending; `slots`: tokens in its cache, the
    whole context."""

    rows: tuple[int, ...]
    slots: int

    @property
    def margin(self) -> int:
        """Slots in front of the cache, and the most rows that a call moves."""
        return self.rows[-1]

    @property
    def all_slots(self) -> int:
        """Those of the tokens, those in front and those that the last rows of a call may need."""
        return self.margin + self.slots + self.rows[-1]

    def padded(self, rows: int) -> int:
        """The rows of the call that computes so many."""
        return next(count for count in self.rows if count >= rows)

    def width(self, rows: int) -> int:
        """Columns of a call of so many rows."""
        return COLUMNS + self.margin + rows


def captured_features(features: GraphFeatures, sizes: CallSizes) -> GraphFeatures:
    """Those of the captured graph beside the graph with `features`: every layer has all slots, and nothing prunes."""
    caches = tuple(replace(cache, window=None) for cache in features.caches)
    return replace(features, caches=caches, slots=sizes.all_slots, exit_layer=None)


class Numbers(NamedTuple):
    """What a call has once: tokens in the cache; the row after which is drafted, -1: the accepted one; the token after
    it, -1: the one chosen."""

    past: int
    node: int = -1
    root: int = -1


def unmoved(sizes: CallSizes, past: int) -> np.ndarray:
    """int64 [margin]: sources that leave every row where it is."""
    return np.arange(past, past + sizes.margin)


def pack(
    call: np.ndarray,
    sizes: CallSizes,
    numbers: Numbers,
    rows: tuple[Sequence[int], Sequence[int] | np.ndarray, Sequence[int] | np.ndarray],
    sees: np.ndarray,
    sources: np.ndarray,
    next_ids: Sequence[int] | np.ndarray | None = None,
) -> None:
    """Fills `call` int64 [n, width]. `rows`: tokens, positions and parents, of at most n rows; `sees` bool of as many:
    which row sees which; `next_ids`: the tokens after them, where they are known. The rest are padding: they see no row
    of the call, themselves included, so that none can be accepted."""
    n, used = len(call), len(rows[0])
    call[:] = 0
    call[:, POSITION] = numbers.past
    for column, values in zip((TOKEN, POSITION, PARENT), rows, strict=True):
        call[: len(values), column] = values
    call[:, NUMBER] = np.arange(n)
    call[:, NEXT] = -1
    if next_ids is not None:
        call[:used, NEXT] = next_ids
    call[0, PAST:COLUMNS] = numbers
    call[0, COLUMNS : COLUMNS + sizes.margin] = sources
    call[:used, COLUMNS + sizes.margin : COLUMNS + sizes.margin + used] = sees


def pack_draw(draw: np.ndarray, parameters: Sequence[np.ndarray], rows: np.ndarray, uniforms: np.ndarray) -> None:
    """Fills `draw` float32 [1 + n, DRAW_COLUMNS]. `parameters` [1] each; `uniforms` [r]: those of the `rows` int64 [r]
    whose tokens matter."""
    draw[:] = 0
    draw[0] = np.concatenate(parameters)
    draw[1:, 0] = np.arange(len(draw) - 1)
    draw[1 + rows, 1] = uniforms


def unsure(choices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The tokens int64 [n] of a result's choices, and bool [n]: which of them the graph is unsure of."""
    coarse = choices < 0
    return np.where(coarse, -1 - choices, choices), coarse


class ResultPart(NamedTuple):
    """One array of a result."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def result_parts(rows: int, features: GraphFeatures) -> list[ResultPart]:
    """What a result holds, in its order: what a static graph of so many rows gives beside its logits and cache."""
    static_outputs = outputs(STATIC, replace(features, rows=rows))
    named = [row for row in static_outputs if row.name != RAW_LOGITS and not is_cache(row.name)]
    return [ResultPart(row.name, row.filled(0).shape, row.dtype) for row in named]


def unpack(result: np.ndarray, parts: Sequence[ResultPart]) -> list[np.ndarray]:
    """Copies of the parts of a result float32 [x], of their own types."""
    ends = np.cumsum([part.size for part in parts])
    arrays = np.split(result, ends[:-1])
    return [array.reshape(part.shape).astype(part.dtype) for array, part in zip(arrays, parts, strict=True)]
