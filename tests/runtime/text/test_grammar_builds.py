"""Grammars are built in threads of their own, a few at a time, and whoever waits may leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from streamspec.errors import ConfigError
from streamspec.runtime import Grammar
from streamspec.runtime.decoding.model_runner import Cancelled
from streamspec.runtime.text.grammar import LIMITS, Vocabulary
from streamspec.runtime.text.grammar_builds import AT_ONCE, REMEMBERED, GrammarBuilds
from tests.support.byte_tokenizers import EOS, byte_level


def nothing() -> None:
    pass


class Held:
    """Builds tuples and refuses texts, once it is let to."""

    fails: Exception | None = None

    def __init__(self) -> None:
        self.let, self.begun, self.most = threading.Event(), list[Any](), 0
        self._now = 0

    def __call__(self, name: Any) -> Any:
        self.begun.append(name)
        self._now += 1
        self.most = max(self.most, self._now)
        assert self.let.wait(20)
        self._now -= 1
        if self.fails is not None:
            raise self.fails
        return ("built", *name) if isinstance(name, tuple) else "refused"


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.let.set()  # the threads are those of all tests


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_what_is_refused_is_remembered_and_all_else_is_built_anew(held: Held) -> None:
    held.let.set()
    builds = GrammarBuilds(held)
    assert [builds.get(("a",), nothing) for _ in range(3)] == [("built", "a")] * 3
    assert [builds.get("no", nothing) for _ in range(3)] == ["refused"] * 3
    assert held.begun.count("no") == 1 and (builds.built, builds.refused) == (3, 3) and builds.seconds >= 0
    for i in range(REMEMBERED):
        builds.get(f"no {i}", nothing)
    assert builds.get("no", nothing) == "refused" and held.begun.count("no") == 2


@pytest.mark.parametrize("kind", [ConfigError, TimeoutError])
def test_an_error_of_the_build_is_raised(held: Held, kind: type[Exception]) -> None:
    held.let.set()
    held.fails = kind("a", "b", "c")
    for _ in range(2):
        with pytest.raises(kind):
            GrammarBuilds(held).get(("a",), nothing)
    assert len(held.begun) == 2


def test_who_waits_may_leave_and_a_build_that_has_not_begun_is_dropped(held: Held) -> None:
    builds, left, gone = GrammarBuilds(held), threading.Event(), list[str]()

    def check() -> None:
        if left.is_set():
            raise Cancelled

    def leave(name: str) -> None:
        with pytest.raises(Cancelled):
            builds.get((name,), check)
        gone.append(name)

    leaving = [threading.Thread(target=leave, args=(name,)) for name in [*"abcdefgh"]]
    for thread in leaving:
        thread.start()
    until(lambda: len(held.begun) == AT_ONCE)
    left.set()
    for thread in leaving:
        thread.join(20)
    assert len(gone) == 8 and not held.let.is_set()
    with pytest.raises(Cancelled):
        builds.get(("i",), check)  # gone before it was asked for
    held.let.set()
    assert builds.get(("j",), nothing) == ("built", "j")
    assert held.most == AT_ONCE and len(held.begun) == AT_ONCE + 1


def walk(vocabulary: Vocabulary, grammar: Grammar, steps: int) -> tuple[list[int], bool]:
    """Tokens that were followed, and whether the limits ended it."""
    state, random, tokens = vocabulary.start(grammar), np.random.default_rng(1), list[int]()
    try:
        for _ in range(steps):
            mask = state.after().mask
            mask[EOS] = False
            tokens.append(int(random.choice(np.flatnonzero(mask))))
            state.advance(tokens[-1:])
    except ConfigError:
        return tokens, True
    return tokens, False


def test_an_answer_that_reached_the_limits_leaves_the_next_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS, "max_lexer_states", 60)
    vocabulary = Vocabulary(byte_level(), 257, [EOS])
    grammar = Grammar.regex("[ab]*a[ab]{12}")
    first = walk(vocabulary, grammar, 100)
    assert first[1] and walk(vocabulary, grammar, 100) == first
    assert vocabulary.builds.built == 2


def test_a_limit_that_a_token_reaches_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS, "max_items_in_row", 60)
    keys = {f"p{i}": {"type": "string"} for i in range(30)}
    grammar = Grammar.json_schema({"type": "object", "properties": keys, "additionalProperties": False})
    state = Vocabulary(byte_level(), 257, [EOS]).start(grammar)
    with pytest.raises(ConfigError, match=r"Current row has \d+ items"):
        state.advance(byte_level().encode('{"p0": "').ids)


def test_a_grammar_beyond_the_limits_is_built_once_and_refused_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, grammar = Vocabulary(byte_level(), 257, [EOS]), Grammar.regex("[ab]*")
    monkeypatch.setitem(LIMITS, "max_grammar_size", 1)
    said, times, match = set[str](), list[int](), vocabulary._match
    monkeypatch.setattr(vocabulary.builds, "_build", lambda grammar: (times.append(1), match(grammar))[1])
    for _ in range(3):
        with pytest.raises(ConfigError) as caught:
            vocabulary.start(grammar)
        said.add(str(caught.value))
    assert len(said) == 1 and times == [1] and vocabulary.builds.refused == 3


def test_a_dead_end_that_a_draft_looks_into_does_not_end_the_answer() -> None:
    """A vocabulary without the bytes that the grammar wants next: the library stops there for good."""
    tokenizer = byte_level()
    state = Vocabulary(tokenizer, 257, [EOS]).start(Grammar.regex("a(b|c(d|e))"))
    a, b, c = (tokenizer.token_to_id(letter) for letter in "abc")
    make_dead(state._matcher, c)
    state.advance([a])
    assert set(np.flatnonzero(state.after().mask)) == {b, c}
    assert state.after((c,)).dead and not state.allows((c,), b)
    assert state.after((b,)).mask[EOS]
    state.advance([b])
    assert state.after().mask[EOS] and not state.after().dead
    with pytest.raises(ConfigError, match="nothing in this vocabulary can go on with"):
        other = Vocabulary(tokenizer, 257, [EOS]).start(Grammar.regex("a(b|c(d|e))"))
        make_dead(other._matcher, c)
        other.advance([a, c])
        other.after()


def make_dead(matcher: Any, token: int) -> None:
    matcher._matchers = [DeadEnds(matcher._matchers[0], matcher._first[0], token)]
    matcher._first = [*matcher._matchers]


class DeadEnds:
    """A matcher of the library for which nothing can follow one token."""

    def __init__(self, matcher: Any, first: Any, dead: int) -> None:
        self.matcher, self.first, self.dead, self.met = matcher, first, dead, False
        self.text = list[int]()

    def deep_copy(self) -> DeadEnds:
        return DeadEnds(self.first.deep_copy(), self.first, self.dead)

    def unsafe_compute_mask_ptr(self, *where: int) -> None:
        self.met = self.met or self.text[-1:] == [self.dead]
        self.matcher.unsafe_compute_mask_ptr(*where)

    def is_error(self) -> bool:
        return self.met

    def get_error(self) -> str:
        return "NoExtensionBias" if self.met else ""

    def consume_token(self, token: int) -> bool:
        self.text.append(token)
        return not self.met and bool(self.matcher.consume_token(token))

    def consume_tokens(self, tokens: list[int]) -> bool:
        return all(self.consume_token(token) for token in tokens)

    def rollback(self, count: int) -> bool:
        del self.text[len(self.text) - count :]
        return not self.met and bool(self.matcher.rollback(count))
