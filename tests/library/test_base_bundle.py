"""What a base is exported to, once, and found again by its content."""

from __future__ import annotations

import builtins
import math
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest

import streamspec.export
from streamspec.adapters.base_models import resolve
from streamspec.adapters.base_models.gguf.file import read_gguf
from streamspec.atomic import sha256_file
from streamspec.bundle.files import read_manifest
from streamspec.errors import ConfigError, ResourceError
from streamspec.export import export_bundle
from streamspec.library import base_bundle
from streamspec.library.base_bundle import bundle_of
from streamspec.runtime import load
from tests.support import gguf_cases, gguf_files
from tests.support.tiny_bundles import tiny_base


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Counts exports; the cache is empty."""
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    made: list[Path] = []
    real = streamspec.export.export_bundle

    def counted(base: Any, adapter: Any, out: Any, **options: Any) -> Any:
        made.append(Path(out))
        return real(base, adapter, out, **options)

    monkeypatch.setattr(streamspec.export, "export_bundle", counted)
    return made


def quiet(line: str) -> None: ...


def test_a_bundle_is_itself(bundle: Path, exports: list[Path]) -> None:
    assert bundle_of(str(bundle)) == bundle and not exports
    with pytest.raises(ConfigError, match=r"--precision int4 and .* is exported already; expected a base"):
        bundle_of(str(bundle), "int4")


def test_a_folder_is_exported_once_and_found_by_its_content(exports: list[Path], tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base", chat=True)
    bundle = bundle_of(str(base), "fp32", quiet)
    assert bundle == exports[0] and load(bundle, threads=1).manifest.prompt_format.kind == "chat"
    moved = Path(shutil.copytree(base, tmp_path / "elsewhere" / "base"))
    assert bundle_of(str(base), "fp32", quiet) == bundle_of(str(moved), "fp32", quiet) == bundle and len(exports) == 1
    template = base / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert bundle_of(str(base), "fp32", quiet) != bundle and len(exports) == 2


def test_a_gguf_file_is_exported_once(exports: list[Path], tmp_path: Path) -> None:
    _, architecture, keys, tensors = gguf_cases.made("llama 3.2")
    file = gguf_files.write_gguf(tmp_path / "model.gguf", architecture, keys, tensors)
    bundle = bundle_of(str(file), "fp32", quiet)
    copied = Path(shutil.copy(file, tmp_path / "copy.gguf"))
    assert bundle.name.startswith("model-fp32-") and load(bundle, threads=1).generate("ab", max_new_tokens=2).token_ids
    assert bundle_of(str(file), "fp32", quiet) == bundle_of(str(copied), "fp32", quiet) == bundle and len(exports) == 1


def test_a_gguf_file_keeps_its_weights_where_native_operators_take_them(
    exports: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_bundle.native_library, "why_not", lambda: "")
    _, architecture, keys, tensors = gguf_cases.made("llama 3.2")
    plain = gguf_files.write_gguf(tmp_path / "plain.gguf", architecture, keys, tensors)
    kind = gguf.GGMLQuantizationType.Q8_0
    kinds = {name: kind for name, values in tensors.items() if values.ndim == 2}
    tensors |= {name: gguf.quantize(tensors[name], kind) for name in kinds}
    own = gguf_files.write_gguf(tmp_path / "own.gguf", architecture, keys, tensors, kinds=kinds)
    said: list[str] = []
    bundle = bundle_of(str(own), None, said.append)
    assert bundle_of(str(own), None, quiet) == bundle == exports[-1] and len(exports) == 1
    assert read_manifest(bundle).precision == "gguf" and said[0].startswith(
        "own.gguf (0.0 GB) becomes a bundle in gguf"
    )
    rounded = bundle_of(str(plain), None, said.append)
    assert bundle_of(str(plain), None, quiet) == rounded and len(exports) == 2  # nothing was tried in vain
    assert read_manifest(rounded).precision == "int8" and "an embedding of type F32: int8 instead" in said
    monkeypatch.setattr(base_bundle.native_library, "why_not", lambda: "none here")
    assert read_manifest(bundle_of(str(own), None, quiet)).precision == "int8"


def test_a_bundle_of_less_precision_is_never_taken_for_the_best(
    exports: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = gguf_cases.rounded(tmp_path / "model.gguf", "llama 3.2", "Q8_0")
    monkeypatch.setattr(base_bundle.native_library, "why_not", lambda: "none here")
    assert read_manifest(bundle_of(str(file), None, quiet)).precision == "int8"
    monkeypatch.setattr(base_bundle.native_library, "why_not", lambda: "")
    assert read_manifest(bundle_of(str(file), "int8", quiet)).precision == "int8" and len(exports) == 1
    assert read_manifest(bundle_of(str(file), None, quiet)).precision == "gguf" and len(exports) == 2


def test_two_processes_export_a_base_once(exports: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, said, begun, go = tiny_base(tmp_path / "base"), list[str](), threading.Event(), threading.Event()
    real = streamspec.export.export_bundle

    def slow(*arguments: Any, **options: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return real(*arguments, **options)

    monkeypatch.setattr(streamspec.export, "export_bundle", slow)

    def say(line: str) -> None:
        said.append(line)
        go.set()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(bundle_of, str(base), "fp32", quiet)
        assert begun.wait(60)
        second = pool.submit(bundle_of, str(base), "fp32", say)
        assert second.result(60) == first.result(60) and len(exports) == 1
    assert said == [f"another process exports {base}: waiting for its bundle"]
    assert [one.name for one in exports[0].parent.iterdir()] == [exports[0].name]


def test_what_a_bundle_takes_counts_the_experts_of_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_bundle.native_library, "why_not", lambda: "")
    file = gguf_cases.rounded(tmp_path / "model.gguf", "olmoe", "Q8_0")
    own = base_bundle._costs(file, "gguf")
    monkeypatch.setattr(base_bundle, "OF_EXPERTS", 1e6)
    assert base_bundle._costs(file, "int8").memory == pytest.approx(110.8, abs=0.1)  # 6 of 3 * 64 * 96 weights
    assert base_bundle._costs(file, "gguf") == own and own.memory < 1  # read one by one
    tensors = read_gguf(file).tensors
    whole, experts = (sum(one.size for name, one in tensors.items() if of in name) for of in ("", "_exps."))
    assert own.read == pytest.approx((whole - experts * 4 / 6) / 1e9)  # a row chooses 2 of 6
    fp32 = base_bundle._costs(file, "fp32")
    assert fp32.read == fp32.disk == pytest.approx(4e-9 * sum(math.prod(one.shape) for one in tensors.values()))
    monkeypatch.setattr(base_bundle.native_library, "why_not", lambda: "none here")
    int8 = base_bundle._costs(file, "int8")
    assert int8.read == pytest.approx(2.75 * int8.disk)  # the standard graph turns all back into constants
    with pytest.raises(ConfigError, match="precision"):
        bundle_of(str(file), "int5", quiet)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q5_K", "Q5_0", "Q8_0"])
def test_what_a_bundle_takes_is_told_by_its_tiles(kind: str, tmp_path: Path) -> None:
    file, _ = gguf_cases.in_blocks(tmp_path / "model.gguf", kind)
    made = export_bundle(file, None, tmp_path / "out", "gguf", progress=quiet, measure=False)
    written = made.data_bytes
    assert base_bundle._costs(file, "gguf").disk * 1e9 == pytest.approx(written, rel=0.06)


def test_a_disk_without_room_is_told_before_any_work(
    base: Path, exports: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = gguf_cases.rounded(tmp_path / "model.gguf", "llama 3.2", "Q8_0")
    with monkeypatch.context() as full:
        full.setattr(base_bundle.shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
        for name, path in (("model.gguf", file), (str(base), base)):
            with pytest.raises(ResourceError, match=f"0.0 GB of disk free at .*; expected the 0.0 GB that {name} take"):
                bundle_of(str(path), None, quiet)
    assert not exports
    written = read_manifest(bundle_of(str(base), "fp32", quiet)).data_bytes
    assert base_bundle._disk_of_folder(base, "fp32") * 1e9 == pytest.approx(written, rel=0.1)


def test_a_type_without_operators_is_seen_before_any_work(
    exports: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_bundle.native_library, "why_not", lambda: "")
    file, said = gguf_cases.rounded(tmp_path / "model.gguf", "llama 3.2", "Q8_0"), list[str]()
    content, odd = read_gguf(file), gguf.GGMLQuantizationType.IQ3_S
    tensors = {
        name: replace(one, kind=odd) if name == "blk.0.ffn_up.weight" else one for name, one in content.tensors.items()
    }
    monkeypatch.setattr(base_bundle, "read_gguf", lambda _: SimpleNamespace(tensors=tensors))
    with pytest.raises(ConfigError, match="blk.0.ffn_up.weight of type IQ3_S"):
        base_bundle._export(str(file), file, tmp_path / "out", "gguf", said.append, True)
    assert not exports and not said


def test_a_file_of_which_a_step_reads_more_than_memory_has_is_refused_before_any_work(
    exports: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_bundle.native_library, "why_not", lambda: "")
    file = gguf_cases.rounded(tmp_path / "model.gguf", "olmoe", "Q8_0")
    read = int(base_bundle._costs(file, "gguf").read * 1e9)
    assert read < file.stat().st_size
    monkeypatch.setattr(base_bundle, "available", lambda: read - 1)
    with pytest.raises(ResourceError, match="of which a step reads 0.0 GB; expected at most the 0.0 GB of memory"):
        bundle_of(str(file), None, quiet)
    assert not exports
    bundle_of(str(file), "fp32", quiet, to_load=False)  # for another machine
    assert len(exports) == 1
    monkeypatch.setattr(base_bundle, "available", lambda: read + 1)
    assert read_manifest(bundle_of(str(file), None, quiet)).precision == "gguf"


def test_the_reference_base_is_the_same_by_name_and_by_file(
    exports: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, architecture, keys, tensors = gguf_cases.made("llama 3.2")
    file = gguf_files.write_gguf(tmp_path / "copy.gguf", architecture, keys, tensors)
    for module in (base_bundle, resolve):
        monkeypatch.setattr(module, "SHA256", sha256_file(file))
    bundle = bundle_of(str(file), "fp32", quiet)
    assert bundle_of("smollm2-135m", "fp32", quiet) == bundle and len(exports) == 1
    assert resolve.resolve_base(file, quiet).path == tmp_path / "cache" / "bases" / "smollm2-135m"


def test_a_damaged_bundle_is_exported_again(exports: list[Path], tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base", chat=True)
    bundle = bundle_of(str(base), "fp32", quiet)
    (bundle / "tokenizer.json").unlink()
    assert bundle_of(str(base), "fp32", quiet) == bundle and len(exports) == 2
    assert (bundle / "tokenizer.json").is_file()


def test_a_file_that_changes_in_place_is_read_again(exports: list[Path], tmp_path: Path) -> None:
    from streamspec.library.base_bundle import _digest

    file = tmp_path / "a.json"
    file.write_text("1")
    first = _digest([file])
    file.write_text("2")
    os.utime(file, ns=(1, 1))
    assert _digest([file]) != first == _digest([_written(tmp_path / "b" / "a.json", "1")])


def _written(file: Path, text: str) -> Path:
    file.parent.mkdir()
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("{}/nothing", "does not exist"),
        ("smollm2-135", "did you mean smollm2-135m"),
        ("{}", "is neither a bundle nor a base"),
    ],
)
def test_what_is_neither_bundle_nor_base_is_refused(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        bundle_of(name.format(tmp_path))


def test_without_the_exports_libraries_it_says_so_and_still_finds_what_was_exported(
    exports: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_base(tmp_path / "base", chat=True)
    bundle = bundle_of(str(base), "fp32", quiet)
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name in ("onnx", "streamspec.export"):
            raise ModuleNotFoundError("No module named 'onnx'", name="onnx")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert bundle_of(str(base), "fp32", quiet) == bundle
    with pytest.raises(ConfigError, match=r"takes the Python package onnx.*streamspec\[cpu\]"):
        bundle_of(str(base), "int8", quiet)


@pytest.mark.skipif(os.name == "nt", reason="names of files are Unicode there")
def test_a_cache_that_cannot_be_written_and_a_name_that_is_no_utf8_stop_no_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / os.fsdecode(b"m\xe8.gguf")
    file.write_bytes(b"x")
    monkeypatch.setenv("STREAMSPEC_CACHE", str(file / "cache"))
    assert resolve.content_hash(file) == sha256_file(file)
