"""The fair lock: in order, one at a time, and who is cancelled does not wait."""

from __future__ import annotations

import threading
import time

import pytest

from streamspec.runtime.decoding.model_runner import Cancelled
from streamspec.runtime.engine.scheduler import FairLock

NEVER = threading.Event()


def waiting(lock: FairLock, count: int) -> None:
    """Returns once `count` are in the queue, the holder included."""
    while len(lock._queue) < count:
        time.sleep(0.001)


def test_the_lock_is_given_in_the_order_of_asking_and_one_at_a_time() -> None:
    lock, order, inside, overlaps = FairLock(), list[int](), list[int](), list[int]()

    def work(name: int) -> None:
        with lock.acquire(NEVER):
            inside.append(name)
            overlaps.append(len(inside))
            order.append(name)
            time.sleep(0.001)
            inside.remove(name)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    with lock.acquire(NEVER):
        for i, thread in enumerate(threads):
            thread.start()
            waiting(lock, i + 2)
    for thread in threads:
        thread.join()
    assert order == list(range(8)) and set(overlaps) == {1}


def test_two_that_ask_again_and_again_alternate() -> None:
    lock, order, left = FairLock(), list[str](), {"a": 200, "b": 200}

    def work(name: str) -> None:
        for _ in range(200):
            with lock.acquire(NEVER):
                order.append(name)
                left[name] -= 1
                waiting(lock, 1 + any(left[other] for other in left if other != name))

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "".join(order) in {"ab" * 200, "ba" * 200}


def test_who_is_cancelled_in_the_queue_leaves_it_at_once_and_the_others_go_on() -> None:
    lock, cancelled, left = FairLock(), threading.Event(), list[float]()

    def impatient() -> None:
        with pytest.raises(Cancelled), lock.acquire(cancelled):
            raise AssertionError("held the lock")
        left.append(time.perf_counter())

    thread = threading.Thread(target=impatient)
    with lock.acquire(NEVER):
        thread.start()
        waiting(lock, 2)
        cancelled.set()
        lock.recheck()
        thread.join(2)
        assert left, "still in the queue"
    with lock.acquire(NEVER):
        pass
    with pytest.raises(Cancelled), lock.acquire(cancelled):  # free at once, and cancelled all the same
        raise AssertionError("held the lock")


def test_a_turn_that_fails_is_given_on() -> None:
    lock = FairLock()
    with pytest.raises(ZeroDivisionError), lock.acquire(NEVER):
        raise ZeroDivisionError
    with lock.acquire(NEVER):
        pass


def test_sequences_are_counted() -> None:
    lock = FairLock()
    with lock.request():
        assert not lock.shared
        with lock.request():
            assert lock.shared
        assert not lock.shared
