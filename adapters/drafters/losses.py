"""Losses of a stage: next token on main rows, later tokens for the drafter (arXiv 2402.11131, equation 5).

Batches come from `step_batches.collate_step`. Means are those over the tokens of all processes' batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, smooth_l1_loss
from torch.utils.checkpoint import checkpoint

from streamspec.adapters.distributed import processes
from streamspec.adapters.drafters.drafting_model import (
    IGNORE,
    DraftingModel,
    DraftRows,
    DraftTargets,
    FitStep,
    MainPass,
    TargetModel,
)

MOST_LIKELY = 10  # tokens that top-k distillation counts
MOST_LOGITS = 1 << 25  # that a loss holds at once: 128 MiB in float32, and a few times that with their gradients


def rows_at_once(vocabulary: int) -> int:
    """Counts the rows whose logits over `vocabulary` tokens may exist at a time."""
    return max(1, MOST_LOGITS // vocabulary)


def in_chunks(losses: Callable[..., Tensor], vocabulary: int, *rows: Tensor) -> Tensor:
    """Computes `losses(*rows)` [n], one for each of n rows, so that at most `MOST_LOGITS` logits over `vocabulary`
    tokens exist at a time: chunks of rows are computed again in the backward pass (torch.utils.checkpoint).
    """
    size = rows_at_once(vocabulary)
    if len(rows[0]) <= size:
        return losses(*rows)
    chunks = zip(*(tensor.split(size) for tensor in rows), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([losses(*chunk) for chunk in chunks])
    return torch.cat([checkpoint(losses, *chunk, use_reentrant=False) for chunk in chunks])


class _HeadLosses(torch.autograd.Function):
    """Cross-entropy [n] of a frozen head, whose gradient is computed in the forward pass while the logits exist: each
    row's loss depends on its own state alone, so the backward pass only scales.
    """

    @staticmethod
    def forward(ctx: Any, score: Callable[..., Tensor], hidden: Tensor, labels: Tensor, size: int) -> Tensor:
        losses, gradients = [], []
        for states, known in zip(hidden.split(size), labels.split(size), strict=True):
            with torch.enable_grad():
                row = states.detach().requires_grad_()
                loss = score(row, known)
                gradients += torch.autograd.grad(loss.sum(), row)
            losses.append(loss.detach())
        ctx.save_for_backward(torch.cat(gradients))
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[None, Tensor, None, None]:
        (gradients,) = ctx.saved_tensors
        return None, gradients * upstream[0][:, None].to(gradients.dtype), None, None


def head_losses(model: TargetModel, hidden: Tensor, labels: Tensor, vocabulary: Tensor | None = None) -> Tensor:
    """Cross-entropy [n] of the LM head's logits of finished states [n, E], over all tokens or those of `vocabulary`
    [D]; `labels` int64 [n] count among them.
    """

    def score(states: Tensor, known: Tensor) -> Tensor:
        return cross_entropy(model.head(states, vocabulary).float(), known, reduction="none")

    count = model.vocabulary_size(vocabulary)
    size = rows_at_once(count)
    frozen = not any(parameter.requires_grad for parameter in model.decoder.lm_head.parameters())
    if len(hidden) > size and frozen and hidden.requires_grad and torch.is_grad_enabled():
        losses: Tensor = _HeadLosses.apply(score, hidden, labels, size)
        return losses
    return in_chunks(score, count, hidden, labels)


def next_token_losses(model: TargetModel, main: MainPass, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy [n] of the completion tokens of this process's batch; only their rows go through the head."""
    targets = batch["loss_mask"][:, 1:]
    return head_losses(model, main.final[:, :-1][targets], batch["input_ids"][:, 1:][targets])


