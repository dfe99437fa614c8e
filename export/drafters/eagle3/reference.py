"""A published EAGLE-3 head in PyTorch, from its tensors and the equations of the format, to compare the graph with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from streamspec.export.drafters.draft_layer.reference import drafted_after, level_paths
from streamspec.export.drafters.eagle3.spec import LAYER, Eagle3Spec
from streamspec.export.ops.builder import Array
from streamspec.export.reference.draft_reference import Compared, DraftedTree, DraftReference, ExpectedDrafts, TreePass
from streamspec.export.reference.pytorch_reference import ReferenceModel
from streamspec.export.reference.reference import tree_rows
from streamspec.export.runners.graph_runner import AnyRunner
from streamspec.step_graph import CANDIDATE_LOGITS, CANDIDATES

Heads = tuple[Tensor, Tensor]  # keys and values [heads, rows, D] of the head's rows so far


class Eagle3Reference(DraftReference):
    """The head over the target's states, which a second pass of the target records."""

    def __init__(self, model: ReferenceModel, spec: Eagle3Spec) -> None:
        self.model, self.spec = model, spec
        self.head = PublishedHead(spec, model.decoder.embedding.weight)
        if "lm_head.weight" not in spec.tensors:
            rows = slice(None) if spec.draft_vocab is None else torch.as_tensor(spec.draft_vocab)
            self.head.tensors["lm_head.weight"] = model.decoder.lm_head.weight[rows].float()

    def expect(self, case: DraftedTree, main: TreePass) -> ExpectedDrafts:
        """Keeps the tapped states of all rows: later levels depend on the graph's own candidates."""
        return _HeadDrafts(self.head, tapped_states(self.model, case, self.spec.entries))


def tapped_states(model: ReferenceModel, case: DraftedTree, entries: Sequence[int]) -> Tensor:
    """The inputs [T + n, taps * hidden] of the layers `entries`, of a context and a tree after it; after the last one
    the finished states."""
    tokens, positions, sees = tree_rows(case.context, case.drafted, case.tree)
    seen: dict[int, Tensor] = {}

    @contextmanager
    def around(layer: int) -> Iterator[None]:
        def keep(module: Any, args: Any, kwargs: Any) -> None:
            seen[layer] = (args[0] if args else kwargs["hidden_states"]).detach()[0]

        module = model.decoder.layer(layer)
        hook = module.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    seen[len(model.decoder.layers)] = model.states(tokens, positions, sees, around).final[0]
    return torch.cat([seen[layer] for layer in entries], dim=-1)


@dataclass(frozen=True)
class _HeadDrafts(ExpectedDrafts):
    """`states` [T + n, taps * hidden]: the target's, of a context and a tree."""

    head: PublishedHead
    states: Tensor

    def compare(self, session: Any, steps: AnyRunner, case: DraftedTree) -> Iterator[Compared]:
        length = len(case.context)
        for path, root, out in drafted_after(session, case):
            rows = [*range(length), *(length + node for node in path)]
            text = np.concatenate([case.context, case.drafted[path]])
            yield from self.head.drafts(text, root, self.states[rows], out)


