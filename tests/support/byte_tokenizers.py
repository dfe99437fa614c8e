"""Tiny tokenizers of both kinds, made on the spot."""

from __future__ import annotations

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
