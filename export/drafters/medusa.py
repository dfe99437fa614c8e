"""Medusa heads as nodes (Medusa, arXiv 2401.10774, section 3.1), behind the accepted node's finished state h:

    state_j = h + SiLU(W_j h + b_j)           (docs/architecture.md)

Knows nothing about how nodes are accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streamspec.export.drafters.base import Accepted, DraftSpec, ParallelDraftPass
from streamspec.export.ops.builder import Array, Scope
from streamspec.export.quantization.precisions import Rows, Weight


@dataclass(frozen=True, kw_only=True)
class MedusaSpec(DraftSpec):
    """Heads of one adapter. `heads` None: all guess through the LM head."""

    block_weights: Array  # W [gamma, H, H]
    block_biases: Array  # b [gamma, H]
    heads: Array | None = None  # [gamma, D, H]


class MedusaPass(ParallelDraftPass):
    """Heads as a branch. All places are computed, in the order of `stream_ids`."""

    spec: MedusaSpec

    def logits(self, g: Scope, accepted: Accepted, presents: list[tuple[str, ...]], stream_ids: str) -> str:
        one = Rows(g.op("Shape", accepted.final, start=0, end=1))
        hidden = g.op("Unsqueeze", accepted.final, g.ints(0))
        states, logits = [], []
        for place in range(self.spec.gamma):
            with g.named(f"medusa.{place}"):
                moved = g.op(
                    "Add",
                    self._linear(g, hidden, one, place),
                    g.store.add(f"medusa.{place}.bias", self.spec.block_biases[place]),
                )
                state = g.op("Add", hidden, g.op("Mul", moved, g.op("Sigmoid", moved)))
                states.append(g.op("Squeeze", state, g.ints(0)))
                if self.spec.heads is not None:
                    logits.append(self.scaled(g, *self.decoder.precision.head(g, states[-1], one, self._head(place))))
        if logits:
            return g.op("Gather", g.op("Concat", *logits, axis=0), stream_ids, axis=0)
        return self.head(
            g, g.op("Gather", g.op("Concat", *states, axis=0), stream_ids, axis=0), Rows(g.op("Shape", stream_ids))
        )

    def _linear(self, g: Scope, hidden: str, rows: Rows, place: int) -> str:
        weight = self.spec.block_weights[place]
        return self.decoder.precision.linear(
            g, hidden, rows, Weight(f"medusa.{place}.block", *_size(weight), lambda: weight)
        )

    def _head(self, place: int) -> Weight:
        assert self.spec.heads is not None
        weight = self.spec.heads[place]
        return Weight(f"medusa.{place}.head", *_size(weight), lambda: weight.astype(np.float32))


def _size(matrix: Array) -> tuple[int, int]:
    rows, columns = matrix.shape
    return rows, columns
