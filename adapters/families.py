"""Where each supported Hugging Face family keeps its decoder layers, rotary embedding, final norm and head.

The layers themselves are called as they are; this module only finds them. Knows nothing about streams or training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from streamspec.errors import BaseModelError


@dataclass(frozen=True)
class Family:
    """Attribute paths below the causal LM."""

    decoder: str  # module that holds layers and norm
    layers: str = "layers"
    norm: str = "norm"
    rotary: str | None = "rotary_emb"
    project_out: str | None = None
    gated: bool = True  # MLPs of gate, up and down, normed behind attention: what a draft layer is made from


FAMILIES = {
    "llama": Family("model"),
    "mistral": Family("model"),
    "qwen2": Family("model"),
    "qwen3": Family("model"),
    "phi": Family("model", norm="final_layernorm", gated=False),
    "opt": Family("model.decoder", norm="final_layer_norm", rotary=None, project_out="project_out", gated=False),
    "gpt2": Family("transformer", layers="h", norm="ln_f", rotary=None, gated=False),
}


class Decoder:
    """Uniform view of a causal LM's decoder: `layers`, `call_layer`, `head`. Holds no parameters of its own."""

    def __init__(self, model: PreTrainedModel) -> None:
        model_type = model.config.model_type
        if model_type not in FAMILIES:
            raise BaseModelError(
                f"model family `{model_type}`", ", ".join(FAMILIES), "choose a base of one of these families"
            )
        family = FAMILIES[model_type]
        stack = attrgetter(family.decoder)(model)
        self.model = model
        self.layers: nn.ModuleList = getattr(stack, family.layers)
        self.norm: nn.Module | None = getattr(stack, family.norm)
        self.rotary: nn.Module | None = getattr(stack, family.rotary) if family.rotary else None
        self.project_out: nn.Module | None = getattr(stack, family.project_out) if family.project_out else None
        self.lm_head: nn.Module = model.get_output_embeddings()
        self.embedding: nn.Embedding = model.get_input_embeddings()
        self.hidden_size: int = model.config.hidden_size  # of the residual stream; OPT-350m embeds narrower

    def window(self, index: int) -> int | None:
        """Sliding attention window of layer `index` in tokens, or None."""
        config = self.model.config
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None)
        if window is None or (kinds is not None and kinds[index] != "sliding_attention"):
            return None
        if config.model_type in ("qwen2", "qwen3") and not getattr(config, "use_sliding_window", False):
            return None
        return int(window)

    def rotary_embeddings(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """cos and sin for `positions` [B, R], or None where positions enter at the embedding only."""
        return None if self.rotary is None else self.rotary(hidden, position_ids=positions)

    def call_layer(
        self, index: int, hidden: Tensor, mask: Tensor, positions: Tensor, rotary: Any, cache: Any
    ) -> Tensor:
        """Runs decoder layer `index` on rows `hidden` [B, R, H] with an additive mask [B, 1, R, K]."""
        extra = {} if rotary is None else {"position_embeddings": rotary}
        out = self.layers[index](
            hidden, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, **extra
        )
        return out[0] if isinstance(out, tuple) else out

    @contextmanager
    def watched(self, index: int) -> Iterator[list[Tensor]]:
        """The hidden states [B, T, H] that enter layer `index` while the block runs, one for each pass."""
        entered: list[Tensor] = []
        hook = self.layers[index].register_forward_pre_hook(
            lambda _, args, kwargs: entered.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
        try:
            yield entered
        finally:
            hook.remove()

    def finish(self, hidden: Tensor) -> Tensor:
        """Final norm (and OPT's output projection): what the head is applied to."""
        if self.norm is not None:
            hidden = self.norm(hidden)
        return hidden if self.project_out is None else self.project_out(hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token embeddings without positions, zero-padded or cut never: [.., E]."""
        return torch.nn.functional.embedding(tokens, self.embedding.weight)

    def linear_names(self, first: int) -> list[str]:
        """Full names of the linear maps in layers `first..N-1`: what the streams' own LoRA attaches to."""
        return [f"{i}.{name}" for i in range(first, len(self.layers)) for name in self.linear_modules(i)]

    def linear_modules(self, index: int) -> list[str]:
        """Names of the linear maps inside layer `index` (`self_attn.q_proj`, ...)."""
        return [n for n, m in self.layers[index].named_modules() if isinstance(m, (nn.Linear, Conv1D))]
