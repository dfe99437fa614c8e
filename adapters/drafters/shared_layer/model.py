"""A draft layer (`draft_layer`, EAGLE's shape) that is the target's own last layer under a LoRA.

Row t stands for the pair (m_t, y_(t+1)), as in `draft_layer`:

    x_t = U e(y_(t+1)) + V m_t + b
    g_t = final(layer(x_t))                                                 over rows <= t

where `layer` is the target's last one with attention, its linear maps under a LoRA that these rows alone use. A copy
of that layer holds 47 million parameters in a model of 1.5 billion; its LoRA, U, V and S hold a fifth of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamspec.adapters.base_models.hf_decoder import HFDecoder
from streamspec.adapters.drafters.draft_layer.experts import Branches
from streamspec.adapters.drafters.draft_layer.model import DraftLayerModel
from streamspec.adapters.drafters.drafter_caches import GrowingCache
from streamspec.adapters.drafters.drafting_model import DrafterRun, additive_mask
from streamspec.adapters.drafters.own_lora import inject_lora, lora_layers, lora_tensors

LORA = "layer"  # the name of the LoRA inside the target


class SharedLayerModel(DraftLayerModel):
    """A causal LM whose last layer, under a LoRA, drafts `gamma` tokens. The target is frozen."""

    @classmethod
    def prepare_target(cls, run: DrafterRun, model: PreTrainedModel) -> None:
        """Puts a LoRA that only draft rows use on the linear maps of the last layer with attention."""
        add_lora(model, run.options["stream_rank"])

    def add_layer(self) -> None:
        """Adds nothing: the layer is the target's."""
        self.heads, self.attention = nn.ModuleList(), None

    @property
    def needed(self) -> int:
        """The layer itself."""
        return self.decoder.last_attention

    def _layer(
        self, weights: Any, tokens: Tensor, states: Tensor, positions: Tensor, seen: Tensor, cache: GrowingCache | None
    ) -> Branches:
        x = nn.functional.linear(self.embedded(tokens, positions + 1), self.from_token, self.bias) + states
        x = x.to(self.decoder.embedding.weight.dtype)
        decoder, mask = self.decoder, additive_mask(seen, x.dtype)
        rotary = decoder.rotary_embeddings(x, positions)
        out = decoder.call_layer(decoder.last_attention, x, mask, positions, rotary, cache).float()
        return Branches(out, None, torch.ones_like(out[..., :1]), torch.zeros_like(out[..., :1]))

    def drafter_tensors(self) -> dict[str, Tensor]:
        """Returns every parameter outside the target and the LoRA's, by their names in an adapter."""
        return super().drafter_tensors() | lora_tensors(self._own_lora(), LORA)

    def _own_lora(self) -> Iterator[tuple[str, LoraLayer]]:
        return lora_layers(self.decoder.layers[self.decoder.last_attention], "layer.")

    def described(self) -> dict[str, Any]:
        """Describes the layer for the section `streams` of an adapter's configuration."""
        rank = next(module.r[LORA] for _, module in self._own_lora())
        return super().described() | {"lora": {"rank": rank, "alpha": float(rank)}}


def add_lora(model: PreTrainedModel, rank: int) -> None:
    """Puts a fresh LoRA in float32 on the linear maps of the last layer with attention."""
    decoder = HFDecoder(model)
    last = f"{decoder.last_attention}."
    maps = [name for name in decoder.linear_names(decoder.last_attention) if name.startswith(last)]
    inject_lora(decoder, maps, rank, LORA)
