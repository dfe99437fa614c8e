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

READABLE = 24  # characters that a column of words has at least


def print_line(text: str) -> None:
    """Prints a line; on a terminal that is too narrow for it, several."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
    print(text)


def print_facts(rows: Sequence[Sequence[str]], title: str, headings: Sequence[str] = ("", "")) -> None:
    """Prints rows of words, first a name: a table on a terminal, a line for each row elsewhere."""
    if sys.stdout.isatty():
        _print(_table(headings, rows, title, set(headings), 0), shutil.get_terminal_size().columns)
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
        least = READABLE if count > 1 else 0
        _print(_turned(headings, rows[first : first + count], title, least), width)


def _turned(headings: Sequence[str], rows: Sequence[Sequence[Any]], title: str, least: int = READABLE) -> Table:
    (names, *others), (corner, *lines) = zip(*rows, strict=True), headings
    cells = [(line, *values) for line, values in zip(lines, others, strict=True)]
    return _table([corner, *map(str, names)], cells, title, {corner, *map(str, names)}, least)


def _table(
    headings: Sequence[str],
    rows: Iterable[Sequence[Any]],
    title: str,
    words: Collection[str],
    least: int = READABLE,
) -> Table:
    """Makes a table whose columns of words have `least` characters, if they hold so many."""
    from rich.table import Table

    rows = list(rows)
    made = Table(title=title or None, title_justify="left", show_header=any(headings))
    for heading, *cells in zip(headings, *rows, strict=True):
        longest = _widest([heading, *cells])
        if heading in words:
            made.add_column(heading, min_width=min(longest, least), overflow="fold")
        else:
            made.add_column(heading, justify="right", no_wrap=True, min_width=longest)
    for row in rows:
        made.add_row(*row)
    return made


def _widest(cells: Iterable[Any]) -> int:
    from rich.cells import cell_len

    return max(cell_len(str(cell)) for cell in cells)


def _least(table: Table) -> int:
    return sum((column.min_width or 0) + 3 for column in table.columns) + 1


def _print(table: Table, width: int) -> None:
    from rich.console import Console

    Console(width=width, height=shutil.get_terminal_size().lines, markup=False, highlight=False).print(table)
