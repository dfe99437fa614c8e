"""Medusa heads (Medusa, arXiv 2401.10774, section 3.1): one block per depth over the accepted node's finished state h.

state_j = h + SiLU(W_j h + b_j)           (docs/explain/how-it-works.md)
"""

from __future__ import annotations

import numpy as np

from streamspec.export.drafters.draft_pass import Accepted, ParallelDraftPass
from streamspec.export.drafters.medusa.spec import MedusaSpec
from streamspec.export.ops.builder import Array, Scope
from streamspec.export.quantization.precisions import Rows, Weight


class MedusaPass(ParallelDraftPass):
    """Heads as a branch. All depths are computed, in the order of `stream_ids`."""

    spec: MedusaSpec

    def logits(self, g: Scope, accepted: Accepted, presents: list[tuple[str, ...]], stream_ids: str) -> str:
        """Adds all heads over the accepted node's state; gathers the rows of `stream_ids`: [m, D]."""
        one = Rows(g.op("Shape", accepted.final, start=0, end=1))
        hidden = g.op("Unsqueeze", accepted.final, g.ints(0))
        states, logits = [], []
        for depth in range(self.spec.gamma):
            with g.named(f"medusa.{depth}"):
                moved = g.op(
                    "Add",
                    self._linear(g, hidden, one, depth),
                    g.store.add(f"medusa.{depth}.bias", self.spec.block_biases[depth]),
                )
                state = g.op("Add", hidden, g.op("Mul", moved, g.op("Sigmoid", moved)))
                states.append(g.op("Squeeze", state, g.ints(0)))
                if self.spec.heads is not None:
                    logits.append(self.scaled(g, *self.decoder.writer.head(g, states[-1], one, self._head(depth))))
        if logits:
            return g.op("Gather", g.op("Concat", *logits, axis=0), stream_ids, axis=0)
        return self.head(
            g, g.op("Gather", g.op("Concat", *states, axis=0), stream_ids, axis=0), Rows(g.op("Shape", stream_ids))
        )

    def _linear(self, g: Scope, hidden: str, rows: Rows, depth: int) -> str:
        weight = self.spec.block_weights[depth]
        return self.decoder.linear_map(
            g, hidden, rows, Weight(f"medusa.{depth}.block", *_size(weight), lambda: weight, drafter=True)
        )

    def _head(self, depth: int) -> Weight:
        assert self.spec.heads is not None
        weight = self.spec.heads[depth]
        return Weight(f"medusa.{depth}.head", *_size(weight), lambda: weight.astype(np.float32), drafter=True)


def _size(matrix: Array) -> tuple[int, int]:
    rows, columns = matrix.shape
    return rows, columns
