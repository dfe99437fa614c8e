"""The one thread in which a device captures graphs, replays them and copies to and from them.

ONNX Runtime keeps captured graphs by thread. In another one the first run of a graph is two runs, a capture and a
replay, so that rows of the cache are moved three times; and copies of any other thread make a capture that is under way
invalid.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Tasks = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


class DeviceThread:
    """Belongs to one open model, and ends with it."""

    def __init__(self) -> None:
        self._tasks: _Tasks = SimpleQueue()
        threading.Thread(target=_work, args=(self._tasks,), name="streamspec-device", daemon=True).start()
        weakref.finalize(self, self._tasks.put, None)

    def run(self, work: Callable[[], T]) -> T:
        """Returns what `work` returns there. Ctrl-C is raised once nothing of this caller is left to do there."""
        try:
            return self._result(work)
        except KeyboardInterrupt:
            while not self._idle():
                pass
            raise

    def _idle(self) -> bool:
        """Waits until all that was asked for is done; tells whether it could."""
        try:
            return self._result(lambda: True)
        except KeyboardInterrupt:
            return False

    def _result(self, work: Callable[[], T]) -> T:
        done = Future[T]()
        self._tasks.put((work, done))
        return done.result()


def _work(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        work, done = task
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)
        del task, work, done  # or they live until the next one
