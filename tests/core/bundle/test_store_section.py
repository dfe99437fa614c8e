"""The store's file: its order, and what is refused of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamspec.bundle.store_section import DEPTH, StoreInfo, decode, encode, read_section, suffix_array
from streamspec.errors import BundleError
from streamspec.json_fields import Fields

VOCAB = 300
TOKENS = np.random.default_rng(0).integers(0, 6, 400)
INFO = StoreInfo(len(TOKENS), 2)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=120))
def test_suffixes_are_in_the_order_of_their_first_tokens(text: list[int]) -> None:
    order = suffix_array(np.array(text)).tolist()
    assert sorted(order) == list(range(len(text)))
    assert [text[i : i + DEPTH] for i in order] == sorted(text[i : i + DEPTH] for i in range(len(text)))


@pytest.mark.parametrize("vocab", [VOCAB, 1 << 17])
def test_what_was_written_is_read(vocab: int) -> None:
    data = encode(TOKENS, vocab)
    assert len(data) == INFO.bytes(vocab)
    tokens, order = decode(data, INFO, vocab)
    assert np.array_equal(tokens, TOKENS) and np.array_equal(order, suffix_array(TOKENS))


def _with_position(place: int, value: int) -> Callable[[bytes], bytes]:
    at = 2 * len(TOKENS) + 4 * place
    return lambda data: data[:at] + value.to_bytes(4, "little") + data[at + 4 :]


def _swapped(data: bytes) -> bytes:
    order = np.frombuffer(data, "<u4", offset=2 * len(TOKENS)).copy()
    order[[0, -1]] = order[[-1, 0]]
    return data[: 2 * len(TOKENS)] + order.tobytes()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:-1], "2399 bytes"),
        (lambda data: data + b"\0", "2401 bytes"),
        (lambda data: b"\xff\xff" + data[2:], "token 65535"),
        (_with_position(7, len(TOKENS)), "no permutation"),
        (_with_position(7, 0xFFFFFFFF), "no permutation"),
        (lambda data: _with_position(7, int.from_bytes(data[804:808], "little"))(data), "no permutation"),
        (_swapped, "not in order"),
    ],
)
def test_a_file_that_is_not_what_the_manifest_says_is_refused(change: Callable[[bytes], bytes], said: str) -> None:
    with pytest.raises(BundleError, match=said):
        decode(change(encode(TOKENS, VOCAB)), INFO, VOCAB)


@pytest.mark.parametrize(
    "section", [{"tokens": 0, "separator": 2}, {"tokens": 1 << 24, "separator": 2}, {"tokens": 5, "separator": VOCAB}]
)
def test_a_section_out_of_bounds_is_refused(section: dict[str, int]) -> None:
    with pytest.raises(BundleError, match=r"store\.(tokens|separator)"):
        read_section(Fields(section, "manifest.store"), VOCAB)
