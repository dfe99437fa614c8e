"""Jakiro's draft layer over a frozen Hugging Face causal LM (Jakiro, arXiv 2502.06282; with one expert and no contrast:
EAGLE).

One decoder layer drafts token after token from the target's hidden states. Row t stands for the pair (m_t, y_(t+1)):

    x_t = U e(y_(t+1)) + s_t + b        s_t = V m_t, m_t the hidden states of row t below the last layers, side by side;
    e and each m over its rms u_t = x_t + attention(norm(x_t))             over rows <= t z_t = norm(u_t)     s =
    softmax(R z_t)     a = the K largest s, over their sum g_t = final(u_t + sum_i a_i E_i(z_t))
    mixture (equations 3 and 6): head(g_t) guesses y_(t+2) c_t = final(C (u_t + B E_1(z_t) - A E_2(z_t)) + T e(y_(t+2)))
    contrast (equation 7): head(c_t) guesses y_(t+3), one place further

E_1, E_2 have the two largest s; (B, A) is the softmax of two further outputs of the router, B >= A. Drafting goes on
from itself: the row behind the guess of y_(t+2) has s = S g_t and that guess for its token, and so on; the last place
comes from c, so it costs no pass of the layer. In training the true tokens take the guesses' place and rows are
unrolled, up to the full length (HASS, EAGLE-3), so the layer learns to live with its own states. What c costs is asked
of the deepest pass of a step; it teaches the layer where that is the last, in which c is used, else only C, T and the
last norm.

Two parts can go (the paper's table 4): without `contrast` the mixture's sum takes its place in c; without `parallel`
the last place has a pass of its own, T is not there, and c, if there is a contrast, guesses what g does. With
`prefix_attention` the first pass alone attends: the others are heads behind it that hand on their states; with
`own_heads` each has weights of its own, as Hydra++'s have (arXiv 2402.05109). With `two_lists` every expert that counts
guesses for itself (the paper's MoE tree, equation 4); a guess has the chance that it has on average,

    p_t(v) = sum_i a_i softmax(head(final(u_t + E_i(z_t))))_v

so the better list is asked first, what both name is one guess, and the loss is least where experts know different
things (the last place's branch keeps one list).

Unlike the paper's, the last guess knows the token before it (T); the layer starts as the target's last one, its MLP
dealt out to the experts, and keeps that layer's norms; U, V, S and b start as the least-squares fit of what that layer
sees one row later, C and T of what the target says behind the tokens that c knows (`fit_start`). So the layer drafts
before it has learnt anything. And m is taken below the last layers (`taps`), where the target has not yet narrowed its
state to one next token. Knows nothing about data, optimisers or files.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamspec.adapters.drafters.base import DraftingModel, DraftRows, MainPass
from streamspec.adapters.drafters.streams import FIT_TOKENS, MASSIVE, ridge, unit_rms
from streamspec.errors import ConfigError

EXPERT_NOISE = 0.02  # of the weights' own spread, where several experts start from the same channels


@dataclass
class DraftLayerConfig:
    """Shape of the draft layer. `contrast`: the last place is guessed by what the two best experts have apart, else by
    their mixture; `parallel`: without a pass of its own. `two_lists`: experts that count guess each for itself. `taps`:
    layers of the target above each of the states that the layer reads. `prefix_attention`: only the first pass attends;
    `own_heads`: the others have weights of their own."""

    gamma: int
    experts: int = 2
    active: int = 2
    contrast: bool = True
    parallel: bool = True
    two_lists: bool = False
    taps: tuple[int, ...] = (2,)
    prefix_attention: bool = False
    own_heads: bool = False

    def check(self, layers: int) -> None:
        """Raises ConfigError where a base of so many layers cannot have it."""
        if not all(1 <= tap <= layers for tap in self.taps):
            raise ConfigError(
                f"taps = {','.join(map(str, self.taps))}", f"1..{layers}, the layers of this base", "change --taps"
            )


class Branches(NamedTuple):
    """Of rows, unrolled ones [B, P, passes, ..] among them: states of the branch that all places but the last come from
    and, if there is one, of that of the `last` [.., H] (of unrolled rows number j of `mixture` guesses place j, and
    `last` [B, P, H] is of the last pass and guesses the same place or, if parallel, the next); `shares` [.., N], the
    experts' weights in the mixture, 0 where they do not count; `overlap` [.., 1], the squared cosine of what the two
    best say; with two lists `apart` [.., K (H + 1)], of each expert that counts the state it alone gives and its
    weight, side by side."""

    mixture: Tensor
    last: Tensor | None
    shares: Tensor
    overlap: Tensor
    apart: Tensor | None = None


class Experts(nn.Module):
    """Gated MLPs in the place of one. Each has 1/K of its channels, K of N count for a row."""

    def __init__(self, mlp: nn.Module, experts: int, active: int, apart: bool = False) -> None:
        super().__init__()
        gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.active, self.apart, self.activation = active, apart, mlp.act_fn
        hidden = gate.weight.shape[1]
        self.gate = nn.Parameter(_dealt(gate.weight, experts, active))
        self.up = nn.Parameter(_dealt(up.weight, experts, active))
        self.down = nn.Parameter(active * _dealt(down.weight.T, experts, active))
        self.router = nn.Parameter(torch.randn(experts + 2, hidden) * 0.1 * hidden**-0.5) if experts > 1 else None

    def forward(self, z: Tensor) -> Branches:
        """What the experts make of rows z [.., H], not yet added to them; `last` is their contrast."""
        inner = self.activation(torch.einsum("...h,eih->...ei", z, self.gate)) * torch.einsum(
            "...h,eih->...ei", z, self.up
        )
        said = torch.einsum("...ei,eih->...eh", inner, self.down)
        experts = len(self.gate)
        if self.router is None:
            return Branches(said[..., 0, :], None, torch.ones_like(z[..., :1]), torch.zeros_like(z[..., :1]))
        routed = nn.functional.linear(z, self.router).float()
        weight, which = routed[..., :experts].softmax(-1).topk(self.active, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        chosen = said.gather(-2, which[..., None].expand(*which.shape, said.shape[-1]))
        shares = torch.zeros_like(routed[..., :experts]).scatter(-1, which, weight)
        weight = weight[..., None].to(said.dtype)
        mixture = (weight * chosen).sum(-2)
        if self.active == 1:
            return Branches(mixture, None, shares, torch.zeros_like(z[..., :1]))
        apart = torch.cat([chosen, weight], dim=-1).flatten(-2) if self.apart else None
        first, second = chosen[..., 0, :], chosen[..., 1, :]
        contrast = routed[..., experts:].softmax(-1).sort(dim=-1, descending=True).values.to(said.dtype)
        overlap = nn.functional.cosine_similarity(first, second, dim=-1).square()[..., None]
        return Branches(mixture, contrast[..., :1] * first - contrast[..., 1:] * second, shares, overlap, apart)


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


class _Pass(nn.Module):
    """Weights of one of hydra's passes behind the first."""

    def __init__(self, mlp: nn.Module, norm: nn.Module, experts: int, active: int, apart: bool) -> None:
        super().__init__()
        self.experts, self.norm_mid = Experts(mlp, experts, active, apart), copy.deepcopy(norm)
        width = norm.weight.shape[0]
        self.from_token, self.from_state = (nn.Parameter(torch.eye(width)) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(width))


