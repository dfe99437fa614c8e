"""Draws validation rows from the data where none are named. Tests: tests/adapters/dataset/test_split.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from streamspec.adapters.dataset.token_rows import Array, TokenRows
from streamspec.errors import DataError

SHARE = 20  # one row in so many is drawn, at most
MOST_LEFT_OUT = 0.1  # of the rows, for prompts that validation has


def drawn_split(
    rows: TokenRows, max_examples: int, seed: int, say: Callable[[str], None], own: bool = False
) -> tuple[TokenRows, TokenRows]:
    """Training rows and validation rows: of one in twenty examples, at most `max_examples`, drawn by `seed`.

    No row is in both. Rows that ask the same as a drawn one are left out of training; where these are many, only those
    that are the same, unless the target's `own` answers are learnt, of which a prompt has one. Says what it drew.
    Raises DataError for a single example.
    """
    examples, first = np.unique(rows.examples, return_index=True)
    if len(examples) < 2:
        raise DataError("data of one row", "two rows, one of them for validation", "add rows, or name --val")
    many = len({rows.opening_bytes(int(row)) for row in first}) if own else len(examples)
    count = min(max_examples, max(1, many // SHARE))
    held = examples[_drawn(rows, first, np.random.default_rng(seed).permutation(len(examples)), count)]
    inside = np.isin(rows.examples, held)
    alike = _alike(rows, inside, rows.opening_bytes)
    if alike.mean() > MOST_LEFT_OUT and not (own and (~inside & ~alike).any()):
        alike = _alike(rows, inside, rows.row_bytes)
    left = ~inside & ~alike
    if not left.any():
        raise DataError("data that repeat one row", "other rows to learn from", "add rows, or name --val")
    more = f", {int(alike.sum()):,} more with the same prompts left out" if alike.any() else ""
    say(f"{len(held):,} of {len(examples):,} rows drawn for validation{more}; --val names a file")
    return rows.select(left), rows.select(inside)


def _drawn(rows: TokenRows, first: Array, order: Array, count: int) -> list[int]:
    """The first `count` examples of `order` with prompts of their own, filled up with others where there are fewer.
    `first`: the first row of each example.
    """
    chosen: dict[bytes, int] = {}
    spare = []
    for example in order:
        prompt = rows.opening_bytes(int(first[example]))
        if prompt in chosen:
            spare.append(int(example))
        else:
            chosen[prompt] = int(example)
        if len(chosen) == count:
            break
    return [*chosen.values(), *spare][:count]


def _alike(rows: TokenRows, inside: Array, tokens: Callable[[int], bytes]) -> Array:
    """bool [rows]: which rows outside `inside` have the tokens of one inside."""
    known = {tokens(i) for i in np.flatnonzero(inside).tolist()}
    same = np.zeros(len(rows), bool)
    for i in np.flatnonzero(~inside).tolist():
        same[i] = tokens(i) in known
    return same
