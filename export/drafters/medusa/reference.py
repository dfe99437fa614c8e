"""Medusa heads in PyTorch, to compare a graph with. The tests of the step graphs cover it."""

from __future__ import annotations

import torch
from torch import Tensor

from streamspec.export.drafters.medusa.spec import MedusaSpec
from streamspec.export.ops.builder import Array
from streamspec.export.reference.draft_reference import ParallelReference
from streamspec.export.reference.pytorch_reference import ReferenceOutput


class MedusaReference(ParallelReference):
    """The same heads in PyTorch."""

    spec: MedusaSpec

    @torch.no_grad()
    def logits(self, main: ReferenceOutput, positions: Array, sees: Array, row: int, root: int) -> Tensor:
        """Logits [gamma, V] of all heads at `row`. Heads with a matrix of their own know draft tokens only: minus
        infinity elsewhere."""
        spec, hidden, decoder = self.spec, main.final[0, row], self.model.decoder
        moved = torch.as_tensor(spec.block_weights) @ hidden + torch.as_tensor(spec.block_biases)
        states = hidden + torch.nn.functional.silu(moved)
        logits: Tensor = decoder.logits(states)
        if spec.heads is not None:
            own = torch.einsum("jdh,jh->jd", torch.as_tensor(spec.heads).float(), states)
            chosen = slice(None) if spec.draft_vocab is None else torch.as_tensor(spec.draft_vocab)
            logits = torch.full_like(logits, -torch.inf)
            logits[:, chosen] = own
        return logits
