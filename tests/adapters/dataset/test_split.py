"""Validation rows are drawn from all of the data, by the seed, and are never trained."""

from __future__ import annotations

import numpy as np
import pytest

from streamspec.adapters.dataset.split import drawn_split
from streamspec.adapters.dataset.token_rows import TokenRows
from streamspec.errors import DataError


def rows_of(*rows: tuple[list[int], list[int], int]) -> TokenRows:
    """Rows of prompts, answers and the numbers of their examples."""
    ids = np.array([token for prompt, answer, _ in rows for token in prompt + answer], np.uint16)
    lengths = [len(prompt) + len(answer) for prompt, answer, _ in rows]
    starts = np.cumsum([0, *lengths[:-1]])
    table = np.array([(s, n, len(row[0]), row[2]) for s, n, row in zip(starts, lengths, rows, strict=True)])
    return TokenRows(ids, np.ones(len(ids), bool), table)


def many(count: int, prompts: int) -> TokenRows:
    return rows_of(*(([7, i % prompts], [i], i) for i in range(count)))


def test_rows_are_drawn_by_the_seed_from_all_of_the_data() -> None:
    said: list[str] = []
    train, val = drawn_split(many(400, 400), 15, 3, said.append)
    assert said == ["15 of 400 rows drawn for validation; --val names a file"]
    assert len(val) == 15 and sorted([*train.examples, *val.examples]) == list(range(400))
    assert min(val.examples) < 130 and max(val.examples) > 270
    assert list(drawn_split(many(400, 400), 15, 3, said.append)[1]) == list(val)
    assert list(drawn_split(many(400, 400), 15, 4, said.append)[1]) != list(val)


def test_one_in_twenty_is_drawn_at_most_and_one_at_least() -> None:
    assert len(drawn_split(many(60, 60), 200, 0, print)[1]) == 3
    assert len(drawn_split(many(2, 2), 200, 0, print)[1]) == 1
    with pytest.raises(DataError, match="data of one row; expected two"):
        drawn_split(many(1, 1), 200, 0, print)


def test_prompts_of_validation_are_not_trained_with_other_answers() -> None:
    said: list[str] = []
    train, val = drawn_split(many(400, 200), 10, 0, said.append)
    assert said == ["10 of 400 rows drawn for validation, 10 more with the same prompts left out; --val names a file"]
    assert not {tuple(train.opening(i)) for i in range(len(train))} & {tuple(val.opening(i)) for i in range(len(val))}
    assert len({tuple(val.opening(i)) for i in range(len(val))}) == 10


def test_where_all_prompts_are_alike_only_the_same_rows_are_left_out() -> None:
    rows = rows_of(*(([7], [i % 150], i) for i in range(300)))
    train, val = drawn_split(rows, 10, 0, print)
    assert len(val) == 10
    assert not {tuple(row.input_ids) for row in train} & {tuple(row.input_ids) for row in val}
    with pytest.raises(DataError, match="repeat one row"):
        drawn_split(rows_of(*(([7], [1], i) for i in range(30))), 10, 0, print)


def test_of_own_answers_a_prompt_has_one_and_is_on_one_side_alone() -> None:
    rows = rows_of(*(([7, i % 40], [i], i) for i in range(400)))  # ten references each
    for own in (False, True):
        train, val = drawn_split(rows, 100, 0, print, own)
        openings = [{tuple(side.opening(i)) for i in range(len(side))} for side in (train, val)]
        assert bool(openings[0] & openings[1]) != own and all(openings)
    rows = rows_of(*(([7, i % 20], [i], i) for i in range(380)))
    train, _ = drawn_split(rows, 100, 0, print, own=True)
    assert len({tuple(train.opening(i)) for i in range(len(train))}) == 19  # one prompt in twenty, not one row


def test_a_conversation_of_several_rows_is_drawn_as_a_whole() -> None:
    rows = rows_of(*(([7, i // 3] + [8] * (i % 3), [9], i // 3) for i in range(120)))
    train, val = drawn_split(rows, 2, 0, print)
    assert len(val) == 6 and not set(train.examples) & set(val.examples)
