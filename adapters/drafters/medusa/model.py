"""Medusa heads over an unmodified Hugging Face causal LM (Medusa, arXiv 2401.10774, section 3.1).

    state_j = h_t + SiLU(W_j h_t + b_j)             j = 1..gamma

h_t is the finished hidden state of row t; W and b start at zero. Depth j is predicted by a head over state_j: one of
its own, which starts as rows of the LM head, or the LM head itself. A head reads neither the row's next token nor the
other depths' draft tokens.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamspec.adapters.drafters.drafting_model import (
    DrafterRun,
    DraftingModel,
    DraftRows,
    FitStep,
    MainPass,
    at_rows,
    bigram_shape,
)
from streamspec.adapters.drafters.losses import drafting_losses


class MedusaModel(DraftingModel):
    """A causal LM with `gamma` Medusa heads of one residual block each.

    `vocabulary` [D]: the tokens that heads may propose, None for all; `own_heads`: each has a matrix [D, H] of its own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        gamma: int,
        frozen: bool,
        vocabulary: Tensor | None,
        own_heads: bool,
        bigram: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(model, gamma, model.config.num_hidden_layers, frozen, bigram)
        width = self.decoder.lm_head.weight.shape[1]
        self.block_weights = nn.Parameter(torch.zeros(gamma, width, width))
        self.block_biases = nn.Parameter(torch.zeros(gamma, width))
        start = self.decoder.lm_head.weight if vocabulary is None else self.decoder.lm_head.weight[vocabulary]
        self.heads = nn.Parameter(start.detach().float().repeat(gamma, 1, 1)) if own_heads else None

    @classmethod
    def fresh(cls, run: DrafterRun, model: PreTrainedModel, vocabulary: Tensor | None, frozen: bool) -> Self:
        """Builds heads that start as the LM head, with blocks at zero."""
        bigram = bigram_shape(run, model, vocabulary)
        return cls(model, run.options["gamma"], frozen, vocabulary, run.options["own_heads"], bigram).to(run.device)

    def losses(self, step: FitStep) -> dict[str, Tensor]:
        """Computes the "total" loss and its parts, each a scalar."""
        return drafting_losses(self, step)

    def draft_pass(self, main: MainPass, picked: DraftRows) -> Tensor:
        """States [B, P, gamma, E], from the rows alone."""
        hidden = at_rows(main.final, picked.rows)
        weights, biases = self.block_weights.to(hidden.dtype), self.block_biases.to(hidden.dtype)
        moved = torch.einsum("bph,jeh->bpje", hidden, weights) + biases
        return hidden[:, :, None] + nn.functional.silu(moved)

    def draft_logits(self, states: Tensor, depths: Tensor, vocabulary: Tensor | None) -> Tensor:
        """Logits [n, D] of states [n, H], each from the head of its depth [n]."""
        if self.heads is None:
            return self.head(states, vocabulary)
        logits = states.new_zeros(len(states), self.heads.shape[1])
        for depth, head in enumerate(self.heads):
            mine = depths == depth
            logits[mine] = nn.functional.linear(states[mine], head.to(states.dtype)).to(logits.dtype)
        return logits

    def drafter_tensors(self) -> dict[str, Tensor]:
        """Returns the blocks, and the heads where they have matrices of their own."""
        tensors = {"block_weights": self.block_weights, "block_biases": self.block_biases}
        return tensors | ({} if self.heads is None else {"heads": self.heads}) | super().drafter_tensors()

    def described(self) -> dict[str, Any]:
        """Describes the heads for the section `streams` of an adapter's configuration."""
        return super().described() | {"own_heads": self.heads is not None}
