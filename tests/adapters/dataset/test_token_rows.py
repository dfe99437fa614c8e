"""Rows written to a folder come back as they were; choices of them share its arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streamspec.adapters.dataset import token_rows
from streamspec.adapters.dataset.batches import LengthGroupedOrder, collate, draft_vocabulary
from streamspec.adapters.dataset.token_rows import ABOUT, IDS, RowWriter, TokenRow, TokenRows, read_rows

ROWS = [TokenRow([5] * n + [n], [False] * (n - n % 2) + [True] * (1 + n % 2)) for n in range(12)]


def saved(folder: Path, vocabulary: int = 64) -> TokenRows:
    writer = RowWriter(folder, vocabulary)
    for start in range(0, len(ROWS), 5):
        writer.add([(row, len(row.input_ids) // 2, (start + i) // 2) for i, row in enumerate(ROWS[start : start + 5])])
    writer.finish({"note": 1})
    found = read_rows(folder)
    assert found is not None and found[1]["note"] == 1
    return found[0]


@pytest.mark.parametrize(("vocabulary", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.int32)])
def test_rows_come_back_as_they_were(vocabulary: int, dtype: type, tmp_path: Path) -> None:
    rows = saved(tmp_path / "rows", vocabulary)
    assert list(rows) == ROWS and rows.ids.dtype == dtype
    assert rows.lengths.tolist() == [len(row.input_ids) for row in ROWS]
    assert [rows.opening(i) for i in range(len(rows))] == [row.input_ids[: len(row.input_ids) // 2] for row in ROWS]
    assert rows.examples.tolist() == [i // 2 for i in range(12)]


def test_a_choice_of_rows_is_one_of_lists(tmp_path: Path) -> None:
    rows, which = saved(tmp_path / "rows"), np.array([7, 3, 3, 0])
    some = rows.select(which)
    assert list(some) == [ROWS[i] for i in which] and list(some[1:3]) == [ROWS[3]] * 2
    assert list(some.select(np.array([True, False, False, True]))) == [ROWS[7], ROWS[0]]
    assert some.ids is rows.ids


def test_batches_order_and_vocabulary_are_those_of_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_rows, "AT_ONCE", 10)  # tokens: in pieces
    rows = saved(tmp_path / "rows")
    assert list(LengthGroupedOrder(rows, 4, 1)) == list(LengthGroupedOrder(ROWS, 4, 1))
    for size in (1, 3, 6):
        assert draft_vocabulary([rows], size, 64, [2]) == draft_vocabulary([ROWS], size, 64, [2])
        assert draft_vocabulary([rows, ROWS[:2]], size, 64, []) == draft_vocabulary([ROWS + ROWS[:2]], size, 64, [])
    batch = collate(rows[2:5])
    assert all((batch[name] == tensor).all() for name, tensor in collate(ROWS[2:5]).items())
    assert rows.has_targets().tolist() == [any(row.loss_mask[1:]) for row in ROWS]
    assert rows[::-1].has_targets().tolist() == [any(row.loss_mask[1:]) for row in ROWS[::-1]]


def test_a_folder_that_is_not_whole_is_none(tmp_path: Path) -> None:
    saved(tmp_path / "rows")
    cut = tmp_path / "rows" / IDS
    cut.write_bytes(cut.read_bytes()[:-2])
    assert read_rows(tmp_path / "rows") is None
    (tmp_path / "rows" / ABOUT).unlink()
    assert read_rows(tmp_path / "rows") is None and read_rows(tmp_path / "none") is None


@pytest.mark.parametrize(("rows", "count"), [(7999, 4000), (399, 200), (5, 9), (12, 12), (0, 3), (7, 1)])
def test_some_of_many_rows_come_from_all_over_them(rows: int, count: int) -> None:
    some = token_rows.spread(rows, count)
    assert len(some) == len(set(some)) == min(rows, count) and all(0 <= row < rows for row in some)
    gaps = np.diff([*some, rows])
    assert not some or (some[0] == 0 and gaps.max() - gaps.min() <= 1)
