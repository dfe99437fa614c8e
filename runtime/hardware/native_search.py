"""Searches draft trees with the native library (native/draft_tree/): the trees of `DraftSearch`, in a tenth of the
time where the model has driven the host out of the caches. tests/runtime/decoding/test_draft_tree_search.py compares
the two."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from streamspec.draft_tree import MAX_GAMMA
from streamspec.runtime.decoding.draft_proposal import DraftProposal, held
from streamspec.runtime.decoding.draft_tree_search import MAX_ROWS, DraftSearch, Taken
from streamspec.runtime.draft_sources.source import CandidateTree
from streamspec.runtime.hardware import native_library
from streamspec.runtime.sampling.grammar_state import GrammarState

NO_PROPOSAL = NO_TREE = (None, None, None, None)
_PLACES, _NUMBERS = ctypes.c_int64 * (1 + 4 * MAX_ROWS), ctypes.c_double * (1 + MAX_ROWS)
_DEPTHS = ctypes.c_int64 * MAX_GAMMA
_WHOLE, _REAL, _IN = ctypes.c_int64, ctypes.c_double, ctypes.c_char_p  # `_IN`: takes bytes as they are
_PROPOSAL = [_IN, _IN, _IN, _IN]


def find() -> NativeSearch | None:
    """Returns the search of the native library, None where there is none to use."""
    path = native_library.library()
    return None if path is None else _opened(path)


@cache
def _opened(path: Path) -> NativeSearch:
    return NativeSearch(path)


class NativeSearch(DraftSearch):
    """For any number of threads; grammars are Python's."""

    def __init__(self, path: Path) -> None:
        library = ctypes.PyDLL(str(path))  # the calls are too short to let other threads run
        self._take, self._compare = library.streamspec_draft_tree, library.streamspec_draft_compare
        self._take.argtypes = [*_PROPOSAL, _IN, _IN, _IN, _IN, _WHOLE, _WHOLE, _REAL, _WHOLE, _IN, _PLACES, _NUMBERS]
        self._compare.argtypes = [*_PROPOSAL, _IN, _WHOLE, _REAL, _DEPTHS]
        self._compare.restype = _REAL

    def take(
        self,
        root: int,
        proposal: DraftProposal | None,
        source_tree: CandidateTree | None,
        rows: int,
        costs: np.ndarray | None,
        sharpness: float,
        grammar_state: GrammarState | None = None,
    ) -> Taken:
        if grammar_state is not None:
            return super().take(root, proposal, source_tree, rows, costs, sharpness, grammar_state)
        if costs is not None and len(costs) < rows:
            raise ValueError(f"{len(costs)} costs of {rows} rows")  # the caller's arithmetic is wrong
        arrays = NO_PROPOSAL if proposal is None else (proposal.tokens, proposal.logits, proposal.more, proposal.shape)
        tree: tuple[bytes | None, ...] = NO_TREE
        size = 0
        if source_tree is not None:
            tokens, parents, rates, sources = source_tree
            size = len(tokens)
            tree = _whole(tokens), _whole(parents), array("d", rates).tobytes(), _whole(sources)
        times = None if costs is None else held(costs, np.float64)
        places, numbers = _PLACES(), _NUMBERS()
        count = self._take(*arrays, *tree, size, root, sharpness, rows, times, places, numbers)
        found = places[: 1 + 4 * count]
        columns = found[1::4], found[2::4], found[3::4], found[4::4]
        return Taken(*columns, numbers[1 : 1 + count], found[0], numbers[0])

    def compare(self, proposal: DraftProposal, came: Sequence[int], sharpness: float) -> tuple[float, list[int | None]]:
        came, firsts = came[: min(proposal.depths, MAX_GAMMA)], _DEPTHS()
        arrays = proposal.tokens, proposal.logits, proposal.more, proposal.shape
        gradient = self._compare(*arrays, _whole(came), len(came), sharpness, firsts)
        return gradient, [None if first < 0 else first for first in firsts[: len(came)]]


def _whole(numbers: Sequence[int]) -> bytes:
    return array("q", numbers).tobytes()
