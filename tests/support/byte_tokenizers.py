"""Tokenizers made on the spot: tiny ones of both kinds, and one with as many tokens as a real one."""

from __future__ import annotations

from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS = 0


def byte_level() -> Tokenizer:
    """Byte-level BPE without merges: one token per byte; token 0 is the special end-of-text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<eos>": EOS} | {c: i + 1 for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
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
