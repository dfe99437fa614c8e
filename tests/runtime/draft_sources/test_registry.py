"""The table of sources and its switches, and that each of them can be made anew."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streamspec.runtime.decoding.policy import DecodingPolicy
from streamspec.runtime.draft_sources.recycling import RECYCLING
from streamspec.runtime.draft_sources.registry import SOURCES, SourceData, chosen
from streamspec.runtime.draft_sources.source import DraftSource
from streamspec.runtime.options import LoadOptions
from streamspec.runtime.past_answers import PastAnswers
from tests.runtime.decoding.test_loop import decode
from tests.runtime.draft_sources.test_store import store_of
from tests.runtime.test_past_answers import described
from tests.support.toy_runner import Setup, ToyRunner, adaptive, scripted

SCRIPT = [(7 * i) % 40 for i in range(40)]  # nothing comes twice
REMEMBER = ("recycling", "lookahead", "past_answers")  # earlier texts


def test_each_source_has_an_option_that_turns_it_off() -> None:
    every = LoadOptions()
    assert every.recycling is True
    assert RECYCLING in chosen(every)
    assert RECYCLING not in chosen(replace(every, recycling=False))
    assert chosen(replace(every, **dict.fromkeys(SOURCES, False))) == ()


def answer(setup: Setup) -> list[tuple[int, bool]]:
    """Answers once and returns the rows of every call."""
    runner = ToyRunner(scripted(3, SCRIPT), 50, gamma=0, context=200)
    assert decode(runner, setup, [48, 49, 47])[0] == SCRIPT[:39]
    return runner.calls


@pytest.mark.parametrize("option", SOURCES)
def test_an_unlearned_source_knows_no_earlier_text(option: str) -> None:
    source = SOURCES[option](SourceData(store_of(SCRIPT[20:30]), PastAnswers(described())))
    assert source is not None, f"the data that {option} drafts from is to be given here"
    setup = Setup(39, rows=16, ngram=False, sources=(source,), adaptive=adaptive())
    first, *_, last = [answer(setup) for _ in range(8)]
    assert (len(last) < len(first)) is (option in REMEMBER)
    policy = DecodingPolicy(sources=setup.sources).unlearned()
    assert answer(replace(setup, sources=policy.sources, adaptive=adaptive())) == first
    assert len(answer(setup)) <= len(last)  # whoever had learned has not forgotten


def test_a_source_that_keeps_answers_must_say_how_a_fresh_one_is_made() -> None:
    with pytest.raises(TypeError, match="'notes' keeps answers"):
        DraftSource("notes", (), keep=lambda answer: None)
