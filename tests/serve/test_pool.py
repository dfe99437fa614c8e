"""Which session a request gets."""

from __future__ import annotations

from typing import Any

import pytest

from streamspec.runtime import GenerationOptions
from streamspec.serve.limits import Limits
from streamspec.serve.pool import Pool, QueuedRequest, Slot
from tests.support.fake_serve_session import FakeServeSession, Shared

SHARED = Shared()


def session(tokens: str, adapter: str | None = None) -> Any:
    made = FakeServeSession(SHARED, adapter)
    made.cached_tokens = list(tokens.encode())
    return made


def choose(slots: list[Slot], prompt: str, adapter: str | None = None, bases: Any = None, which: int = 0) -> int:
    """`bases`: of bundles, the one with the place `which` asked for; without them all slots are of one bundle."""
    pool = Pool(bases or session(""), Limits(sessions=len(slots)))
    for slot in slots if bases is None else ():
        slot.base = pool.first
    pool.slots = slots
    hint, options = list(prompt.encode()), [GenerationOptions()]
    return slots.index(pool._choose(QueuedRequest(pool, adapter, [str], options, hint, pool.bases[which])))


@pytest.mark.parametrize(
    ("held", "prompt", "chosen"),
    [
        (["abcdef", "abcxyz", ""], "abcdefgh", 0),  # a conversation goes on
        (["abcdef", "abcxyz", ""], "abcxyzuvw", 1),
        (["abcdefghijklmnop", ""], "abcd", 0),  # the same prompt again
        (["abcdefgh", "abcdxxxx", ""], "abcdzzzz", 2),  # another conversation under the same system prompt
        (["abcdefgh", None], "qrst", 1),  # a session is opened
        (["abcdefgh", "", None], "qrst", 1),  # rather an empty one
        (["abcdefgh", "ijkl"], "qrst", 0),  # the one longest unused
        (["", None], "qrst", 0),
    ],
)
def test_a_request_gets_the_cache_that_knows_it(held: list[str | None], prompt: str, chosen: int) -> None:
    slots = [Slot(None if tokens is None else session(tokens), used=i) for i, tokens in enumerate(held)]
    assert choose(slots, prompt) == chosen


def test_an_answer_that_comes_back_in_other_tokens_leaves_the_conversation_its_cache() -> None:
    """As where the template leaves thoughts out of earlier turns."""
    slots = [Slot(session("abcdANSWER, WHICH IS LONG"), prompt_tokens=4), Slot(session(""))]
    assert choose(slots, "abcdanswer, which is long, and more") == 0
    assert choose(slots, "abxyanswer") == 1


def test_a_cache_that_cannot_go_back_to_the_prompt_is_no_better_than_none() -> None:
    ring = session("abcdefghij")
    slots = [Slot(ring, used=0), Slot(session("abcdefg"), used=1)]
    assert choose(slots, "abcdefgh") == 0
    ring.taken_back = 2  # of the ten tokens that it holds, three are not of the prompt
    assert choose(slots, "abcdefgh") == 1
    assert choose(slots, "abcdefghijk") == 0


def test_busy_sessions_and_those_of_other_adapters_are_left_alone() -> None:
    slots = [
        Slot(session("abcdef"), busy=True, used=0),
        Slot(session("abcdef", "alpha"), used=1),
        Slot(session("xyz"), used=2),
    ]
    assert choose(slots, "abcdefgh") == 2 and choose(slots, "abcdefgh", "alpha") == 1
    assert choose(slots, "abcdefgh", "beta") == 1  # no session has it: the one longest unused
    slots.append(Slot())
    assert choose(slots, "abcdefgh", "beta") == 3


def test_caches_of_other_bundles_are_none() -> None:
    bases = [session(""), session("")]
    slots = [Slot(session("abcdef"), bases[0], used=1), Slot(session("xyz"), bases[1], used=2)]
    assert choose(slots, "abcdefgh", bases=bases) == 0 and choose(slots, "abcdefgh", bases=bases, which=1) == 1
    assert choose([slots[0]], "abcdefgh", bases=bases, which=1) == 0  # it gives way
    slots.append(Slot())
    assert choose(slots, "abcdefgh", bases=bases, which=1) == 2


def test_a_slot_changes_its_bundle_and_keeps_one_session() -> None:
    bases = [session("", "alpha"), session("", "beta")]
    slot = Slot()
    first = slot.of(bases[0])
    assert first.adapter == "alpha" and slot.of(bases[0]) is first
    assert slot.of(bases[1]).adapter == "beta" and slot.base is bases[1]
