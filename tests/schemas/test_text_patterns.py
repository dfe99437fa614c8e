"""Expressions of all other texts, against Python's `re`."""

from __future__ import annotations

import re
from itertools import product

import pytest

from streamspec.schemas.text_patterns import (
    MOST_LETTERS,
    InexpressibleError,
    listed,
    other_texts,
    whole,
    without_look_ahead,
)

TEXTS = ["".join(letters) for size in range(5) for letters in product("ab-.", repeat=size)]
AHEAD = [
    "^(?!^[-.]*$)[-.ab]*$",
    "^(?![^a]+$)",
    "^(?!a-)",
    "^(?!(?:ab|a)$)[a-b]+$",
    "^(?!(ab|b))",
    "^(?!a|-)[ab].*$",
    r"^(?!\.)(?!b$)a?",
    "^(?=.{1,2}$)(?!a)[ab-]+$",
    "^(?!)a",
]


def matches(pattern: str, text: str) -> bool:
    """Python has no \\x{..}; its `$` also matches before a last line end, which no text here has."""
    return (
        re.search(re.sub(r"\\x\{(\w+)\}", lambda found: re.escape(chr(int(found[1], 16))), pattern), text) is not None
    )


@pytest.mark.parametrize("texts", [["a"], ["", "a"], ["ab", "a", "ba"], ["-.", "-"], []])
def test_all_texts_but_some_are_matched(texts: list[str]) -> None:
    assert [text for text in TEXTS if not matches(other_texts(texts), text)] == [t for t in TEXTS if t in texts]


@pytest.mark.parametrize("pattern", AHEAD[:-1])
def test_look_ahead_is_said_without_it(pattern: str) -> None:
    patterns = without_look_ahead(pattern)
    assert not any("(?=" in each or "(?!" in each for each in patterns)
    assert [t for t in TEXTS if all(matches(each, t) for each in patterns)] == [t for t in TEXTS if matches(pattern, t)]


def test_a_pattern_without_look_ahead_stays() -> None:
    assert without_look_ahead("^a|(?:b)$") == ["^a|(?:b)$"]


def test_an_expression_that_spells_its_texts_lists_them() -> None:
    right = [("^(en|de)$", ["en", "de"]), ("^(?:a)$", ["a"]), ("^a$", ["a"]), (r"^(a\.b|c)$", ["a.b", "c"])]
    wrong = ["^a|b$", "(a|b)", "^(a|b)", "^(a|b)?$", "^a+$", r"^a\$", "^(a|)$", "^(a", "^(a)(b)$", "^[ab]$", "^(?=a)$"]
    assert [listed(pattern) for pattern, _ in right] == [texts for _, texts in right]
    assert [pattern for pattern in wrong if listed(pattern) is not None] == []


@pytest.mark.parametrize(
    "pattern", ["a", "^a|b$", "(^a|b$)", "^(?:(a|b)$)", "(a)(b)", r"^a\.$|-", r"[|^$]|^\.", "^$|b", "(?:^a)"]
)
def test_what_matches_somewhere_is_said_of_the_whole_text(pattern: str) -> None:
    found = [text for text in TEXTS if re.fullmatch(whole(pattern), text)]
    assert found == [text for text in TEXTS if re.search(pattern, text)]


@pytest.mark.parametrize("pattern", ["a(?!b)", "(?<=a)b", "^(?!a)b|c", "^(?!.*x)a", "^(?!a+$)", "^(?!a", AHEAD[-1]])
def test_other_look_around_is_refused(pattern: str) -> None:
    with pytest.raises(InexpressibleError, match="pattern|opposite"):
        without_look_ahead(pattern)


def test_long_texts_are_refused() -> None:
    with pytest.raises(InexpressibleError, match="characters"):
        other_texts(["x" * (MOST_LETTERS + 1)])
