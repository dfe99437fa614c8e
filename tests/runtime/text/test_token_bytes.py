"""Bytes of tokens and where they begin, by the definition: UTF-8, and the character that a token's first byte is of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models

from streamspec.runtime.text.token_bytes import TextOffsets, TokenBytes
from tests.support.byte_tokenizers import EOS, byte_fallback, byte_level

TEXT = "a “b” é🙂\n中!"


def straddling() -> Tokenizer:
    """As GPT-2: the token of a blank and the first two bytes of a quotation mark."""
    tokenizer = byte_level()
    vocabulary = tokenizer.get_vocab(False)
    vocabulary |= {"âĢ": len(vocabulary) + 1, "ĠâĢ": len(vocabulary) + 2}
    made = Tokenizer(models.BPE(vocabulary | {"<eos>": EOS}, [("â", "Ģ"), ("Ġ", "âĢ")]))
    made.pre_tokenizer, made.decoder = tokenizer.pre_tokenizer, tokenizer.decoder
    made.add_special_tokens(["<eos>"])
    return made


def begins(pieces: list[bytes]) -> list[int]:
    """Where pieces of a text begin: characters that end before them."""
    return [len(b"".join(pieces[:i]).decode("utf-8", "ignore")) for i in range(len(pieces))]


@pytest.mark.parametrize("make", [byte_level, byte_fallback, straddling])
def test_tokens_have_the_bytes_that_make_the_text(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    spelt = TEXT.replace(" ", "▁") if make is byte_fallback else TEXT
    ids, tokens = tokenizer.encode(spelt).ids, TokenBytes(tokenizer)
    pieces = [tokens(token) or b"" for token in ids]
    assert b"".join(pieces) == TEXT.encode() and len(ids) > len(TEXT)
    assert [tokens.text(token) for token in ids] == [piece.decode("utf-8", "replace") for piece in pieces]
    for known in (None, TEXT):
        offsets = TextOffsets(tokens, known)
        assert [offsets.push(token) for token in ids] == begins(pieces)
    assert tokens(EOS) == b"<eos>" and tokens(10**6) == b""


def test_what_a_text_leaves_out_takes_no_room_in_it() -> None:
    tokenizer = byte_fallback()
    hello, world, blank = (tokenizer.token_to_id(piece) for piece in ("▁Hello", "▁world", "▁"))
    answer = TextOffsets(TokenBytes(tokenizer))
    assert [answer.push(token) for token in (hello, EOS, world, EOS)] == [0, 5, 5, 11]  # "Hello world"
    assert [TextOffsets(TokenBytes(tokenizer)).push(blank)] == [0]
    added, named = (TextOffsets(TokenBytes(byte_level()), text) for text in ("ab", "<eos>ab"))
    a, b, newline = byte_level().encode("ab\n").ids
    assert [added.push(token) for token in (EOS, a, b, newline, a)] == [0, 0, 1, 2, 2]
    assert [named.push(token) for token in (EOS, a, b)] == [0, 5, 6]
    lowered = TextOffsets(TokenBytes(byte_level()), "AB")
    assert [lowered.push(token) for token in (a, b)] == [0, 1]


def test_bytes_that_are_no_character_count_as_they_are_shown() -> None:
    tokenizer = byte_level()
    lead, letter = tokenizer.token_to_id("â"), tokenizer.token_to_id("A")
    offsets = TextOffsets(TokenBytes(tokenizer))
    assert [offsets.push(token) for token in (lead, letter, letter)] == [0, 1, 2]


def test_other_kinds_of_tokenizers_tell_the_bytes_of_whole_characters() -> None:
    tokenizer = byte_fallback()
    tokenizer.decoder = decoders.ByteFallback()
    tokens = TokenBytes(tokenizer)
    assert tokens(tokenizer.token_to_id("é")) == "é".encode() and tokens(tokenizer.token_to_id("<0xC3>")) is None
