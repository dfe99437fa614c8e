"""A block drafter over a frozen Hugging Face causal LM in the form that speculators and vLLM compute, so that an
adapter of it can be written for them: DFlash (arXiv 2602.06036) that drafts from its first row on, with a bigram
DSpark.

    F_s = norm_f(U [m_s^1 ; m_s^2 ; ..])            m^k: the hidden states of row s at the tapped layers

Keys and values of row s of the text are maps of F_s in every layer. After row t the rows of the block are the target's
embeddings of y_(t+1) and of gamma - 1 mask tokens, at positions t+1 .. t+gamma. They see K/V of F_s for all s <= t and
one another, later ones too; row j = 1..gamma predicts y_(t+1+j). Embedding and head are the target's. The layers are of
Qwen3, the only ones the format knows, and start as the target's last ones as far as these have their maps and norms; U
starts as the state below the first of them, so that K/V start as the target's own but for the norm of keys.
"""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from streamspec.adapters.base_models.hf_decoder import HFDecoder
from streamspec.adapters.drafters.dflash.config import BlockConfig, taps_of
from streamspec.adapters.drafters.drafting_model import (
    DrafterRun,
    DraftingModel,
    DraftRows,
    FitStep,
    MainPass,
    bigram_shape,
)
from streamspec.adapters.drafters.eagle3.model import layer_fields
from streamspec.adapters.drafters.layer_copy import plain_maps
from streamspec.adapters.drafters.losses import drafting_losses
from streamspec.adapters.drafters.streams.model import stream_mask


