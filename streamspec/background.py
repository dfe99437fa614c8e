"""Runs a function in a thread of its own while the caller goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Background(Generic[Result]):
    """A call in progress in a daemon thread. Pays for functions that release other threads:
    hashing, native code."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._returned: list[Result] = []
        self._raised: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="streamspec background", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no memory for a stack of its own: it runs here
            self._thread = threading.current_thread()
            self._run()

    def result(self) -> Result:
        """Waits for the function; returns what it returned, or raises what it raised."""
        if self._thread is not threading.current_thread():
            self._thread.join()
        if self._raised is not None:
            raise self._raised
        return self._returned[0]

    def _run(self) -> None:
        try:
            self._returned.append(self._function())
        except BaseException as error:  # for whoever asks for the result
            self._raised = error
        finally:
            del self._function  # and what it holds
