"""The table of sources and its switches."""

from __future__ import annotations

from dataclasses import replace

from streamspec.runtime.draft_sources.recycling import RECYCLING
from streamspec.runtime.draft_sources.registry import SOURCES, chosen
from streamspec.runtime.options import LoadOptions


def test_each_source_has_an_option_that_turns_it_off() -> None:
    every = LoadOptions()
    assert every.recycling is True
    assert RECYCLING in chosen(every)
    assert RECYCLING not in chosen(replace(every, recycling=False))
    assert chosen(replace(every, **dict.fromkeys(SOURCES, False))) == ()
