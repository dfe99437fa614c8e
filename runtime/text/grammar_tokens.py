"""Gives the grammar library a bundle's tokens as bytes, without writing and parsing the tokenizer as JSON three times.

For 262,144 tokens that takes a third of the processor's time and a twentieth of the memory
(docs/lab/decisions/2026-11-23-grammar-in-the-background.md). Only the two common kinds of tokenizer are
read here, byte-level BPE and BPE with byte fallback; the library reads the bytes of all others. `test_grammar.py`
covers this module.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Any

from streamspec.runtime.text.token_bytes import spelling

END = "<|streamspec: end of grammar|>"  # a token that stands for the end, whatever a vocabulary uses for it
SPECIAL = b"\xff"  # the library's prefix of the name of a token that is no text
PROBES = (b"x", b" x", b"a\n1", "\u00e9".encode())


class TokenList:
    """The tokens of a vocabulary as the library's `TokenizerWrapper` takes them, with one more for the end.

    Called with text, UTF-8, returns token ids that spell it: those of the tokenizer, or where these do not, of longest
    tokens. So text that a grammar forces never becomes a special token, which has no text in an answer. Other added
    tokens (Qwen's `<think>`, Gemma's HTML tags) are text like any.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Any, tokens: list[bytes], ends: Collection[int]) -> None:
        """`tokens`: bytes by id; those of added tokens, and of ids that are none, do not matter. `ends`: tokens that
        end a text, and are none inside it."""
        added = tokenizer.get_added_tokens_decoder()
        special = sorted(
            {i for i, token in added.items() if token.special}.union(ends).intersection(range(len(tokens)))
        )
        self.tokens = [*tokens, END.encode()]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [*special, self.eos_token_id]
        for i, token in added.items():
            self.tokens[i] = token.content.encode()
        for i in self.special_token_ids:
            self.tokens[i] = SPECIAL + self.tokens[i]
        self._encode = tokenizer.encode

    def __call__(self, text: bytes) -> list[int]:
        ids = self.encode(text)
        return ids if b"".join(self.tokens[i] for i in ids) == text else self._longest(text)

    def encode(self, text: bytes) -> list[int]:
        """Returns the ids that the tokenizer itself makes of a text."""
        return list(self._encode(text.decode(), add_special_tokens=False).ids)

    def _longest(self, text: bytes) -> list[int]:
        ids, at, most = [], 0, max(map(len, self._numbers))
        while at < len(text):
            ends = range(min(at + most, len(text)), at, -1)
            end = next((end for end in ends if text[at:end] in self._numbers), None)
            if end is None:
                break  # not of this vocabulary: the library looks at each token that may follow
            ids.append(self._numbers[text[at:end]])
            at = end
        return ids

    @cached_property
    def _numbers(self) -> dict[bytes, int]:
        """The ids of tokens that are text, by their bytes."""
        special = {*self.special_token_ids}
        return {token: i for i, token in enumerate(self.tokens) if token and i not in special}


def read_tokens(tokenizer: Any, ends: Collection[int]) -> TokenList | None:
    """Returns the tokens of a `tokenizers.Tokenizer`, or None for a kind that only the library can read. `ends`: as of
    `TokenList`."""
    plain = spelling(tokenizer)
    if plain is None:
        return None
    vocabulary, added = tokenizer.get_vocab(True), tokenizer.get_added_tokens_decoder()
    tokens = [b""] * (max(vocabulary.values(), default=-1) + 1)
    try:
        for text, i in vocabulary.items():
            if i not in added:
                tokens[i] = plain(text)
    except (KeyError, ValueError):  # not what the kind promises
        return None
    listed = TokenList(tokenizer, tokens, ends)
    if any(b"".join(listed.tokens[i] for i in listed.encode(text)) != text for text in PROBES):
        return None  # it changes text, or puts something in front of it
    return listed
