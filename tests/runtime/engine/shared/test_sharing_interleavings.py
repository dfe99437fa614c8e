"""Shared calls under every order in which two or three answers can join, leave, be cancelled and fail, with few
preemptions: none is lost, made twice, given to another or kept from leaving, and nobody waits for ever.

Threads run one at a time and give way at the lines of `call_sharing` (`tests/support/stepper.py`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streamspec.draft_tree import DraftTree
from streamspec.errors import BundleError
from streamspec.runtime.decoding.model_runner import Cancelled
from streamspec.runtime.engine.graph_call import CallRows
from streamspec.runtime.engine.scheduler import FairLock
from streamspec.runtime.engine.shared import call_sharing
from streamspec.runtime.engine.shared.call_sharing import CallSharing
from streamspec.runtime.engine.shared.shared_call import SharedRows
from streamspec.runtime.sampling.sampling_params import GREEDY, Sampling
from tests.support.stepper import SteppedCondition, Stepper, orders

Program = Callable[["Sharing"], None]
FAILS = 97  # a token that no call survives
HOT = Sampling(temperature=1.0)


class Sharing:
    """One run: what was asked for, in which calls it was, and how each ended."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper, self.lock, self.inside = stepper, FairLock(), 0
        self.lock._changed = SteppedCondition(stepper)  # type: ignore[assignment]
        model: Any = SimpleNamespace(scheduler=self.lock)
        self.sharing = CallSharing(model, 3)
        self.sharing._changed = SteppedCondition(stepper)  # type: ignore[assignment]
        self.sharing._places, self.sharing._call = object(), self  # type: ignore[assignment]
        self.event = threading.Event()
        self.calls: list[list[SharedRows]] = []
        self.ends: Counter[str] = Counter()

    def run(self, calls: list[SharedRows]) -> None:
        """In the place of `SharedCall`: chooses the number after each token."""
        self.inside += 1
        assert self.inside == 1, "two calls at once"
        assert len({call.sampling.shared_call_key for call in calls}) == 1, "others than asked for"
        self.calls.append(calls)
        self.stepper.pause()
        self.inside -= 1
        if any(FAILS in call.rows.tokens for call in calls):
            raise BundleError("97", "another", "-")
        for call in calls:
            call.choices = [token + 1 for token in call.rows.tokens]

    def step(self, me: object, token: int, event: threading.Event, sampling: Sampling = GREEDY) -> None:
        """A step of an answer, as the runner makes it."""
        rows = CallRows([token], [0], np.zeros((1, 1)), np.zeros(1), np.zeros(1), None, DraftTree((0,), (0,)))
        mine = SharedRows(me, rows, 0, 0, sampling)
        self.sharing.sequences(me, mine.sampling.shared_call_key)
        self.stepper.pause(waits=True)  # while it drafts
        try:
            self.sharing.run(mine, event)
            assert mine.choices == [token + 1], "another's choices, or none"
            self.ends["answered"] += 1
        except Cancelled:
            assert event.is_set(), "cancelled by nobody"
            self.ends["cancelled"] += 1
        except BundleError:
            assert any(mine in calls and any(FAILS in one.rows.tokens for one in calls) for calls in self.calls)
            self.ends["failed"] += 1

    def check(self) -> None:
        """Nothing is left, and nothing was made twice."""
        assert not self.sharing._waiting and not self.sharing._decoding and not self.sharing._late
        assert not self.sharing._leading and not self.lock._queue and not self.inside
        made = Counter(id(call) for calls in self.calls for call in calls)
        assert max(made.values(), default=1) == 1, "made twice"
        for calls in self.calls:
            assert all(call.over for call in calls)


def answer(
    case: Sharing, tokens: Sequence[int] = (10, 20), sampling: Sampling = GREEDY, impatient: bool = False
) -> None:
    me, event = object(), case.event if impatient else threading.Event()
    for token in tokens:
        case.step(me, token, event, sampling)
    case.sharing.leave(me)


def idles(case: Sharing) -> None:
    """Decodes, asks for nothing and leaves: the others may wait for it in vain."""
    me = object()
    case.sharing.sequences(me, GREEDY.shared_call_key)
    case.stepper.pause(waits=True)
    case.sharing.leave(me)


def reads(case: Sharing) -> None:
    """A prompt, which takes the model for itself."""
    with case.lock.acquire(threading.Event()):
        case.inside += 1
        assert case.inside == 1, "two calls at once"
        case.stepper.pause(waits=True)
        case.inside -= 1


def canceller(case: Sharing) -> None:
    case.event.set()
    case.lock.recheck()
    case.sharing.recheck()


one = partial(answer, tokens=(10,))
two = partial(answer, tokens=(30, 40))
other = partial(answer, tokens=(50,), sampling=HOT)
fails = partial(answer, tokens=(FAILS,))
failing = partial(answer, tokens=(FAILS, 60))
hasty = partial(answer, tokens=(70,), impatient=True)


def explore(programs: Sequence[Program], preemptions: int) -> tuple[int, Counter[str], set[int]]:
    """Runs all orders. Returns how many there are, how steps ended in them, and of how many answers calls were."""
    ends, sizes = Counter[str](), set[int]()

    def run(choices: Sequence[int]) -> Stepper:
        stepper = Stepper(choices, preemptions, call_sharing.__file__, inside=False)
        case = Sharing(stepper)
        stepper.run([partial(program, case) for program in programs])
        case.check()
        ends.update(case.ends)
        sizes.update(len(calls) for calls in case.calls)
        return stepper

    return orders(run), ends, sizes


@pytest.mark.parametrize(
    ("programs", "preemptions", "ends", "sizes"),
    [
        ((one, one), 1, {"answered"}, {1, 2}),
        ((answer, two), 0, {"answered"}, {1, 2}),
        ((one, one, one), 0, {"answered"}, {1, 2, 3}),
        ((one, other, one), 0, {"answered"}, {1, 2}),
        ((one, idles), 1, {"answered"}, {1}),
        ((one, idles, reads), 0, {"answered"}, {1}),
        ((fails, one), 1, {"answered", "failed"}, {1, 2}),
        ((failing, one), 0, {"answered", "failed"}, {1, 2}),
        ((hasty, canceller), 2, {"answered", "cancelled"}, {1}),
        ((hasty, one, canceller), 0, {"answered", "cancelled"}, {1, 2}),
        ((hasty, hasty, canceller), 0, {"answered", "cancelled"}, {1, 2}),
        ((hasty, one, reads, canceller), 0, {"answered", "cancelled"}, {1, 2}),
    ],
    ids=lambda value: None if isinstance(value, int) else "",
)
def test_in_every_order_each_answer_gets_its_own(
    programs: Sequence[Program], preemptions: int, ends: set[str], sizes: set[int]
) -> None:
    runs, found, found_sizes = explore(programs, preemptions)
    print(runs, found, found_sizes)
    assert set(found) == ends and found_sizes == sizes and runs > 20


def test_a_lost_wake_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SteppedCondition, "notify_all", lambda self: None)
    with pytest.raises(AssertionError, match="all wait for each other"):
        explore((one, one), 0)


def test_a_call_that_nobody_marks_as_taken_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = CallSharing._gathered

    def untaken(self: CallSharing, mine: SharedRows) -> list[SharedRows]:
        calls = gathered(self, mine)
        for call in calls:
            call.taken = False
        return calls

    monkeypatch.setattr(CallSharing, "_gathered", untaken)
    with pytest.raises((AssertionError, ValueError)):
        explore((hasty, one, canceller), 1)
