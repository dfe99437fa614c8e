"""Schedules model calls: a fair (FIFO) lock admits one at a time.

Two calls at once would share the cores and both be late. A sequence queues again after each of its calls, so sequences
alternate step by step, unless they share calls (`shared.call_sharing`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from streamspec.runtime.decoding.model_runner import Cancelled


class _Turn:
    """A place in the queue, and the lock once it is the first. A class, as every step of every session takes one: a
    generator would cost three times as much."""

    def __init__(self, queue: deque[object], changed: threading.Condition, cancelled: threading.Event) -> None:
        self._queue, self._changed, self._cancelled = queue, changed, cancelled

    def __enter__(self) -> None:
        queue = self._queue
        try:
            queue.append(self)
            if queue[0] is self and not self._cancelled.is_set():
                return
            with self._changed:
                self._changed.wait_for(lambda: queue[0] is self or self._cancelled.is_set())
            if self._cancelled.is_set():
                raise Cancelled
        except BaseException:
            if self in queue:
                self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        queue = self._queue
        queue.remove(self)
        if queue:  # one that joins from now on finds itself the first
            with self._changed:
                self._changed.notify_all()


class FairLock:
    """A FIFO lock whose waiters can be cancelled."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()  # the first holds the lock
        self._requests = 0

    def acquire(self, cancelled: threading.Event) -> _Turn:
        """The body holds the lock. Raises Cancelled where `cancelled` is set before it is acquired (`recheck`)."""
        return _Turn(self._queue, self._changed, cancelled)

    def recheck(self) -> None:
        """Makes all waiters check whether they were cancelled."""
        with self._changed:
            self._changed.notify_all()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts the body as one request, which acquires the lock again and again."""
        with self._changed:
            self._requests += 1
        try:
            yield
        finally:
            with self._changed:
                self._requests -= 1

    @property
    def shared(self) -> bool:
        """Tells whether several requests are under way: long calls would delay the others."""
        return self._requests > 1
