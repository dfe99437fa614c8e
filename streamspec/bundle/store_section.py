"""The store of a bundle: token ids of answers or other texts, and the order of their suffixes, so that the runtime
finds in microseconds how texts went on that ended as this one does (retrieval drafts, REST: arXiv 2311.08252).

The file `store.bin` holds, little-endian, the tokens of all texts, each ended by `separator` (uint16 [n], uint32 where
the vocabulary needs it), then their suffix array (uint32 [n]): positions in the order of the `DEPTH` tokens from there
on. Pure numbers: reading it compares them with the section `store` of the manifest. It decides what is drafted, never
what is answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from streamspec.bundle.model_section import AGAIN
from streamspec.errors import BundleError
from streamspec.json_fields import Fields

STORE = "store.bin"
DEPTH = 24  # tokens by which suffixes are ordered: those that are looked up and those that are drafted
MAX_TOKENS = 1 << 23  # of any store: 64 MB


@dataclass(frozen=True)
class StoreInfo:
    """`tokens`: their number in all texts; `separator`: the token after each text."""

    tokens: int
    separator: int

    def bytes(self, vocab_size: int) -> int:
        """Returns the size of the file."""
        return self.tokens * (token_type(vocab_size).itemsize + 4)


def read_store(manifest: Fields, vocab_size: int, files: Mapping[str, int]) -> StoreInfo | None:
    """Reads the section `store` of a bundle; `files`: the sizes of its files in bytes. Returns None
    without the section. Raises BundleError that names the field, or a file that does not match it.
    """
    if not manifest.optional("store"):
        return None
    store = read_section(manifest.nested("store"), vocab_size)
    if files.get(STORE) != store.bytes(vocab_size):
        found = f"{files[STORE]} bytes" if STORE in files else "no such file"
        raise BundleError(f"{STORE} with {found}", f"{store.bytes(vocab_size)} bytes", AGAIN)
    return store


def read_section(raw: Fields, vocab_size: int) -> StoreInfo:
    """Reads the section. Raises BundleError that names the field."""
    return StoreInfo(raw.integer("tokens", 1, MAX_TOKENS), raw.integer("separator", 0, vocab_size - 1))


def token_type(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Returns the dtype of the tokens in the file."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def suffix_array(tokens: np.ndarray) -> np.ndarray:
    """Sorts the positions of `tokens` [n] by the tokens that follow, into uint32 [n].

    Compares at least `DEPTH` tokens; equal suffixes keep their order. Prefix doubling (Manber and
    Myers, 1993); 0.3 s for 300,000 tokens.
    """
    rank, length = tokens.astype(np.int64), 1
    while True:
        after = np.full_like(rank, -1)
        after[:-length] = rank[length:]
        order = np.lexsort((after, rank))
        rank, after = rank[order], after[order]
        new = np.empty_like(rank)
        new[order] = np.concatenate([[0], np.cumsum((rank[1:] != rank[:-1]) | (after[1:] != after[:-1]))])
        length, rank = 2 * length, new
        if length >= DEPTH or length >= len(tokens) or new.max() == len(tokens) - 1:
            return order.astype(np.uint32)


def encode(tokens: np.ndarray, vocab_size: int) -> bytes:
    """Returns the content of the file with these tokens."""
    return tokens.astype(token_type(vocab_size)).tobytes() + suffix_array(tokens).astype("<u4").tobytes()


def decode(data: bytes, info: StoreInfo, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Reads the tokens [n] and the suffix array uint32 [n] of the file.

    Raises BundleError where they do not match the section: another size, tokens beyond the
    vocabulary, positions that are missing or repeated, another order.
    """
    if len(data) != info.bytes(vocab_size):
        raise BundleError(f"{STORE} has {len(data)} bytes", f"{info.bytes(vocab_size)} for {info.tokens} tokens", AGAIN)
    dtype = token_type(vocab_size)
    tokens = np.frombuffer(data, dtype, info.tokens)
    order = np.frombuffer(data, "<u4", info.tokens, info.tokens * dtype.itemsize)
    if tokens.max() >= vocab_size:
        raise BundleError(f"{STORE} has token {tokens.max()}", f"tokens 0..{vocab_size - 1}", AGAIN)
    if order.max() >= info.tokens or np.bincount(order, minlength=info.tokens).max() > 1:
        raise BundleError(f"{STORE} has no permutation", f"each position below {info.tokens} once", AGAIN)
    if not _ordered(tokens, order):
        raise BundleError(f"{STORE} is not in order", "a suffix array of its tokens", AGAIN)
    return tokens, order


def _ordered(tokens: np.ndarray, order: np.ndarray) -> bool:
    """Whether suffixes rise by their first `DEPTH` tokens; the end of all texts is less than any token."""
    padded = np.concatenate([tokens.astype(np.int64), np.full(DEPTH, -1)])
    first, second = order[:-1].astype(np.int64), order[1:].astype(np.int64)
    for depth in range(DEPTH):
        token, next_token = padded[first + depth], padded[second + depth]
        if (token > next_token).any():
            return False
        equal = token == next_token
        first, second = first[equal], second[equal]
        if not len(first):
            break
    return True
