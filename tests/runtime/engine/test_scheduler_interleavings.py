"""The fair lock under every order in which threads can run its lines, of small cases with few preemptions: no wake-up
is lost, nobody enters beside another or before who asked earlier, and who is cancelled leaves.

Threads run one at a time and give way at each line of the scheduler; a search goes through all choices of who is next
(as CHESS does: Musuvathi et al., OSDI 2008).
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from streamspec.runtime.decoding.model_runner import Cancelled
from streamspec.runtime.engine import scheduler
from streamspec.runtime.engine.scheduler import FairLock

Program = Callable[["Case"], None]


class Stepper:
    """Runs programs in threads, of which one runs at a time; `choices`: who is next, as far as that is decided."""

    def __init__(self, choices: Sequence[int], preemptions: int) -> None:
        self.choices, self.left = list(choices), preemptions
        self.options: list[int] = []  # how many there were at each choice
        self.ready: dict[int, Callable[[], bool]] = {}
        self.goes: list[threading.Semaphore] = []
        self.back = threading.Semaphore(0)
        self.failed: list[BaseException] = []
        self.aborted = False
        self.mine = threading.local()

    def pause(self, until: Callable[[], bool] = lambda: True) -> None:
        """Gives way to another thread, and does not go on before `until`."""
        if self.aborted:
            raise SystemExit
        self.ready[self.mine.number] = until
        self.back.release()
        self.goes[self.mine.number].acquire()
        if self.aborted:
            raise SystemExit

    def run(self, programs: Sequence[Callable[[], None]]) -> None:
        """Runs all to their end. Raises AssertionError where none of those left can go on, and what they raise."""
        self.goes = [threading.Semaphore(0) for _ in programs]
        self.ready = {number: lambda: True for number in range(len(programs))}
        threads = [threading.Thread(target=self._body, args=one, daemon=True) for one in enumerate(programs)]
        for thread in threads:
            thread.start()
        current, stuck = -1, False
        while self.ready and not self.failed and not stuck:
            able = [number for number, until in self.ready.items() if until()]
            stuck = not able
            if able:
                current = self._next(able, current)
                self.goes[current].release()
                self.back.acquire()
        self.aborted = True
        for number in list(self.ready):
            self.goes[number].release()
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed[0]
        assert not stuck, "all wait for each other"

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
        self.goes[number].acquire()
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
            self.back.release()

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != scheduler.__file__ and not frame.f_code.co_name.startswith("_leaves"):
            return None
        if event == "line":
            self.pause()
        return self._trace


class SteppedCondition:
    """A condition whose waiters the stepper knows."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper, self.held, self.rounds = stepper, False, 0

    def __enter__(self) -> None:
        if self.held:
            self.stepper.pause(lambda: not self.held)
        self.held = True

    def __exit__(self, *_: object) -> None:
        self.held = False

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        while not predicate():
            self.held = False
            self._pause(self.rounds)
            self.held = True

    def _pause(self, seen: int) -> None:
        self.stepper.pause(lambda: self.rounds > seen and not self.held)

    def notify_all(self) -> None:
        assert self.held
        self.rounds += 1


class Queue(deque[object]):
    """Remembers who asked, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[object] = []

    def append(self, one: object) -> None:
        self.asked.append(one)
        super().append(one)


class Case:
    """One run: who asked, who entered, who left without."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper, self.lock, self.queue = stepper, FairLock(), Queue()
        self.lock._changed, self.lock._queue = SteppedCondition(stepper), self.queue  # type: ignore[assignment]
        self.entered, self.cancelled, self.inside = list[object](), list[object](), 0
        self.event = threading.Event()

    def turn(self, event: threading.Event) -> None:
        turn = self.lock.acquire(event)
        try:
            with turn:
                self.entered.append(turn)
                self.inside += 1
                assert self.inside == 1, "two at once"
                self.stepper.pause()
                self.inside -= 1
        except Cancelled:
            self.cancelled.append(turn)


def twice(case: Case) -> None:
    case.turn(threading.Event())
    case.turn(threading.Event())


def once(case: Case) -> None:
    case.turn(threading.Event())


def impatient(case: Case) -> None:
    case.turn(case.event)


def canceller(case: Case) -> None:
    case.event.set()
    case.lock.recheck()


def fails(case: Case) -> None:
    with pytest.raises(ZeroDivisionError), case.lock.acquire(threading.Event()):
        raise ZeroDivisionError


def explore(programs: Sequence[Program], preemptions: int) -> tuple[int, set[int]]:
    """Runs all orders. Returns how many there are, and how many turns were cancelled in one or another."""
    choices: list[int] = []
    runs, cancelled = 0, set[int]()
    while True:
        stepper = Stepper(choices, preemptions)
        case = Case(stepper)
        stepper.run([partial(program, case) for program in programs])
        assert not case.queue and case.inside == 0
        assert case.entered == [one for one in case.queue.asked if one in case.entered], "not in the order of asking"
        runs += 1
        cancelled.add(len(case.cancelled))
        choices = stepper.choices
        while choices and choices[-1] + 1 == stepper.options[len(choices) - 1]:
            choices.pop()
        if not choices:
            return runs, cancelled
        choices[-1] += 1


@pytest.mark.parametrize(
    ("programs", "preemptions", "cancelled"),
    [
        ((twice, twice), 2, {0}),
        ((once, once, once), 2, {0}),
        ((once, impatient, canceller), 2, {0, 1}),
        ((impatient, impatient, canceller), 2, {0, 1, 2}),
        ((once, impatient, once, canceller), 1, {0, 1}),
        ((fails, once, twice), 1, {0}),
    ],
)
def test_in_every_order_all_get_their_turn(programs: Sequence[Program], preemptions: int, cancelled: set[int]) -> None:
    runs, found = explore(programs, preemptions)
    assert found == cancelled and runs > 50


def _leaves_without_waking(turn: Any, *_: object) -> None:
    turn._queue.remove(turn)


def _leaves_after_waking(turn: Any, *_: object) -> None:
    with turn._changed:
        turn._changed.notify_all()
    turn._queue.remove(turn)


@pytest.mark.parametrize("leave", [_leaves_without_waking, _leaves_after_waking])
def test_a_lost_wake_up_is_found(leave: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler._Turn, "__exit__", leave)
    with pytest.raises(AssertionError, match="all wait for each other"):
        explore((once, once), 2)
