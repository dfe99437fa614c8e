"""Who may call the model: one at a time, in the order of asking.

A graph with a past takes one sequence a call, and two calls at once would share the cores and both be late. Knows
nothing about models.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from streamspec.runtime.decoding.model_runner import Cancelled


class FairLock:
    """A fair lock: whoever has had a turn stands in line again behind all that wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._line: deque[object] = deque()  # the first has the turn
        self._sequences = 0

    @contextmanager
    def turn(self, cancelled: threading.Event) -> Iterator[None]:
        """The body has the turn. Raises Cancelled where `cancelled` is set before it comes (`wake` has it looked
        at).
        """
        ticket = object()
        with self._changed:
            self._line.append(ticket)
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._line[0] is ticket or cancelled.is_set())
            if cancelled.is_set():
                raise Cancelled
            yield
        finally:
            with self._changed:
                self._line.remove(ticket)
                self._changed.notify_all()

    def wake(self) -> None:
        """Has all that wait look whether they were cancelled."""
        with self._changed:
            self._changed.notify_all()

    @contextmanager
    def sequence(self) -> Iterator[None]:
        """The body asks for turns, again and again."""
        with self._changed:
            self._sequences += 1
        try:
            yield
        finally:
            with self._changed:
                self._sequences -= 1

    @property
    def shared(self) -> bool:
        """Whether several sequences ask for turns: long ones would keep the others waiting."""
        return self._sequences > 1
