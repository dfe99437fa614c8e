"""Speculative streams over an unmodified Hugging Face causal LM (Speculative Streaming, arXiv 2402.11131, section 3.2).

Two passes, the same in training and in the exported graph. Pass 1 is the plain model over the main rows; its K/V is
kept. Pass 2 runs stream rows only, through the family's own last `Ns` decoder layers:

    S_(t,j) = c_j M_t + scale * (P_j + a_j W e(y_(t+1)))          j = 1..gamma

M_t is the hidden state of row t at the input of layer N-Ns (equation 4 with a factor for f), e(y) the embedding of the
token that follows row t over its rms. The W term is ours: streams run after acceptance, so the next token is known. All
of them start as the least-squares fit of M_(t+j), the state that row t+j will have there (`fit_start`). For pruning
(section 3.2.3) a map of low rank predicts the next token from M_t alone, through the model's own norm and head:

    early(M_t) = head(norm(u + B A u))                    u = M_t over its rms

Options of the paper: `start_rank`, f_eta of equation 4, M + U D M in place of M; `value_rotation`, its appendix B: no
P, but the values of stream j turned by the angle j pi / (gamma + 1) in every layer, in pairs of channels.

Row (t, j) attends to main rows <= t and to streams <= j of the same t (equations 2 and 3); main rows never see streams.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Self

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamspec.adapters.base_models.hf_decoder import HFDecoder
from streamspec.adapters.base_models.token_mixers.recurrent_state import Paths
from streamspec.adapters.dataset.batches import collate
from streamspec.adapters.distributed import processes
from streamspec.adapters.distributed.processes import say
from streamspec.adapters.drafters.drafter_caches import AppendCache
from streamspec.adapters.drafters.drafting_model import (
    IGNORE,
    DrafterRun,
    DraftingModel,
    DraftRows,
    FitStep,
    MainPass,
    TargetModel,
    additive_mask,
    at_rows,
    bigram_shape,
)
from streamspec.adapters.drafters.least_squares import FIT_TOKENS, MASSIVE, pairs_ahead, ridge, share_left, unit_rms
from streamspec.adapters.drafters.losses import drafting_losses, head_losses, vocabulary_index
from streamspec.adapters.drafters.own_lora import inject_lora, lora_layers, lora_tensors
from streamspec.adapters.drafters.streams.config import StreamConfig
from streamspec.bundle.adapter_folder import rotation_angle, streams_of
from streamspec.errors import ConfigError

LORA = "streams"  # the name of the LoRA inside the target
SCALE_ROWS = 16  # texts at which the scale is measured


class StreamingModel(DraftingModel):
    """A causal LM with `gamma` speculative streams. Trainable: P, W and whatever LoRA layers the caller attached.

    `frozen`: the LoRA layers inside `model` belong to the streams alone and are switched off in pass 1 (staged recipe).
    """

    optional_tensors: ClassVar = DraftingModel.optional_tensors | {
        "prune_": "prune_up",
        "shares": "shares",
        "start_": "start_up",
    }

    def __init__(
        self,
        model: PreTrainedModel,
        config: StreamConfig,
        frozen: bool,
        embedding_rms: float = 0.5,
        bigram: tuple[int, int] | None = None,
        prune_rank: int = 0,
        exit_layers: tuple[int, ...] = (),
        tapped: tuple[int, ...] = (),
    ) -> None:
        """`bigram`: (tokens that streams may propose, rank); `prune_rank`: of the early exits' maps, 0 for none;
        `exit_layers`: whose inputs they read, () for one that reads M."""
        layers = model.config.num_hidden_layers
        if not 1 <= config.ns <= layers:
            raise ConfigError(f"ns = {config.ns}", f"1..{layers}, the layers of this base", "change --ns")
        first, self.exit_layers = layers - config.ns, exit_layers
        tapped = tapped or (first, *(layer for layer in exit_layers if layer != first))
        super().__init__(model, config.gamma, first, frozen, bigram, tapped)
        self.config = config
        hidden = self.decoder.hidden_size
        embeddings = torch.randn(config.gamma, hidden) * embedding_rms
        self.stream_embeddings = nn.Parameter(embeddings, not config.value_rotation)
        if config.value_rotation:
            nn.init.zeros_(self.stream_embeddings)
        rank = config.start_rank
        self.start_down = nn.Parameter(torch.randn(rank, hidden) * hidden**-0.5) if rank else None  # D
        self.start_up = nn.Parameter(torch.zeros(hidden, rank)) if rank else None  # U
        # The map starts as a scaled identity: a token's embedding already points where lower layers would carry it.
        width = self.decoder.embedding.weight.shape[1]
        self.root_map = nn.Parameter(torch.eye(hidden, width) * embedding_rms) if config.root_token else None
        self.shares = nn.Parameter(torch.ones(config.gamma, 2))  # c_j, a_j
        many = (len(exit_layers),) if exit_layers else ()
        self.prune_down = nn.Parameter(torch.randn(*many, prune_rank, hidden) * hidden**-0.5) if prune_rank else None
        self.prune_up = nn.Parameter(torch.zeros(*many, hidden, prune_rank)) if prune_rank else None

    @classmethod
    def prepare_target(cls, run: DrafterRun, model: PreTrainedModel) -> None:
        """Puts a LoRA that only stream rows use on the linear maps of the last Ns layers."""
        rank, decoder = run.options["stream_rank"], HFDecoder(model)
        inject_lora(decoder, decoder.linear_names(len(decoder.layers) - run.ns), rank, LORA)

    @classmethod
    def lowest_layer(cls, run: DrafterRun, decoder: HFDecoder) -> int:
        """See `DraftingModel.lowest_layer`."""
        return len(decoder.layers) - run.ns

    @classmethod
    def taps(cls, run: DrafterRun, decoder: HFDecoder) -> tuple[int, ...]:
        """See `DraftingModel.taps`: those of the early exits."""
        return tuple(len(decoder.layers) - layer for layer in exits_of(run.options))

    @classmethod
    def fresh(cls, run: DrafterRun, model: PreTrainedModel, vocabulary: Tensor | None, frozen: bool) -> Self:
        """Builds streams at the scale measured of the hidden state that they are added to, or at that of the adapter
        that they start from.
        """
        options, scale = run.options, start_scale(run, model, run.ns)
        same = ("gamma", "positions", "root_token", "value_rotation", "start_rank")
        shape = StreamConfig(ns=run.ns, scale=scale, **{name: options[name] for name in same})
        bigram = bigram_shape(run, model, vocabulary)
        rms, prune_rank = options["stream_embedding"], options["prune_rank"]
        if prune_rank and HFDecoder(model).family.remembers(model.config):
            prune_rank = 0
            say("no early exit is trained: recurrent states take up all rows of a draft")
        streams = cls(model, shape, frozen, rms, bigram, prune_rank, exits_of(options)).to(run.device)
        if options["fit_start"] and run.begins_with is None:
            run.fit_start(lambda batches: fit_start(streams.eval(), batches))
        return streams

    def losses(self, step: FitStep) -> dict[str, Tensor]:
        """Computes the "total" loss and its parts, each a scalar; adds that of the early exit, which is no part of the
        "loss" that is shown: its own parameters alone learn from it.
        """
        losses = drafting_losses(self, step)
        if self.prune_down is not None:
            exits = exit_loss(self, step)
            losses |= {"loss": losses["total"], "total": losses["total"] + exits, "early_exit": exits}
        return losses

    def draft_pass(self, main: MainPass, picked: DraftRows) -> Tensor:
        """Pass 2: finished hidden states [B, P, gamma, E] of the streams."""
        rows = picked.rows
        batch, count = rows.shape
        gamma = self.gamma
        hidden = self.entry_states(self.start_states(main), rows, picked.roots).reshape(batch, count * gamma, -1)
        positions = self.positions(rows)
        rotary = self.decoder.rotary_embeddings(hidden, positions)
        cache = self.cache(main, rows)
        length = main.entry.shape[1]
        masks: dict[int | None, Tensor] = {}
        below = self.decoder.kept_below(self.first)  # these see the main rows alone
        for index in range(self.first, len(self.decoder.layers)):
            window = self.decoder.window(index)
            if window not in masks:
                masks[window] = stream_mask(rows, length, gamma, positions, window, hidden.dtype)
            mask = masks[window][..., :length] if index in below else masks[window]
            hidden = self.decoder.call_layer(index, hidden, mask, positions, rotary, cache)
        return self.decoder.finish(hidden).reshape(batch, count, gamma, -1)

    def positions(self, rows: Tensor) -> Tensor:
        """The positions [B, P*gamma] of the streams of main rows [B, P]."""
        gamma = self.config.gamma
        offsets = torch.arange(1, gamma + 1, device=rows.device) if self.config.positions == "shifted" else 0
        positions = (rows[:, :, None] + offsets).expand(-1, -1, gamma).reshape(len(rows), -1)
        limit = getattr(self.decoder.model.config, "max_position_embeddings", None)
        return positions.clamp(max=limit - 1) if limit and self.decoder.rotary is None else positions

    def start_states(self, main: MainPass) -> Tensor:
        """M [B, T, H] of all rows."""
        return self.entered(main, self.first)

    def cache(self, main: MainPass, rows: Tensor) -> AppendCache:
        """The K/V that the streams of `rows` [B, P] attend to: the main rows' and their own."""
        shared = {
            self.decoder.model.config.layer_types[layer]: (
                main.keys[layer - self.first],
                main.values[layer - self.first],
            )
            for layer in self.decoder.kept_below(self.first)
        }
        angles = None
        if self.config.value_rotation:
            numbers = torch.arange(1, self.gamma + 1, device=main.tokens.device)
            angles = numbers * rotation_angle(self.gamma)
        numbers, paths = self.decoder.cache_numbers(self.first), Paths(rows, self.gamma)
        return AppendCache(main.keys, main.values, numbers, shared, paths, angles)

    def entry_states(self, entry: Tensor, rows: Tensor, roots: Tensor) -> Tensor:
        """S [B, P, gamma, H] at the input of layer N-Ns."""
        hidden = at_rows(entry, rows)[:, :, None, :]
        if self.start_down is not None and self.start_up is not None:
            moved = nn.functional.linear(nn.functional.linear(hidden.float(), self.start_down), self.start_up)
            hidden = hidden + moved.to(hidden.dtype)
        shift = self.stream_embeddings[None, None]
        if self.root_map is not None:
            root_term = nn.functional.linear(unit_rms(self.decoder.embed(roots).float()), self.root_map)[:, :, None, :]
            shift = shift + self.shares[:, 1:] * root_term
        return (self.shares[:, :1] * hidden + self.config.scale * shift).to(hidden.dtype)

    def entered(self, main: MainPass, layer: int) -> Tensor:
        """States [B, T, H] at the input of one of the `tapped` layers."""
        return main.entry.chunk(len(self.tapped), dim=-1)[self.tapped.index(layer)]

    def exit_states(self, entry: Tensor, number: int = 0) -> Tensor:
        """States of an early exit, of several its `number`, from rows [.., H] at its layer's input, ready for the head.
        No gradient flows into these."""
        assert self.prune_down is not None and self.prune_up is not None
        down, up = (side[number] if self.exit_layers else side for side in (self.prune_down, self.prune_up))
        unit = unit_rms(entry.detach().float())
        moved = nn.functional.linear(nn.functional.linear(unit, down), up)
        return self.decoder.finish((unit + moved).to(entry.dtype))

    def drafter_tensors(self) -> dict[str, Tensor]:
        """Returns the streams' own parameters and LoRA, by their names in an adapter."""
        tensors: dict[str, Tensor] = {"shares": self.shares}
        if not self.config.value_rotation:
            tensors["stream_embeddings"] = self.stream_embeddings
        if self.start_down is not None and self.start_up is not None:
            tensors |= {"start_down": self.start_down, "start_up": self.start_up}
        if self.root_map is not None:
            tensors["root_map"] = self.root_map
        if self.prune_down is not None and self.prune_up is not None:
            tensors |= {"prune_down": self.prune_down, "prune_up": self.prune_up}
        return tensors | lora_tensors(self._own_lora(), LORA) | super().drafter_tensors()

    def _own_lora(self) -> Iterator[tuple[str, LoraLayer]]:
        """The streams' own LoRA: `layers.I.MODULE`, layer."""
        for index in range(self.first, len(self.decoder.layers)) if self.frozen else ():
            yield from lora_layers(self.decoder.layers[index], f"layers.{index}.")

    def described(self) -> dict[str, Any]:
        """Describes the streams for the section `streams` of an adapter's configuration."""
        shape = self.config
        rank = next((module.r[LORA] for _, module in self._own_lora()), 0)
        return super().described() | {
            **{name: getattr(shape, name) for name in ("ns", "scale", "positions", "root_token")},
            "shares": True,
            "value_rotation": shape.value_rotation,
            "start_rank": shape.start_rank,
            "lora": {"rank": rank, "alpha": float(rank)} if rank else None,
            "pruning": None if self.prune_down is None else self.prune_down.shape[-2],
            **({"exit_layers": list(self.exit_layers)} if self.exit_layers else {}),
        }


