"""The order of token rows in training, and padded batches of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices

from streamspec.adapters.dataset.token_rows import TokenRow


class LengthGroupedOrder(Sampler[int]):
    """Shuffled order with rows of similar length side by side; a function of (seed, epoch), so a resumed run sees the
    same batches. The first epoch begins with the rows `ahead`.
    """

    def __init__(self, rows: Sequence[TokenRow], batch_size: int, seed: int, ahead: Sequence[int] = ()) -> None:
        self.lengths, self.ahead = row_lengths(rows), frozenset(ahead)
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch whose order the next iteration gives."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + 1000 * self.epoch)
        order = get_length_grouped_indices(self.lengths, self.batch_size, generator=generator)
        return iter(order if self.epoch else sorted(order, key=lambda index: index not in self.ahead))


def row_lengths(rows: Sequence[TokenRow]) -> list[int]:
    """Counts the tokens of each row."""
    known = getattr(rows, "lengths", None)  # of `TokenRows`, without making the rows
    return [len(row.input_ids) for row in rows] if known is None else known.tolist()


def collate(rows: Sequence[TokenRow], device: torch.device | None = None) -> dict[str, Tensor]:
    """Right-padded batch: `input_ids`, `attention_mask` [B, T] int64 and `loss_mask` [B, T] bool, on `device`."""
    length = max(len(r.input_ids) for r in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    attention, loss = torch.zeros_like(ids), torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        n = len(row.input_ids)
        ids[i, :n] = torch.tensor(row.input_ids)
        attention[i, :n] = 1
        loss[i, :n] = torch.tensor(row.loss_mask)
    batch = {"input_ids": ids, "attention_mask": attention, "loss_mask": loss}
    return batch if device is None else {name: tensor.to(device) for name, tensor in batch.items()}


def token_pieces(rows: Sequence[TokenRow]) -> Iterator[np.ndarray]:
    """All tokens of the rows, in order, in arrays of about a million."""
    if hasattr(rows, "tokens"):
        yield from rows.tokens()
    else:
        yield np.fromiter(chain.from_iterable(row.input_ids for row in rows), np.int64)


def draft_vocabulary(
    parts: Sequence[Sequence[TokenRow]], size: int, vocab_size: int, always: Sequence[int]
) -> list[int] | None:
    """The `size` most frequent tokens of the rows in all parts, of equally frequent ones the first to occur, sorted by
    id; None where the whole vocabulary is wanted.
    """
    if size == 0 or size >= vocab_size:
        return None
    counts: Counter[int] = Counter()
    for piece in chain.from_iterable(map(token_pieces, parts)):
        tokens, first, times = np.unique(piece, return_index=True, return_counts=True)
        order = np.argsort(first)
        counts.update(dict(zip(tokens[order].tolist(), times[order].tolist(), strict=True)))
    frequent = [token for token, _ in counts.most_common(size)]
    return sorted({*frequent[: size - len(always)], *always})
