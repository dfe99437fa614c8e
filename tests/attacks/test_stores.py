"""Stores of answers whose hashes are right and whose content is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streamspec.bundle.store_section import MAX_TOKENS, STORE, encode
from tests.support.forging import edit, forge, refused
from tests.support.tiny_bundles import VOCAB

TOKENS = np.random.default_rng(0).integers(0, VOCAB, 200)
GOOD = encode(TOKENS, VOCAB)


def with_store(bundle: Path, content: bytes, tokens: int = len(TOKENS), separator: int = 2) -> Path:
    forge(bundle, STORE, content)
    edit(bundle, lambda m: m.__setitem__("store", {"tokens": tokens, "separator": separator}))
    return bundle


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff" * 400 + GOOD[400:], "token 65535"),
        (GOOD[:400] + b"\xff" * 800, "no permutation"),
        (GOOD[:400] + bytes(800), "no permutation"),
        (GOOD[:400] + np.arange(200, dtype="<u4").tobytes(), "not in order"),
        (GOOD[:-4], "1196 bytes"),
        (b"", "0 bytes"),
    ],
)
def test_a_store_with_false_numbers_is_refused_before_use(bundle: Path, content: bytes, said: str) -> None:
    refused(with_store(bundle, content), said)


@pytest.mark.parametrize(
    ("tokens", "separator", "said"),
    [
        (MAX_TOKENS + 1, 2, "store.tokens"),
        (0, 2, "store.tokens"),
        (10**6, 2, "6000000 bytes"),
        (200, VOCAB, "separator"),
    ],
)
def test_a_store_whose_size_or_separator_lies_is_refused(bundle: Path, tokens: int, separator: int, said: str) -> None:
    refused(with_store(bundle, GOOD, tokens, separator), said)


def test_a_store_that_is_not_there_is_refused(bundle: Path) -> None:
    edit(bundle, lambda m: m.__setitem__("store", {"tokens": 5, "separator": 2}))
    refused(bundle, "no such file")
