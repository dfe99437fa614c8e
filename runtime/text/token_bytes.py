"""Gives the bytes of single tokens, also of parts of characters, and where in a text tokens begin.

Tokens are read as byte-level BPE and BPE with byte fallback spell them, the two common kinds of tokenizer; of other
kinds a token has the bytes of its text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from streamspec.runtime.text.detokenize import BROKEN, Detokenizer

SPACE = "\u2581"  # sentencepiece's


class TokenBytes:
    """Returns the bytes of a token when called with its id: None where they are not known."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: a `tokenizers.Tokenizer`."""
        self.tokenizer, self._spelling = tokenizer, spelling(tokenizer)
        self._added = tokenizer.get_added_tokens_decoder()

    def __call__(self, token: int) -> bytes | None:
        written = self.tokenizer.id_to_token(token)
        if self._spelling is not None and written is not None and token not in self._added:
            try:
                return self._spelling(written)
            except (KeyError, ValueError):  # not what the kind promises
                pass
        text = self.decode([token])
        return None if BROKEN in text else text.encode()

    def text(self, token: int) -> str:
        """Returns the text of a token, the replacement character for parts of a character."""
        written = self(token)
        return self.decode([token]) if written is None else written.decode("utf-8", "replace")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Returns the text of tokens, special ones always included."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def special(self, token: int) -> bool:
        """Tells whether texts of answers leave the token out."""
        return token in self._added and bool(self._added[token].special)


class TextOffsets:
    """Finds where tokens begin in a text, in characters: a part of a character where that does. `text`: the prompt that
    the tokens were made of; None: they are those of an answer."""

    def __init__(self, tokens: TokenBytes, text: str | None = None) -> None:
        self._tokens, self._text, self._at = tokens, text, 0
        self._detokenizer = Detokenizer(tokens.tokenizer if text is None else tokens)

    def push(self, token: int) -> int:
        """Returns where the next token begins."""
        held, written = self._detokenizer.held, self._tokens(token)
        if written is None or (written and written[0] & 0xC0 == 0x80):  # it goes on with a character
            held = held.rstrip(BROKEN)
        begin, shown = self._at + len(held), self._detokenizer.push(token)
        if self._text is None:
            self._at += len(shown)
            return begin
        if not self._tokens.special(token) or self._text.startswith(shown, self._at):  # else the tokenizer added it
            self._at += len(shown)
        return min(begin, len(self._text))


def spelling(tokenizer: Any) -> Callable[[str], bytes] | None:
    """Returns what gives the bytes of a token as the vocabulary spells it, None for other kinds of `tokenizer`. It
    raises KeyError or ValueError for a token that its kind does not have."""
    steps = list(steps_of(json.loads(tokenizer.decoder.__getstate__()))) if tokenizer.decoder is not None else []
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level()
    blank = any(step.get("pattern") == {"String": SPACE} and step.get("content") == " " for step in steps)
    return _with_fallback if "ByteFallback" in kinds and blank else None


def _byte_level() -> Callable[[str], bytes]:
    """Returns the bytes of a token in GPT-2's alphabet, in which printable bytes stand for themselves and others for
    characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return lambda text: bytes(table[character] for character in text)


def _with_fallback(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace(SPACE, " ").encode()


def steps_of(component: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the steps of a normalizer, pre-tokenizer, post-processor or decoder, as `tokenizer.json` spells them."""
    inner = next(
        (component[name] for name in ("normalizers", "pretokenizers", "processors", "decoders") if name in component),
        None,
    )
    if inner is None:
        yield component
    for step in inner or ():
        yield from steps_of(step)
