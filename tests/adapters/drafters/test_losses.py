"""Losses against their equations, computed text by text, row by row and depth by depth; in chunks of rows against the
same losses at once, and how many logits exist at a time.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.adapters.drafters import losses
from streamspec.adapters.drafters.acceptance_eval import record_ranks
from streamspec.adapters.drafters.drafting_model import IGNORE, DraftRows, DraftTargets, FitStep, MainPass
from streamspec.adapters.drafters.losses import (
    depth_losses,
    draft_losses,
    drafting_losses,
    lookup_table,
    next_token_loss,
    pick_passes,
    pick_rows,
    state_loss,
)
from streamspec.adapters.drafters.streams.model import StreamConfig, StreamingModel
from tests.support.tiny_models import tiny_model

IDS = torch.tensor([[5, 9, 33, 12, 7, 41, 60, 3, 18], [8, 8, 21, 50, 11, 2, 0, 0, 0]])
MASK = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
BATCH = {"input_ids": IDS, "attention_mask": MASK, "loss_mask": torch.arange(9) * MASK > 1}
VOCABULARY = torch.tensor([3, 7, 11, 12, 18, 21, 33, 41, 50])
KINDS = [None, "hard", "kl", "tv", "topk"]  # None: the next-token loss
GAMMA = 3
# Two answers in the first text; before the last one of the second an answer of one token. Means of means are others.
ANSWERS = {**BATCH, "loss_mask": torch.tensor([[c == "#" for c in text] for text in ("..##.####", "..#.##...")])}


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


def test_the_rows_of_a_frozen_head_are_gathered_once_and_follow_its_weights(drafter: StreamingModel) -> None:
    head = drafter.decoder.lm_head.weight.requires_grad_(False)
    states = torch.randn(3, head.shape[1])
    drafter.head(states, VOCABULARY)
    gathered = drafter._head_rows(VOCABULARY)[0]
    assert drafter._head_rows(VOCABULARY)[0] is gathered
    assert drafter._head_rows(VOCABULARY.flip(0))[0] is not gathered
    drafter.head(states, VOCABULARY)
    with torch.no_grad():
        head.mul_(2)
    torch.testing.assert_close(drafter.head(states, VOCABULARY), drafter.head(states, None)[:, VOCABULARY])
    head.requires_grad_(True)
    assert drafter.head(states, VOCABULARY).requires_grad


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


def text(number: int) -> tuple[list[int], list[bool]]:
    """The tokens of a text without padding, and which of them belong to an answer."""
    length = int(MASK[number].sum())
    return IDS[number, :length].tolist(), ANSWERS["loss_mask"][number, :length].tolist()


def rows_ahead(number: int) -> list[tuple[int, list[int]]]:
    """Rows t after which token t + 1 of an answer is known and further ones are drafted, with the places of these: up
    to the answer's end.
    """
    ids, answer = text(number)
    found = []
    for t in range(len(ids)):
        ahead: list[int] = []
        for i in range(t + 2, min(t + 2 + GAMMA, len(ids))):
            if not all(answer[t + 1 : i + 1]):
                break
            ahead.append(i)
        if ahead:
            found.append((t, ahead))
    return found


def capped(states: torch.Tensor, drafter: StreamingModel, vocabulary: list[int]) -> torch.Tensor:
    """Logits over `vocabulary` of finished states, as Gemma 2's head computes them with a soft cap of 5."""
    return 5 * (states @ drafter.decoder.lm_head.weight[vocabulary].T / 5).tanh()


def summands(drafter: StreamingModel, labels: str, vocabulary: list[int]) -> list[list[float]]:
    """The summands of equation 5 (arXiv 2402.11131) by depth, -log p(y_(t+1+j) | y_(<=t+1)), or with another kind of
    labels the distance from what the target expects there.
    """
    found: list[list[float]] = [[] for _ in range(GAMMA)]
    for number in range(len(IDS)):
        ids, _ = text(number)
        main = drafter.main_pass(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.long))
        own = drafter.model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        for t, ahead in rows_ahead(number):
            states = drafter.draft_pass(main, one_row(t, ids[t + 1]))[0, 0]
            for j, i in enumerate(ahead):
                logits = capped(states[j], drafter, vocabulary)
                if drafter.bigram_in is not None and ids[i - 1] in vocabulary:
                    logits = logits + drafter.bigram_out @ drafter.bigram_in[vocabulary.index(ids[i - 1])]
                drafted = logits.log_softmax(-1)
                wanted = capped(own[i - 1], drafter, vocabulary).softmax(-1)
                if labels == "hard":
                    found[j] += [-float(drafted[vocabulary.index(ids[i])])] if ids[i] in vocabulary else []
                elif labels == "kl":
                    found[j].append(sum(float(p * (p.log() - q)) for p, q in zip(wanted, drafted, strict=True)))
                elif labels == "tv":
                    found[j].append(sum(abs(float(p - q.exp())) for p, q in zip(wanted, drafted, strict=True)) / 2)
                else:
                    best = sorted(range(len(wanted)), key=lambda v: -float(wanted[v]))[:10]
                    found[j].append(-sum(float(wanted[v] * drafted[v]) for v in best))
    return found


def one_row(t: int, root: int) -> DraftRows:
    return DraftRows(torch.tensor([[t]]), torch.tensor([[root]]), torch.full((1, 1, GAMMA), IGNORE))


def mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)


def drafting(whole: bool) -> tuple[StreamingModel, torch.Tensor | None]:
    """A drafter with a bigram, and the tokens that it may propose."""
    torch.manual_seed(1)
    bigram = (64 if whole else len(VOCABULARY), 4)
    model = StreamingModel(tiny_model("gemma2"), StreamConfig(GAMMA, 2, scale=0.7), frozen=False, bigram=bigram).eval()
    torch.nn.init.normal_(model.bigram_out)
    return model, None if whole else VOCABULARY


