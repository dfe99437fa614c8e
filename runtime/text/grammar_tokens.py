"""Gives the grammar library a bundle's tokens as bytes, without writing and parsing the tokenizer as JSON three times.

For 262,144 tokens that takes a third of the processor's time and a twentieth of the memory
(docs/lab/decisions/2026-11-23-grammar-in-the-background.md). Only the two common kinds of tokenizer are
read here, byte-level BPE and BPE with byte fallback; the library reads all others itself. `test_grammar.py` covers this
module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamspec.runtime.text.token_bytes import spelling

END = "<|streamspec: end of grammar|>"  # a token that stands for the end, whatever a vocabulary uses for it
SPECIAL = b"\xff"  # the library's prefix of the name of a token that is no text
PROBES = ("x", " x", "a\n1", "\u00e9")


class TokenList:
    """The tokens of a vocabulary as the library's `TokenizerWrapper` takes them, with one more for the end.

    Called with text, UTF-8, returns its token ids.
    """

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], encode: Callable[[str], list[int]]) -> None:
        self.tokens = [*tokens, SPECIAL + END.encode()]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [*special, self.eos_token_id]
        self._encode = encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode())


def read_tokens(tokenizer: Any) -> TokenList | None:
    """Returns the tokens of a `tokenizers.Tokenizer`, or None for a kind that only the library can read."""
    plain = spelling(tokenizer)
    if plain is None:
        return None
    vocabulary, added = tokenizer.get_vocab(True), tokenizer.get_added_tokens_decoder()
    tokens, special = [b""] * (max(vocabulary.values(), default=-1) + 1), []
    try:
        for text, i in vocabulary.items():
            if i not in added:
                tokens[i] = plain(text)
            elif added[i].special or (text.startswith("<") and text.endswith(">")):  # as the library has it
                tokens[i] = SPECIAL + text.encode()
                special.append(i)
            else:
                tokens[i] = text.encode()
    except (KeyError, ValueError):  # not what the kind promises
        return None

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    if any(b"".join(tokens[i] for i in encode(text)) != text.encode() for text in PROBES):
        return None  # it changes text, or puts something in front of it
    return TokenList(tokens, special, encode)