class DraftLayerModel(DraftingModel):
    """A causal LM with a draft layer of its own, for `gamma` places ahead. The target is frozen."""

    def __init__(self, model: PreTrainedModel, config: DraftLayerConfig) -> None:
        layers = model.config.num_hidden_layers
        config.check(layers)
        super().__init__(model, config.gamma, layers, True, tapped=tuple(layers - tap for tap in config.taps))
        self.config, self.passes = config, config.gamma - config.parallel  # of the layer, for one draft
        last, width = self.decoder.layers[-1], self.decoder.hidden_size
        layer = copy.deepcopy(last).float().requires_grad_(True)
        shape = config.experts, config.active, config.two_lists
        self.experts = Experts(layer.mlp, *shape)
        self.attention, self.norm_in, self.norm_mid = (
            layer.self_attn,
            layer.input_layernorm,
            layer.post_attention_layernorm,
        )
        assert self.decoder.norm is not None
        self.norm_out = copy.deepcopy(self.decoder.norm).float().requires_grad_(True)
        own = range(self.passes - 1) if config.own_heads else ()
        self.heads = nn.ModuleList(_Pass(layer.mlp, layer.post_attention_layernorm, *shape) for _ in own)
        self.from_token = nn.Parameter(torch.eye(width))
        self.from_state = None if config.own_heads else nn.Parameter(torch.eye(width))
        self.from_entry = nn.Parameter(torch.eye(width).repeat(1, len(self.tapped)) / len(self.tapped))
        self.bias = nn.Parameter(torch.zeros(width))
        self.last_state = nn.Parameter(torch.eye(width)) if config.contrast or config.parallel else None
        self.last_token = nn.Parameter(torch.zeros(width, width)) if config.parallel else None

    def draft_pass(self, main: MainPass, picked: DraftRows) -> Tensor:
        found = self.unroll(main, picked, self.passes)
        places = found.mixture if found.apart is None else found.apart
        if found.last is None:
            return places
        last = found.last[:, :, None]
        if found.apart is not None:  # all lists are this one
            weight = torch.full_like(last[..., :1], 1 / self.config.active)
            last = torch.cat([last, weight], dim=-1).repeat(1, 1, 1, self.config.active)
        return torch.cat([places[:, :, : self.gamma - 1], last], dim=2)

    def guess(self, states: Tensor, places: Tensor, vocabulary: Tensor | None) -> Tensor:
        """Of states [n, H], or [n, K (H + 1)] of experts apart: log chances then."""
        width = self.decoder.hidden_size
        if states.shape[-1] == width:
            return super().guess(states, places, vocabulary)
        lists = states.unflatten(-1, (-1, width + 1))
        chances = self.head(lists[..., :width], vocabulary).float().log_softmax(-1)
        return torch.logsumexp(chances + lists[..., width:].float().log(), dim=-2)

    def unroll(self, main: MainPass, picked: DraftRows, passes: int) -> Branches:
        """The first passes behind the rows `picked`, their states ready for the head."""
        rows, following = picked.rows, picked.labels
        cache = _Behind([], [])
        first = self.main_rows(main, cache)
        at = rows[:, :, None]
        steps = [Branches(*(None if x is None else x.gather(1, at.expand(-1, -1, x.shape[2])) for x in first))]
        columns = torch.arange(main.tokens.shape[1], device=rows.device)
        seen = (columns <= rows[:, :, None])[:, None]  # [B, 1, P, T]
        own = torch.eye(rows.shape[1], dtype=torch.bool, device=rows.device).expand(len(rows), 1, -1, -1)
        behind = None if self.config.prefix_attention else cache
        for step in range(1, passes):
            seen = seen if behind is None else torch.cat([seen, own], dim=3)
            part = self._part(step)
            states = nn.functional.linear(self._finish(steps[-1].mixture).float(), part.from_state)
            steps.append(self._layer(part, following[:, :, step - 1].clamp(min=0), states, rows + step, seen, behind))
        mixture, shares, overlap = (
            torch.stack([getattr(one, part) for one in steps], dim=2) for part in ("mixture", "shares", "overlap")
        )
        apart = None
        if self.config.two_lists:
            lists = torch.stack([one.apart for one in steps if one.apart is not None], dim=2).unflatten(
                -1, (self.config.active, -1)
            )
            apart = torch.cat(
                [self._finish(lists[..., :-1]), lists[..., -1:].to(self.decoder.embedding.weight.dtype)], dim=-1
            ).flatten(-2)
        last = None
        if self.last_state is not None:
            said = steps[-1].last
            assert said is not None
            # Only the layer's last pass is asked for that place: one before teaches the maps, and is not taught to look
            # further than its own.
            last = nn.functional.linear(said if passes == self.passes else said.detach(), self.last_state)
            if self.last_token is not None:
                last = last + nn.functional.linear(
                    self._embedded(following[:, :, passes - 1].clamp(min=0)), self.last_token
                )
            last = self._finish(last)
        return Branches(self._finish(mixture), last, shares, overlap, apart)

    def main_rows(self, main: MainPass, cache: _Behind) -> Branches:
        """The layer over all rows of the text, each with the token behind it; states before the last norm."""
        batch, length = main.tokens.shape
        columns = torch.arange(length, device=main.tokens.device)
        causal = (columns[:, None] >= columns[None, :]).expand(batch, 1, length, length)
        states = nn.functional.linear(self.entries(main), self.from_entry)
        return self._layer(self, main.tokens.roll(-1, dims=1), states, columns.expand(batch, -1), causal, cache)

    def entries(self, main: MainPass) -> Tensor:
        """m [B, T, taps H]."""
        return unit_rms(main.entry.float().unflatten(-1, (len(self.tapped), -1))).flatten(-2)

    def _part(self, step: int) -> Any:
        """What holds the weights of a pass, the first being 0."""
        return self.heads[step - 1] if self.config.own_heads and step else self

    def _layer(
        self, part: Any, tokens: Tensor, states: Tensor, positions: Tensor, seen: Tensor, cache: _Behind | None
    ) -> Branches:
        """Of rows (`states` [B, R, H], `tokens` [B, R]) under a mask [B, 1, R, K]; without a cache they attend to
        nothing.
        """
        x = nn.functional.linear(self._embedded(tokens), part.from_token, part.bias) + states
        u = x
        if cache is not None:
            mask = torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill_(~seen, torch.finfo(x.dtype).min)
            rotary = self.decoder.rotary_embeddings(x, positions)
            u = (
                x
                + self.attention(
                    self.norm_in(x), position_embeddings=rotary, attention_mask=mask, past_key_values=cache
                )[0]
            )
        said: Branches = part.experts(part.norm_mid(u))
        last = said.last if self.config.contrast else said.mixture
        apart = (
            None if said.apart is None else said.apart + nn.functional.pad(u, (0, 1)).repeat(1, 1, self.config.active)
        )
        return said._replace(
            mixture=u + said.mixture, last=None if last is None or self.last_state is None else u + last, apart=apart
        )

    def _embedded(self, tokens: Tensor) -> Tensor:
        return unit_rms(self.decoder.embed(tokens).float())

    def _finish(self, states: Tensor) -> Tensor:
        """Ready for the head, in its dtype."""
        finished: Tensor = self.norm_out(states)
        return finished.to(self.decoder.embedding.weight.dtype)

    def drafter_tensors(self) -> dict[str, Tensor]:
        own = {name: p for name, p in self.named_parameters() if not name.startswith(("model.", "bigram_"))}
        return own | super().drafter_tensors()

    def described(self) -> dict[str, Any]:
        shape = self.config
        biases = sorted(
            name for name in self.drafter_tensors() if name.startswith("attention.") and name.endswith(".bias")
        )
        return super().described() | {
            "experts": shape.experts,
            "active": shape.active,
            "contrast": shape.contrast,
            "parallel": shape.parallel,
            "two_lists": shape.two_lists,
            "taps": list(shape.taps),
            "prefix_attention": shape.prefix_attention,
            "own_heads": shape.own_heads,
            "biases": biases,
        }


