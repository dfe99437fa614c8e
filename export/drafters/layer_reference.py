"""The layers of a drafter that are not the target's in PyTorch, from its tensors and the equations of their format.
Covered by tests/export/drafters/test_eagle3.py and test_published_block.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from streamspec.export.ops.builder import Array
from streamspec.export.reference.draft_reference import DraftedTree
from streamspec.export.reference.pytorch_reference import ReferenceModel
from streamspec.export.reference.reference import tree_rows


class LayerReference:
    """Layers of the configuration `layer` (of transformers) in float32 over `tensors`, by their names."""

    def __init__(self, layer: Any, tensors: Mapping[str, Array]) -> None:
        self.layer = layer
        self.tensors = {name: torch.as_tensor(array) for name, array in tensors.items()}
        self.rotary = LlamaRotaryEmbedding(layer)
        self.activation = ACT2FN[layer.hidden_act]

    def heads(self, rows: Tensor, name: str) -> Tensor:
        """[heads, n, D] of rows [n, H] through the linear map `name`."""
        return self.linear(rows, name).view(len(rows), -1, self.layer.head_dim).transpose(0, 1)

    def turns(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [n, D] of positions int64 [n], in the dtype of `rows`."""
        cos, sin = (table[0] for table in self.rotary(rows[None], positions[None]))
        return cos, sin

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sees: Tensor) -> Tensor:
        """[n, Hq * D] of queries [Hq, n, D] over keys and values [Hkv, m, D]; `sees` bool [n, m]."""
        group = len(query) // len(key)
        scores = query @ key.repeat_interleave(group, dim=0).transpose(1, 2) / self.layer.head_dim**0.5
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        return (weights @ value.repeat_interleave(group, dim=0)).transpose(0, 1).flatten(1)

    def mlp(self, stream: Tensor, inside: str) -> Tensor:
        """The residual stream [n, H] after the MLP of the layer whose tensors' names begin with `inside`."""
        inner = self.norm(stream, f"{inside}post_attention_layernorm")
        gate, up = (self.linear(inner, f"{inside}mlp.{side}_proj") for side in ("gate", "up"))
        return stream + self.linear(self.activation(gate) * up, f"{inside}mlp.down_proj")

    def norm(self, x: Tensor, name: str) -> Tensor:
        """The RMS norm `name` of x [.., H]."""
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.layer.rms_norm_eps)
        return x * scale * self.tensors[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        """The linear map `name` of x [.., in]."""
        return nn.functional.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))


def turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [.., n, D] turned by cosines and sines [n, D] of their positions."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


def tapped_states(model: ReferenceModel, case: DraftedTree, entries: Sequence[int]) -> Tensor:
    """The inputs [T + n, taps * hidden] of the layers `entries`, of a context and a tree after it; after the last one
    the finished states."""
    tokens, positions, sees = tree_rows(case.context, case.drafted, case.tree)
    entered: dict[int, Tensor] = {}
    entered[model.layers] = model.states(tokens, positions, sees, entered=entered).final
    return torch.cat([entered[layer][0] for layer in entries], dim=-1)
