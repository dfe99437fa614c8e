"""Compares rows after the sliding window and after the rope's original length, where short texts never come.

A cache of that length is needed, not the computation of all its rows: as many rows as `WORK` allows are computed, the
first ones and those before each limit among them, and keys and values of the others are zeros in both models. Zeros
are keys like others: a row that sees a zero too many or too few has another softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamspec.adapters.base_models.config_fields import rope_parameters
from streamspec.export.ops.builder import Array
from streamspec.export.spec.decoder_spec import DecoderSpec

if TYPE_CHECKING:
    from streamspec.export.reference.reference import Reference


WORK = 1e12  # multiplications that each side may take: some 20 s on two cores
MOST_ROWS = 4160  # computed, however small the model: attention grows with their square
FIRST, BEFORE, AFTER = 96, 48, 16  # rows at the start, before a limit, and compared after it
CACHE_BYTES = 3 << 30  # of keys and values in float32, if no layer kept its window only
SCORE_BYTES = 1 << 26  # of one layer's attention scores at a time


@dataclass(frozen=True)
class LongText:
    """The rows of a long text that are computed and compared. `limits`: names of limits, by position (`window`,
    ...)."""

    computed: NDArray[np.bool_]  # [T]
    limits: dict[int, str]
    chunk: int  # rows at a time

    @property
    def positions(self) -> Array:
        """int64: positions of the rows that are computed."""
        return np.flatnonzero(self.computed)

    @property
    def compared(self) -> Array:
        """int64: positions of the rows that are compared."""
        return np.concatenate([np.arange(limit, limit + AFTER) for limit in self.limits])

    def __str__(self) -> str:
        """Names the rows that are compared."""
        return ", ".join(
            f"positions {limit}-{limit + AFTER - 1} (after the {name} of {limit})"
            for limit, name in self.limits.items()
        )

    def chunks(self) -> Iterator[slice]:
        """Stretches of `positions` without a gap, `chunk` rows at most."""
        where = self.positions
        borders = [0, *(np.flatnonzero(np.diff(where) > 1) + 1), len(where)]
        for start, stop in pairwise(borders):
            for at in range(start, stop, self.chunk):
                yield slice(at, min(at + self.chunk, stop))


@dataclass(frozen=True)
class ExpectedLong:
    """PyTorch's logits [rows, V] of the compared rows. `left_out`: what is not compared, and why."""

    text: LongText | None
    tokens: Array  # of the computed rows
    logits: Array
    left_out: str | None


def plan(reference: Reference, spec: DecoderSpec) -> tuple[LongText | None, str | None]:
    """The rows to compute, None where it has no limit within its context; and what is left out."""
    limits = {window: "window" for window in spec.windows if window is not None}
    for parameters in rope_parameters(reference.config).values():
        if length := parameters.get("original_max_position_embeddings"):
            limits.setdefault(int(length), "original rope length")
    limits = {limit: limits[limit] for limit in sorted(limits) if limit + AFTER <= spec.context_length}
    all_limits = " and ".join(f"the {name} of {limit:,}" for limit, name in limits.items())
    if spec.state is not None and limits:
        return None, f"rows after {all_limits}: states"
    row_bytes = 8 * spec.layers * spec.kv_heads * spec.head_dim
    fitting = {limit: name for limit, name in limits.items() if (limit + AFTER) * row_bytes <= CACHE_BYTES}
    left = [
        f"rows after the {name} of {limit:,}: keys and values of more than {CACHE_BYTES >> 30} GB"
        for limit, name in limits.items()
        if limit not in fitting
    ]
    if not fitting:
        return None, "; ".join(left) or None
    total = max(fitting) + AFTER
    computed = np.zeros(total, bool)
    computed[:FIRST] = True
    for limit in fitting:
        computed[max(0, limit - BEFORE) : limit + AFTER] = True
    more = min(int(WORK / reference.parameters), MOST_ROWS) - int(computed.sum())
    computed[np.flatnonzero(~computed)[: max(0, more)]] = True
    if any(spec.conv_widths) and not computed.all():  # the first rows after a gap read those before it
        return None, f"rows after {all_limits}: short convolutions"
    chunk = SCORE_BYTES // (4 * spec.heads * total)
    return LongText(computed, fitting, min(256, max(16, chunk))), "; ".join(left) or None


def expect_long(reference: Reference, spec: DecoderSpec, tokens: Array, say: Callable[[str], None]) -> ExpectedLong:
    """Runs the reference over a long text. `tokens` are repeated as often as needed."""
    text, left_out = plan(reference, spec)
    if text is None:
        return ExpectedLong(None, tokens[:0], np.zeros((0, spec.vocab), np.float32), left_out)
    say(f"computing {len(text.positions)} rows of the reference, to compare {text}")
    computed = np.resize(tokens, len(text.computed))[text.positions]
    return ExpectedLong(text, computed, reference.long(text, computed), left_out)


def run_long(steps: Any, text: LongText, tokens: Array) -> Array:
    """The graph's logits [rows, V] of the compared rows. `steps`: a runner with an empty cache, `graph_runner.stepper`;
    `tokens`: of the computed rows.
    """
    where, kept = text.positions, []
    for rows in text.chunks():
        steps.skip(int(where[rows.start]) - steps.length)
        compared = np.flatnonzero(np.isin(where[rows], text.compared))
        asked = compared if len(compared) else np.zeros(1, np.int64)  # a graph gives the logits of at least one row
        kept.append((steps.prefill(tokens[rows], rows=asked, forced_node=int(asked[-1])), len(compared)))
    return np.concatenate([out["logits"][:count] for out, count in kept])