class PublishedHead:
    """The head in float32, one text at a time. `embedding` [V, H]: the target's, for a head without its own."""

    def __init__(self, spec: Eagle3Spec, embedding: Tensor) -> None:
        self.spec, self.layer = spec, spec.head.layer
        self.tensors = {name: torch.as_tensor(array) for name, array in spec.tensors.items()}
        self.embedding = self.tensors.get("embed_tokens.weight", embedding)
        self.rotary = LlamaRotaryEmbedding(self.layer)
        self.activation = ACT2FN[self.layer.hidden_act]

    @torch.no_grad()
    def drafts(self, text: Array, root: int, states: Tensor, out: dict[str, Array]) -> Iterator[Compared]:
        """Yields every draft row in `out`, the graph's outputs after the last token of `text` [T], whose next is
        `root` and whose tapped states are `states` [T, taps * hidden], as `TrainedDraftLayer.drafts` does."""
        spec, following = self.spec, torch.as_tensor(np.append(text[1:], root))
        first, past = self.run(following, self.fused(states), torch.arange(len(text)), None)
        for start, paths in level_paths(spec.levels, out):
            count = len(paths)
            feature = torch.stack([self._after(path, first[-1:], past, len(text)) for path in paths])
            logits = torch.full((count, len(self.embedding)), -torch.inf)
            chosen = slice(None) if spec.draft_vocab is None else torch.as_tensor(spec.draft_vocab)
            logits[:, chosen] = self.logits(feature)
            ours = out[CANDIDATE_LOGITS][start : start + count]
            theirs = (logits - logits.max(dim=1, keepdim=True).values).numpy()
            yield from zip(
                out[CANDIDATES][start : start + count], ours - ours.max(axis=1, keepdims=True), theirs, strict=True
            )

    def _after(self, path: list[int], feature: Tensor, past: Heads, length: int) -> Tensor:
        """The feature [H] after the draft tokens `path`; `feature` [1, H] and `past` are those before them."""
        for step, token in enumerate(path):
            feature, past = self.run(torch.tensor([token]), self.handed(feature), torch.tensor([length + step]), past)
        return feature[0]

    def fused(self, states: Tensor) -> Tensor:
        """f [T, H] of tapped states [T, taps * hidden]."""
        head = self.spec.head
        if head.norm_before_fc:
            states = self._norm(states, "input_norm")
        if head.fc_norm:
            parts = states.split(head.target_hidden, dim=-1)
            states = torch.cat([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], dim=-1)
        return self._linear(states, "fc")

    def handed(self, feature: Tensor) -> Tensor:
        """What the row after a draft token reads of the row before it."""
        return self._norm(feature, "norm") if self.spec.head.norm_output else feature

    def logits(self, feature: Tensor) -> Tensor:
        """Logits [n, D] of features [n, H]."""
        return self._linear(self._norm(feature, "norm"), "lm_head")

    @torch.no_grad()
    def run(self, tokens: Tensor, feature: Tensor, positions: Tensor, past: Heads | None) -> tuple[Tensor, Heads]:
        """g [n, H] of rows with the tokens after them and f [n, H], each seeing `past` and the rows up to it."""
        config = self.layer
        embedded = self._norm(self.embedding[tokens].float(), f"{LAYER}input_layernorm")
        normed = self._norm(feature, f"{LAYER}hidden_norm")
        stream = normed if self.spec.head.norm_before_residual else feature
        pair = torch.cat([embedded, normed], dim=-1)
        heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        query, key, value = (
            self._linear(pair, f"{LAYER}self_attn.{name}_proj").view(len(tokens), count, -1).transpose(0, 1)
            for name, count in zip("qkv", heads, strict=True)
        )
        if f"{LAYER}self_attn.q_norm.weight" in self.tensors:
            query, key = self._norm(query, f"{LAYER}self_attn.q_norm"), self._norm(key, f"{LAYER}self_attn.k_norm")
        cos, sin = (table[0] for table in self.rotary(pair[None], positions[None]))
        query, key = (side * cos + half_turn(side) * sin for side in (query, key))
        if past is not None:
            key, value = torch.cat([past[0], key], dim=1), torch.cat([past[1], value], dim=1)
        before = key.shape[1] - len(tokens)
        group = heads[0] // heads[1]
        scores = query @ key.repeat_interleave(group, dim=0).transpose(1, 2) / config.head_dim**0.5
        sees = torch.ones(len(tokens), key.shape[1]).tril(before).bool()
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        mixed = (weights @ value.repeat_interleave(group, dim=0)).transpose(0, 1).flatten(1)
        stream = stream + self._linear(mixed, f"{LAYER}self_attn.o_proj")
        inner = self._norm(stream, f"{LAYER}post_attention_layernorm")
        gate, up = (self._linear(inner, f"{LAYER}mlp.{side}_proj") for side in ("gate", "up"))
        return stream + self._linear(self.activation(gate) * up, f"{LAYER}mlp.down_proj"), (key, value)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.layer.rms_norm_eps)
        return x * scale * self.tensors[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return nn.functional.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))


def half_turn(x: Tensor) -> Tensor:
    """(-second, first) of the two halves of x [.., D]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
