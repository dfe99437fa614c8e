"""Builds grammars in threads of their own: whoever waits for one may stop waiting, a few are built at once however many
ask, and what cannot be built is remembered. `test_grammar_builds.py` covers this module.

What can be built is built for each answer: copies of llguidance's matcher share its lexer, so that the limits that one
answer reaches would end all others (docs/lab/decisions/2026-11-23-building-grammars.md).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

AT_ONCE = 2  # builds, of all vocabularies of the process; the library takes a core for each
REMEMBERED = 64  # refusals of a vocabulary
POLL = 0.02  # seconds


class GrammarBuilds:
    """Calls `build`, which returns a text where it refuses a grammar. For use from any thread.

    `built`, `refused`: how many grammars were asked for and ended so; `waiting`: how many are waited for; `seconds`:
    time spent building.
    """

    def __init__(self, build: Callable[[Any], Any]) -> None:
        self._build, self._lock = build, threading.Lock()
        self._refusals: OrderedDict[Hashable, str] = OrderedDict()
        self.built = self.refused = self.waiting = 0
        self.seconds = 0.0

    def get(self, grammar: Hashable, check: Callable[[], None]) -> Any:
        """Returns what `build` returns. Raises what it raises, and what `check` raises while this waits: a build that
        has not begun by then is dropped, one that has goes on."""
        with self._lock:
            if (known := self._refusals.get(grammar)) is not None:
                self._refusals.move_to_end(grammar)
                self.refused += 1
                return known
            self.waiting += 1
        try:
            check()
            return self._wait(_threads().submit(self._work, grammar), check)
        finally:
            with self._lock:
                self.waiting -= 1

    def _wait(self, future: Future[Any], check: Callable[[], None]) -> Any:
        while True:
            try:
                return future.result(POLL)
            except TimeoutError:
                if future.done():  # the build's own
                    raise
            try:
                check()
            except BaseException:
                future.cancel()
                raise

    def _work(self, grammar: Hashable) -> Any:
        began = time.perf_counter()
        try:
            made = self._build(grammar)
        finally:
            with self._lock:
                self.seconds += time.perf_counter() - began
        with self._lock:
            if isinstance(made, str):
                self.refused += 1
                self._refusals[grammar] = made
                while len(self._refusals) > REMEMBERED:
                    self._refusals.popitem(last=False)
            else:
                self.built += 1
        return made


@cache
def _threads() -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(AT_ONCE, "streamspec-grammar")
