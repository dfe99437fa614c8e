"""Jakiro's draft layer over a frozen Hugging Face causal LM (Jakiro, arXiv 2502.06282; with one expert and no contrast: EAGLE).

One decoder layer drafts token after token from the target's hidden states. Row t stands for the pair (m_t, y_(t+1)):

    x_t = U e(y_(t+1)) + s_t + b        s_t = V m_t, m_t the hidden state of row t below the last layers; e and m over their rms
    u_t = x_t + attention(norm(x_t))             over rows <= t
    z_t = norm(u_t)     s = softmax(R z_t)     a = the K largest s, over their sum
    g_t = final(u_t + sum_i a_i E_i(z_t))        mixture (equations 3 and 6): head(g_t) guesses y_(t+2)
    c_t = final(u_t + B E_1(z_t) - A E_2(z_t))   contrast (equation 7): head(c_t) guesses y_(t+3), one place further

E_1, E_2 have the two largest s; (B, A) is the softmax of two further outputs of the router, B >= A. Drafting goes on from itself:
the row behind the guess of y_(t+2) has s = S g_t and that guess for its token, and so on; the last place comes from c, so it costs no pass of the layer.
In training the true tokens take the guesses' place and every row is unrolled to the full length (HASS, EAGLE-3), so the layer
learns to live with its own states.

Unlike the paper's, the layer starts as the target's last one, its MLP dealt out to the experts, and keeps that layer's norms; U, V,
S and b start as the least-squares fit of what that layer sees one row later (`fit_start`). So it drafts before it has learnt anything.
And m is taken `depth` layers below the end, where the target has not yet narrowed its state to one next token. Knows nothing about data, optimisers or files.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamspec.adapters.streams import FIT_TOKENS, MASSIVE, ridge, unit_rms
from streamspec.adapters.target import DraftingModel, DraftRows, MainPass
from streamspec.errors import ConfigError

EXPERT_NOISE = 0.02  # of the weights' own spread, where several experts start from the same channels


@dataclass
class JakiroConfig:
    """Shape of the draft layer. `depth`: layers of the target above the states it reads. `contrast`: whether the last place is
    guessed without a pass of its own."""

    gamma: int
    experts: int = 2
    active: int = 2
    contrast: bool = True
    depth: int = 2


class Experts(nn.Module):
    """Gated MLPs in the place of one. Each has 1/K of its channels, K of N count for a row."""

    def __init__(self, mlp: nn.Module, experts: int, active: int) -> None:
        super().__init__()
        gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.active, self.activation = active, mlp.act_fn
        hidden = gate.weight.shape[1]
        self.gate = nn.Parameter(_dealt(gate.weight, experts, active))
        self.up = nn.Parameter(_dealt(up.weight, experts, active))
        self.down = nn.Parameter(active * _dealt(down.weight.T, experts, active))
        self.router = nn.Parameter(torch.randn(experts + (2 if experts > 1 else 0), hidden) * 0.1 * hidden**-0.5)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mixture and contrast [.., H] of z [.., H]; no contrast with one expert."""
        inner = self.activation(torch.einsum("...h,eih->...ei", z, self.gate)) * torch.einsum("...h,eih->...ei", z, self.up)
        said = torch.einsum("...ei,eih->...eh", inner, self.down)
        experts = len(self.gate)
        if experts == 1:
            return said[..., 0, :], None
        routed = nn.functional.linear(z, self.router).float()
        weight, which = routed[..., :experts].softmax(-1).topk(self.active, dim=-1)
        chosen = said.gather(-2, which[..., None].expand(*which.shape, said.shape[-1]))
        mixture = ((weight / weight.sum(-1, keepdim=True))[..., None].to(said.dtype) * chosen).sum(-2)
        contrast = routed[..., experts:].softmax(-1).sort(dim=-1, descending=True).values.to(said.dtype)
        return mixture, contrast[..., :1] * chosen[..., 0, :] - contrast[..., 1:] * chosen[..., 1, :]


def _dealt(weight: Tensor, experts: int, active: int) -> Tensor:
    """[experts, channels / active, H] of a weight [channels, H]: expert i gets every K-th channel from i mod K on."""
    weight = weight.detach().float()
    channels = len(weight) // active * active
    parts = torch.stack([weight[i % active : channels : active] for i in range(experts)])
    return parts if experts == active else parts + EXPERT_NOISE * parts.std() * torch.randn_like(parts)


class _Behind:
    """The cache that HF's attention sees: K/V of earlier rows, and room for those it adds."""

    def __init__(self, keys: list[Tensor], values: list[Tensor]) -> None:
        self.keys, self.values = keys, values
        self.is_updated: dict[int, bool] = {}

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys.append(key)
        self.values.append(value)
        return torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2)

    def get_seq_length(self, *_: Any) -> int:
        return sum(key.shape[2] for key in self.keys)


