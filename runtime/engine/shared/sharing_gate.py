"""Decides whether sequences that decode at once share their calls, by the tokens a second that either way brings.

A shared call reads the weights once for all of them, but nothing drafts in it: what pays depends on the machine, the
bundle, the texts and on how many they are. So both ways are measured, for each number of sequences apart, and measured
again now and then. Pure arithmetic.
"""

from __future__ import annotations

import threading

TRIAL = 48  # steps of all sequences that a way is measured for,
PERIOD = 2000  # and that the better one is then taken for


class _Way:
    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class _Ways:
    """Compares shared with separate calls for one number of sequences."""

    def __init__(self) -> None:
        self.shared, self._left, self._trial = True, TRIAL, True
        self.ways = {True: _Way(), False: _Way()}

    def step(self) -> None:
        self._left -= 1
        if self._left > 0:
            return
        if self._trial and self.ways[not self.shared].seconds:  # both are known
            self.shared = self.ways[True].rate >= self.ways[False].rate
            self._left, self._trial = PERIOD, False
        else:
            self.shared, self._left, self._trial = not self.shared, TRIAL, True
        self.ways[self.shared] = _Way()  # measured anew


class SharingGate:
    """One per bundle, for sequences in threads of their own."""

    def __init__(self) -> None:
        self._numbers: dict[int, _Ways] = {}
        self._lock = threading.Lock()

    def shares(self, sequences: int) -> bool:
        """Tells whether so many sequences are to share their next calls."""
        return sequences > 1 and self._ways(sequences).shared

    def called(self, sequences: int, shared: bool, seconds: float) -> None:
        """Reports the time that a call took, waiting for its sequences included, while so many decoded."""
        if sequences > 1:
            with self._lock:
                self._ways(sequences).ways[shared].seconds += seconds

    def committed(self, sequences: int, shared: bool, tokens: int) -> None:
        """Reports the tokens that a step of one of so many sequences brought."""
        if sequences > 1:
            with self._lock:
                ways = self._ways(sequences)
                ways.ways[shared].tokens += tokens
                ways.step()

    def _ways(self, sequences: int) -> _Ways:
        return self._numbers.setdefault(sequences, _Ways())