def exits_of(options: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers that `options` (`TrainConfig.resolved`) name for early exits."""
    return tuple(map(int, options["exit_layer"].split(","))) if options["exit_layer"] else ()


def stream_mask(
    rows: Tensor,
    length: int,
    gamma: int,
    positions: Tensor,
    window: int | None,
    dtype: torch.dtype,
    causal: bool = True,
) -> Tensor:
    """Additive mask [B, 1, P*gamma, length + P*gamma] of pass 2 for main rows `rows` [B, P].

    `positions` [B, P*gamma] matter only where the layer has a sliding `window`. `causal`: streams see no later ones.
    """
    batch, count = rows.shape
    own_row = rows.repeat_interleave(gamma, dim=1)  # [B, R]
    columns = torch.arange(length, device=rows.device)
    see_main = columns[None, None, :] <= own_row[:, :, None]
    group = torch.arange(count, device=rows.device).repeat_interleave(gamma)
    stream = torch.arange(gamma, device=rows.device).repeat(count)
    see_stream = group[:, None] == group[None, :]
    if causal:
        see_stream = see_stream & (stream[None, :] <= stream[:, None])
    see_stream = see_stream[None].expand(batch, -1, -1)
    if window is not None:
        see_main = see_main & (positions[:, :, None] - columns[None, None, :] < window)
        see_stream = see_stream & (positions[:, :, None] - positions[:, None, :] < window)
    return additive_mask(torch.cat([see_main, see_stream], dim=2), dtype)[:, None]


@torch.no_grad()
def start_scale(run: DrafterRun, model: PreTrainedModel, ns: int) -> float:
    """Returns the scale of P_j: that of the adapter that the run begins with, else the median rms of the hidden state
    at the input of layer N-Ns over the tokens of some texts."""
    if run.begins_with is not None:
        return float(streams_of(run.begins_with)["scale"])
    return run.measured_once("scale", partial(_rms, run, model, ns))


def _rms(run: DrafterRun, model: PreTrainedModel, ns: int) -> float:
    probe = TargetModel(model, model.config.num_hidden_layers - ns)
    batch = collate(run.first_rows(SCALE_ROWS), run.device)
    entry = probe.main_pass(batch["input_ids"], batch["attention_mask"]).entry.float()
    scale = float(entry.pow(2).mean(-1).sqrt()[batch["attention_mask"].bool()].median())
    if not math.isfinite(scale) or scale <= 0:
        raise ConfigError(f"hidden states with rms {scale}", "finite activations", "check the base's weights")
    return scale


@torch.no_grad()
def fit_start(streams: StreamingModel, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Fits c, a, W and P by least squares to M_(t+j) from M_t and e(y_(t+1)) over the rows of `batches` (ids and
    attention mask [B, T] each): W for the first stream, two factors and a mean for each. Returns the share of the first
    stream's variance that is left. Rows with massive activations (rms above `MASSIVE` times the scale) are left out:
    they would rule the fit. No more batches are read once `FIT_TOKENS` rows are there.
    """
    seen, count = [], 0
    for ids, mask in batches:
        states = streams.start_states(streams.main_pass(ids, mask)).float() / streams.config.scale
        usable = mask.bool() & (states.pow(2).mean(-1) < MASSIVE**2)
        seen.append((unit_rms(streams.decoder.embed(ids).float()), states, usable))
        count += int(usable.sum())
        if count >= FIT_TOKENS:
            break
    left = 1.0
    for j in range(streams.config.gamma):
        token, state, target = (
            torch.cat(side) for side in zip(*(pairs_ahead(*batch, ahead=j + 1) for batch in seen), strict=True)
        )
        if not len(token):  # texts shorter than a draft
            break
        means = token.mean(0), state.mean(0), target.mean(0)
        token, state, target = token - means[0], state - means[1], target - means[2]
        terms, pull = [state], means[1][:, None]
        if streams.root_map is not None:
            if j == 0:
                streams.root_map.copy_(ridge(token, target - state).T)
            terms.append(token @ streams.root_map.T)
            pull = torch.stack([means[1], streams.root_map @ means[0]], dim=1)
        columns = torch.stack([term.flatten() for term in terms], dim=1)
        shares = ridge(columns, target.flatten()[:, None])[:, 0]
        streams.shares[j, : len(shares)] = shares
        if not streams.config.value_rotation:
            streams.stream_embeddings[j] = means[2] - pull @ shares
        if j == 0:
            left = share_left(target.flatten() - columns @ shares, target)
    return left


def exit_loss(model: StreamingModel, step: FitStep) -> Tensor:
    """Mean cross-entropy of the early exits' next token, where it is one that streams may propose."""
    targets, main, picked = step.targets, step.targets.main, step.targets.picked
    labels = vocabulary_index(picked.roots, targets.lookup)
    counts = (picked.labels[:, :, 0] != IGNORE) & (labels >= 0)
    losses = []
    for number, layer in enumerate(model.exit_layers or (model.first,)):
        rows = at_rows(model.entered(main, layer), picked.rows)[counts]
        losses.append(head_losses(model, model.exit_states(rows, number), labels[counts], targets.vocabulary))
    return processes.mean_over(torch.stack(losses).mean(0))