class JakiroModel(DraftingModel):
    """A causal LM with a draft layer of its own, for `gamma` places ahead. The target is frozen."""

    def __init__(self, model: PreTrainedModel, config: JakiroConfig) -> None:
        layers = model.config.num_hidden_layers
        if not 1 <= config.depth <= layers:
            raise ConfigError(f"ns = {config.depth}", f"1..{layers}, the layers of this base", "change --ns")
        super().__init__(model, config.gamma, layers - config.depth, True)
        self.config, self.passes = config, config.gamma - config.contrast  # of the layer, for one draft
        last, width = self.decoder.layers[-1], self.decoder.hidden_size
        layer = copy.deepcopy(last).float().requires_grad_(True)
        self.experts = Experts(layer.mlp, config.experts, config.active)
        self.attention, self.norm_in, self.norm_mid = layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm
        assert self.decoder.norm is not None
        self.norm_out = copy.deepcopy(self.decoder.norm).float().requires_grad_(True)
        self.from_token, self.from_entry, self.from_state = (nn.Parameter(torch.eye(width)) for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(width))

    def draft_pass(self, main: MainPass, picked: DraftRows) -> Tensor:
        mixture, contrast = self.unroll(main, picked)
        if self.config.contrast:
            assert contrast is not None
            mixture = torch.cat([mixture, contrast[:, :, -1:]], dim=2)
        return mixture

    def unroll(self, main: MainPass, picked: DraftRows) -> tuple[Tensor, Tensor | None]:
        """Finished states [B, P, passes, H] of both branches: number j of the mixture guesses place j, of the contrast place j + 1."""
        rows, following = picked.rows, picked.labels
        batch, length = main.tokens.shape
        columns = torch.arange(length, device=rows.device)
        causal = (columns[:, None] >= columns[None, :]).expand(batch, 1, length, length)
        cache = _Behind([], [])
        state, other = self._layer(main.tokens.roll(-1, dims=1), nn.functional.linear(unit_rms(main.entry.float()), self.from_entry), columns.expand(batch, -1), causal, cache)
        place = rows[:, :, None].expand(-1, -1, state.shape[2])
        mixture, contrast = [state.gather(1, place)], [None if other is None else other.gather(1, place)]
        seen = (columns <= rows[:, :, None])[:, None]  # [B, 1, P, T]
        own = torch.eye(rows.shape[1], dtype=torch.bool, device=rows.device).expand(batch, 1, -1, -1)
        for step in range(1, self.passes):
            seen = torch.cat([seen, own], dim=3)
            tokens = following[:, :, step - 1].clamp(min=0)
            state, other = self._layer(tokens, nn.functional.linear(mixture[-1].float(), self.from_state), rows + step, seen, cache)
            mixture.append(state)
            contrast.append(other)
        both = torch.stack(mixture, dim=2)
        return both, None if other is None else torch.stack([c for c in contrast if c is not None], dim=2)

    def _layer(
        self, tokens: Tensor, states: Tensor, positions: Tensor, seen: Tensor, cache: _Behind
    ) -> tuple[Tensor, Tensor | None]:
        """Both branches' finished states [B, R, H] of rows (`states` [B, R, H], `tokens` [B, R]) under a mask [B, 1, R, K]."""
        embedded = unit_rms(self.decoder.embed(tokens).float())
        x = nn.functional.linear(embedded, self.from_token, self.bias) + states
        mask = torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill_(~seen, torch.finfo(x.dtype).min)
        rotary = self.decoder.rotary_embeddings(x, positions)
        mixed = self.attention(self.norm_in(x), position_embeddings=rotary, attention_mask=mask, past_key_values=cache)[0]
        u = x + mixed
        mixture, contrast = self.experts(self.norm_mid(u))
        dtype = self.decoder.embedding.weight.dtype  # of the head that comes next
        return self.norm_out(u + mixture).to(dtype), None if contrast is None else self.norm_out(u + contrast).to(dtype)

    def drafter_tensors(self) -> dict[str, Tensor]:
        own = {name: p for name, p in self.named_parameters() if not name.startswith(("model.", "bigram_"))}
        return own | super().drafter_tensors()

    def described(self) -> dict[str, Any]:
        shape = self.config
        biases = sorted(name for name in self.drafter_tensors() if name.startswith("attention.") and name.endswith(".bias"))
        return super().described() | {
            "experts": shape.experts, "active": shape.active, "contrast": shape.contrast, "depth": shape.depth, "biases": biases,
        }  # fmt: skip


@torch.no_grad()
def fit_start(drafter: JakiroModel, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Sets U, V and b to the least-squares fit of what the target's last layer sees at row t + 1, by e(y_(t+1)) and m_t, over the rows
    of `batches` (ids and attention mask [B, T] each); then S, by which a finished state f_t best makes V m_t. Returns the share of
    the variance that is left. Massive activations are left out, and batches beyond `FIT_TOKENS`, as for streams.
    """
    decoder, seen, count = drafter.decoder, [], 0
    for ids, mask in batches:
        with decoder.watched(len(decoder.layers) - 1) as entered:
            main = drafter.main_pass(ids, mask)
        wanted = entered[0].float()
        level = wanted.pow(2).mean(-1).sqrt()
        usable = mask.bool() & (level < MASSIVE * level[mask.bool()].median())
        tokens = unit_rms(decoder.embed(ids).float())
        both = usable[:, :-1] & usable[:, 1:]
        parts = tokens[:, 1:], unit_rms(main.entry.float())[:, :-1], main.final.float()[:, :-1], wanted[:, 1:]
        seen.append([part[both] for part in parts])
        count += int(both.sum())
        if count >= FIT_TOKENS:
            break
    if not count:
        return 1.0
    token, state, final, wanted = (torch.cat(side) for side in zip(*seen, strict=True))
    inputs = torch.cat([token, state, torch.ones_like(token[:, :1])], dim=1)
    solved = ridge(inputs, wanted)
    width = token.shape[1]
    drafter.from_token.copy_(solved[:width].T)
    drafter.from_entry.copy_(solved[width:-1].T)
    drafter.bias.copy_(solved[-1])
    drafter.from_state.copy_(ridge(final, state @ solved[width:-1]).T)
    return float((wanted - inputs @ solved).pow(2).sum() / (wanted - wanted.mean(0)).pow(2).sum())
