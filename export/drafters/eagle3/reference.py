"""An EAGLE-3 head in PyTorch, from its tensors and the equations of the format, to compare the graph with."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from streamspec.export.drafters.eagle3.spec import EMBEDDING, HEAD, LAYER, Eagle3Spec
from streamspec.export.drafters.layer_reference import LayerReference, tapped_states, turned
from streamspec.export.ops.builder import Array
from streamspec.export.reference.draft_reference import DraftedTree, LevelLogits, LevelReference, TreePass
from streamspec.export.reference.pytorch_reference import ReferenceModel
from streamspec.export.weights.lazy_weights import LazyMatrix

Heads = tuple[Tensor, Tensor]  # keys and values [heads, rows, D] of the head's rows so far


class Eagle3Reference(LevelReference):
    """The head over the target's states, which a second pass of the target records."""

    spec: Eagle3Spec

    def __init__(self, model: ReferenceModel, spec: Eagle3Spec) -> None:
        self.model, self.spec = model, spec
        self.head = PublishedHead(spec, LazyMatrix(model.decoder.embedding.weight).rows(slice(None)))
        if HEAD not in spec.tensors:
            rows = slice(None) if spec.draft_vocab is None else torch.as_tensor(spec.draft_vocab)
            self.head.tensors[HEAD] = LazyMatrix(model.decoder.lm_head.weight).rows(rows)

    def states(self, case: DraftedTree, main: TreePass) -> Tensor:
        """The tapped states [T, taps * hidden]."""
        return tapped_states(self.model, case, self.spec.entries)

    def after(self, text: Array, root: int, states: Tensor, rows: list[int]) -> LevelLogits:
        return self.head.after(torch.as_tensor(np.append(text[1:], root)), states[rows])


class PublishedHead(LayerReference):
    """The head in float32, one text at a time. `embedding` [V, H]: the target's, for a head without its own."""

    def __init__(self, spec: Eagle3Spec, embedding: Tensor) -> None:
        super().__init__(spec.head.layer, spec.tensors)
        self.spec = spec
        self.embedding = self.tensors.get(EMBEDDING, embedding)

    def after(self, following: Tensor, states: Tensor) -> LevelLogits:
        """As `LevelReference.after`, of the tapped `states` [n, taps * hidden] and the tokens `following` them int64
        [n]; minus infinity where nothing may be proposed."""
        spec, length = self.spec, len(following)
        first, past = self.run(following, self.fused(states), torch.arange(length), None)

        @torch.no_grad()
        def logits(paths: list[list[int]]) -> Array:
            feature = torch.stack([self._feature(path, first[-1:], past, length) for path in paths])
            of_paths = torch.full((len(paths), len(self.embedding)), -torch.inf)
            chosen = slice(None) if spec.draft_vocab is None else torch.as_tensor(spec.draft_vocab)
            of_paths[:, chosen] = self.logits(feature)
            return of_paths.numpy()

        return logits

    def _feature(self, path: list[int], feature: Tensor, past: Heads, length: int) -> Tensor:
        """The feature [H] after the draft tokens `path`; `feature` [1, H] and `past` are those before them."""
        for step, token in enumerate(path):
            feature, past = self.run(torch.tensor([token]), self.handed(feature), torch.tensor([length + step]), past)
        return feature[0]

    def fused(self, states: Tensor) -> Tensor:
        """f [T, H] of tapped states [T, taps * hidden]."""
        head = self.spec.head
        if head.norm_before_fc:
            states = self.norm(states, "input_norm")
        if head.fc_norm:
            parts = states.split(head.target_hidden, dim=-1)
            states = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], dim=-1)
        return self.linear(states, "fc")

    def handed(self, feature: Tensor) -> Tensor:
        """The state of a row that the row after its draft token reads."""
        return self.norm(feature, "norm") if self.spec.head.norm_output else feature

    def logits(self, feature: Tensor) -> Tensor:
        """Logits [n, D] of features [n, H]."""
        return self.linear(self.norm(feature, "norm"), "lm_head")

    @torch.no_grad()
    def run(self, tokens: Tensor, feature: Tensor, positions: Tensor, past: Heads | None) -> tuple[Tensor, Heads]:
        """g [n, H] of rows with the tokens after them and f [n, H], each seeing `past` and the rows up to it."""
        embedded = self.norm(self.embedding[tokens].float(), f"{LAYER}input_layernorm")
        normed = self.norm(feature, f"{LAYER}hidden_norm")
        stream = normed if self.spec.head.norm_before_residual else feature
        pair = torch.cat([embedded, normed], dim=-1)
        query, key, value = (self.heads(pair, f"{LAYER}self_attn.{name}_proj") for name in "qkv")
        if f"{LAYER}self_attn.q_norm.weight" in self.tensors:
            query, key = self.norm(query, f"{LAYER}self_attn.q_norm"), self.norm(key, f"{LAYER}self_attn.k_norm")
        turns = self.turns(pair, positions)
        query, key = turned(query, *turns), turned(key, *turns)
        if past is not None:
            key, value = torch.cat([past[0], key], dim=1), torch.cat([past[1], value], dim=1)
        sees = torch.ones(len(tokens), key.shape[1]).tril(key.shape[1] - len(tokens)).bool()
        mixed = self.attend(query, key, value, sees)
        return self.mlp(stream + self.linear(mixed, f"{LAYER}self_attn.o_proj"), LAYER), (key, value)
