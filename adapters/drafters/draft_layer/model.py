"""A draft layer over a frozen Hugging Face causal LM: Jakiro (arXiv 2502.06282), and with one expert and no contrast
EAGLE, MTP and Hydra.

One decoder layer drafts token after token from the target's hidden states. Row t stands for the pair (m_t, y_(t+1)):

    x_t = U e(y_(t+1)) + s_t + b            s_t = V m_t; m_t: hidden states of row t below the last layers, side by side
    u_t = x_t + attention(norm(x_t))        over rows <= t; e and each m are divided by their rms
    z_t = norm(u_t)                         s = softmax(R z_t); a = the K largest s, over their sum
    g_t = final(u_t + sum_i a_i E_i(z_t))                                   mixture (equations 3 and 6)
    c_t = final(C (u_t + B E_1(z_t) - A E_2(z_t)) + T e(y_(t+2)))           contrast (equation 7)

head(g_t) predicts y_(t+2), head(c_t) predicts y_(t+3), one position further. E_1, E_2 have the two largest s; (B, A) is
the softmax of two further outputs of the router, B >= A. Drafting continues on its own states: the row after the draft
token for y_(t+2) has s = S g_t and that token's embedding, and so on. The last position comes from c and costs no pass
of the layer. In training the true tokens stand in for draft tokens and rows are unrolled, up to the full length (HASS,
EAGLE-3), so the layer learns to live with its own states. The loss of c is taken at the deepest pass of a step; it
trains the whole layer only where that is the draft's last pass, else C, T and the last norm.

Variants: without `contrast` the mixture's sum replaces the difference in c (the paper's table 4); without `parallel`
the last position has a pass of its own, without T, and c, if there is a contrast, predicts what g does. With
`prefix_attention` only the first pass attends and the later ones are heads on its states; with `own_heads` each of them
has weights of its own, as in Hydra++ (arXiv 2402.05109), and without `prefix_attention` the first does not attend
either, as in plain Hydra (there a head reads the whole path's embeddings, here the last one's beside the state of the
head before). With `depth` D the first D passes have weights of their own, attention's too: the modules of DeepSeek-V3
(arXiv 2412.19437, equations 21 to 23), but for the keys and values of the text, which the first module makes for all.
With `two_lists` every active expert proposes candidates of
its own (the paper's MoE tree, equation 4), and a candidate has the mean probability

    p_t(v) = sum_i a_i softmax(head(final(u_t + E_i(z_t))))_v

so the better list counts more, equal candidates are merged, and the loss is least where experts know different things
(the last position's branch keeps one list).

The equations are those of a layer with a norm before each half. Other families' layers keep their own form: norms after
a half (of the mixture, the contrast, each list), attention and MLP side by side, no gate, biases, a window, positions
added to e.

Unlike the paper's, the last draft token depends on the one before it (T); the layer starts as a copy of the target's
last one, its MLP split among the experts, and keeps that layer's norms; U, V, S and b start as the least-squares fit of
what that layer reads one row later, C and T of the target's finished states (`fit_start`), so the layer drafts before
it has learnt anything; m is taken below the last layers (`taps`), where the target's state is not yet narrowed to one
next token, or finished, as the head reads it (EAGLE, arXiv 2401.15077): where it is that alone, S is V, as there.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamspec.adapters.base_models.hf_decoder import HFDecoder
from streamspec.adapters.dataset.batches import collate
from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.adapters.distributed import processes
from streamspec.adapters.drafters.draft_layer.config import SHAPE, DraftLayerConfig, counted_passes
from streamspec.adapters.drafters.draft_layer.experts import Branches, Experts, LaterPass
from streamspec.adapters.drafters.draft_layer.start import fit_start
from streamspec.adapters.drafters.drafter_caches import GrowingCache
from streamspec.adapters.drafters.drafting_model import (
    IGNORE,
    DrafterRun,
    DraftingModel,
    DraftRows,
    DraftTargets,
    FitStep,
    MainPass,
    additive_mask,
    at_rows,
)
from streamspec.adapters.drafters.layer_copy import copy_last_layer, weighted
from streamspec.adapters.drafters.least_squares import unit_rms
from streamspec.adapters.drafters.losses import depth_losses, in_chunks, pick_passes, pick_rows, state_loss
from streamspec.bundle.adapter_folder import read_adapter

STATISTIC_ROWS = 16  # of a text


class DraftLayerModel(DraftingModel):
    """A causal LM with a draft layer of its own, for `gamma` draft tokens. The target is frozen."""

    def __init__(self, model: PreTrainedModel, config: DraftLayerConfig) -> None:
        layers = model.config.num_hidden_layers
        config.check(layers)
        super().__init__(model, config.gamma, layers, True, tapped=tuple(layers - tap for tap in config.taps))
        self.config, self.passes = config, config.passes
        width = self.decoder.hidden_size
        self.add_layer()
        assert self.decoder.norm is not None
        self.norm_out = weighted(copy.deepcopy(self.decoder.norm), self.decoder).float().requires_grad_(True)
        self.from_token = nn.Parameter(torch.eye(width))
        self.from_state = None if config.heads or config.one_map else nn.Parameter(torch.eye(width))
        self.from_entry = nn.Parameter(torch.eye(width).repeat(1, len(self.tapped)) / len(self.tapped))
        self.bias = nn.Parameter(torch.zeros(width))
        self.last_state = nn.Parameter(torch.eye(width)) if config.contrast or config.parallel else None
        self.last_token = nn.Parameter(torch.zeros(width, width)) if config.parallel else None

    def add_layer(self) -> None:
        """Adds the weights of the passes: copies of the target's last layer."""
        config, layer = self.config, copy_last_layer(self.decoder)
        shape = config.experts, config.active, config.two_lists
        self.experts = Experts(layer.mlp, *shape)
        self.parallel_mlp = layer.parallel  # the MLP reads what attention reads
        self.heads = nn.ModuleList(
            LaterPass(layer, self.decoder.hidden_size, config.attends(number), Experts(layer.mlp, *shape))
            for number in range(1, 1 + config.heads)
        )
        self.attention, self.norm_in, self.norm_mid, self.norm_attention, self.norm_mlp = layer.of_pass(
            config.attends(0)
        )

    @classmethod
    def taps(cls, run: DrafterRun, decoder: HFDecoder) -> tuple[int, ...]:
        """See `DraftingModel.taps`."""
        return DraftLayerConfig.of(run.options).taps

    @classmethod
    def fresh(cls, run: DrafterRun, model: PreTrainedModel, vocabulary: Tensor | None, frozen: bool) -> Self:
        """Builds a draft layer from the target's last layer and fits its maps to the training rows, unless
        it begins with another adapter's.
        """
        shape, decoder = DraftLayerConfig.of(run.options), HFDecoder(model)
        before, window = run.begins_with, decoder.window(decoder.last_attention)
        if before is not None:  # layers of an older version have none
            window = (read_adapter(before).streams or {}).get("window")
        drafter = cls(model, replace(shape, window=window)).to(run.device)
        if before is None:
            run.fit_start(lambda batches: fit_start(drafter.eval(), batches))
        return drafter

    def train(self, mode: bool = True) -> Self:
        """Keeps the layer's attention without dropout, as the target's own is."""
        super().train(mode)
        for weights in (self, *self.heads):
            if weights.attention is not None:
                weights.attention.eval()
        return self

    def losses(self, step: FitStep) -> dict[str, Tensor]:
        """Computes the weighted "total" and its parts, each a scalar."""
        options = step.options
        passes = counted_passes(options)
        if options["random_unroll"] and not self.heads:  # heads of their own would all have to be met as often
            passes = pick_passes(passes, step.draw)
        losses = draft_layer_losses(self, step.targets, passes)
        depths = losses.pop("depths")
        weights = step.weights[: len(depths)]
        total = (
            (weights * depths).sum() / weights.sum()
            + options["state_weight"] * losses["state"]
            + options["expert_weight"] * losses["alike"]
        )
        if "last" in losses:
            weight = options["last_state_weight"]
            weight = options["state_weight"] if weight is None else weight
            total = total + options["last_weight"] * losses["last"] + weight * losses["last_state"]
        return {"total": total} | {f"place_{j + 1}": value for j, value in enumerate(depths)} | losses

    @torch.no_grad()
    def statistics(self, rows: Sequence[TokenRow], vocabulary: Tensor | None, batch_size: int = 8) -> dict[str, Any]:
        """Measures how the layer is used: `expert_shares`, the experts' weights; `expert_overlap`, the squared cosine
        of the outputs of the two best; where the last position has a branch of its own `branches_agree`, how often its
        best candidate is the mixture's for the last position that the mixture drafts.
        """
        shares: list[Tensor] = []
        alike: list[Tensor] = []
        agree: list[Tensor] = []
        size = self.vocabulary_size(vocabulary)
        for start in range(0, len(rows), batch_size):
            batch = collate(rows[start : start + batch_size], self.device)
            picked = pick_rows(batch, self.gamma, STATISTIC_ROWS, torch.Generator().manual_seed(start))
            main = self.main_pass(batch["input_ids"], batch["attention_mask"])
            branches = self.unroll(main, picked, self.passes)
            counts = picked.labels[:, :, : self.passes] != IGNORE
            shares.append(branches.shares[counts])
            alike.append(branches.overlap[counts])
            before = self.passes - self.config.parallel  # then the branch predicts the mixture's last depth
            branch = self.unroll(main, picked, before).last if before else None
            if branch is not None:
                mixed, branched = (
                    in_chunks(lambda y: self.head(y, vocabulary).argmax(-1), size, x[counts[:, :, -1]])
                    for x in (branches.mixture[:, :, -1], branch)
                )
                agree.append(mixed == branched)
        used: dict[str, Any] = {
            "expert_shares": [round(float(x), 3) for x in torch.cat(shares).mean(0)],
            "expert_overlap": round(float(torch.cat(alike).mean()), 3),
        }
        return used | {"branches_agree": round(float(torch.cat(agree).float().mean()), 3)} if agree else used

    def draft_pass(self, main: MainPass, picked: DraftRows) -> Tensor:
        """Returns states [B, P, gamma, H]; with separate lists [B, P, gamma, K (H + 1)], see `draft_logits`."""
        branches = self.unroll(main, picked, self.passes)
        states = branches.mixture if branches.apart is None else branches.apart
        if branches.last is None:
            return states
        last = branches.last[:, :, None]
        if branches.apart is not None:  # all lists are this one
            weight = torch.full_like(last[..., :1], 1 / self.config.active)
            last = torch.cat([last, weight], dim=-1).repeat(1, 1, 1, self.config.active)
        return torch.cat([states[:, :, : self.gamma - 1], last], dim=2)

    def draft_logits(self, states: Tensor, depths: Tensor, vocabulary: Tensor | None) -> Tensor:
        """Logits of states [n, H]; of separate experts [n, K (H + 1)] the log of their mean probabilities."""
        width = self.decoder.hidden_size
        if states.shape[-1] == width:
            return super().draft_logits(states, depths, vocabulary)
        lists = states.unflatten(-1, (-1, width + 1))
        scores = self.head(lists[..., :width], vocabulary).float().log_softmax(-1)
        return torch.logsumexp(scores + lists[..., width:].float().log(), dim=-2)

    def unroll(self, main: MainPass, picked: DraftRows, passes: int) -> Branches:
        """The first `passes` passes after the rows `picked`, their states ready for the head."""
        rows, following = picked.rows, picked.labels
        cache = GrowingCache()
        first = self.main_rows(main, cache)
        steps = [Branches(*(None if states is None else at_rows(states, rows) for states in first))]
        columns = torch.arange(main.tokens.shape[1], device=rows.device)
        itself = torch.eye(rows.shape[1], dtype=torch.bool, device=rows.device).expand(len(rows), 1, -1, -1)
        back = rows[:, :, None] - columns
        for step in range(1, passes):
            past = ((back >= 0) & self._near(back + step))[:, None]  # [B, 1, P, T]
            seen = torch.cat([past, *(itself & self._near(torch.tensor(step - k)) for k in range(1, step + 1))], dim=3)
            weights = self._weights(step)
            states, later = self.handed(weights, steps[-1].mixture), cache if self.config.attends(step) else None
            steps.append(self._layer(weights, following[:, :, step - 1].clamp(min=0), states, rows + step, seen, later))
        return self._finished(steps, picked)

    def _finished(self, steps: list[Branches], picked: DraftRows) -> Branches:
        """The `steps` of unrolled rows as one, their states ready for the head."""
        mixture, shares, overlap = (
            torch.stack([getattr(step, name) for step in steps], dim=2) for name in ("mixture", "shares", "overlap")
        )
        apart = None
        if self.config.two_lists:
            stacked = torch.stack([step.apart for step in steps if step.apart is not None], dim=2)
            lists = stacked.unflatten(-1, (self.config.active, -1))
            weights = lists[..., -1:].to(self.decoder.embedding.weight.dtype)
            apart = torch.cat([self._finish(lists[..., :-1]), weights], dim=-1).flatten(-2)
        return Branches(self._finish(mixture), self._last(steps, picked), shares, overlap, apart)

    def _last(self, steps: list[Branches], picked: DraftRows) -> Tensor | None:
        """The finished state [B, P, H] of the last position's branch after these steps, if it has one."""
        branch, passes = steps[-1].last, len(steps)
        if self.last_state is None or branch is None:
            return None
        # Only the layer's last pass drafts that position: an earlier one trains the maps, but is not itself taught
        # to look further ahead than its own.
        last = nn.functional.linear(branch if passes == self.passes else branch.detach(), self.last_state)
        if self.last_token is not None:
            known = self.embedded(picked.labels[:, :, passes - 1].clamp(min=0), picked.rows + passes + 1)
            last = last + nn.functional.linear(known, self.last_token)
        return self._finish(last)

    def main_rows(self, main: MainPass, cache: GrowingCache | None = None) -> Branches:
        """The layer over all rows of the text, each with the token after it; states before the last norm."""
        batch, length = main.tokens.shape
        columns = torch.arange(length, device=main.tokens.device)
        back = columns[:, None] - columns[None, :]
        causal = ((back >= 0) & self._near(back)).expand(batch, 1, length, length)
        states = nn.functional.linear(self.entries(main), self.from_entry)
        return self._layer(
            self,
            main.tokens.roll(-1, dims=1),
            states,
            columns.expand(batch, -1),
            causal,
            (cache or GrowingCache()) if self.config.attends(0) else None,
        )

    def entries(self, main: MainPass) -> Tensor:
        """m [B, T, taps H]."""
        return unit_rms(main.entry.float().unflatten(-1, (len(self.tapped), -1))).flatten(-2)

    def handed(self, weights: Any, mixture: Tensor) -> Tensor:
        """The input that a row's `mixture` [.., H] gives to the next row."""
        states = self._finish(mixture).float()
        if self.config.one_map:
            return nn.functional.linear(unit_rms(states), self.from_entry)
        return nn.functional.linear(states, weights.from_state)

    def _weights(self, step: int) -> Any:
        """The module with the weights of pass `step`, counted from 0."""
        return self.heads[min(step, len(self.heads)) - 1] if self.heads and step else self

    def _layer(
        self, weights: Any, tokens: Tensor, states: Tensor, positions: Tensor, seen: Tensor, cache: GrowingCache | None
    ) -> Branches:
        """Runs the layer over rows (`states` [B, R, H], `tokens` [B, R] after them) under a mask [B, 1, R, K]; without
        a cache they attend to nothing.
        """
        x = nn.functional.linear(self.embedded(tokens, positions + 1), weights.from_token, weights.bias) + states
        u, scale = x, self.decoder.residual_scale
        if cache is not None:
            mask = additive_mask(seen, x.dtype)
            normed = _through(weights.norm_in, x)
            mixed = self.decoder.attend(weights.attention, self.decoder.last_attention, normed, mask, positions, cache)
            u = x + scale * _through(weights.norm_attention, mixed)
        read = x if self.parallel_mlp else u  # by the MLP
        norm = weights.norm_in if self.parallel_mlp and weights.norm_mid is None else weights.norm_mid
        added: Branches = weights.experts(_through(norm, read))

        def joined(update: Tensor) -> Tensor:
            return u + scale * _through(weights.norm_mlp, update)

        last = added.last if self.config.contrast else added.mixture
        apart = None
        if added.apart is not None:
            lists = added.apart.unflatten(-1, (self.config.active, -1))
            states = u[..., None, :] + scale * _through(weights.norm_mlp, lists[..., :-1])
            apart = torch.cat([states, lists[..., -1:]], dim=-1).flatten(-2)
        return added._replace(
            mixture=joined(added.mixture),
            last=None if last is None or self.last_state is None else joined(last),
            apart=apart,
        )

    def _near(self, back: Tensor) -> Tensor:
        """Tells which rows are within the window, from how many positions they lie `back`."""
        return torch.ones_like(back, dtype=torch.bool) if self.config.window is None else back < self.config.window

    def embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """e [.., H] of tokens at `positions`, which count where they enter at the embedding (up to the last one)."""
        decoder = self.decoder
        if decoder.positions is None:
            return unit_rms(decoder.embed(tokens).float())
        last = len(decoder.positions.weight) - decoder.family.position_offset - 1
        return unit_rms(decoder.begin(tokens, positions.clamp(max=last)).float())

    def _finish(self, states: Tensor) -> Tensor:
        """Applies the last norm; states are then in the head's dtype."""
        finished: Tensor = self.norm_out(states)
        return finished.to(self.decoder.embedding.weight.dtype)

    def unscaled(self, finished: Tensor) -> Tensor:
        """States [.., H] before the last norm's weight and bias."""
        bias = getattr(self.norm_out, "bias", None)
        shifted = finished if bias is None else finished - bias
        return shifted / (self.norm_out.weight + self.decoder.family.one_added)

    def drafter_tensors(self) -> dict[str, Tensor]:
        """Returns every parameter outside the target, by its name in an adapter."""
        parameters = {name: p for name, p in self.named_parameters() if not name.startswith(("model.", "bigram_"))}
        return parameters | super().drafter_tensors()

    def described(self) -> dict[str, Any]:
        """Describes the layer for the section `streams` of an adapter's configuration."""
        shape = {name: getattr(self.config, name) for name in SHAPE} | {"taps": list(self.config.taps)}
        biases = sorted(name for name in self.drafter_tensors() if name.endswith((".bias", "_bias")))
        return super().described() | shape | {"biases": biases, "window": self.config.window}