@torch.no_grad()
def fit_start(drafter: DraftLayerModel, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Sets U, V and b to the least-squares fit of what the target's last layer sees at row t + 1, by e(y_(t+1)) and
    m_t, over the rows of `batches` (ids and attention mask [B, T] each); then S, by which a finished state f_t best
    makes V m_t; then C and T, by which the last branch at row t best makes f_(t+2), or f_(t+1), before its norm.
    Returns the share of the first fit's variance that is left. Massive activations are left out, and batches beyond
    `FIT_TOKENS`, as for streams.
    """
    decoder, width = drafter.decoder, drafter.decoder.hidden_size
    mains, usable, fitted, count = [], [], [], 0
    for ids, mask in batches:
        with decoder.watched(len(decoder.layers) - 1) as entered:
            main = drafter.main_pass(ids, mask)
        wanted = entered[0].float()
        level = wanted.pow(2).mean(-1).sqrt()
        good = mask.bool() & (level < MASSIVE * level[mask.bool()].median())
        both = good[:, :-1] & good[:, 1:]
        tokens = unit_rms(decoder.embed(ids).float())
        parts = tokens[:, 1:], drafter.entries(main)[:, :-1], main.final.float()[:, :-1], wanted[:, 1:]
        fitted.append([part[both] for part in parts])
        if drafter.last_state is not None:
            mains.append(main)
            usable.append(good)
        count += int(both.sum())
        if count >= FIT_TOKENS:
            break
    if not count:
        return 1.0
    token, state, final, wanted = (torch.cat(side) for side in zip(*fitted, strict=True))
    inputs = torch.cat([token, state, torch.ones_like(token[:, :1])], dim=1)
    solved = ridge(inputs, wanted)
    drafter.from_token.copy_(solved[:width].T)
    drafter.from_entry.copy_(solved[width:-1].T)
    drafter.bias.copy_(solved[-1])
    handed = ridge(final, state @ solved[width:-1]).T
    learning: list[Any] = list(drafter.heads) if drafter.config.own_heads else [drafter]
    for part in learning:
        part.from_state.copy_(handed)
        part.from_token.copy_(drafter.from_token)
        part.bias.copy_(drafter.bias)
    if drafter.last_state is not None:
        pairs = [_last_and_true(drafter, *one) for one in zip(mains, usable, strict=True)]
        known, true = (torch.cat(side) for side in zip(*pairs, strict=True))
        if len(known):
            mapped = ridge(known, true)
            drafter.last_state.copy_(mapped[:width].T)
            if drafter.last_token is not None:
                drafter.last_token.copy_(mapped[width:].T)
    return float((wanted - inputs @ solved).pow(2).sum() / (wanted - wanted.mean(0)).pow(2).sum())


def _last_and_true(drafter: DraftLayerModel, main: MainPass, usable: Tensor) -> tuple[Tensor, Tensor]:
    """What the last branch has at rows t, its token beside its state, and the target's finished states of the row it
    stands for, before the norm's weight [n, H].
    """
    last, ahead = drafter.main_rows(main, _Behind([], [])).last, 1 + drafter.config.parallel
    assert last is not None
    both = usable[:, :-ahead] & usable[:, ahead:]
    known = [last[:, :-ahead][both]]
    if drafter.last_token is not None:
        known.append(unit_rms(drafter.decoder.embed(main.tokens).float())[:, ahead:][both])
    return torch.cat(known, dim=1), (main.final.float() / drafter.norm_out.weight)[:, ahead:][both]
