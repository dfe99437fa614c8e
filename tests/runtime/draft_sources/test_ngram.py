"""N-grams of the text (prompt lookup)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from streamspec.runtime.draft_sources.ngram import CODES, CONTINUATION, LONGEST, MEASURED, NgramIndex
from streamspec.runtime.draft_sources.source import Continuations


def find(text: list[int], limit: int = CONTINUATION) -> Continuations | None:
    index = NgramIndex()
    index.extend(text)
    return index.find(limit)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([0, 0xD800, 0xDFFF, 262_143]), max_size=40))  # characters that no text has, too
def test_find_equals_its_definition(text: list[int]) -> None:
    found = find(text)
    for n in range(min(LONGEST, len(text)), 0, -1):
        before = [i for i in range(n, len(text)) if text[i - n : i] == text[-n:]]
        if before:
            at = before[-1]
            match = max(m for m in range(n, at + 1) if text[at - m : at] == text[len(text) - m :])
            tokens = text[at : at + CONTINUATION]
            chain = list(range(-1, len(tokens) - 1))
            assert found == Continuations(tokens, chain, [min(match, MEASURED)] * len(tokens))
            return
    assert found is None


def test_tokens_beyond_the_characters_are_offered_as_they_are() -> None:
    assert find([CODES + 7, 2 * CODES, CODES + 7]) == Continuations([2 * CODES, CODES + 7], [-1, 0], [1, 1])


def test_no_more_tokens_than_the_limit_are_offered() -> None:
    assert find([1, 2, 3, 1, 2], limit=1) == Continuations([3], [-1], [2])
