"""The fair lock under every order in which threads can run its lines, of small cases with few preemptions: no wake-up
is lost, nobody enters beside another or before who asked earlier, and who is cancelled leaves.

Threads run one at a time and give way at each line of the scheduler (`tests/support/stepper.py`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from streamspec.runtime.decoding.model_runner import Cancelled
from streamspec.runtime.engine import scheduler
from streamspec.runtime.engine.scheduler import FairLock
from tests.support.stepper import SteppedCondition, Stepper, orders

Program = Callable[["Case"], None]


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
    cancelled = set[int]()

    def run(choices: Sequence[int]) -> Stepper:
        stepper = Stepper(choices, preemptions, scheduler.__file__, inside=True)
        case = Case(stepper)
        stepper.run([partial(program, case) for program in programs])
        assert not case.queue and case.inside == 0
        assert case.entered == [one for one in case.queue.asked if one in case.entered], "not in the order of asking"
        cancelled.add(len(case.cancelled))
        return stepper

    return orders(run), cancelled


@pytest.mark.parametrize(
    ("programs", "preemptions", "cancelled"),
    [
        ((twice, twice), 2, {0}),
        ((once, once, once), 1, {0}),
        ((once, impatient, canceller), 1, {0, 1}),
        ((impatient, impatient, canceller), 1, {0, 1, 2}),
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
