"""Acceptance of drafts: ranks of the true tokens on the target's own answers, and the next-token loss on references.

The ranks feed the choice of trees (`streamspec.acceptance_stats`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from streamspec.acceptance_stats import ENDED, MISSED
from streamspec.adapters.dataset.batches import collate
from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.adapters.distributed import processes
from streamspec.adapters.drafters.drafting_model import IGNORE, DraftingModel, DraftRows, TargetModel
from streamspec.adapters.drafters.losses import in_chunks, lookup_table, next_token_losses, vocabulary_index
from streamspec.adapters.runs.budget import ENDLESS, Deadline

MAX_RANK = 10


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Holds the model in eval mode."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def batches_in_time(rows: Sequence[TokenRow], size: int, until: Deadline, label: str) -> Iterator[list[int]]:
    """Indices of this process's share of `rows`, batch by batch, as many as are done by `until` and at least one; with
    a limit in a random order, always the same, first one alone. Shows progress by the row.
    """
    order, done = list(range(len(rows))), 0
    limited, began = not math.isinf(until.at), until.now()
    if limited:
        random.Random(0).shuffle(order)
    mine = list(chain.from_iterable(processes.dealt([order[i : i + size] for i in range(0, len(order), size)])))
    with processes.counted(label, len(mine)) as add:
        while done < len(mine):
            batch = mine[done : done + (1 if limited and not done else size)]
            if done and until.over((until.now() - began) / done * len(batch)):
                return
            yield batch
            done += len(batch)
            add(len(batch))


@torch.no_grad()
def record_ranks(
    model: DraftingModel,
    rows: Sequence[TokenRow],
    vocabulary: Tensor | None,
    batch_size: int = 8,
    until: Deadline = ENDLESS,
) -> list[list[list[int]]]:
    """For each row, or those that are done by `until`: [positions][gamma] rank of the true token among each depth's
    candidates (docs/reference/adapter-format.md).

    Each depth is ranked given the true tokens before it. Positions are those whose root is a completion token: position
    t of a completion drafts tokens t+1 .. t+gamma after root t.
    """
    gamma, device = model.gamma, model.device
    lookup = lookup_table(vocabulary, model.decoder.embedding.num_embeddings)
    out: dict[int, list[list[int]]] = {}
    for indices in batches_in_time(rows, batch_size, until, "measuring acceptance"):
        batch = collate([rows[index] for index in indices], device)
        main = model.main_pass(batch["input_ids"], batch["attention_mask"])
        for i, index in enumerate(indices):
            row = rows[index]
            positions = [t for t in range(len(row.input_ids) - 1) if row.loss_mask[t + 1]]
            labels = _labels(row, positions, gamma).to(device)
            rows_ = torch.tensor([positions], device=device)
            roots = torch.tensor([[row.input_ids[t + 1] for t in positions]], device=device)
            states = model.draft_pass(main.of(i), DraftRows(rows_, roots, labels[None]))[0]
            before = vocabulary_index(torch.cat([roots[0][:, None], labels[:, :-1]], dim=1), lookup)
            depths = torch.arange(gamma, device=device).repeat(len(positions))
            rank = partial(true_ranks, model, vocabulary)
            size = model.vocabulary_size(vocabulary)
            ranks = in_chunks(rank, size, states.flatten(0, 1), depths, before.flatten(), labels.flatten())
            ranks = ranks.unflatten(0, (-1, gamma))
            out[index] = torch.where(labels == IGNORE, ENDED, ranks).tolist()
    every = {index: ranks for share in processes.gathered(out) for index, ranks in share.items()}
    return [every[index] for index in sorted(every)]


def true_ranks(
    model: DraftingModel, vocabulary: Tensor | None, states: Tensor, depths: Tensor, before: Tensor, labels: Tensor
) -> Tensor:
    """int64 [n]: the rank of each true token among the best candidates of a drafted state [n, E], or `MISSED`."""
    logits = model.with_bigram(model.draft_logits(states, depths, vocabulary), before)
    candidates = logits.topk(min(MAX_RANK, logits.shape[-1]), dim=-1).indices
    candidates = candidates if vocabulary is None else vocabulary[candidates]
    hit = candidates == labels[:, None]
    return torch.where(hit.any(-1), hit.int().argmax(-1), MISSED)


def _labels(row: TokenRow, positions: list[int], gamma: int) -> Tensor:
    """int64 [positions, gamma]: the true tokens after each root, -100 past the end of the answer."""
    labels = torch.full((len(positions), gamma), IGNORE)
    for i, t in enumerate(positions):
        for j in range(gamma):
            k = t + 2 + j
            if k >= len(row.input_ids) or not row.loss_mask[k]:
                break
            labels[i, j] = row.input_ids[k]
    return labels


@torch.no_grad()
def validation_loss(
    model: TargetModel, rows: Sequence[TokenRow], batch_size: int = 8, until: Deadline = ENDLESS
) -> tuple[float, int]:
    """Mean next-token loss per completion token, and the number of rows it comes from: those done by `until`."""
    total, count, done = 0.0, 0, 0
    for indices in batches_in_time(rows, batch_size, until, "validation loss"):
        batch = collate([rows[index] for index in indices], model.device)
        losses = next_token_losses(model, model.main_pass(batch["input_ids"], batch["attention_mask"]), batch)
        total += float(losses.sum())
        count, done = count + len(losses), done + len(indices)
    totals, counts, texts = zip(*processes.gathered((total, count, done)), strict=True)
    return float(sum(totals)) / max(sum(counts), 1), sum(texts)
