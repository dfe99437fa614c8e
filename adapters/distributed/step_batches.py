"""The rows that a training step reads on each process, and the random numbers that belong to them.

Both are functions of the seed, the epoch and the row: not of the process, nor of an interruption.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

from streamspec.adapters.dataset.batches import LengthGroupedOrder, collate
from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.adapters.distributed import processes


class Pick(NamedTuple):
    """A row of a step. `counts`: false for one that only fills the share of a process without rows."""

    row: int
    epoch: int
    counts: bool = True


class PickedRow(NamedTuple):
    """A row and its random numbers in [0, 1), one for each token."""

    row: TokenRow
    draws: Tensor


class StepBatches(Sampler[list[Pick]]):
    """This process's share of each step's `total` rows. The union over processes is the batch that one process alone
    would read.
    """

    def __init__(self, rows: Sequence[TokenRow], total: int, seed: int, ahead: Sequence[int] = ()) -> None:
        self.order, self.total = LengthGroupedOrder(rows, total, seed, ahead), total

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch whose batches the next iteration gives."""
        self.order.set_epoch(epoch)

    def __len__(self) -> int:
        return -(-len(self.order) // self.total)

    def __iter__(self) -> Iterator[list[Pick]]:
        order, epoch = list(self.order), self.order.epoch
        for start in range(0, len(order), self.total):
            step = order[start : start + self.total]
            yield [Pick(index, epoch) for index in processes.dealt(step)] or [Pick(step[0], epoch, counts=False)]


class StepRows(Dataset[PickedRow]):
    """The rows of a stage, as `StepBatches` picks them."""

    def __init__(self, rows: Sequence[TokenRow], seed: int) -> None:
        self.rows, self.seed = rows, seed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, pick: Pick) -> PickedRow:
        row = self.rows[pick.row]
        if not pick.counts:
            row = TokenRow(row.input_ids, [False] * len(row.loss_mask))
        draws = drawn_numbers(len(row.input_ids), self.seed, pick.epoch, pick.row)
        return PickedRow(row, torch.from_numpy(draws))


def collate_step(picked: list[PickedRow]) -> dict[str, Tensor]:
    """As `batches.collate`, with the rows' random numbers `draws` [B, T] float32."""
    draws = pad_sequence([pick.draws for pick in picked], batch_first=True)
    return collate([pick.row for pick in picked]) | {"draws": draws}


class StepLoader(DataLoader[PickedRow]):
    """The batches of a stage on this process."""

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch whose batches the next iteration gives."""
        assert isinstance(self.batch_sampler, StepBatches)
        self.batch_sampler.set_epoch(epoch)


def step_loader(rows: Sequence[TokenRow], total: int, seed: int, ahead: Sequence[int] = ()) -> StepLoader:
    """Loads `total` rows a step over all processes, first those at the indices `ahead`."""
    batches = StepBatches(rows, total, seed, ahead)
    return StepLoader(StepRows(rows, seed), batch_sampler=batches, collate_fn=collate_step)  # type: ignore[arg-type]


def drawn_numbers(count: int, *seed: int) -> np.ndarray:
    """float32 [count] in [0, 1): random numbers that are a function of `seed`."""
    return np.random.default_rng(seed).random(count, dtype=np.float32)
