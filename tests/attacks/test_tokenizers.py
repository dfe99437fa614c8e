"""Tokenizers that parse and then pad to a billion tokens, multiply texts or panic: nothing of it ends the process,
fills it or leaves a traceback.
"""

from __future__ import annotations

import base64
import json
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from streamspec.errors import StreamspecError
from streamspec.runtime import load
from streamspec.runtime.text import tokenizer
from streamspec.runtime.text.tokenizer import LONG, BundleTokenizer, read_tokenizer
from tests.support.forging import forge, refused

SECONDS = 20


def change(bundle: Path, **parts: Any) -> None:
    found = json.loads((bundle / "tokenizer.json").read_text())
    forge(bundle, "tokenizer.json", json.dumps(found | parts).encode())


def replaced(content: str, times: int, pattern: dict[str, str] | None = None) -> list[dict[str, Any]]:
    return [{"type": "Replace", "pattern": pattern or {"String": "a"}, "content": content}] * times


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def around(*pieces: dict[str, Any], ids: int = 1) -> dict[str, Any]:
    """A post-processor that makes `pieces` of a prompt; the special token "x" is `ids` tokens."""
    return {
        "type": "TemplateProcessing",
        "single": list(pieces),
        "pair": [PROMPT, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"x": {"id": "x", "ids": [5] * ids, "tokens": ["x"] * ids}},
    }


def charsmap(replacement: bytes) -> dict[str, Any]:
    """A normalizer of sentencepiece's that makes `replacement` of "a"."""
    trie = [0] * 128  # Darts' double array: offset << 10, a leaf follows << 8, label
    trie[0], trie[0x60], trie[0x61] = 1 << 10, 1 << 10 | 1 << 8 | ord("a"), 0
    data = struct.pack("<129I", 4 * len(trie), *trie) + replacement + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


PROMPT, MARK = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "x", "type_id": 0}}
PADDING = {
    "strategy": "BatchLongest",
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "<pad>",
}
TOO_MUCH = {
    "replacements that multiply": {"normalizer": {"type": "Sequence", "normalizers": replaced("aaaaaaaaaa", 12)}},
    "replacements of nothing": {
        "normalizer": {"type": "Sequence", "normalizers": replaced("aaaaaaaaaa", 12, {"Regex": ""})}
    },
    "replacements in sequences of sequences": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Sequence", "normalizers": replaced("aaaa", 3)}] * 3,
        }
    },
    "texts put in front": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 5000}] * 20}
    },
    "a thousand steps": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 1000}},
    "bytes of bytes": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
            ]
            * 20,
        }
    },
    "a decoder that multiplies": {"decoder": {"type": "Sequence", "decoders": replaced("aaaaaaaaaa", 12)}},
    "a charsmap that multiplies": {"normalizer": charsmap(b"a" * 5000)},
    "a special token of many": {"post_processor": around(PROMPT, *[MARK] * 20, ids=100)},
    "many special tokens": {"post_processor": around(*[MARK] * 5000, PROMPT)},
    "post-processors that add up": {
        "post_processor": {"type": "Sequence", "processors": [around(PROMPT, MARK, ids=100)] * 20}
    },
}
PANICS = {
    "a decoder that strips more than there is": {
        "decoder": {"type": "Strip", "content": "a", "start": 10**18, "stop": 10**18}
    },
    "a charsmap that points outside": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}},
    "an empty charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAAAAAA"}},
    "a regular expression that takes for ever": {"pre_tokenizer": split("(a+)+$")},
    "an unknown token that is not there": {"model": {"type": "WordLevel", "vocab": {"a": 5}, "unk_token": "nope"}},
    "a word piece that is not there": {
        "model": {
            "type": "WordPiece",
            "vocab": {"a": 5},
            "unk_token": "x",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 10**18,
        }
    },
    "tokens outside the model": {"model": {"type": "WordLevel", "vocab": {"a": 4294967295}, "unk_token": "a"}},
}
SENSELESS = {
    "a score that is no number": {
        "model": {"type": "Unigram", "unk_id": 10**9, "vocab": [["a", -1.0]], "byte_fallback": False}
    },
    "a dropout of two": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 2.0}},
    "merges of nothing": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["b", "c"]]}},
    "dropout, which makes other tokens each time": {
        "model": {"type": "BPE", "vocab": {"a": 0, "aa": 1}, "merges": [["a", "a"]], "dropout": 0.1}
    },
    "a post-processor that repeats the prompt": {"post_processor": around(*[PROMPT] * 100_000)},
    "a post-processor that drops the prompt": {"post_processor": around(MARK)},
    "a word of any length": {
        "model": {
            "type": "WordPiece",
            "vocab": {"a": 0},
            "unk_token": "a",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 10**18,
        }
    },
    "a deep regular expression": {"pre_tokenizer": split("(" * 100_000 + ")" * 100_000)},
    "an unknown step": {"normalizer": {"type": "Exec", "command": "id"}},
}


@pytest.mark.parametrize("parts", TOO_MUCH.values(), ids=list(TOO_MUCH))
def test_what_grows_is_refused_at_load(parts: dict[str, Any], bundle: Path) -> None:
    change(bundle, **parts)
    refused(bundle, r"tokenizer\.json: \d+ steps that make")


