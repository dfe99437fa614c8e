"""Tokenizers made on the spot: tiny ones of both kinds, and one with as many tokens as a real one."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS = 0


def bytes_and_words(first: Sequence[str], words: Sequence[str]) -> Tokenizer:
    """Byte-level BPE: the tokens `first`, one per byte, and those that merge bytes to `words` from their beginnings."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary, merges = {name: i for i, name in enumerate([*first, *alphabet])}, list[tuple[str, str]]()
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_level(words: Sequence[str] = ()) -> Tokenizer:
    """Byte-level BPE with merges to `words` alone: token 0 is the special end-of-text."""
    tokenizer = bytes_and_words(["<eos>"], words)
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Like sentencepiece: words that begin with a space mark, letters, and single bytes for everything else."""
    pieces = ["<eos>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁Hello", "▁world", "▁a", "a", "b", "é", "!"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


PIECES = [
    "e",
    "n",
    "th",
    "ing",
    "er",
    "0",
    "7",
    "00",
    "{",
    '"',
    '":',
    ",",
    ".",
    "\\",
    "\n",
    "é",
    "я",
    "中",
    "🙂",
    "A",
    "_",
    "-",
]


def byte_level_of(size: int) -> Tokenizer:
    """Byte-level BPE of `size` tokens that look like a real one's: words, with and without a space, numbers, brackets,
    several scripts, pieces of characters. Token 0 is end-of-text."""
    random, vocabulary = Random(size), {"<eos>": EOS}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    written = {piece: split.pre_tokenize_str(piece)[0][0] for piece in [*PIECES, " "]}
    for character in alphabet:
        vocabulary[character] = len(vocabulary)
    while len(vocabulary) < size:
        text = "".join(written[random.choice(PIECES)] for _ in range(random.randrange(1, 8)))
        text = (written[" "] if random.random() < 0.4 else "") + text[: random.randrange(1, 16)]
        vocabulary.setdefault(text, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer
