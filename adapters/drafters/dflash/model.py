"""A block drafter over a frozen Hugging Face causal LM (DFlash, arXiv 2602.06036): a few layers of its own draft all
depths in one pass.

Every row s of the text becomes keys and values of these layers, from states of the target alone:

    F_s = U [m_s^1 ; m_s^2 ; ..]            m^k: the hidden states of row s at the tapped layers, over their rms

After row t, whose next token is y_(t+1), the rows of the block stand at positions t+1 .. t+gamma,

    B_j = c_j m_t + scale * (P_j + a_j W e(y_(t+1)))

and see K/V of F_s for all s <= t and one another, later ones too; in a `causal` block (JetSpec, arXiv 2606.18394) they
see earlier ones alone. Through the layers, a norm and the head row j predicts y_(t+1+j). The logits of a candidate also
depend on the one before it, by the low-rank bigram that all drafters share (DSpark's Markov head).

Unlike the published drafters, whose rows are the embeddings of y_(t+1) and of mask tokens, rows start as streams do
(`streams`): as the least-squares fit of what the target's own row t+j reads there, with an embedding P_j for each. The
layers start as copies of the target's last ones and keep their norms, also for F, and U starts as the state below the
first of them, so that with one layer K/V start as the target's own.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamspec.adapters.base_models.hf_decoder import HFDecoder
from streamspec.adapters.drafters.dflash.config import BlockConfig, taps_of
from streamspec.adapters.drafters.drafter_caches import AppendCache, KeptHeads
from streamspec.adapters.drafters.drafting_model import (
    DrafterRun,
    DraftingModel,
    DraftRows,
    FitStep,
    MainPass,
    bigram_shape,
)
from streamspec.adapters.drafters.layer_copy import plain_maps, weighted
from streamspec.adapters.drafters.least_squares import unit_rms
from streamspec.adapters.drafters.losses import drafting_losses
from streamspec.adapters.drafters.streams.model import (
    StreamingModel,
    fit_start,
    start_scale,
    stream_mask,
)
from streamspec.errors import ConfigError


class BlockDraftModel(StreamingModel):
    """A causal LM with a block drafter of `gamma` depths. The target is frozen."""

    config: BlockConfig
    optional_tensors: ClassVar = DraftingModel.optional_tensors

    def __init__(
        self,
        model: PreTrainedModel,
        config: BlockConfig,
        bigram: tuple[int, int] | None = None,
        embedding_rms: float = 0.5,
    ) -> None:
        """`bigram`: (tokens that may be proposed, rank); `embedding_rms`: of P_j before they are fitted."""
        layers = model.config.num_hidden_layers
        super().__init__(model, config, True, embedding_rms, bigram, tapped=tuple(layers - tap for tap in config.taps))
        self.first = layers  # nothing is read of the target's own K/V
        self.copied = like_last(self.decoder, config.ns)
        config.window = self.decoder.window(self.copied[-1])
        self.block_layers = nn.ModuleList(own_layer(self.decoder, index) for index in self.copied)
        assert self.decoder.norm is not None
        self.norm_out = weighted(copy.deepcopy(self.decoder.norm), self.decoder).float().requires_grad_(True)
        width = self.decoder.hidden_size
        fuse = torch.zeros(width, len(config.taps) * width)
        fuse[:, :width] = config.scale * torch.eye(width)
        self.fuse = nn.Parameter(fuse)

    @classmethod
    def prepare_target(cls, run: DrafterRun, model: PreTrainedModel) -> None:
        """Adds nothing: the drafter has no part inside the target."""

    @classmethod
    def lowest_layer(cls, run: DrafterRun, decoder: HFDecoder) -> int:
        """See `DraftingModel.lowest_layer`."""
        return like_last(decoder, run.options["block_layers"])[0]

    @classmethod
    def taps(cls, run: DrafterRun, decoder: HFDecoder) -> tuple[int, ...]:
        """See `DraftingModel.taps`."""
        layers = len(decoder.layers)
        return taps_of(run.options, layers, layers - cls.lowest_layer(run, decoder))

    @classmethod
    def fresh(cls, run: DrafterRun, model: PreTrainedModel, vocabulary: Tensor | None, frozen: bool) -> Self:
        """Builds a drafter of the target's last layers and fits the start of its rows to the training rows, unless it
        begins with another adapter's.
        """
        options, taps = run.options, cls.taps(run, HFDecoder(model))
        scale = start_scale(run, model, taps[0])
        shape = BlockConfig(options["gamma"], options["block_layers"], scale, taps=taps, causal=options["causal"])
        drafter = cls(model, shape, bigram_shape(run, model, vocabulary)).to(run.device)
        if run.begins_with is None:
            run.fit_start(lambda batches: fit_start(drafter.eval(), batches))
        return drafter

    def train(self, mode: bool = True) -> Self:
        """Keeps the layers without dropout, as the target's own are."""
        super().train(mode)
        self.block_layers.eval()
        return self

    def losses(self, step: FitStep) -> dict[str, Tensor]:
        """Computes the weighted "total" and its parts, each a scalar."""
        return drafting_losses(self, step)

    def draft_pass(self, main: MainPass, picked: DraftRows) -> Tensor:
        """Returns the finished states [B, P, gamma, H] of the block after each of the rows `picked`."""
        rows = picked.rows
        hidden = self.entry_states(self.start_states(main), rows, picked.roots).flatten(1, 2)
        positions = self.positions(rows)
        length, shape = main.tokens.shape[1], self.config
        mask = stream_mask(rows, length, self.gamma, positions, shape.window, hidden.dtype, shape.causal)
        rotary = self.decoder.rotary_embeddings(hidden, positions)
        for index, layer, text in zip(self.copied, self.block_layers, self.context(main), strict=True):
            cache = AppendCache([text.keys], [text.values], [index], {})
            hidden = self.decoder.call_layer(index, hidden, mask, positions, rotary, cache, module=layer)
        finished: Tensor = self.norm_out(hidden)
        return finished.to(self.decoder.embedding.weight.dtype).unflatten(1, (-1, self.gamma))

    def start_states(self, main: MainPass) -> Tensor:
        """m^1 [B, T, H] of all rows, as it is."""
        return main.entry[..., : self.decoder.hidden_size].float()

    def context(self, main: MainPass) -> list[KeptHeads]:
        """K/V of all rows of the text for each layer of the drafter."""
        tapped = main.entry.float().unflatten(-1, (len(self.tapped), -1))
        states = nn.functional.linear(unit_rms(tapped).flatten(-2), self.fuse)
        columns = torch.arange(states.shape[1], device=states.device).expand(len(states), -1)
        mask, norm = states.new_zeros(len(states), 1, states.shape[1], 1), self.decoder.family.attention_norm
        caches = []
        for index, layer in zip(self.copied, self.block_layers, strict=True):
            cache = KeptHeads()
            normed = layer.get_submodule(norm)(states) if norm else states
            attention = layer.get_submodule(self.decoder.family.attention)
            self.decoder.attend(attention, index, normed, mask, columns, cache)
            caches.append(cache)
        return caches

    def drafter_tensors(self) -> dict[str, Tensor]:
        """Returns every parameter outside the target, by its name in an adapter: the layers' as `layers.I.MODULE`."""
        tensors = {
            name.replace("block_layers.", "layers.", 1): parameter
            for name, parameter in self.named_parameters()
            if not name.startswith("model.")
        }
        return tensors | DraftingModel.drafter_tensors(self)

    def described(self) -> dict[str, Any]:
        """Describes the drafter for the section `streams` of an adapter's configuration."""
        return DraftingModel.described(self) | {
            "block_layers": self.config.ns,
            "scale": self.config.scale,
            "taps": list(self.config.taps),
            "window": self.config.window,
            "causal": self.config.causal,
            "biases": [name for name in self.drafter_tensors() if name == "norm_out.bias"],
        }


