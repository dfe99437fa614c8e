"""Asks the sources of one generation what may follow, and counts what came of it.

tests/runtime/decoding/test_loop.py covers this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from streamspec.runtime.draft_sources.source import (
    DRAFTER,
    AcceptanceRates,
    CandidateTree,
    Continuations,
    DraftSource,
    Found,
    LastingIndex,
    SourceCounts,
    Stems,
    TextIndex,
    merged,
)

if TYPE_CHECKING:
    from streamspec.runtime.decoding.draft_proposal import DraftProposal
    from streamspec.runtime.decoding.draft_tree_search import DraftCalibration, DraftSearch


_Index = tuple[TextIndex, AcceptanceRates, int]  # with the rates and the bit of its source
MOST_WAITING = 64  # calls that are put off: the next look-up, which makes them, is not to take long


class SourceLookup:
    """The `sources` over one text. `learned`: of the session; `search` finds the rows that lasting sources add to.

    What is read and learned waits for the next look-up: steps without one need not touch the sources' memory, which
    the model's weights have driven out of the caches.

    `explorer`: bit of the source that has rows verified for what they teach, 0 for none. `waking`: the indices that are
    asked while speculation pauses. `found`: what the last look-up
    brought; `source_tree`: the same as one tree, None for nothing.
    """

    def __init__(self, sources: Sequence[DraftSource], learned: DraftCalibration, search: DraftSearch) -> None:
        self._learned, self._search = learned, search
        rated = [(source, learned.rates_of(source), 2 << i) for i, source in enumerate(sources)]
        self._indices, self.waking = list[_Index](), list[_Index]()
        for source, rates, bit in rated:
            if source.begin is not None and (text_index := source.begin()) is not None:
                self._indices.append((text_index, rates, bit))
                self.waking += self._indices[-1:] if source.wakes else []
        self.lasting: list[tuple[LastingIndex, AcceptanceRates, int]] = [
            (index, rates, bit) for source, rates, bit in rated if (index := learned.lasting_index(source)) is not None
        ]
        self._bits = {"drafter": DRAFTER} | {source.name: bit for source, _, bit in rated}
        self._keep = [source.keep for source in sources if source.keep is not None]
        self.explorer = next((bit for source, _, bit in rated if source.explores), 0)
        self.found: list[Found] = []
        self.source_tree: CandidateTree | None = None
        self._waiting: list[Callable[[], None]] = []

    def read(self, tokens: Sequence[int]) -> None:
        """Adds tokens to the text."""
        if self._indices or self.lasting:
            self._put_off(partial(self._read, tokens))

    def look_up(self, room: int, paused: bool = False) -> CandidateTree | None:
        """Returns what may follow by the sources of this text, at most `room` tokens deep; `paused`: by those that wake
        speculation."""
        self.found.clear()
        indices = (self.waking if paused else self._indices) if room > 0 else []
        if indices or (room > 0 and not paused):
            self._catch_up()
        for index, rates, bit in indices:
            if (continuations := index.find(room)) is not None:
                self.found.append(Found(continuations, rates, bit))
        self.source_tree = merged(self.found)
        return self.source_tree

    def graft(
        self, room: int, root: int, proposal: DraftProposal | None, rows: int, costs: np.ndarray | None, root_only: bool
    ) -> CandidateTree | None:
        """Adds what may follow, by the sources that last, the `rows` rows that would be drafted without them after
        `root`, or where `root_only` the root alone; at most `room` tokens deep. Returns `source_tree`."""
        stems = Stems((root,), (0,), (1.0,), (0,))
        if not root_only and (proposal is not None or self.source_tree is not None):
            taken = self._search.take(root, proposal, self.source_tree, rows, costs, self._learned.sharpness)
            stems = Stems(taken.tokens, taken.parents, taken.probabilities, taken.sources)
        for index, rates, bit in self.lasting:
            if (continuations := index.graft(room, stems, rates)) is not None:
                self.found.append(Found(continuations, rates, bit))
                self.source_tree = merged(self.found)
        return self.source_tree

    def explore(self, room: int) -> Continuations | None:
        """Returns the rows to verify for what they teach, by the source that has such."""
        if not self.explorer:
            return None
        self._catch_up()
        return next((index.explore(room) for index, _, bit in self.lasting if bit == self.explorer), None)

    def learn(self, tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int], path: Sequence[int]) -> None:
        """Shows what the model chose after each row to the sources that last (`LastingIndex.chosen`)."""
        if self.lasting:
            self._put_off(partial(self._learn, tokens, parents, choices, path))

    def keep(self, answer: Sequence[int]) -> None:
        """Gives an answer that has ended to the sources that collect them."""
        self._catch_up()
        for keep in self._keep:
            keep(answer)

    def count(
        self, before: Mapping[str, SourceCounts], sources: Sequence[int], path: Sequence[int]
    ) -> dict[str, SourceCounts]:
        """Adds the nodes of a draft, by their `sources`, and those of the accepted `path` to the counts `before`."""
        counts = dict(before)
        for name, bit in self._bits.items():
            if drafted := sum(1 for bits in sources if bits & bit):
                known, accepted = counts.get(name, SourceCounts()), sum(1 for node in path if sources[node] & bit)
                counts[name] = SourceCounts(known.drafted + drafted, known.accepted + accepted)
        return counts

    def _put_off(self, call: Callable[[], None]) -> None:
        self._waiting.append(call)
        if len(self._waiting) >= MOST_WAITING:
            self._catch_up()

    def _catch_up(self) -> None:
        """Makes the calls that wait, in their order."""
        for call in self._waiting:
            call()
        self._waiting.clear()

    def _read(self, tokens: Sequence[int]) -> None:
        for index, _, _ in self._indices:
            index.extend(tokens)
        for lasting_index, _, _ in self.lasting:
            lasting_index.extend(tokens)

    def _learn(
        self, tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int], path: Sequence[int]
    ) -> None:
        for index, _, _ in self.lasting:
            index.chosen(tokens, parents, choices, path)
