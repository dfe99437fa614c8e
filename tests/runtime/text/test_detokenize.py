"""Text of tokens as they come, and stop strings in it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamspec.runtime.text.detokenize import Detokenizer, StopStrings, TextStream
from tests.support.byte_tokenizers import byte_fallback, byte_level

BYTES, PIECES = byte_level(), byte_fallback()


def speak(tokenizer: object, ids: list[int]) -> list[str]:
    stream = Detokenizer(tokenizer)  # type: ignore[arg-type]
    return [*(stream.push(i) for i in ids), stream.finish()]


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20).filter(lambda text: "<eos>" not in text))
def test_pieces_are_whole_characters_and_join_to_the_text(text: str) -> None:
    pieces = speak(BYTES, BYTES.encode(text, add_special_tokens=False).ids)
    assert "".join(pieces) == text
    assert pieces[-1].strip("\ufffd") == ""  # nothing waits for the end


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60), st.lists(st.integers(1, 9), min_size=1, max_size=8), st.booleans())
def test_tokens_that_come_together_give_the_text_that_they_give_one_by_one(
    text: str, sizes: list[int], fallback: bool
) -> None:
    tokenizer = PIECES if fallback else BYTES
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    together, alone, begin = Detokenizer(tokenizer), Detokenizer(tokenizer), 0
    for size in (sizes * (len(ids) + 1))[: len(ids)]:
        some, begin = ids[begin : begin + size], begin + size
        assert together.push(*some) == "".join(alone.push(token) for token in some)
    assert together.finish() == alone.finish()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 256), max_size=60))
def test_any_ids_join_to_the_full_decoding(ids: list[int]) -> None:
    assert "".join(speak(BYTES, ids)) == BYTES.decode(ids, skip_special_tokens=True)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["▁", "▁Hello", "▁world", "▁a", "a", "b", "é", "!", "<eos>", "€", "🎈"]), max_size=50))
def test_byte_fallback_joins_to_the_full_decoding(pieces: list[str]) -> None:
    ids: list[int] = []
    for piece in pieces:
        known = PIECES.token_to_id(piece)
        ids += [known] if known is not None else [PIECES.token_to_id(f"<0x{b:02X}>") for b in piece.encode()]
    spoken = speak(PIECES, ids)
    assert "".join(spoken) == PIECES.decode(ids, skip_special_tokens=True)
    assert not any("\ufffd" in piece for piece in spoken)


def test_half_a_character_waits() -> None:
    stream = Detokenizer(BYTES)
    ids = BYTES.encode("a€", add_special_tokens=False).ids
    assert [stream.push(i) for i in ids] == ["a", "", "", "€"]
    stream.push(ids[1])
    assert stream.finish() == "\ufffd"


def definition(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the first moment at which the text ends with a stop string, the longest of them."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_do_not_depend_on_the_cut(pieces: list[str], stops: list[str]) -> None:
    matcher, shown, stopped = StopStrings(stops), "", False
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown += text
        if stopped:
            break
    if not stopped:
        shown += matcher.finish()
    assert (shown, stopped) == definition("".join(pieces), stops)


@pytest.mark.parametrize(
    ("text", "shown"), [("one\n\ntwo", "one"), ("one\ntwo", "one\ntwo"), ("one\n", "one\n"), ("\n\n", "")]
)
def test_a_stop_string_over_several_tokens(text: str, shown: str) -> None:
    stream = TextStream(BYTES, ["\n\n"])
    out = ""
    for token in BYTES.encode(text, add_special_tokens=False).ids:
        _, piece, stopped = stream.push([token])
        out += piece
        if stopped:
            break
    else:
        out += stream.finish()[0]
    assert out == shown


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    matcher = StopStrings(["END"])
    assert [matcher.push(c)[0] for c in "aEExEN"] == ["a", "", "E", "Ex", "", ""]
    assert matcher.push("D") == ("", True)
