"""What is copied of a base's tokenizer; the templates and end tokens are covered by `test_bundle_writer.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.adapters.base_models.tokenizer import compact
from streamspec.errors import BaseModelError
from streamspec.export import described_base
from streamspec.export.described_base import describe_base
from tests.support.tiny_exports import save_base


def test_a_tokenizer_that_no_bundle_may_have_is_refused_by_its_own_path(tmp_path: Path) -> None:
    file = save_base(tmp_path / "base").path / "tokenizer.json"
    found = json.loads(file.read_text())
    found["model"] = {"type": "BPE", "vocab": {"a": 0, "aa": 1}, "merges": [["a", "a"]], "dropout": 0.1}
    file.write_text(json.dumps(found))
    (out := tmp_path / "out").mkdir()
    with pytest.raises(BaseModelError, match=r"base/tokenizer\.json: .*dropout of 0\.1"):
        describe_base(resolve_base(file.parent, lambda line: None), None, None).copy_tokenizer(out)


def bpe(*, merges: list[list[str]], **options: object) -> dict[str, object]:
    """A byte-level tokenizer in JSON, its tokens those of the merges."""
    vocab = dict.fromkeys([*map(chr, range(33, 127)), *(c for pair in merges for c in (*pair, "".join(pair)))])
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(vocab)}, "merges": merges, **options}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"version": "1.0", "added_tokens": [{"id": len(vocab), "content": "<é\n>", **added}], "model": model}


ODD = [['"', "]"], ['"]', "]"], ["\\", '"'], ["a", "b"], ["ab", "é"], ["#", "version"]]


def test_a_large_tokenizer_is_copied_without_white_space_and_pairs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = save_base(tmp_path / "base").path / "tokenizer.json"
    described = describe_base(resolve_base(file.parent, lambda line: None), None, None)
    file.write_text(json.dumps(bpe(merges=ODD, unk_token=None, byte_fallback=False), indent=2))
    for large, copied in ((1 << 20, file.read_text()), (100, None)):
        monkeypatch.setattr(described_base, "LARGE", large)
        (out := tmp_path / str(large)).mkdir()
        tokenizer = described.copy_tokenizer(out)
        text = (out / "tokenizer.json").read_text()
        assert text == copied or (copied is None and len(text) < 0.6 * len(file.read_text()) and '"ab é"' in text)
        assert tokenizer.to_str() == Tokenizer.from_file(str(file)).to_str()


@pytest.mark.parametrize("pair", [["a ", "b"], ["a", "b "], ["#version", "b"]])
def test_merges_that_would_be_read_otherwise_stay_pairs(pair: list[str]) -> None:
    written = json.dumps(bpe(merges=[*ODD, pair])).encode()
    assert compact(written) == written


@pytest.mark.parametrize("written", [b"{", b"[" * 100_000, b"[]", b'{"model": {"type": "Unigram", "vocab": []}}'])
def test_what_is_no_bpe_stays_as_it_is(written: bytes) -> None:
    assert compact(written) == written
