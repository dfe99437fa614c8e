"""Whether a bundle is awake: puts it to sleep when nobody has asked for anything for some time, and wakes it for
whoever asks next.

Nothing is polled: one timer sleeps until it is due, and only where idleness is limited. Knows nothing about what
sleeping means.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakMethod

from streamspec.errors import ConfigError


class IdleUnloader:
    """`seconds`: how long idleness may last, None: for ever. Safe to use from several threads."""

    def __init__(self, sleep: Callable[[], None], wake: Callable[[], None]) -> None:
        """Awake. `sleep`, `wake`: methods of an object, which this one does not keep alive. Neither is called while the
        other runs, or while anybody is at work; what `wake` raises reaches who asked."""
        self.seconds: float | None = None
        self.awake = True
        self._sleep, self._wake = WeakMethod(sleep), WeakMethod(wake)
        self._lock = (
            threading.RLock()
        )  # while it is held, a body that nobody holds any longer may end in the same thread
        self._users = 0
        self._timer: threading.Timer | None = None

    @contextmanager
    def at_work(self, wake: bool = True) -> Iterator[bool]:
        """The body finds everything awake; idleness begins where the last such body ends. Without `wake` what sleeps
        goes on sleeping, and the body is told so: False."""
        with self._lock:
            there = self.awake or wake
            if there:
                self._begin()
        try:
            yield there
        finally:
            if there:
                self._end()

    def limit(self, seconds: float | None) -> None:
        """From now on idleness may last so long."""
        self.seconds = seconds
        with self.at_work():
            pass

    def unload(self) -> None:
        """To sleep now. Raises ConfigError while anybody is at work."""
        with self._lock:
            if self._users:
                raise ConfigError(
                    "a bundle that is at work", "one that nobody uses", "cancel or finish what runs first"
                )
            self._rest()

    def _begin(self) -> None:
        self._stop()
        if not self.awake:
            _call(self._wake)
            self.awake = True
        self._users += 1

    def _end(self) -> None:
        with self._lock:
            self._users -= 1
            if (
                self._users == 0 and self.seconds is not None and not sys.is_finalizing()
            ):  # a thread begun then never comes to run
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
                self._rest()

    def _rest(self) -> None:
        self._stop()
        if self.awake:
            self.awake = False
            _call(self._sleep)


def _call(method: WeakMethod[Callable[[], None]]) -> None:
    bound = method()
    if bound is not None:
        bound()


def check_idle(seconds: float | None) -> float | None:
    """Raises ConfigError for what is no time."""
    if seconds is not None and not (
        isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 < seconds < threading.TIMEOUT_MAX
    ):
        raise ConfigError(f"idle {seconds!r}", "seconds above 0, or None", "correct idle")
    return seconds
