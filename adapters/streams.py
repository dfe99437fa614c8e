"""Speculative streams over an unmodified Hugging Face causal LM (Speculative Streaming, arXiv 2402.11131, section 3.2).

Two passes, the same in training and in the exported graph. Pass 1 is the plain model over the main rows; its K/V is kept.
Pass 2 runs stream rows only, through the family's own last `Ns` decoder layers:

    S_(t,j) = M_t + scale * (P_j + W e(y_(t+1)))          j = 1..gamma

M_t is the hidden state of row t at the input of layer N-Ns (equation 4 with the identity for f), e(y) the embedding of the
token that follows row t over its rms. The W term is ours: streams run after acceptance, so the next token is known.
A low-rank bigram makes a guess depend on the one before it:

    logits_j(v | u) = head(S_j)_v + A_u . B_v             u: the token before; A, B [draft vocabulary, r]

For pruning (section 3.2.3) a map of low rank foretells the next token from M_t alone, through the model's own norm and head:

    early(M_t) = head(norm(u + B A u))                    u = M_t over its rms

Row (t, j) attends to main rows <= t and to streams <= j of the same t (equations 2 and 3); main rows never see streams.

Knows nothing about data, optimisers or files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from streamspec.adapters.families import Decoder
from streamspec.errors import ConfigError


@dataclass
class StreamConfig:
    """Shape of the streams. `scale` is the median rms of M; it is measured before training and then fixed."""

    gamma: int
    ns: int
    scale: float = 1.0
    positions: str = "shifted"
    root_token: bool = True


@dataclass
class MainPass:
    """What pass 1 leaves behind: M [B, T, H], the finished hidden states [B, T, H] and K/V of the MSA layers."""

    entry: Tensor
    final: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    lengths: Tensor  # [B] real tokens of each row (right-padded)


class AppendCache:
    """The cache HF layers see in pass 2: main K/V (read-only) followed by the stream rows' own."""

    def __init__(self, keys: list[Tensor], values: list[Tensor], first: int) -> None:
        self.keys, self.values, self.first = keys, values, first
        self.is_updated: dict[int, bool] = {}

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        i = layer - self.first
        return torch.cat([self.keys[i], key], dim=2), torch.cat([self.values[i], value], dim=2)

    def get_seq_length(self, *_: Any) -> int:
        return int(self.keys[0].shape[2])


