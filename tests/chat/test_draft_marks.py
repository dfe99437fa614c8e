"""Marks around drafted tokens: where they stand, and what a terminal is spared."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from streamspec.chat.draft_marks import MARKS, MarkedText, choose_marks
from streamspec.errors import ConfigError
from streamspec.runtime.decoding.stats import Stats
from streamspec.runtime.stream import Chunk
from streamspec.runtime.text.detokenize import TextStream

WORDS = ["<end>", "ab", "c", "é", "\x1b[2J", " d\n"]


class Words:
    """Token i is word i; 0 is special."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(WORDS[i] for i in ids if i)


def shown(
    chunks: Sequence[tuple[list[int], list[bool]]], marks: str, terminal: bool = True, stops: Sequence[str] = ()
) -> str:
    """The text of an answer in these chunks, cut by the session's own text stream."""
    marked, stream, out = MarkedText(Words(), MARKS[marks], terminal), TextStream(Words(), stops), ""
    for tokens, drafted in chunks:
        _, text, _ = stream.push(tokens)
        out += marked.push(Chunk(text, tokens, drafted, None, Stats()))
    rest, _ = stream.finish()
    return out + marked.push(Chunk(rest, [], [], "eos", Stats())) + marked.finish()


def test_marks_stand_around_drafted_tokens_across_chunks() -> None:
    chunks = [([1], [False]), ([2, 1, 2], [True, True, False]), ([3], [True]), ([1], [True])]
    assert shown(chunks, "brackets") == "ab[cab]c[éab]"
    assert shown(chunks, "none") == "abcabcéab"


def test_an_answer_that_ends_drafted_closes_its_mark() -> None:
    assert shown([([1, 0], [True, True])], "colour") == "\x1b[1;32mab\x1b[0m"


def test_text_that_waits_for_a_stop_string_keeps_its_marks() -> None:
    chunks = [([1], [False]), ([2, 1], [True, False]), ([2], [True])]
    assert shown(chunks, "brackets", stops=["cabX"]) == "ab[c]ab[c]"


def test_a_model_does_not_steer_the_terminal_but_a_pipe_gets_every_byte() -> None:
    chunks = [([4, 5], [False, False])]
    assert shown(chunks, "brackets") == "\ufffd[2J d\n"
    assert shown(chunks, "none", terminal=False) == "\x1b[2J d\n"


@pytest.mark.parametrize(
    ("wanted", "terminal", "environment", "marks"),
    [
        ("auto", True, {}, "colour"),
        ("auto", True, {"NO_COLOR": "1"}, "brackets"),
        ("auto", True, {"TERM": "dumb"}, "brackets"),
        ("auto", False, {}, "none"),
        ("brackets", False, {}, "brackets"),
    ],
)
def test_marks_fit_what_shows_them(
    wanted: str, terminal: bool, environment: dict[str, str], marks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert choose_marks(wanted, terminal) == MARKS[marks]


def test_unknown_marks_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected auto, colour, brackets, none"):
        choose_marks("bold", True)


@pytest.mark.parametrize(
    ("thoughts", "terminal", "colour", "wanted"),
    [
        ("shown", True, True, "\x1b[2mab\ufffd[2J\x1b[0m\n\n[c]é"),
        ("shown", True, False, "(ab\ufffd[2J)\n\n[c]é"),
        ("folded", True, True, "\x1b[2mthinking\x1b[0m\n\n[c]é"),
        ("shown", False, True, "[c]é"),
    ],
)
def test_a_thought_is_dimmed_or_folded_and_not_in_a_pipe(
    thoughts: str, terminal: bool, colour: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "" if colour else "1")
    monkeypatch.setenv("TERM", "xterm")
    marked = MarkedText(Words(), MARKS["brackets"], terminal, thoughts)
    chunks = [
        Chunk("", [1], [False], None, Stats(), reasoning="ab", thought=[True]),
        Chunk("c", [4, 5, 2], [True] * 3, None, Stats(), reasoning="\x1b[2J", thought=[True, None, False]),
        Chunk("é", [3], [False], "eos", Stats(), thought=[False]),
    ]
    assert "".join(map(marked.push, chunks)) + marked.finish() == wanted


def test_a_thought_without_an_answer_ends_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    marked = MarkedText(Words(), MARKS["none"], True)
    assert marked.push(Chunk("", [1], [False], "length", Stats(), reasoning="ab", thought=[True])) == "(ab"
    assert marked.finish() == ")"
