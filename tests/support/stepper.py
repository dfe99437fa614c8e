"""Runs threads in every order in which they can run the lines of a file, of small cases with few preemptions (as CHESS
does: Musuvathi et al., OSDI 2008).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any


class Stepper:
    """Runs programs in threads, of which one runs at a time; `choices`: who is next, as far as that is decided. Threads
    give way at the lines of `file`, but for those under a `SteppedCondition` unless `inside`."""

    def __init__(self, choices: Sequence[int], preemptions: int, file: str, inside: bool) -> None:
        self.choices, self.left, self.file, self.inside = list(choices), preemptions, file, inside
        self.options: list[int] = []  # how many there were at each choice
        self.ready: dict[int, Callable[[], bool]] = {}
        self.goes: list[SimpleQueue[None]] = []
        self.over: SimpleQueue[None] = SimpleQueue()
        self.failed: list[BaseException] = []
        self.aborted = False
        self.mine = threading.local()

    def pause(self, until: Callable[[], bool] = lambda: True, waits: bool = False) -> None:
        """Gives way to another thread, and does not go on before `until`. `waits`: freely, which is no preemption."""
        if self.aborted:
            raise SystemExit
        me = self.mine.number
        self.ready[me] = until
        if not self._goes_on(me, -1 if waits else me):
            self.goes[me].get()
        if self.aborted:
            raise SystemExit

    def run(self, programs: Sequence[Callable[[], None]]) -> None:
        """Runs all to their end. Raises AssertionError where none of those left can go on, and what they raise."""
        self.goes = [SimpleQueue() for _ in programs]
        self.ready = {number: lambda: True for number in range(len(programs))}
        threads = [threading.Thread(target=self._body, args=one, daemon=True) for one in enumerate(programs)]
        for thread in threads:
            thread.start()
        self._goes_on(-1, -1)
        self.over.get()
        stuck, self.aborted = bool(self.ready), True
        for number in list(self.ready):
            self.goes[number].put(None)
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed[0]
        assert not stuck, "all wait for each other"

    def _goes_on(self, me: int, current: int) -> bool:
        """Whether the thread `me` is next; another one is woken, or the caller of `run` where none is."""
        able = [] if self.failed else [number for number, until in self.ready.items() if until()]
        if not able:
            self.over.put(None)
            return False
        chosen = self._next(able, current)
        if chosen != me:
            self.goes[chosen].put(None)
        return chosen == me

    def _next(self, able: list[int], current: int) -> int:
        order = [current, *(number for number in able if number != current)] if current in able else able
        if current in able and not self.left:
            order = [current]
        at = len(self.options)
        self.options.append(len(order))
        if at == len(self.choices):
            self.choices.append(0)
        chosen = order[self.choices[at]]
        self.left -= current in able and chosen != current
        return chosen

    def _body(self, number: int, program: Callable[[], None]) -> None:
        self.mine.number = number
        self.goes[number].get()
        try:
            if not self.aborted:
                sys.settrace(self._trace)
                program()
        except BaseException as error:
            if not self.aborted:
                self.failed.append(error)
        finally:
            sys.settrace(None)
            self.ready.pop(number, None)
            if not self.aborted:
                self._goes_on(-1, number)

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != self.file and not frame.f_code.co_name.startswith("_leaves"):
            return None
        if event == "line" and (self.inside or not getattr(self.mine, "locked", False)):
            self.pause()
        return self._trace


class SteppedCondition:
    """A condition whose waiters the stepper knows."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper, self.held, self.rounds = stepper, False, 0

    def __enter__(self) -> None:
        if self.held:
            self.stepper.pause(lambda: not self.held)
        self._hold(True)

    def __exit__(self, *_: object) -> None:
        self._hold(False)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> None:
        """With a `timeout` that is over when the thread is next."""
        while not predicate():
            self._hold(False)
            self._pause(self.rounds, timeout is not None)
            self._hold(True)
            if timeout is not None:
                return

    def _hold(self, held: bool) -> None:
        self.held = self.stepper.mine.locked = held

    def _pause(self, seen: int, times_out: bool) -> None:
        self.stepper.pause(lambda: (times_out or self.rounds > seen) and not self.held, waits=True)

    def notify_all(self) -> None:
        assert self.held
        self.rounds += 1


def orders(run: Callable[[Sequence[int]], Stepper]) -> int:
    """Calls `run` with the choices of each order, for it to return the stepper it ran. Returns how many there are."""
    choices: list[int] = []
    runs = 0
    while True:
        stepper = run(choices)
        runs += 1
        choices = stepper.choices
        while choices and choices[-1] + 1 == stepper.options[len(choices) - 1]:
            choices.pop()
        if not choices:
            return runs
        choices[-1] += 1
