"""The rows of a step are those of one process, whoever reads them; random numbers belong to rows."""

from __future__ import annotations

import pytest
import torch

from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.adapters.distributed import processes
from streamspec.adapters.distributed.step_batches import StepBatches, step_loader
from streamspec.adapters.drafters.losses import pick_rows

ROWS = [TokenRow([i % 7 + 3] * (3 + i % 5), [False] + [True] * (2 + i % 5)) for i in range(13)]


def as_process(index: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "index", lambda: index)
    monkeypatch.setattr(processes, "count", lambda: count)


def steps(total: int, epoch: int) -> list[list[tuple[int, bool]]]:
    batches = StepBatches(ROWS, total, seed=3)
    batches.set_epoch(epoch)
    assert len(batches) == -(-len(ROWS) // total)
    return [[(pick.row, pick.counts) for pick in step] for step in batches]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_together_processes_read_the_batch_that_one_would_read(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for epoch in (0, 1):
        alone = steps(4, epoch)
        shares = []
        for index in range(count):
            as_process(index, count, monkeypatch)
            shares.append(steps(4, epoch))
        as_process(0, 1, monkeypatch)
        for number, whole in enumerate(alone):
            here = [one for share in shares for one in share[number]]
            assert sorted(row for row, counts in here if counts) == sorted(row for row, _ in whole)
            assert all(share[number] for share in shares)  # none without a row
    assert steps(4, 0) != steps(4, 1)


def test_a_process_without_a_row_reads_one_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    as_process(1, 2, monkeypatch)
    batches = list(step_loader(ROWS, 4, seed=3))
    assert batches[-1]["attention_mask"].any() and not batches[-1]["loss_mask"].any()
    assert all(batch["loss_mask"].any() for batch in batches[:-1])
    assert (pick_rows(batches[-1], 2, 4).labels == -100).all()


def test_random_numbers_are_those_of_the_row_and_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    def draws(total: int, epoch: int) -> dict[int, list[float]]:
        loader = step_loader(ROWS, total, seed=3)
        loader.set_epoch(epoch)
        picks = [[pick.row for pick in step] for step in loader.batch_sampler]
        return {
            row: numbers[: len(ROWS[row].input_ids)].tolist()
            for step, batch in zip(picks, loader, strict=True)
            for row, numbers in zip(step, batch["draws"], strict=True)
        }

    alone = draws(4, 0)
    assert len(alone) == len(ROWS) and alone == draws(6, 0) and alone != draws(4, 1)
    as_process(1, 2, monkeypatch)
    mine = draws(4, 0)
    assert 0 < len(mine) < len(ROWS) and all(alone[row] == numbers for row, numbers in mine.items())
    assert len({tuple(numbers[:2]) for numbers in alone.values()}) == len(ROWS)


def test_rows_with_the_smallest_numbers_are_drafted_from() -> None:
    row = TokenRow([5] * 8, [False] + [True] * 7)
    batch = {"input_ids": torch.tensor([row.input_ids]), "loss_mask": torch.tensor([row.loss_mask])}
    batch["draws"] = torch.tensor([[0.9, 0.1, 0.8, 0.2, 0.7, 0.3, 0.0, 0.0]])
    assert pick_rows(batch, 2, 3).rows.tolist() == [[1, 3, 5]]  # the last two have no two tokens after them
