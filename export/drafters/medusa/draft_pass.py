"""Medusa heads (Medusa, arXiv 2401.10774, section 3.1): one block per depth over the accepted node's finished state h.

state_j = h + SiLU(W_j h + b_j)           (docs/explain/how-it-works.md)
"""

from __future__ import annotations

from streamspec.export.drafters.draft_pass import Accepted, ParallelDraftPass, own_weight
from streamspec.export.drafters.medusa.spec import MedusaSpec
from streamspec.export.ops.builder import Scope
from streamspec.export.quantization.precisions import Rows


class MedusaPass(ParallelDraftPass):
    """Heads as a branch."""

    spec: MedusaSpec

    def logits(self, g: Scope, accepted: Accepted, presents: list[tuple[str, ...]], stream_ids: str) -> str:
        """[m, D]. Computes every head, then picks the depths `stream_ids`."""
        row = Rows(g.op("Shape", accepted.final, start=0, end=1))
        hidden = g.op("Unsqueeze", accepted.final, g.ints(0))
        states, logits = [], []
        for depth in range(self.spec.gamma):
            with g.named(f"medusa.{depth}"):
                block = own_weight(f"medusa.{depth}.block", self.spec.block_weights[depth])
                mapped = self.decoder.linear_map(g, hidden, row, block)
                moved = g.op("Add", mapped, g.store.add(f"medusa.{depth}.bias", self.spec.block_biases[depth]))
                state = g.op("Add", hidden, g.op("Mul", moved, g.op("Sigmoid", moved)))
                states.append(g.op("Squeeze", state, g.ints(0)))
                if self.spec.heads is not None:
                    head = own_weight(f"medusa.{depth}.head", self.spec.heads[depth])
                    logits.append(self.scaled(g, *self.decoder.writer.head(g, states[-1], row, head)))
        if logits:
            return g.op("Gather", g.op("Concat", *logits, axis=0), stream_ids, axis=0)
        chosen = g.op("Gather", g.op("Concat", *states, axis=0), stream_ids, axis=0)
        return self.head(g, chosen, Rows(g.op("Shape", stream_ids)))