def like_last(decoder: HFDecoder, count: int) -> list[int]:
    """The last `count` layers that attend as the last one with attention does. Raises ConfigError for fewer."""
    last = decoder.last_attention

    def attention(index: int) -> tuple[Any, ...]:
        kind = decoder.rotary_kind(index) if decoder.rotates(index) else None
        return decoder.window(index), kind, decoder.conv(index) is None

    alike = [index for index in range(last + 1) if attention(index) == attention(last)]
    if len(alike) < count:
        raise ConfigError(
            f"block_layers = {count}", f"at most {len(alike)}, the layers like the last one", "change --block-layers"
        )
    return alike[-count:]


def own_layer(decoder: HFDecoder, index: int) -> nn.Module:
    """A trainable copy of a layer in float32, its maps plain ones and its norms with weights; of attention and a
    convolution beside it attention alone."""
    family, layer = decoder.family, copy.deepcopy(decoder.layers[index])
    if family.conv_beside:
        delattr(layer, str(family.conv))
    plain_maps(layer)
    names = family.attention_norm, family.mlp_norm, family.attention_out_norm, family.mlp_out_norm
    for name in filter(None, names if family.bare_norms else ()):
        layer.set_submodule(name, weighted(layer.get_submodule(name), decoder))
    return layer.float().requires_grad_(True)