def _through(norm: nn.Module | None, x: Tensor) -> Tensor:
    """Applies a norm; x as it is where the layer has none there."""
    return x if norm is None else norm(x)  # type: ignore[no-any-return]


def draft_layer_losses(model: DraftLayerModel, targets: DraftTargets, passes: int | None = None) -> dict[str, Tensor]:
    """The draft layer's losses (equations 9 to 13), every pass of the unrolled layer counted, or the first `passes`.

    "depths" [passes]: mean loss of the mixture at each depth. "state": `losses.state_loss` of the mixture's states.
    "last" and "last_state": the same two of the last position's branch after the last of these passes, where there is
    one. "alike": 0 where the outputs of a row's two best experts are orthogonal and all experts are used alike.
    """
    drafted = model.unroll(targets.main, targets.picked, min(passes or model.passes, model.passes))
    mixture = drafted.mixture
    states = mixture if drafted.apart is None else drafted.apart
    losses = {"depths": depth_losses(model, targets, states), "state": state_loss(targets, mixture)}
    if drafted.last is not None:
        depth, last = mixture.shape[2] - 1 + model.config.parallel, drafted.last[:, :, None]
        losses["last"] = depth_losses(model, targets, last, depth)[0]
        losses["last_state"] = state_loss(targets, last, depth)
    counts = targets.picked.labels[:, :, : mixture.shape[2]] != IGNORE
    shares = processes.mean_over(drafted.shares[counts])
    uneven = len(shares) * shares.square().sum() - shares.sum()
    losses["alike"] = processes.mean_over(drafted.overlap[counts]).sum() + uneven
    return losses
