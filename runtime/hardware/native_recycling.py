"""Recycles tokens with the native library (native/draft_tree/recycling.cpp): the table of `draft_sources.recycling`,
number for number. tests/runtime/draft_sources/test_recycling.py compares the two."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from streamspec.runtime.decoding.draft_tree_search import MAX_ROWS
from streamspec.runtime.draft_sources.recycling import ADDED, ASSUMED, CHOICES, RECYCLING, ROWS, RecyclingTable
from streamspec.runtime.draft_sources.source import ALONE, AcceptanceRates, Continuations, DraftSource, Stems
from streamspec.runtime.hardware import native_library

_TABLE, _FOUND = ctypes.c_int32 * (ROWS * CHOICES), ctypes.c_int64 * (3 * (MAX_ROWS + ADDED))
_TABLES, _WHOLE, _IN = [_TABLE, _TABLE], ctypes.c_int64, ctypes.c_char_p  # `_IN`: takes bytes as they are
_LEVELS = range(len(ASSUMED))


def with_native_table(source: DraftSource) -> DraftSource:
    """Returns the source with the native library's table, where it recycles tokens and there is a library to use."""
    path = native_library.library()
    return replace(source, lasting=partial(NativeRecyclingTable, path)) if source == RECYCLING and path else source


@cache
def _functions(path: Path) -> tuple[Any, Any]:
    library = ctypes.PyDLL(str(path))  # the calls are too short to let other threads run
    graft, chosen = library.streamspec_recycled, library.streamspec_recycle
    graft.argtypes = [*_TABLES, _WHOLE, _WHOLE, _IN, _IN, _WHOLE, _IN, _FOUND]
    graft.restype = _WHOLE
    chosen.argtypes, chosen.restype = [*_TABLES, _WHOLE, _IN, _WHOLE, _IN, _WHOLE], None
    return graft, chosen


class NativeRecyclingTable(RecyclingTable):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._graft, self._chosen = _functions(path)
        self._tables = _TABLE.from_buffer(self._pairs), _TABLE.from_buffer(self._singles)

    def chosen(
        self, tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int], path: Sequence[int]
    ) -> None:
        rows = _bytes(tokens, parents, choices)
        self._chosen(*self._tables, self._before, rows, len(tokens), _bytes(path), len(path))

    def graft(self, limit: int, stems: Stems, rates: AcceptanceRates) -> Continuations | None:
        tokens, parents, probabilities, sources = stems
        alone = array("d", [rates.of(level)[ALONE] for level in _LEVELS]).tobytes()
        likely, found = array("d", probabilities).tobytes(), _FOUND()
        rows = _bytes(tokens, parents, sources)
        count = self._graft(*self._tables, self._before, limit, rows, likely, len(tokens), alone, found)
        return Continuations(*_columns(found, count)) if count else None


def _bytes(*columns: Sequence[int]) -> bytes:
    return b"".join(array("q", column).tobytes() for column in columns)


def _columns(found: Any, count: int) -> Iterator[list[int]]:
    return (found[start : start + count] for start in range(0, 3 * count, count))
