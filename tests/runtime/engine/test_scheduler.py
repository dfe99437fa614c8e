"""Whose turn it is: in order, one at a time, and nobody waits who was cancelled."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from streamspec.runtime.decoding.model_runner import Cancelled
from streamspec.runtime.engine.scheduler import FairLock

NEVER = threading.Event()


def waiting(turns: FairLock, count: int) -> None:
    """Returns once `count` stand in line, the one with the turn included."""
    while len(turns._line) < count:
        time.sleep(0.001)


def test_turns_come_in_the_order_of_asking_and_one_at_a_time() -> None:
    turns, order, inside, overlaps = FairLock(), list[int](), list[int](), list[int]()

    def work(name: int) -> None:
        with turns.turn(NEVER):
            inside.append(name)
            overlaps.append(len(inside))
            order.append(name)
            time.sleep(0.001)
            inside.remove(name)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    with turns.turn(NEVER):
        for i, thread in enumerate(threads):
            thread.start()
            waiting(turns, i + 2)
    for thread in threads:
        thread.join()
    assert order == list(range(8)) and set(overlaps) == {1}


def test_two_that_ask_again_and_again_alternate() -> None:
    turns, order = FairLock(), list[str]()
    gate = threading.Barrier(2)

    def work(name: str) -> None:
        gate.wait()
        for _ in range(200):
            with turns.turn(NEVER):
                order.append(name)
                time.sleep(0.0002)

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end = min(max(i for i, name in enumerate(order) if name == who) for who in "ab")  # behind it one asks alone
    both = order[20:end]
    repeats = sum(x == y for x, y in itertools.pairwise(both))
    assert len(both) > 100 and repeats < 0.1 * len(both)


def test_who_is_cancelled_in_line_leaves_it_at_once_and_the_others_go_on() -> None:
    turns, cancelled, left = FairLock(), threading.Event(), list[float]()

    def impatient() -> None:
        with pytest.raises(Cancelled), turns.turn(cancelled):
            raise AssertionError("had a turn")
        left.append(time.perf_counter())

    thread = threading.Thread(target=impatient)
    with turns.turn(NEVER):
        thread.start()
        waiting(turns, 2)
        cancelled.set()
        turns.wake()
        thread.join(2)
        assert left, "still in line"
    with turns.turn(NEVER):
        pass
    with pytest.raises(Cancelled), turns.turn(cancelled):  # its turn at once, and cancelled all the same
        raise AssertionError("had a turn")


def test_a_turn_that_fails_is_given_on() -> None:
    turns = FairLock()
    with pytest.raises(ZeroDivisionError), turns.turn(NEVER):
        raise ZeroDivisionError
    with turns.turn(NEVER):
        pass


def test_sequences_are_counted() -> None:
    turns = FairLock()
    with turns.sequence():
        assert not turns.shared
        with turns.sequence():
            assert turns.shared
        assert not turns.shared
