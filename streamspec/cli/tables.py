"""Prints tables and lines: on a terminal no wider than it is, elsewhere as wide as they are, for other programs.

The width is that of `COLUMNS` or else of the terminal. No word is broken, unless it is wider than its column.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def print_line(text: str) -> None:
    """Prints a line; on a terminal that is too narrow for it, several."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
    print(text)


def print_facts(rows: Sequence[Sequence[str]], title: str, headings: Sequence[str] = ("", "")) -> None:
    """Prints rows of words, first a name: a table on a terminal, a line for each row elsewhere."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        table = _table(headings, rows, title, headings)
        _print(table if _least(table) <= width else _table(headings, rows, title, headings, fold=True), width)
        return
    for name, *rest in rows:
        print(f"{name}: {'; '.join(part for part in rest if part)}")


def print_figures(
    headings: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "", words: Collection[str] = ("",)
) -> None:
    """Prints a table of figures, str or Text of rich; the columns in `words` have words.

    On a terminal that is too narrow, rows become columns, and the table as many as are needed.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    whole = _table(headings, rows, title, words)
    if _least(whole) <= width:
        _print(whole, min(width, sum(map(_widest, zip(headings, *rows, strict=True))) + 3 * len(headings) + 1))
        return
    count = len(rows)
    while count > 1 and _least(_turned(headings, rows[:count], title)) > width:
        count -= 1
    for first in range(0, len(rows), count):
        _print(_turned(headings, rows[first : first + count], title, fold=count == 1), width)


def _turned(headings: Sequence[str], rows: Sequence[Sequence[Any]], title: str, fold: bool = False) -> Table:
    (names, *others), (corner, *lines) = zip(*rows, strict=True), headings
    cells = [(line, *values) for line, values in zip(lines, others, strict=True)]
    new = [corner, *map(str, names)]
    return _table(new, cells, title, new if fold else {corner}, fold)


def _table(
    headings: Sequence[str], rows: Iterable[Sequence[Any]], title: str, words: Collection[str], fold: bool = False
) -> Table:
    """Makes a table. Figures stay in a line; columns of words break between words, with `fold` within them too."""
    from rich.table import Table

    rows = list(rows)
    made = Table(title=title or None, title_justify="left", show_header=any(headings))
    for column in zip(headings, *rows, strict=True):
        if column[0] in words:
            longest = 0 if fold else _widest(word for cell in column for word in str(cell).split() or [""])
            made.add_column(column[0], min_width=longest, max_width=_widest(column), overflow="fold")
        else:
            longest = _widest(column)
            made.add_column(column[0], justify="right", no_wrap=True, min_width=longest, max_width=longest)
    for row in rows:
        made.add_row(*row)
    return made


def _widest(cells: Iterable[Any]) -> int:
    from rich.cells import cell_len

    return max(cell_len(str(cell)) for cell in cells)


def _least(table: Table) -> int:
    return sum((column.min_width or 0) + 3 for column in table.columns) + 1


def _print(table: Table, width: int) -> None:
    """Prints a table whose columns share what is left of `width`: rich would take it from the widest ones alone."""
    from rich.console import Console

    spare = width - _least(table)
    needs = sorted(((column.max_width or 0) - (column.min_width or 0), at) for at, column in enumerate(table.columns))
    for left, (need, at) in zip(range(len(needs), 0, -1), needs, strict=True):
        more = max(min(need, spare // left), 0)
        table.columns[at].width = max((table.columns[at].min_width or 0) + more, 1)
        spare -= more
    Console(width=width, height=shutil.get_terminal_size().lines, markup=False, highlight=False).print(table)
