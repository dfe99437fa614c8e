"""Damaged and misnamed GGUF files: one line each, and nothing stays in the cache."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from streamspec.adapters.base_models.gguf.converter import read_parameters
from streamspec.adapters.base_models.gguf.file import parts_of, read_gguf
from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.errors import BaseModelError
from tests.support import gguf_files as files
from tests.support.gguf_cases import made


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    _, architecture, keys, tensors = made("qwen2")
    path = files.write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", architecture, keys, tensors)
    return path.read_bytes()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refusal(path: Path, cache: Path) -> str:
    """The one line that refuses `path`, after which the cache is as empty as before."""
    with pytest.raises(BaseModelError) as caught:
        resolve_base(path, lambda _: None)
    line = str(caught.value)
    assert "\n" not in line and caught.value.expected and caught.value.fix, line
    assert [file for file in cache.rglob("*") if file.is_file() or file.parent.name == "bases"] == []
    return line


def test_a_file_that_is_cut_off_anywhere_is_refused(whole: bytes, tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "m.gguf"
    for size in (4, 12, 23, 24, 100, 3000, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert "cut off" in refusal(file, cache), size


def test_the_missing_bytes_are_counted(whole: bytes, tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(whole[:-100])
    assert f"is cut off: it has {len(whole) - 100} bytes; expected {len(whole)}" in refusal(file, cache)


Edit = Callable[[bytes], bytes]


def at(offset: int, form: str, value: int) -> Edit:
    raw = struct.pack(form, value)
    return lambda data: data[:offset] + raw + data[offset + len(raw) :]


def tensor_kind(kind: int) -> Edit:
    """The quantization of the embedding."""

    def edit(data: bytes) -> bytes:
        after = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
        return at(after, "<I", kind)(data)

    return edit


DAMAGED: dict[str, tuple[Edit, str]] = {
    "renamed from something else": (lambda data: b"PK\x03\x04" + data, "is no GGUF file"),
    "empty": (lambda data: b"", "is no GGUF file"),
    "big-endian": (at(4, ">I", 3), "big-endian GGUF file; expected little-endian"),
    "of the first version": (at(4, "<I", 1), "version 1; expected version 2 or 3"),
    "of a later version": (at(4, "<I", 4), "version 4; expected"),
    "with more tensors than bytes": (at(8, "<Q", 1 << 60), "cut off or damaged"),
    "with more keys than bytes": (at(16, "<Q", 1 << 60), "cut off or damaged"),
    "with a text beyond its end": (at(24, "<Q", 1 << 62), "cut off or damaged"),
    "with a text that is none": (at(32, "<I", 0xFFFFFFFF), "no text at byte 32"),
    "with a quantization that nobody knows": (tensor_kind(99), "token_embd.weight is quantized as type 99"),
    "with a quantization that is no weight": (tensor_kind(26), "token_embd.weight is quantized as I32"),
    "with rows that are no blocks": (tensor_kind(12), "rows of token_embd.weight have 64 values"),
    "with a key twice": (
        lambda data: data.replace(b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id"),
        "key tokenizer.ggml.eos_token_id twice",
    ),
    "with a tensor twice": (
        lambda data: data.replace(b"blk.1.ffn_up", b"blk.0.ffn_up"),
        "tensor blk.0.ffn_up.weight twice",
    ),
}


@pytest.mark.parametrize("reason", DAMAGED)
def test_a_damaged_file_is_refused(reason: str, whole: bytes, tmp_path: Path, cache: Path) -> None:
    edit, message = DAMAGED[reason]
    file = tmp_path / "m.gguf"
    file.write_bytes(edit(whole))
    assert message in refusal(file, cache)


def test_no_byte_of_the_header_makes_it_crash(whole: bytes, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    for offset in [*range(0, 300, 3), *range(6000, 9000, 31)]:
        file.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0xFF]) + whole[offset + 1 :])
        try:
            read_gguf(file)
        except BaseModelError as error:
            assert "\n" not in str(error)


def test_the_name_does_not_matter_the_content_does(whole: bytes, tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(whole)
    assert resolve_base(file, lambda _: None).model_type == "qwen2"


def test_parts_are_found_beside_each_other(tmp_path: Path, cache: Path) -> None:
    _, architecture, keys, tensors = made("qwen2")
    last = files.write_gguf(tmp_path / "m.gguf", architecture, keys, tensors, split=8)
    base = resolve_base(last, lambda _: None)
    assert resolve_base(parts_of(last)[0], lambda _: None) == base  # not converted again
    second = parts_of(last)[1]
    moved = second.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(BaseModelError, match=f"{second.name} is missing.*expected all"):
        resolve_base(last, lambda _: None)
    with pytest.raises(BaseModelError, match=r"says it is part 2 of \d; expected part 1 of 1"):
        resolve_base(moved, lambda _: None)
    second.write_bytes((tmp_path / second.name.replace("-00002-", "-00001-")).read_bytes())
    with pytest.raises(BaseModelError, match=f"{second.name} says it is part 1"):
        resolve_base(last, lambda _: None)


def test_parts_may_be_links_into_a_folder_of_other_names(tmp_path: Path, cache: Path) -> None:
    """As the hub's cache has them."""
    _, architecture, keys, tensors = made("qwen2")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "blobs").mkdir()
    last = files.write_gguf(tmp_path / "snapshot" / "m.gguf", architecture, keys, tensors, split=8)
    for number, part in enumerate(parts_of(last)):
        part.symlink_to(part.rename(tmp_path / "blobs" / f"{number:064x}"))
    read, hashed = resolve_base(last, lambda _: None, weights=False), resolve_base(last, lambda _: None)
    assert read.gguf is not None and hashed.made_of is not None
    assert read_parameters(read.gguf).keys() == read_parameters(hashed.made_of, by_table=False).keys() != set()


def test_a_conversion_of_an_earlier_version_is_made_again(
    whole: bytes, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from streamspec.adapters.base_models import resolve

    file = tmp_path / "m.gguf"
    file.write_bytes(whole)
    lines: list[str] = []
    first = resolve_base(file, lines.append)
    config = json.loads((first.path / "config.json").read_text())
    (first.path / "config.json").write_text(json.dumps(config | {"stale": True}))
    assert resolve_base(file, lines.append) == first and sum("hashing the weights" in line for line in lines) == 1
    monkeypatch.setattr(resolve, "CONVERTER", resolve.CONVERTER + 1)
    assert resolve_base(file, lines.append) == first and sum("hashing the weights" in line for line in lines) == 2
    assert "stale" not in (first.path / "config.json").read_text()
    identity = first.path / resolve.IDENTITY_FILE
    identity.write_text(identity.read_text().replace('"converter"', '"none"'))  # as before there was a number
    assert resolve_base(file, lines.append) == first and sum("hashing the weights" in line for line in lines) == 3
