"""A published block drafter in PyTorch, from its tensors and the equations of the format, to compare the graph with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from streamspec.export.drafters.eagle3.reference import half_turn, tapped_states
from streamspec.export.drafters.published.spec import EMBEDDING, HEAD, PublishedBlockSpec
from streamspec.export.reference.draft_reference import (
    DraftedTree,
    DraftReference,
    ExpectedDrafts,
    ParallelDrafts,
    TreePass,
)
from streamspec.export.reference.pytorch_reference import ReferenceModel


class PublishedBlockReference(DraftReference):
    """The drafter over the target's states, which a second pass of the target records."""

    def __init__(self, model: ReferenceModel, spec: PublishedBlockSpec) -> None:
        self.model, self.spec, self.layer = model, spec, spec.block.layer
        self.tensors = {name: torch.as_tensor(array) for name, array in spec.tensors.items()}
        self.tensors.setdefault(EMBEDDING, model.decoder.embedding.weight.float())
        self.own_head, head = HEAD in self.tensors, model.decoder.lm_head
        self.tensors.setdefault(HEAD, head.weight.float())
        if not self.own_head and getattr(head, "bias", None) is not None:
            self.tensors["lm_head.bias"] = head.bias.float()
        self.rotary, self.activation = LlamaRotaryEmbedding(self.layer), ACT2FN[self.layer.hidden_act]

    def expect(self, case: DraftedTree, main: TreePass) -> ExpectedDrafts:
        """Computes the logits at every sampled node at once; the model is not kept."""
        states, length, drafts = tapped_states(self.model, case, self.spec.entries), len(case.context), []
        for node, root in case.samples():
            rows = [*range(length), *(length + one for one in case.tree.path(node))]
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
        context, x = self._norm(self._linear(states, "fc"), "hidden_norm"), self.tensors[EMBEDDING][tokens]
        where = torch.arange(length + len(tokens))[None]
        cos, sin = (table[0] for table in self.rotary(x[None], where))
        for number in range(block.layers):
            inside = f"layers.{number}."
            own = self._norm(x, f"{inside}input_layernorm")
            x = x + self._attention(
                inside, own, torch.cat([context, own]), cos, sin, self._sees(number, len(tokens), length)
            )
            inner = self._norm(x, f"{inside}post_attention_layernorm")
            gate, up = (self._linear(inner, f"{inside}mlp.{side}_proj") for side in ("gate", "up"))
            x = x + self._linear(self.activation(gate) * up, f"{inside}mlp.down_proj")
        return self._linear(self._norm(x, "norm")[first:], "lm_head")

    def _sees(self, number: int, count: int, length: int) -> Tensor:
        """Bool [count, length + count]: which rows of a text and of a block those of the block see in a layer."""
        block = self.spec.block
        rows, columns = torch.arange(length, length + count)[:, None], torch.arange(length + count)
        sees = columns <= rows if block.causal[number] else torch.ones(count, length + count, dtype=torch.bool)
        if (window := block.windows[number]) is None:
            return sees
        return sees & (columns >= (length - window if block.anchored else rows - window + 1))

    def _attention(self, inside: str, own: Tensor, every: Tensor, cos: Tensor, sin: Tensor, sees: Tensor) -> Tensor:
        """Of rows `own` [n, H] over keys and values of `every` row [T + n, H], the last ones theirs."""
        width, name = self.layer.head_dim, f"{inside}self_attn."
        query, key, value = (
            self._linear(rows, f"{name}{side}_proj").view(len(rows), -1, width).transpose(0, 1)
            for side, rows in (("q", own), ("k", every), ("v", every))
        )
        query, key = self._norm(query, f"{name}q_norm"), self._norm(key, f"{name}k_norm")
        count = len(own)
        query = query * cos[-count:] + half_turn(query) * sin[-count:]
        key = key * cos + half_turn(key) * sin
        group = len(query) // len(key)
        scores = query @ key.repeat_interleave(group, dim=0).transpose(1, 2) / width**0.5
        mixed = scores.masked_fill(~sees, -torch.inf).softmax(-1) @ value.repeat_interleave(group, dim=0)
        return self._linear(mixed.transpose(0, 1).flatten(1), f"{name}o_proj")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.layer.rms_norm_eps)
        return x * scale * self.tensors[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return nn.functional.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))