class StreamingModel(nn.Module):
    """A causal LM with `gamma` speculative streams. Trainable: P, W and whatever LoRA layers the caller attached.

    `own_lora`: the LoRA layers inside `model` belong to the streams alone and are switched off in pass 1 (staged recipe).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: StreamConfig,
        own_lora: bool,
        embedding_rms: float = 0.5,
        bigram: tuple[int, int] | None = None,
        prune_rank: int = 0,
    ) -> None:
        """`bigram`: (tokens that streams may propose, rank); `prune_rank`: of the early exit's map, 0 for none."""
        super().__init__()
        self.model, self.config, self.own_lora = model, config, own_lora
        self.decoder = Decoder(model)
        self.first = len(self.decoder.layers) - config.ns
        if not 1 <= config.ns <= len(self.decoder.layers):
            raise ConfigError(
                f"ns = {config.ns}", f"1..{len(self.decoder.layers)}, the layers of this base", "change --ns"
            )
        hidden = self.decoder.hidden_size
        self.stream_embeddings = nn.Parameter(torch.randn(config.gamma, hidden) * embedding_rms)
        # The map starts as a scaled identity: a token's embedding already points where lower layers would carry it.
        width = self.decoder.embedding.weight.shape[1]
        self.root_map = nn.Parameter(torch.eye(hidden, width) * embedding_rms) if config.root_token else None
        # One side starts at zero: the streams begin as if there were no bigram.
        self.bigram_in = nn.Parameter(torch.randn(bigram) * bigram[1] ** -0.5) if bigram else None
        self.bigram_out = nn.Parameter(torch.zeros(bigram)) if bigram else None
        self.prune_down = nn.Parameter(torch.randn(prune_rank, hidden) * hidden**-0.5) if prune_rank else None
        self.prune_up = nn.Parameter(torch.zeros(hidden, prune_rank)) if prune_rank else None

    def train(self, mode: bool = True) -> StreamingModel:
        """A target that streams must not change is never in training mode: its dropout would blur what they learn from."""
        super().train(mode)
        if self.own_lora:
            self.model.eval()
        return self

    # ---- pass 1

    def main_pass(self, input_ids: Tensor, attention_mask: Tensor) -> MainPass:
        """The plain model over right-padded rows [B, T]; bit for bit what the model gives without streams."""
        cache = DynamicCache()
        with self.stream_lora(False):
            inner = self.model.model if hasattr(self.model, "model") else self.model.transformer
            caught: list[Tensor] = []
            hook = self.decoder.layers[self.first].register_forward_pre_hook(
                lambda _, args, kwargs: caught.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
            )
            try:
                out = inner(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
            finally:
                hook.remove()
        layers = cache.layers[self.first :]
        return MainPass(
            entry=caught[0],
            final=out.last_hidden_state,
            keys=[layer.keys for layer in layers],
            values=[layer.values for layer in layers],
            lengths=attention_mask.sum(dim=1),
        )

    @contextmanager
    def stream_lora(self, enabled: bool) -> Iterator[None]:
        """Switches the streams' own LoRA; does nothing where the LoRA belongs to every row (joint recipe)."""
        if self.own_lora:
            for layer in self._lora_layers():
                layer.enable_adapters(enabled)
        try:
            yield
        finally:
            if self.own_lora:
                for layer in self._lora_layers():
                    layer.enable_adapters(True)

    def _lora_layers(self) -> list[BaseTunerLayer]:
        return [m for m in self.model.modules() if isinstance(m, BaseTunerLayer)]

    # ---- pass 2

    def stream_pass(self, main: MainPass, rows: Tensor, roots: Tensor) -> Tensor:
        """Streams beside main rows `rows` [B, P] whose next tokens are `roots` [B, P].

        Returns finished hidden states [B, P, gamma, E], ready for the head.
        """
        batch, count = rows.shape
        gamma = self.config.gamma
        hidden = self.entry_states(main.entry, rows, roots).reshape(batch, count * gamma, -1)
        offsets = torch.arange(1, gamma + 1, device=rows.device) if self.config.positions == "shifted" else 0
        positions = (rows[:, :, None] + offsets + torch.zeros(gamma, dtype=rows.dtype, device=rows.device)).reshape(
            batch, -1
        )
        limit = getattr(self.decoder.model.config, "max_position_embeddings", None)
        if limit and self.decoder.rotary is None:
            positions = positions.clamp(max=limit - 1)
        rotary = self.decoder.rotary_embeddings(hidden, positions)
        cache = self.cache(main)
        length = main.entry.shape[1]
        masks: dict[int | None, Tensor] = {}
        for index in range(self.first, len(self.decoder.layers)):
            window = self.decoder.window(index)
            if window not in masks:
                masks[window] = stream_mask(rows, length, gamma, positions, window, hidden.dtype)
            hidden = self.decoder.call_layer(index, hidden, masks[window], positions, rotary, cache)
        return self.decoder.finish(hidden).reshape(batch, count, gamma, -1)

    def cache(self, main: MainPass) -> AppendCache:
        """What stream rows find behind and among themselves."""
        return AppendCache(main.keys, main.values, self.first)

    def entry_states(self, entry: Tensor, rows: Tensor, roots: Tensor) -> Tensor:
        """S [B, P, gamma, H] at the input of layer N-Ns."""
        hidden = torch.gather(entry, 1, rows[:, :, None].expand(-1, -1, entry.shape[2]))[:, :, None, :]
        shift = self.stream_embeddings[None, None]
        if self.root_map is not None:
            shift = (
                shift + nn.functional.linear(unit_rms(self.decoder.embed(roots).float()), self.root_map)[:, :, None, :]
            )
        return hidden + (self.config.scale * shift).to(hidden.dtype)

    def exit_states(self, entry: Tensor) -> Tensor:
        """Of rows M [.., H], ready for the head; learning stops here and leaves what made M alone."""
        assert self.prune_down is not None and self.prune_up is not None
        unit = unit_rms(entry.detach().float())
        moved = nn.functional.linear(nn.functional.linear(unit, self.prune_down), self.prune_up)
        return self.decoder.finish((unit + moved).to(entry.dtype))

    def head(self, hidden: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        """LM head over all tokens, or over the rows `vocabulary` [D] of it only."""
        if vocabulary is None:
            return self.decoder.lm_head(hidden)
        bias = self.decoder.lm_head.bias
        return nn.functional.linear(
            hidden, self.decoder.lm_head.weight[vocabulary], None if bias is None else bias[vocabulary]
        )

    def with_bigram(self, logits: Tensor, before: Tensor) -> Tensor:
        """Float logits [.., D] given the token before each, as its number `before` [..] among the D, negative for others."""
        if self.bigram_in is None or self.bigram_out is None:
            return logits.float()
        known = self.bigram_in[before.clamp(min=0)] * (before >= 0)[..., None]
        return logits.float() + nn.functional.linear(known, self.bigram_out)


def unit_rms(x: Tensor) -> Tensor:
    """x over the root mean square of its last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-12)


def stream_mask(
    rows: Tensor, length: int, gamma: int, positions: Tensor, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Additive mask [B, 1, P*gamma, length + P*gamma] of pass 2 for main rows `rows` [B, P].

    `positions` [B, P*gamma] matter only where the layer has a sliding `window`.
    """
    batch, count = rows.shape
    own_row = rows.repeat_interleave(gamma, dim=1)  # [B, R]
    columns = torch.arange(length, device=rows.device)
    see_main = columns[None, None, :] <= own_row[:, :, None]
    group = torch.arange(count, device=rows.device).repeat_interleave(gamma)
    stream = torch.arange(gamma, device=rows.device).repeat(count)
    see_stream = (group[:, None] == group[None, :]) & (stream[None, :] <= stream[:, None])
    see_stream = see_stream[None].expand(batch, -1, -1)
    if window is not None:
        see_main = see_main & (positions[:, :, None] - columns[None, None, :] < window)
        see_stream = see_stream & (positions[:, :, None] - positions[:, None, :] < window)
    see = torch.cat([see_main, see_stream], dim=2)
    mask = torch.zeros(see.shape, dtype=dtype, device=rows.device)
    return mask.masked_fill_(~see, torch.finfo(dtype).min)[:, None]


@torch.no_grad()
def measure_scale(model: PreTrainedModel, ns: int, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Median rms of the hidden state at the input of layer N-Ns over all real tokens: P_j must live at this scale."""
    probe = StreamingModel(model, StreamConfig(gamma=1, ns=ns, root_token=False), own_lora=False)
    values = []
    for input_ids, attention_mask in batches:
        entry = probe.main_pass(input_ids, attention_mask).entry.float()
        values.append(entry.pow(2).mean(-1).sqrt()[attention_mask.bool()])
    scale = float(torch.cat(values).median())
    if not math.isfinite(scale) or scale <= 0:
        raise ConfigError(f"hidden states with rms {scale}", "finite activations", "check the base's weights")
    return scale