class PublishedBlockModel(DraftingModel):
    """A causal LM with such a drafter. The target is frozen. `config`: `ns` layers, `gamma`, `taps`."""

    def __init__(
        self, model: PreTrainedModel, config: BlockConfig, bigram: tuple[int, int] | None = None, mask_token: int = 0
    ) -> None:
        """`bigram`: (tokens that may be proposed, rank)."""
        layers = model.config.num_hidden_layers
        super().__init__(model, config.gamma, layers, True, bigram, tuple(layers - tap for tap in config.taps))
        self.config, self.mask_token = config, mask_token
        of_target = [copy.deepcopy(layer) for layer in self.decoder.layers[-config.ns :]]
        for layer in of_target:
            plain_maps(layer)
        attention: Any = of_target[-1].self_attn
        biased = attention.q_proj.bias is not None
        known = layer_fields(model.config)
        known |= {"model_type": "qwen3", "attention_bias": biased, "head_dim": attention.head_dim}
        self.described_layer = known | {"num_hidden_layers": config.ns, "layer_types": ["full_attention"] * config.ns}
        own = AutoConfig.for_model(**self.described_layer, attn_implementation="sdpa")
        self.layers = nn.ModuleList(Qwen3DecoderLayer(own, index) for index in range(config.ns))
        for layer, start in zip(self.layers, of_target, strict=True):
            missing, _ = layer.load_state_dict(start.state_dict(), strict=False)
            for name in missing:
                if name.endswith("bias"):
                    nn.init.zeros_(layer.get_parameter(name))
        width, eps = self.decoder.hidden_size, own.rms_norm_eps
        self.hidden_norm, self.norm = Qwen3RMSNorm(width, eps), Qwen3RMSNorm(width, eps)
        self.hidden_norm.load_state_dict(self.layers[0].input_layernorm.state_dict())
        assert self.decoder.norm is not None
        self.norm.load_state_dict(self.decoder.norm.state_dict())
        self.fc = nn.Linear(width * len(config.taps), width, bias=False)
        with torch.no_grad():
            self.fc.weight.zero_()[:, :width].fill_diagonal_(1.0)
        self.rotary = Qwen3RotaryEmbedding(own)
        for part in (self.layers, self.hidden_norm, self.norm, self.fc, self.rotary):
            part.float()

    @classmethod
    def lowest_layer(cls, run: DrafterRun, decoder: HFDecoder) -> int:
        """See `DraftingModel.lowest_layer`."""
        return len(decoder.layers) - int(run.options["block_layers"])

    @classmethod
    def taps(cls, run: DrafterRun, decoder: HFDecoder) -> tuple[int, ...]:
        """See `DraftingModel.taps`."""
        return taps_of(run.options, len(decoder.layers), run.options["block_layers"])

    @classmethod
    def fresh(cls, run: DrafterRun, model: PreTrainedModel, vocabulary: Tensor | None, frozen: bool) -> Self:
        """Builds a drafter of the target's last layers. Its mask token is one that pads or ends texts."""
        options = run.options
        shape = BlockConfig(options["gamma"], options["block_layers"], 1.0, taps=cls.taps(run, HFDecoder(model)))
        ends = model.config.eos_token_id
        known = (model.config.pad_token_id, *(ends if isinstance(ends, list) else [ends]), 0)
        mask_token = next(token for token in known if token is not None and token >= 0)
        return cls(model, shape, bigram_shape(run, model, vocabulary), mask_token).to(run.device)

    def losses(self, step: FitStep) -> dict[str, Tensor]:
        """Computes the weighted "total" and its parts, each a scalar."""
        return drafting_losses(self, step)

    def draft_pass(self, main: MainPass, picked: DraftRows) -> Tensor:
        """Returns the finished states [B, P, gamma, H] of the block after each of the rows `picked`."""
        rows, gamma, length = picked.rows, self.gamma, main.tokens.shape[1]
        masks = rows.new_full((*rows.shape, gamma - 1), self.mask_token)
        tokens = torch.cat([picked.roots.clamp(min=0)[..., None], masks], dim=-1).flatten(1)
        hidden = self.decoder.embed(tokens).float()
        positions = (rows[..., None] + torch.arange(1, gamma + 1, device=rows.device)).flatten(1)
        mask = stream_mask(rows, length, gamma, positions, None, hidden.dtype, causal=False)
        context = self.hidden_norm(self.fc(main.entry.float()))
        columns = torch.arange(length, device=rows.device).expand(len(rows), -1)
        turns = self.rotary(hidden, torch.cat([columns, positions], dim=1))
        for layer in self.layers:
            hidden = self._through(layer, hidden, context, mask, turns)
        finished: Tensor = self.norm(hidden)
        return finished.to(self.decoder.embedding.weight.dtype).unflatten(1, (-1, gamma))

    def _through(
        self, layer: nn.Module, hidden: Tensor, context: Tensor, mask: Tensor, turns: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Rows [B, R, H] after a layer, whose keys and values are those of `context` [B, T, H] and of the rows."""
        attention: Any = layer.self_attn
        read = layer.input_layernorm(hidden)  # type: ignore[operator]
        every, width = torch.cat([context, read], dim=1), attention.head_dim
        query = attention.q_norm(attention.q_proj(read).unflatten(-1, (-1, width))).transpose(1, 2)
        key = attention.k_norm(attention.k_proj(every).unflatten(-1, (-1, width))).transpose(1, 2)
        value = attention.v_proj(every).unflatten(-1, (-1, width)).transpose(1, 2)
        count, (cos, sin) = read.shape[1], turns
        query, _ = apply_rotary_pos_emb(query, query, cos[:, -count:], sin[:, -count:])
        _, key = apply_rotary_pos_emb(key, key, cos, sin)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        out: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))  # type: ignore[operator]
        return out

    def drafter_tensors(self) -> dict[str, Tensor]:
        """Returns every parameter outside the target, by its name in speculators' format."""
        named = {name: one for name, one in self.named_parameters() if not name.startswith(("model.", "bigram_"))}
        return named | super().drafter_tensors()

    def described(self) -> dict[str, Any]:
        """Describes the drafter for the section `streams` of an adapter's configuration."""
        return super().described() | {
            "block_layers": self.config.ns,
            "taps": list(self.config.taps),
            "mask_token": self.mask_token,
            "layer": self.described_layer,
        }
