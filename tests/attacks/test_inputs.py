"""Other files of strangers: data, configurations, bases, GGUF files; and files that are exchanged while they are
read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import stat
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from streamspec.adapters.base_models.resolve import resolve_base, weights_hash
from streamspec.adapters.training.config import TrainConfig
from streamspec.bundle.files import read_manifest, read_small, verify_files
from streamspec.cli.train import read_yaml
from streamspec.data import MAX_LINE, read_examples
from streamspec.errors import BaseModelError, BundleError, ConfigError, DataError, StreamspecError
from tests.attacks.test_adapters import FILES
from tests.support.manifests import FILES as PARTS
from tests.support.manifests import manifest, write_bundle

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "content",
    {
        "a bomb of aliases": BOMB.encode() + b"lora_alpha: *i\n",
        "an object of Python": b"base: !!python/object/apply:os.system ['touch was-here']\n",
        "a module of Python": b"base: !!python/module:os\n",
        "a key twice": b"base: a\nbase: b\n",
        "keys that are lists": b"? [a, b]\n: c\n",
        "deep lists": b"base: " + b"[" * 100_000,
        "no UTF-8": b"base: \xff\xfe",
        "a number of ten thousand digits": b"seed: " + b"9" * 10_000,
        "a date that is none": b"base: 2001-99-99\n",
        "a list": b"- a\n",
        "a megabyte": b"base: " + b"a" * (1 << 20),
    }.items(),
    ids=lambda item: item[0],
)
def test_yaml_with(content: tuple[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where an attack that succeeds leaves its mark
    (tmp_path / "c.yaml").write_bytes(content[1])
    started = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        read_yaml(tmp_path / "c.yaml")
    assert "\n" not in str(caught.value) and time.perf_counter() - started < 20
    assert not Path("was-here").exists()


def test_an_option_too_large_for_a_number(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"base: a\ndata: b\nout: c\nlr: " + b"9" * 400)
    with pytest.raises(ConfigError, match="a number"):
        TrainConfig.from_dict(read_yaml(tmp_path / "c.yaml"))


@pytest.mark.parametrize(
    "line",
    {
        "deep lists": b"[" * 100_000,
        "deep turns": b'{"turns": [' + b"[" * 900 + b"]" * 900 + b"]}",
        "half a surrogate pair": b'{"text": "\\ud800"}',
        "half a pair in a key": b'{"text": "a", "\\udfff": 1}',
        "no UTF-8": b'{"text": "\xff"}',
        "a number of ten thousand digits": b'{"text": ' + b"9" * 10_000 + b"}",
        "a list": b"[1, 2]",
        "roles that are lists": b'{"messages": [{"role": ["user"], "content": "x"}]}',
        "no messages": b'{"messages": []}',
        "references that are objects": b'{"prompt": "a", "completion": "b", "references": {"a": 1}}',
        "a line of 17 MB": b'{"text": "' + b"a" * (MAX_LINE + 1) + b'"}',
        "bytes of nothing": b"\0" * 1000,
    }.items(),
    ids=lambda item: item[0],
)
def test_json_lines_with(line: tuple[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "good"}\n' + line[1] + b"\n")
    with pytest.raises(DataError) as caught:
        read_examples(tmp_path / "d.jsonl")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1500


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs POSIX")
def test_data_without_end_are_not_read_for_ever() -> None:
    with pytest.raises(DataError, match="more than"):
        read_examples("/dev/zero")


@pytest.mark.parametrize("content", FILES.values(), ids=list(FILES))
def test_the_hash_of_a_base_with(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    try:
        weights_hash(tmp_path)  # a hash of nonsense harms nobody; the library refuses the file afterwards
    except BaseModelError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "config",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b'{"model_type": "exec"}',
        b'{"model_type": ["llama"]}',
        b'{"model_type": {}}',
        b"\xff",
    ],
)
def test_a_base_whose_configuration_is_none(config: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(config)
    (tmp_path / "model.safetensors").write_bytes(FILES["nothing"])
    with pytest.raises(BaseModelError) as caught:
        resolve_base(tmp_path, lambda line: None)
    assert "\n" not in str(caught.value)


def gguf(tensors: int, keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest


def text(value: str, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value.encode()


@pytest.mark.parametrize(
    "content",
    {
        "nothing behind the magic number": b"GGUF",
        "another magic number": b"GGML" + bytes(100),
        "2^60 keys": gguf(0, 1 << 60),
        "2^60 tensors": gguf(1 << 60, 0),
        "a name of 2^62 bytes": gguf(0, 1, text("a", 1 << 62)),
        "a list of 2^60": gguf(0, 1, text("a") + struct.pack("<IIQ", 9, 4, 1 << 60)),
        "lists in lists": gguf(0, 1, text("a") + struct.pack("<IIQ", 9, 9, 1) * 2000),
        "an unknown type": gguf(0, 1, text("a") + struct.pack("<I", 99)),
        "a tensor of 2^64 rows": gguf(1, 0, text("t") + struct.pack("<IQQIQ", 2, (1 << 64) - 1, 4, 0, 0)),
        "another version": b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_gguf_file_with(content: tuple[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "m.gguf").write_bytes(content[1])
    with pytest.raises(BaseModelError) as caught:
        resolve_base(tmp_path / "m.gguf", lambda line: None)
    assert "\n" not in str(caught.value)
    if "2^60" in content[0]:  # counts are held against the file's length before anything else
        assert "its header goes on after byte" in str(caught.value)
    assert not list((tmp_path / "cache").glob("bases/*"))


# ---- files of other kinds, and files that change


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "b", PARTS, manifest())
    return tmp_path / "b"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX")
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "terminal", "folder", "loop", "proc"])
def test_a_file_of_another_kind_is_never_opened(kind: str, bundle: Path) -> None:
    import socket

    file = bundle / "tokenizer.json"
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(file))
    elif kind == "folder":
        file.mkdir()
    elif kind == "loop":
        os.symlink(file, file)
    else:
        os.symlink({"device": "/dev/zero", "terminal": "/dev/tty", "proc": "/proc/self/environ"}[kind], file)
    listed = read_manifest(bundle)
    if kind != "loop":  # of the size that the manifest says
        info = dataclasses.replace(listed.files["tokenizer.json"], bytes=file.stat().st_size)
        listed = dataclasses.replace(listed, files=listed.files | {"tokenizer.json": info})
    with pytest.raises(
        BundleError, match=r"tokenizer\.json is a link out .* or no regular file|has no tokenizer\.json"
    ):
        verify_files(bundle, listed)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX")
@pytest.mark.parametrize("content", ["pipe", "/dev/zero"])
def test_a_manifest_exchanged_between_the_check_and_the_opening(
    content: str, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is what it should be when it is looked at, and a pipe nobody writes into, or a device, when it is
    opened.
    """
    real = os.open

    def exchanged(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if os.fspath(path).endswith("manifest.json"):
            os.unlink(path)
            os.mkfifo(path) if content == "pipe" else os.symlink(content, path)
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", exchanged)
    with pytest.raises(BundleError, match=r"manifest\.json has 0 bytes; expected a file of at most"):
        read_manifest(bundle)


def test_a_manifest_that_grows_while_it_is_read(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fstat", lambda handle: os.stat_result((stat.S_IFREG, 0, 0, 1, 0, 0, 10, 0, 0, 0)))
    (bundle / "manifest.json").write_bytes(b" " * 1000)
    with pytest.raises(BundleError, match="at most 100"):
        read_small(bundle, "manifest.json", "", 100)


def test_what_may_not_be_read_is_one_line(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(BundleError, match="Permission denied"):
        read_manifest(bundle)


@pytest.mark.skipif(os.name == "nt", reason="needs names that are bytes")
def test_a_name_that_is_no_text(bundle: Path, tmp_path: Path) -> None:
    """Files beside the listed ones are not looked at; as the folder's own name it is printed harmlessly."""
    (bundle / os.fsdecode(b"\xff\xfe")).write_bytes(b"x")
    assert verify_files(bundle).method == "streaming"
    odd = tmp_path / os.fsdecode(b"\xff\n\x1b[31m")
    shutil.move(bundle, odd)
    (odd / "tokenizer.json").unlink()
    with pytest.raises(StreamspecError) as caught:
        verify_files(odd)
    assert str(caught.value).isprintable()


def test_a_file_listed_twice(bundle: Path) -> None:
    text = (bundle / "manifest.json").read_text()
    entry = json.dumps("tokenizer.json") + ": " + json.dumps({"sha256": "0" * 64, "bytes": 1}) + ","
    (bundle / "manifest.json").write_text(text.replace('"files": {', '"files": {' + entry, 1))
    with pytest.raises(BundleError, match="a key is repeated"):
        read_manifest(bundle)


def test_names_that_differ_in_case_alone_stay_apart(bundle: Path) -> None:
    """On disks that do not tell cases apart both names are one file, whose hash fits one of them at most."""
    data = json.loads((bundle / "manifest.json").read_text())
    data["files"]["Model.onnx"] = {"sha256": "0" * 64, "bytes": 5}
    (bundle / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(BundleError, match=r"Model\.onnx"):
        verify_files(bundle)
