"""Losses in chunks of rows against the same losses at once, and how many logits exist at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.adapters.drafters import losses
from streamspec.adapters.drafters.acceptance_eval import record_ranks
from streamspec.adapters.drafters.drafting_model import DraftTargets
from streamspec.adapters.drafters.losses import draft_losses, lookup_table, next_token_loss, pick_rows
from streamspec.adapters.drafters.streams.model import StreamConfig, StreamingModel
from tests.support.tiny_models import tiny_model

IDS = torch.tensor([[5, 9, 33, 12, 7, 41, 60, 3, 18], [8, 8, 21, 50, 11, 2, 0, 0, 0]])
MASK = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
BATCH = {"input_ids": IDS, "attention_mask": MASK, "loss_mask": torch.arange(9) * MASK > 1}
VOCABULARY = torch.tensor([3, 7, 11, 12, 18, 21, 33, 41, 50])
KINDS = [None, "hard", "kl", "tv", "topk"]  # None: the next-token loss


@pytest.fixture
def drafter() -> StreamingModel:
    torch.manual_seed(1)
    model = StreamingModel(tiny_model("gemma2"), StreamConfig(3, 2, scale=0.7), frozen=False, bigram=(9, 4)).eval()
    with torch.no_grad():
        model.bigram_out.normal_()
    return model.requires_grad_(True)


def computed(drafter: StreamingModel, kind: str | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The losses and their gradients."""
    drafter.zero_grad()
    main = drafter.main_pass(IDS, MASK)
    if kind is None:
        loss = next_token_loss(drafter, main, BATCH)
    else:
        picked = pick_rows(BATCH, 3, 8, torch.Generator().manual_seed(0))
        loss = draft_losses(drafter, DraftTargets(main, picked, VOCABULARY, lookup_table(VOCABULARY, 64), kind))
    (loss * torch.arange(1.0, 1 + loss.numel())).sum().backward()
    return loss.detach(), [p.grad.clone() for p in drafter.parameters() if p.grad is not None]


def watch_logits(drafter: StreamingModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    head = drafter.head

    def counted(*args: Any) -> torch.Tensor:
        logits = head(*args)
        sizes.append(logits.numel())
        return logits

    monkeypatch.setattr(drafter, "head", counted)
    return sizes


@pytest.mark.parametrize("kind", KINDS)
def test_losses_in_chunks_are_the_losses_and_hold_few_logits(
    drafter: StreamingModel, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, gradients = computed(drafter, kind)
    monkeypatch.setattr(losses, "MOST_LOGITS", 2 * (64 if kind is None else len(VOCABULARY)))
    sizes = watch_logits(drafter, monkeypatch)
    chunked, chunked_gradients = computed(drafter, kind)
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close(chunked_gradients, gradients)
    assert len(sizes) > 2
    assert max(sizes) <= losses.MOST_LOGITS


@pytest.mark.parametrize("frozen", [True, False])
def test_a_head_is_chunked_whether_it_learns_or_not(
    drafter: StreamingModel, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter.decoder.lm_head.weight.requires_grad_(not frozen)
    test_losses_in_chunks_are_the_losses_and_hold_few_logits(drafter, None, monkeypatch)


def test_ranks_in_chunks_are_the_ranks(drafter: StreamingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        TokenRow(ids[mask.bool()].tolist(), [False] * 3 + [True] * (int(mask.sum()) - 3))
        for ids, mask in zip(IDS, MASK, strict=True)
    ]
    whole = record_ranks(drafter, rows, VOCABULARY)
    monkeypatch.setattr(losses, "MOST_LOGITS", 18)
    sizes = watch_logits(drafter, monkeypatch)
    assert record_ranks(drafter, rows, VOCABULARY) == whole
    assert len(sizes) > 3
    assert max(sizes) <= 18
