"""A published block drafter in PyTorch, from its tensors and the equations of the format, to compare the graph with."""

from __future__ import annotations

import torch
from torch import Tensor

from streamspec.export.drafters.eagle3.spec import EMBEDDING, HEAD
from streamspec.export.drafters.layer_reference import LayerReference, tapped_states, turned
from streamspec.export.drafters.published.spec import PublishedBlockSpec
from streamspec.export.reference.draft_reference import (
    DraftedTree,
    DraftReference,
    ExpectedDrafts,
    ParallelDrafts,
    TreePass,
)
from streamspec.export.reference.pytorch_reference import ReferenceModel
from streamspec.export.weights.lazy_weights import LazyMatrix


class PublishedBlockReference(LayerReference, DraftReference):
    """The drafter over the target's states, which a second pass of the target records."""

    def __init__(self, model: ReferenceModel, spec: PublishedBlockSpec) -> None:
        super().__init__(spec.block.layer, spec.tensors)
        self.model, self.spec = model, spec
        self.tensors.setdefault(EMBEDDING, LazyMatrix(model.decoder.embedding.weight).rows(slice(None)))
        self.own_head, head = HEAD in self.tensors, model.decoder.lm_head
        self.tensors.setdefault(HEAD, LazyMatrix(head.weight).rows(slice(None)))
        if not self.own_head and getattr(head, "bias", None) is not None:
            self.tensors["lm_head.bias"] = head.bias.float()

    def expect(self, case: DraftedTree, main: TreePass) -> ExpectedDrafts:
        """Computes the logits at every sampled node at once; the model is not kept."""
        states, length, drafts = tapped_states(self.model, case, self.spec.entries), len(case.context), []
        for node, root in case.samples():
            rows = [*range(length), *(length + step for step in case.tree.path(node))]
            logits = self.logits(states[rows], root)
            if self.own_head and self.spec.draft_vocab is not None:
                spread = torch.full((len(logits), self.layer.vocab_size), -torch.inf)
                spread[:, torch.as_tensor(self.spec.draft_vocab)] = logits
                logits = spread
            drafts.append((node, root, logits.numpy()))
        return ParallelDrafts(self.spec, drafts)

    @torch.no_grad()
    def logits(self, states: Tensor, root: int) -> Tensor:
        """[gamma, D] after a text of tapped states [T, taps * H] whose next token is `root`; without the bigram's
        share."""
        spec, block, length = self.spec, self.spec.block, len(states)
        first = 0 if block.from_anchor else 1
        tokens = torch.tensor([root, *[block.mask_token] * (spec.gamma + first - 1)])
        context, x = self.norm(self.linear(states, "fc"), "hidden_norm"), self.tensors[EMBEDDING][tokens]
        turns = self.turns(x, torch.arange(length + len(tokens)))
        for number in range(block.layers):
            inside = f"layers.{number}."
            own = self.norm(x, f"{inside}input_layernorm")
            mixed = self._attention(f"{inside}self_attn.", own, context, turns, self._sees(number, len(tokens), length))
            x = self.mlp(x + mixed, inside)
        return self.linear(self.norm(x, "norm")[first:], "lm_head")

    def _sees(self, number: int, count: int, length: int) -> Tensor:
        """Bool [count, length + count]: which rows of a text and of a block those of the block see in a layer."""
        block = self.spec.block
        rows, columns = torch.arange(length, length + count)[:, None], torch.arange(length + count)
        sees = columns <= rows if block.causal[number] else torch.ones(count, length + count, dtype=torch.bool)
        if (window := block.windows[number]) is None:
            return sees
        return sees & (columns >= (length - window if block.anchored else rows - window + 1))

    def _attention(self, name: str, own: Tensor, context: Tensor, turns: tuple[Tensor, Tensor], sees: Tensor) -> Tensor:
        """Attention of rows `own` [n, H] over keys and values of the `context` [T, H] and of these rows."""
        every, (cos, sin) = torch.cat([context, own]), turns
        query = self.norm(self.heads(own, f"{name}q_proj"), f"{name}q_norm")
        key = self.norm(self.heads(every, f"{name}k_proj"), f"{name}k_norm")
        query = turned(query, cos[-len(own) :], sin[-len(own) :])
        mixed = self.attend(query, turned(key, cos, sin), self.heads(every, f"{name}v_proj"), sees)
        return self.linear(mixed, f"{name}o_proj")