def next_token_loss(model: TargetModel, main: MainPass, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of completion tokens."""
    return processes.mean_over(next_token_losses(model, main, batch))


def pick_rows(
    batch: dict[str, Tensor], gamma: int, max_rows: int, generator: torch.Generator | None = None
) -> DraftRows:
    """At most `max_rows` main rows per sequence that predict a completion token. Where there are more, those with the
    smallest of the batch's `draws` [B, T], else of random numbers from `generator`.
    """
    ids, is_target = batch["input_ids"], batch["loss_mask"]
    size, length = ids.shape
    padded = torch.cat([ids, ids.new_zeros(size, gamma + 1)], dim=1)
    counted = torch.cat([is_target, is_target.new_zeros(size, gamma + 1)], dim=1)
    eligible = counted[:, 1 : length + 1] & counted[:, 2 : length + 2]  # the root and at least one token after it
    count = int(min(max_rows, eligible.sum(1).max().clamp(min=1)))
    draws = batch["draws"] if "draws" in batch else torch.rand(size, length, generator=generator).to(ids.device)
    rows = draws.masked_fill(~eligible, 2.0).topk(count, dim=1, largest=False).indices.sort(dim=1).values
    offsets = torch.arange(2, gamma + 2, device=ids.device)
    where = (rows[:, :, None] + offsets).reshape(size, -1)
    labels = padded.gather(1, where).masked_fill_(~counted.gather(1, where), IGNORE).reshape(size, count, gamma)
    # A depth is scored only while every token before its own is part of the completion.
    alive = torch.cumprod((labels != IGNORE).long(), dim=2).bool() & eligible.gather(1, rows)[:, :, None]
    return DraftRows(rows, padded.gather(1, rows + 1), labels.masked_fill_(~alive, IGNORE))


def pick_passes(max_passes: int, draw: float) -> int:
    """Draws how many passes of a draft layer a training step unrolls: n of 1 .. `max_passes` with a probability
    proportional to 1/n. Most steps are cheap and train the first pass, on which all others depend; the rest teach the
    layer to live with its own states. `draw` [0, 1): the step's random number.
    """
    shares = (1 / torch.arange(1.0, max_passes + 1, dtype=torch.float64)).cumsum(0)
    return 1 + int((shares / shares[-1] <= draw).sum())


def drafting_losses(model: DraftingModel, step: FitStep) -> dict[str, Tensor]:
    """The losses of a drafter that drafts all depths in one pass: beside a frozen target the weighted mean over depths,
    else the next-token loss and `alpha` times their weighted sum; and the loss on states, where that has a weight.
    """
    states = model.draft_pass(step.targets.main, step.targets.picked)
    per_depth = depth_losses(model, step.targets, states)
    parts = {f"stream_{j + 1}": value for j, value in enumerate(per_depth)}
    if model.frozen:
        total = (step.weights * per_depth).sum() / step.weights.sum()
    else:
        parts["next_token"] = next_token_loss(model, step.targets.main, step.batch)
        total = parts["next_token"] + step.options["alpha"] * (step.weights * per_depth).sum()
    if weight := step.options.get("state_weight"):
        parts["state"] = state_loss(step.targets, states)
        total = total + weight * parts["state"]
    return {"total": total, **parts}


def draft_losses(model: DraftingModel, targets: DraftTargets) -> Tensor:
    """Mean loss at each depth [gamma].

    The labels: "hard", cross-entropy of the true tokens; "kl" or "tv", Kullback-Leibler divergence or total variation
    from the target's distribution at the same position, over the tokens that may be proposed; "topk", cross-entropy of
    its ten likeliest tokens there by their probabilities (HASS).
    """
    return depth_losses(model, targets, model.draft_pass(targets.main, targets.picked))


def depth_losses(model: DraftingModel, targets: DraftTargets, states: Tensor, first: int = 0) -> Tensor:
    """Mean losses [m] of states [B, P, m, E] at the depths first .. first + m - 1, counted from 0."""
    ahead, picked = slice(first, first + states.shape[2]), targets.picked
    known, roots = (vocabulary_index(tokens, targets.lookup) for tokens in (picked.labels, picked.roots))
    labels, before = known[:, :, ahead], torch.cat([roots[:, :, None], known], dim=2)[:, :, ahead]
    counts = labels >= 0 if targets.labels == "hard" else picked.labels[:, :, ahead] != IGNORE
    depth = torch.arange(states.shape[2], device=labels.device).expand_as(labels)[counts]
    text = torch.arange(len(labels), device=labels.device)[:, None, None].expand_as(labels)[counts]
    row = picked.rows[:, :, None].expand_as(labels)[counts] + 1 + first + depth
    at = text * targets.main.final.shape[1] + row  # of the target's state that predicts the same token
    score, size = scorer(model, targets, first), model.vocabulary_size(targets.vocabulary)
    losses = in_chunks(score, size, states[counts], depth, before[counts], labels[counts], at)
    total = torch.zeros(labels.shape[2], device=losses.device).index_add(0, depth, losses)
    return processes.shared_mean(total, counts.sum(dim=(0, 1)))


def state_loss(targets: DraftTargets, states: Tensor, first: int = 0) -> Tensor:
    """Smooth L1 of finished states [B, P, m, H] at the depths first .. first + m - 1 against the target's own, from
    which it predicts the same tokens, over the spread of these; 0 where no token counts.
    """
    picked, final = targets.picked, targets.main.final
    depths = torch.arange(first, first + states.shape[2], device=states.device)
    counts = picked.labels[:, :, depths] != IGNORE
    rows = (picked.rows[:, :, None] + 1 + depths).clamp(max=final.shape[1] - 1)
    text = torch.arange(len(rows), device=rows.device)[:, None, None].expand_as(rows)
    target = final[text, rows][counts].float()
    spread = processes.spread_over(target)
    return processes.mean_over(smooth_l1_loss(states[counts] / spread, target / spread, reduction="none")).mean()


def scorer(
    model: DraftingModel, targets: DraftTargets, first: int
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Returns the losses [n] of drafted states [n, E] as a function of these, their depths less `first`, the tokens
    before them, their labels, and the rows [n] of the target's states that predict the same tokens.
    """
    final, vocabulary = targets.main.final, targets.vocabulary

    def target(at: Tensor) -> Tensor:
        unique, which = torch.unique(at, return_inverse=True)  # depths of neighbouring rows are the same row
        with torch.no_grad():
            return model.head(final.flatten(0, 1)[unique], vocabulary).float().log_softmax(-1)[which]

    def score(states: Tensor, depth: Tensor, before: Tensor, labels: Tensor, at: Tensor) -> Tensor:
        logits = model.with_bigram(model.draft_logits(states, first + depth, vocabulary), before)
        if targets.labels == "hard":
            return cross_entropy(logits, labels, reduction="none")
        expected, drafted = target(at), logits.log_softmax(-1)
        if targets.labels == "kl":
            return kl_div(drafted, expected, reduction="none", log_target=True).sum(-1)
        if targets.labels == "topk":
            likeliest = expected.topk(min(MOST_LIKELY, expected.shape[-1]), dim=-1)
            return -(likeliest.values.exp() * drafted.gather(-1, likeliest.indices)).sum(-1)
        return (drafted.exp() - expected.exp()).abs().sum(-1) / 2

    return score


def vocabulary_index(tokens: Tensor, lookup: Tensor | None) -> Tensor:
    """Indices of `tokens` among those that drafters may propose, negative for others."""
    return tokens if lookup is None else torch.where(tokens >= 0, lookup[tokens.clamp(min=0)], IGNORE)


def lookup_table(vocabulary: Tensor | None, size: int) -> Tensor | None:
    """int64 [size]: index of each token in `vocabulary`, -100 outside it. None where drafters may propose any token."""
    if vocabulary is None:
        return None
    lookup = torch.full((size,), IGNORE, device=vocabulary.device)
    lookup[vocabulary] = torch.arange(len(vocabulary), device=vocabulary.device)
    return lookup
