"""An EAGLE-3 head (arXiv 2503.01840) over a frozen Hugging Face causal LM: a draft layer in the form that speculators,
vLLM and SGLang compute, so that an adapter of it can be written for them.

Row t stands for the pair (f_t, y_(t+1)), f_t = F m_t: a map of the hidden states of row t at the tapped layers.

    u_t = f_t + attention([norm_e(e(y_(t+1))) ; norm_f(f_t)])               over rows <= t
    g_t = u_t + mlp(norm_m(u_t))
    head(norm_o(g_t)) predicts y_(t+2)

The row after a draft token for y_(t+2) has f = g_t and that token's embedding. Embedding and head are the target's.
Unrolling and losses are those of `draft_layer`. The layer starts as the target's last one: F as the state below it, e
and f enter its attention by the least-squares fit of what that layer reads one row later.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from streamspec.adapters.drafters.draft_layer.config import DraftLayerConfig
from streamspec.adapters.drafters.draft_layer.experts import Branches
from streamspec.adapters.drafters.draft_layer.model import DraftLayerModel
from streamspec.adapters.drafters.draft_layer.start import rows_to_fit
from streamspec.adapters.drafters.drafting_model import DrafterRun, DraftingModel, MainPass, additive_mask
from streamspec.adapters.drafters.eagle3.options import LAYER_OF
from streamspec.adapters.drafters.least_squares import ridge, share_left, unit_rms
from streamspec.errors import ConfigError

SIDES = ("q_proj", "k_proj", "v_proj")
LAYER = "layers.0."
# Of the layer's configuration in transformers, as far as heads of other makers are read.
FIELDS = (
    *("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_act", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "attention_bias", "vocab_size"),
)


class PairLayerModel(DraftLayerModel):
    """A causal LM with an EAGLE-3 head. The target is frozen."""

    def __init__(self, model: PreTrainedModel, config: DraftLayerConfig) -> None:
        super().__init__(model, config)
        width = self.decoder.hidden_size
        if window := self.decoder.window(self.decoder.last_attention):
            raise ConfigError(
                f"--method eagle3 over a window of {window} tokens", "full attention", "take --method eagle"
            )
        self.from_token = self.from_state = self.bias = None  # type: ignore[assignment]
        self.norm_token = copy.deepcopy(self.norm_in)
        for name in SIDES:
            old = getattr(self.attention, name)
            wide = nn.Linear(2 * width, old.out_features, bias=old.bias is not None)
            with torch.no_grad():
                wide.weight.copy_(torch.cat([torch.zeros_like(old.weight), old.weight], dim=1))
                if old.bias is not None:
                    wide.bias.copy_(old.bias)
            setattr(self.attention, name, wide)
        assert self.attention is not None
        out = self.attention.o_proj
        self.biased = self.attention.q_proj.bias is not None
        if self.biased and out.bias is None:  # the formats' one switch is for all four
            out.bias = nn.Parameter(torch.zeros(out.out_features))
        fuse = torch.zeros(width, len(self.tapped) * width)
        fuse[:, :width] = torch.eye(width)
        self.from_entry = nn.Parameter(fuse)

    @classmethod
    def fresh(cls, run: DrafterRun, model: PreTrainedModel, vocabulary: Tensor | None, frozen: bool) -> Self:
        """Builds a head of the target's last layer and fits how tokens enter it, unless it begins with another
        adapter's.
        """
        head = cls(model, DraftLayerConfig.of(run.options)).to(run.device)
        if run.begins_with is None:
            run.fit_start(lambda batches: fit_tokens(head.eval(), batches))
        return head

    def entries(self, main: MainPass) -> Tensor:
        """m [B, T, taps H], as the target has them."""
        return main.entry.float()

    def handed(self, weights: Any, mixture: Tensor) -> Tensor:
        """The state itself, before the last norm."""
        return mixture

    def embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embeddings [.., H] as they are in the table."""
        return self.decoder.embed(tokens).float()

    def _layer(
        self, weights: Any, tokens: Tensor, states: Tensor, positions: Tensor, seen: Tensor, cache: Any
    ) -> Branches:
        assert self.norm_in is not None and self.norm_token is not None and self.norm_mid is not None
        mask = additive_mask(seen, torch.float32)
        pair = torch.cat([self.norm_token(self.embedded(tokens, positions)), self.norm_in(states)], dim=-1)
        mixed = self.decoder.attend(self.attention, self.decoder.last_attention, pair, mask, positions, cache)
        u = states + mixed
        added: Branches = self.experts(self.norm_mid(u))
        return added._replace(mixture=u + added.mixture)

    def drafter_tensors(self) -> dict[str, Tensor]:
        """Returns every parameter outside the target, by its name in speculators' format."""
        assert self.attention is not None
        tensors: dict[str, Any] = {
            "fc.weight": self.from_entry,
            "norm.weight": self.norm_out.weight,
            f"{LAYER}input_layernorm.weight": self.norm_token.weight,  # type: ignore[union-attr]
            f"{LAYER}hidden_norm.weight": self.norm_in.weight,  # type: ignore[union-attr]
            f"{LAYER}post_attention_layernorm.weight": self.norm_mid.weight,  # type: ignore[union-attr]
            f"{LAYER}mlp.gate_proj.weight": self.experts.gate[0],  # type: ignore[index]
            f"{LAYER}mlp.up_proj.weight": self.experts.up[0],  # type: ignore[index]
            f"{LAYER}mlp.down_proj.weight": self.experts.down[0].T,
        }
        return tensors | {f"{LAYER}self_attn.{name}": p for name, p in self.attention.named_parameters()}

    def described(self) -> dict[str, Any]:
        """Describes the head for the section `streams` of an adapter's configuration."""
        config = self.decoder.model.config
        layer = layer_fields(config) | {"model_type": LAYER_OF[config.model_type], "attention_bias": self.biased}
        biases = [f"{LAYER}self_attn.o_proj.bias"] if self.biased else []
        return DraftingModel.described(self) | {"taps": list(self.config.taps), "layer": layer, "biases": biases}


def layer_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """What the published formats say of a layer, as the target's configuration has it."""
    known = config.to_dict()
    return {name: known[name] for name in FIELDS if known.get(name) is not None}


@torch.no_grad()
def fit_tokens(head: PairLayerModel, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Fits by least squares the input of the target's last layer at row t + 1, from e(y_(t+1)) and m_t over the rows of
    `batches` (ids and attention mask [B, T] each); F becomes the map of m_t, and the part of queries, keys and values
    that reads tokens the last layer's own after the map of e, over the size of that input. Returns the
    share of the fit's variance that is left.
    """
    width = head.decoder.hidden_size
    rows = rows_to_fit(head, batches, lambda tokens, _: unit_rms(head.decoder.embed(tokens).float()))
    if rows is None:
        return 1.0
    token, state, target = rows.token, rows.state, rows.target
    scale = float(target.pow(2).mean().sqrt())
    inputs = torch.cat([token, state / scale, torch.ones_like(token[:, :1])], dim=1)
    solved = ridge(inputs, target)
    head.from_entry.copy_(solved[width:-1].T / scale)
    weight, enters = head.norm_in.weight, solved[:width].T / scale  # type: ignore[union-attr]
    for name in SIDES:
        wide = getattr(head.attention, name).weight
        wide[:, :width] = (wide[:, width:] * weight) @ enters
    head.norm_token.weight.fill_(1.0)  # type: ignore[union-attr]
    weight.mul_((state @ head.from_entry.T).pow(2).mean().sqrt() / scale)  # f is the part of that input without e
    return share_left(target - inputs @ solved, target - target.mean(0))
