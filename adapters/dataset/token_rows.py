"""Token rows as flat arrays in one folder, mapped into memory: a million short rows take a few bytes a token.

Tests: tests/adapters/dataset/test_token_rows.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, overload

import numpy as np

from streamspec.atomic import write_text
from streamspec.json_fields import read_note

IDS, MASK, ROWS, ABOUT = "ids.bin", "mask.bin", "rows.bin", "about.json"  # ABOUT is written last
AT_ONCE = 1 << 20  # tokens of a piece
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class TokenRow:
    """One training sequence. `loss_mask[i]` is true where token i is to be predicted."""

    input_ids: list[int]
    loss_mask: list[bool]


def spread(rows: int, count: int) -> list[int]:
    """The indices of at most `count` of so many rows, evenly from all over them."""
    count = min(count, rows)
    return [i * rows // count for i in range(count)]


def joined(prompt: list[int], answer: list[int]) -> TokenRow:
    """Prompt and answer tokens as one row that is trained on the answer."""
    return TokenRow(prompt + answer, [False] * len(prompt) + [True] * len(answer))


class TokenRows(Sequence[TokenRow]):
    """A choice of the rows of a folder, in any order; a row becomes a `TokenRow` when it is asked for.

    `examples` int64 [rows]: the number of the example each came from. `openings` int64 [rows]: how many of its first
    tokens are the prompt of its last answer, or the beginning of a text. `lengths` int64 [rows].
    """

    def __init__(self, ids: Array, mask: Array, table: Array, picked: Array | None = None) -> None:
        """`ids` [T], `mask` bool [T]: the tokens of all rows. `table` int64 [all rows, 4]: where a row begins, its
        length, opening and example. `picked` int64 [rows]: the chosen ones, None for all.
        """
        self.ids, self.mask, self.table = ids, mask, table
        self.picked = np.arange(len(table)) if picked is None else picked

    @property
    def lengths(self) -> Array:
        return self.table[self.picked, 1]

    @property
    def openings(self) -> Array:
        return self.table[self.picked, 2]

    @property
    def examples(self) -> Array:
        return self.table[self.picked, 3]

    def __len__(self) -> int:
        return len(self.picked)

    @overload
    def __getitem__(self, index: int) -> TokenRow: ...
    @overload
    def __getitem__(self, index: slice) -> TokenRows: ...
    def __getitem__(self, index: int | slice) -> TokenRow | TokenRows:
        if isinstance(index, slice):
            return self.select(np.arange(len(self))[index])
        start, length = self.table[self.picked[index], :2]
        return TokenRow(self.ids[start : start + length].tolist(), self.mask[start : start + length].tolist())

    def select(self, which: Array) -> TokenRows:
        """The rows at these positions (int64 [n] or bool [rows]), over the same arrays."""
        return TokenRows(self.ids, self.mask, self.table, self.picked[which])

    def opening(self, index: int) -> list[int]:
        """The tokens that a model is given to answer row `index` itself."""
        start, _, length, _ = self.table[self.picked[index]]
        tokens: list[int] = self.ids[start : start + length].tolist()
        return tokens

    def opening_bytes(self, index: int) -> bytes:
        """The opening of row `index`, as a key to compare by."""
        start, _, length, _ = self.table[self.picked[index]].tolist()
        return self.ids[start : start + length].tobytes()

    def row_bytes(self, index: int) -> bytes:
        """The tokens of row `index`, as a key to compare by."""
        start, length, _, _ = self.table[self.picked[index]].tolist()
        return self.ids[start : start + length].tobytes()

    def has_targets(self) -> Array:
        """bool [rows]: tells which rows have a token to predict; the first token of a row is none."""
        counts = np.zeros(len(self.table), bool)
        for begin, end in _pieces(self.table):
            first, last = int(self.table[begin, 0]), int(self.table[end - 1, :2].sum())
            inside = np.array(self.mask[first:last])
            starts = self.table[begin:end, 0] - first
            inside[starts] = False
            counts[begin:end] = np.logical_or.reduceat(inside, starts)
        return counts[self.picked]

    def has_room(self, longest: int) -> Array:
        """bool [rows]: tells which openings are prompts of at most `longest` tokens; an empty one is none."""
        return (self.openings > 0) & (self.openings <= longest)

    def prompts(self, longest: int, count: int) -> list[list[int]]:
        """At most `count` openings of at most `longest` tokens, from all over the rows."""
        fitting = np.flatnonzero(self.has_room(longest))
        return [self.opening(i) for i in fitting[spread(len(fitting), count)].tolist()]

    def tokens(self) -> Iterator[Array]:
        """The tokens of all rows, row after row, in pieces of about a million."""
        lengths, begin = self.lengths, 0
        while begin < len(self):
            end = begin + max(1, int(np.searchsorted(np.cumsum(lengths[begin : begin + AT_ONCE]), AT_ONCE, "right")))
            spans = self.table[self.picked[begin:end], :2]
            yield np.concatenate([self.ids[start : start + length] for start, length in spans])
            begin = end


def _pieces(table: Array) -> Iterator[tuple[int, int]]:
    """Stretches of consecutive rows of about a million tokens: first row, and the row after the last."""
    begin = 0
    while begin < len(table):
        limit = int(table[begin, 0]) + AT_ONCE
        end = max(begin + 1, int(np.searchsorted(table[:, 0], limit)))
        yield begin, end
        begin = end


class RowWriter:
    """Writes rows to a folder as they come; `finish` makes it whole."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        folder.mkdir(parents=True)
        self.folder, self.dtype = folder, np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.int32)
        self._files: list[IO[bytes]] = [(folder / name).open("wb") for name in (IDS, MASK, ROWS)]
        self.rows = self.written = 0

    def add(self, rows: Sequence[tuple[TokenRow, int, int]]) -> None:
        """Adds rows with their openings and examples."""
        table = np.empty((len(rows), 4), np.int64)
        for i, (row, opening, example) in enumerate(rows):
            table[i] = self.written, len(row.input_ids), opening, example
            self.written += len(row.input_ids)
        ids = [token for row, _, _ in rows for token in row.input_ids]
        mask = [counts for row, _, _ in rows for counts in row.loss_mask]
        for file, array in zip(self._files, (np.array(ids, self.dtype), np.array(mask, np.bool_), table), strict=True):
            file.write(array.tobytes())
        self.rows += len(rows)

    def finish(self, about: dict[str, Any]) -> None:
        """Closes the files; `about` is what `read_rows` returns beside the rows."""
        self.close()
        write_text(self.folder / ABOUT, json.dumps(about | {"dtype": self.dtype.name}))

    def close(self) -> None:
        """Closes the files, as they are."""
        for file in self._files:
            file.close()


def read_rows(folder: Path, in_memory: bool = False) -> tuple[TokenRows, dict[str, Any]] | None:
    """The rows of a finished folder with what `finish` was told; None for any other. Mapped into memory, or read."""
    try:
        about = read_note(folder / ABOUT)
        read = np.fromfile if in_memory else _mapped
        ids = read(folder / IDS, np.dtype(about["dtype"]))
        table = np.fromfile(folder / ROWS, np.int64).reshape(-1, 4)
        rows = TokenRows(ids, read(folder / MASK, np.dtype(np.bool_)), table)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = len(rows.ids) == len(rows.mask) == (int(table[-1, :2].sum()) if len(table) else 0)
    return (rows, about) if whole else None


def _mapped(file: Path, dtype: np.dtype[Any]) -> Array:
    return np.memmap(file, dtype, "r") if file.stat().st_size else np.empty(0, dtype)