def targets_of(model: StreamingModel, vocabulary: torch.Tensor | None, labels: str, main: MainPass) -> DraftTargets:
    return DraftTargets(main, pick_rows(ANSWERS, GAMMA, 99), vocabulary, lookup_table(vocabulary, 64), labels)


def test_rows_to_draft_from_are_those_before_two_tokens_of_an_answer() -> None:
    picked = pick_rows(ANSWERS, GAMMA, 99)
    for number in range(len(IDS)):
        ids, _ = text(number)
        found = {
            int(t): (int(root), [int(label) for label in labels if label != IGNORE], (labels != IGNORE).tolist())
            for t, root, labels in zip(picked.rows[number], picked.roots[number], picked.labels[number], strict=True)
            if bool((labels != IGNORE).any())
        }
        assert found == {
            t: (ids[t + 1], [ids[i] for i in ahead], [j < len(ahead) for j in range(GAMMA)])
            for t, ahead in rows_ahead(number)
        }
    assert picked.rows.shape[1] == max(len(rows_ahead(number)) for number in range(len(IDS)))  # and no column in vain


def test_of_too_many_rows_those_with_the_smallest_draws_are_picked() -> None:
    draws = torch.tensor([[0.0, 0.5, 0.1, 0.0, 0.9, 0.4, 0.6, 0.0, 0.2], [0.0, 0.3, 0.0, 0.7, 0.1, 0.0, 0.0, 0.0, 0.0]])
    picked = pick_rows(ANSWERS | {"draws": draws}, GAMMA, 2)
    assert picked.rows[0].tolist() == [1, 5]
    assert [int(t) for t, labels in zip(picked.rows[1], picked.labels[1], strict=True) if labels[0] != IGNORE] == [3]


@pytest.mark.parametrize("labels", KINDS[1:])
@pytest.mark.parametrize("whole", [True, False])
@torch.no_grad()
def test_the_loss_of_a_depth_is_the_mean_of_its_summands(labels: str, whole: bool) -> None:
    model, vocabulary = drafting(whole)
    expected = [
        mean(some) for some in summands(model, labels, vocabulary.tolist() if vocabulary is not None else [*range(64)])
    ]
    targets = targets_of(model, vocabulary, labels, model.main_pass(IDS, MASK))
    torch.testing.assert_close(draft_losses(model, targets), torch.tensor(expected), atol=1e-5, rtol=1e-4)
    states = model.draft_pass(targets.main, targets.picked)
    for first in range(GAMMA):  # a draft layer's last position is scored alone
        found = depth_losses(model, targets, states[:, :, first : first + 1], first)
        torch.testing.assert_close(found, torch.tensor(expected[first : first + 1]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("frozen", [True, False])
@torch.no_grad()
def test_the_total_weighs_the_depths_and_where_the_target_learns_adds_them_to_its_loss(frozen: bool) -> None:
    model, vocabulary = drafting(whole=True)
    weights, alpha = [1.0, 0.5, 0.125], 0.3
    depths = [mean(some) for some in summands(model, "hard", [*range(64)])]
    target = []
    for number in range(len(IDS)):
        ids, answer = text(number)
        logits = model.model(input_ids=torch.tensor([ids])).logits[0]
        target += [-float(logits[i - 1].log_softmax(-1)[ids[i]]) for i in range(1, len(ids)) if answer[i]]
    weighted = sum(weight * loss for weight, loss in zip(weights, depths, strict=True))
    main, model.frozen = model.main_pass(IDS, MASK), frozen
    targets = targets_of(model, vocabulary, "hard", main)
    found = drafting_losses(model, FitStep(ANSWERS, targets, torch.tensor(weights), {"alpha": alpha}, 0.0))
    expected = weighted / sum(weights) if frozen else mean(target) + alpha * weighted
    assert float(found["total"]) == pytest.approx(expected, rel=1e-4)
    assert ("next_token" in found) != frozen
    assert float(next_token_loss(model, main, ANSWERS)) == pytest.approx(mean(target), rel=1e-4)


@pytest.mark.parametrize("first", range(GAMMA))
@torch.no_grad()
def test_the_loss_on_states_is_their_distance_from_those_that_predict_the_same_tokens(first: int) -> None:
    """Smooth L1 (arXiv 2502.06282, equations 9 and 10) over the spread of the target's states."""
    model, _ = drafting(whole=True)
    main = model.main_pass(IDS, MASK)
    targets = targets_of(model, None, "hard", main)
    states = model.draft_pass(main, targets.picked)
    pairs = []
    for number in range(len(IDS)):
        place = {int(t): p for p, t in enumerate(targets.picked.rows[number])}
        ids, _ = text(number)
        own = model.model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        for t, ahead in rows_ahead(number):
            pairs += [(states[number, place[t], j], own[i - 1]) for j, i in enumerate(ahead) if j >= first]
    drafted, wanted = (torch.stack(side).double() for side in zip(*pairs, strict=True))
    apart = ((drafted - wanted) / wanted.std()).abs().flatten().tolist()
    expected = mean([x * x / 2 if x < 1 else x - 0.5 for x in apart])
    assert float(state_loss(targets, states[:, :, first:], first)) == pytest.approx(expected, rel=1e-4)


def test_passes_divide_the_numbers_below_one_at_their_borders() -> None:
    border = 1 / 1.5  # of two passes the first has two thirds
    assert (pick_passes(2, 0.0), pick_passes(2, math.nextafter(border, 0)), pick_passes(2, border)) == (1, 1, 2)
    assert pick_passes(4, math.nextafter(1, 0)) == 4