@pytest.mark.parametrize("parts", SENSELESS.values(), ids=list(SENSELESS))
def test_what_makes_no_sense_is_refused_at_load(parts: dict[str, Any], bundle: Path) -> None:
    change(bundle, **parts)
    refused(bundle, r"tokenizer\.json")


@pytest.mark.parametrize("character", ["z", "\\", '"', "é"])
def test_a_token_of_megabytes_is_refused_at_load(character: str, bundle: Path) -> None:
    """An answer could be thousands of them."""
    long = character * 1_000_000
    change(bundle, model={"type": "BPE", "vocab": {"a": 0, long: 1}, "merges": []})
    refused(bundle, r"tokenizer\.json: a text of \d+ bytes")


def test_a_charsmap_may_be_long_and_what_hides_behind_its_name_not(bundle: Path) -> None:
    many = b"\0".join([b"b" * 30] * 1000)
    change(bundle, normalizer=charsmap(many))
    assert read_tokenizer(bundle).normalizer.normalize_str("aa") == "b" * 60
    hidden = {"precompiled_charsmap": 0, "z" * 1_000_000: 1}
    change(bundle, model={"type": "BPE", "vocab": hidden, "merges": []})
    refused(bundle, r"tokenizer\.json: a text of \d+ bytes")


@pytest.mark.parametrize("parts", PANICS.values(), ids=list(PANICS))
def test_what_panics_later_ends_in_one_line(parts: dict[str, Any], bundle: Path) -> None:
    change(bundle, **parts)
    started = time.perf_counter()
    with pytest.raises(StreamspecError) as caught:
        session = load(bundle, threads=1, tree="plain")
        session.generate("ab " + "a" * 60 + "! ab", max_new_tokens=8)
        session.tokenizer.decode(range(60))
    assert "\n" not in str(caught.value)
    assert time.perf_counter() - started < SECONDS


@pytest.mark.parametrize(
    "padding",
    [PADDING | {"strategy": {"Fixed": 10**12}}, PADDING | {"pad_to_multiple_of": 10**12}],
    ids=["to a length", "to a multiple"],
)
def test_padding_of_a_trillion_tokens_is_taken_off(padding: dict[str, Any], bundle: Path) -> None:
    change(bundle, padding=padding)
    assert len(load(bundle, threads=1, tree="plain").generate("abc", max_new_tokens=2).token_ids) <= 2


def test_a_truncation_that_swallows_the_prompt_is_taken_off(original: Path, bundle: Path) -> None:
    change(bundle, truncation={"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0})
    assert read_tokenizer(bundle).encode("abcabc").ids == read_tokenizer(original).encode("abcabc").ids


@pytest.mark.parametrize("regex", ["((a{1,1000}){1,1000}){1,1000}", "(?:a|a)*b", "(?<=a{1,100000})b"])
def test_regular_expressions_that_multiply_end(regex: str, bundle: Path) -> None:
    change(bundle, pre_tokenizer=split(regex))
    started = time.perf_counter()
    try:
        read_tokenizer(bundle).encode("a" * 10_000)
    except StreamspecError as error:
        assert "\n" not in str(error)
    assert time.perf_counter() - started < SECONDS


def test_a_tokenizer_of_a_gigabyte_is_not_read(bundle: Path) -> None:
    with open(bundle / "tokenizer.json", "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(StreamspecError, match="at most"):
        read_tokenizer(bundle)


def test_a_token_that_claims_every_text(bundle: Path) -> None:
    """An added token of a million characters, and one of none."""
    token = {"single_word": False, "lstrip": True, "rstrip": True, "normalized": True, "special": True}
    found = json.loads((bundle / "tokenizer.json").read_text())["added_tokens"]
    change(
        bundle,
        added_tokens=[
            *found,
            {"id": 4294967295, "content": "z" * 1_000_000} | token,
            {"id": 65, "content": ""} | token,
        ],
    )
    started = time.perf_counter()
    try:
        load(bundle, threads=1, tree="plain").generate("abc", max_new_tokens=4)
    except StreamspecError as error:
        assert "\n" not in str(error)
    assert time.perf_counter() - started < SECONDS


def test_of_several_long_texts_one_at_a_time_takes_memory_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones do not wait for it."""
    inside, most, given_back = [], [0, 0], []
    monkeypatch.setattr(tokenizer, "trim", lambda: given_back.append(len(inside)))

    class Slow:
        def encode(self, text: str, add_special_tokens: bool) -> str:
            inside.append(text)
            most[text == "short"] = max(most[text == "short"], inside.count(text))
            time.sleep(0.05)
            inside.remove(text)
            return text

    tokenizers = [BundleTokenizer(Slow()) for _ in range(2)]
    texts = ["x" * (LONG + 1)] * 4 + ["short"] * 4
    with ThreadPoolExecutor(8) as threads:
        encoded = list(threads.map(lambda i: tokenizers[i % 2].encode(texts[i]), range(8)))
    assert encoded == texts and most[0] == 1 and most[1] > 1 and len(given_back) == 4
