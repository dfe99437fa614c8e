"""Unloads a bundle after an idle timeout and reloads it on the next use.

Nothing is polled: one timer sleeps until it is due, and only where idle time is limited.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakMethod

from streamspec.errors import ConfigError


class IdleUnloader:
    """`seconds`: the idle timeout, None: never unloads. Safe to use from several threads."""

    def __init__(self, unload: Callable[[], None], reload: Callable[[], None]) -> None:
        """Begins loaded. `unload`, `reload`: methods of an object, which this one does not keep alive. Neither is
        called while the other runs, or while the bundle is in use; errors of `reload` are raised by `in_use`."""
        self.seconds: float | None = None
        self.loaded = True
        self._unload, self._reload = WeakMethod(unload, lambda _: self._stop()), WeakMethod(reload)
        # Reentrant: while it is held, an abandoned body may end in the same thread.
        self._lock = threading.RLock()
        self._users, self._ended = 0, time.monotonic()
        self._timer: threading.Timer | None = None

    @contextmanager
    def in_use(self, reload: bool = True) -> Iterator[bool]:
        """Loads the bundle for the body; idle time begins when the last such body ends. Without `reload` an unloaded
        bundle stays unloaded, and the body gets False."""
        with self._lock:
            there = self.loaded or reload
            if there:
                self._begin()
        try:
            yield there
        finally:
            if there:
                self._end()

    def unused(self) -> float:
        """Returns for how many seconds the bundle has not been in use."""
        with self._lock:
            return 0.0 if self._users else time.monotonic() - self._ended

    def limit(self, seconds: float | None) -> None:
        """Sets the idle timeout."""
        self.seconds = seconds
        with self.in_use():
            pass

    def unload(self) -> None:
        """Unloads now. Raises ConfigError while the bundle is in use."""
        with self._lock:
            if self._users:
                raise ConfigError("a bundle in use", "one that is idle", "cancel or finish what runs first")
            self._unload_now()

    def _begin(self) -> None:
        self._stop()
        if not self.loaded:
            _call(self._reload)
            self.loaded = True
        self._users += 1

    def _end(self) -> None:
        with self._lock:
            self._users, self._ended = self._users - 1, time.monotonic()
            # A thread that is started while the interpreter ends never runs.
            if self._users == 0 and self.seconds is not None and not sys.is_finalizing():
                self._start(self.seconds)

    def _start(self, seconds: float) -> None:
        self._stop()
        self._timer = threading.Timer(seconds, self._due)
        self._timer.args = [self._timer]  # so that a timer knows whether it still counts
        self._timer.name, self._timer.daemon = "streamspec idle", True
        self._timer.start()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self, timer: threading.Timer) -> None:
        with self._lock:
            if timer is self._timer and not self._users:
                self._unload_now()

    def _unload_now(self) -> None:
        self._stop()
        if self.loaded:
            self.loaded = False
            _call(self._unload)


def _call(method: WeakMethod[Callable[[], None]]) -> None:
    bound = method()
    if bound is not None:
        bound()
