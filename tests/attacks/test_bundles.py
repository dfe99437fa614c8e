"""Failed attempts to make a bundle do harm: each must end in one line that names the problem."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from streamspec.bundle import files
from streamspec.bundle.files import read_manifest, verified, verify_files
from streamspec.bundle.manifest import FORMAT_VERSION, OLDEST_FORMAT, Manifest, StaticInfo, check_name
from streamspec.errors import BundleError
from streamspec.paths import PassedChecks
from tests.support.manifests import FILES, manifest, write_bundle

GONE = object()
GOOD = json.loads(manifest().to_json()) | {
    "files": {name: {"sha256": "0" * 64, "bytes": 1} for name in ("model.onnx", "tokenizer.json")}
}


def refused(data: Any, match: str | None = None) -> None:
    text = data if isinstance(data, (str, bytes)) else json.dumps(data)
    with pytest.raises(BundleError, match=match) as caught:
        Manifest.from_json(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1500


def bent(path: str, value: Any) -> dict[str, Any]:
    """The good manifest with one field replaced, or removed where `value` is GONE."""
    data = json.loads(json.dumps(GOOD))
    *parents, last = path.split("/")
    at = data
    for name in parents:
        at = at[int(name)] if isinstance(at, list) else at[name]
    if value is GONE:
        del at[last]
    else:
        at[int(last) if isinstance(at, list) else last] = value
    return data


def test_the_good_manifest_is_accepted() -> None:
    assert Manifest.from_json(json.dumps(GOOD)).model.layers == 2
    assert Manifest.from_json(json.dumps(bent("comment", "fields we do not know are ignored"))).method == "streaming"


def test_another_format_is_refused_with_the_way_out() -> None:
    refused(bent("format_version", FORMAT_VERSION + 1), f"format {FORMAT_VERSION + 1}.*update streamspec")
    refused(bent("format_version", OLDEST_FORMAT - 1), f"format {OLDEST_FORMAT - 1}.*export it again")


FIXED = bent("static", {"rows": 8, "slots": 128})
FIXED["files"]["choose.onnx"] = {"sha256": "0" * 64, "bytes": 1}


def test_a_static_manifest_is_accepted() -> None:
    assert Manifest.from_json(json.dumps(FIXED)).static == StaticInfo(8, 128)
    assert Manifest.from_json(json.dumps(GOOD)).static is None


@pytest.mark.parametrize(
    "fixed",
    [
        {"rows": 1, "slots": 128},
        {"rows": 257, "slots": 128},
        {"rows": 8.0, "slots": 128},
        {"rows": "8", "slots": 128},
        {"rows": True, "slots": 128},
        {"rows": 8, "slots": 127},
        {"rows": 8, "slots": 1 << 40},
        {"rows": 8},
        {"slots": 128},
        [8, 128],
        True,
        "static",
    ],
)
def test_senseless_fixed_shapes(fixed: Any) -> None:
    refused(FIXED | {"static": fixed}, "static")


def test_a_static_bundle_needs_its_choice_and_no_early_exit_and_no_eager_streams() -> None:
    refused(FIXED | {"files": GOOD["files"]}, r"without choose\.onnx")
    refused(FIXED | {"streams": GOOD["streams"] | {"pruning": True}}, "early exit")
    refused(FIXED | {"streams": GOOD["streams"] | {"eager": True, "root_token": False}}, "static.* with eager streams")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format_version", 0),
        ("format_version", "1"),
        ("format_version", True),
        ("format_version", GONE),
        ("method", "pickle"),
        ("method", ["lora"]),
        ("precision", None),
        ("base", []),
        ("base/sha256", "AB" * 32),
        ("base/sha256", "0"),
        ("base/id", "x" * 5000),
        ("model/layers", 0),
        ("model/layers", 10**9),
        ("model/layers", 2.0),
        ("model/kv_heads", -1),
        ("model/head_dim", 1 << 40),
        ("model/vocab_size", 0),
        ("model/vocab_size", 1 << 60),
        ("model/context_length", 1),
        ("model/context_length", 1 << 62),
        ("model/eos_token_ids", [257]),
        ("model/eos_token_ids", 0),
        ("model/eos_token_ids", [0] * 100),
        ("model/bos_token_id", 9999),
        ("streams/gamma", 0),
        ("streams/gamma", 10**6),
        ("streams/ns", 3),
        ("streams/candidates", 258),
        ("streams/positions", "sideways"),
        ("streams/root_token", 1),
        ("streams", None),
        ("trees", None),
        ("method", "lora"),
        ("trees/nodes", []),
        ("trees/nodes", [[0, 0, 1.0]] * 257),
        ("trees/nodes/1/0", 1),
        ("trees/nodes/1/0", -1),
        ("trees/nodes/3/1", 5),
        ("trees/nodes/3/1", 0),
        ("trees/nodes/1/2", 1.5),
        ("trees/nodes/2/2", 0.9),
        ("trees/nodes/1/2", "1"),
        ("trees/nodes/1", [0, 0]),
        ("trees/nodes/0/1", 3),
        ("trees/nodes", [[0, 0, 1], [0, 0, 0.5], [1, 0, 0.5], [2, 0, 0.5]]),
        ("trees/default_rows", 0),
        ("probe/input_ids/0", 257),
        ("probe/choices", [1]),
        ("probe/top_logits/0", 1e300),
        ("probe/top_logits/0", None),
        ("prompt_format/kind", "exec"),
        ("prompt_format/separator", 5),
        ("files", []),
        ("files/model.onnx", GONE),
        ("files/tokenizer.json", GONE),
        ("files/model.onnx", 5),
        ("files/model.onnx/bytes", -1),
        ("files/model.onnx/sha256", "z" * 64),
        ("opset", 10**9),
        ("weights_bytes", -5),
        ("tools", []),
        ("parity", 1),
        ("provider", 3),
        ("drafter", {"a": 1}),
    ],
)
def test_every_field_is_checked(path: str, value: Any) -> None:
    refused(bent(path, value))


@pytest.mark.parametrize(
    "name",
    [
        "../model.onnx",
        "/etc/passwd",
        "a/b",
        "a\\b",
        "..",
        ".",
        "",
        ".hidden",
        "C:evil",
        "manifest.json",
        "x\n",
        "x" * 300,
        "nul\0",
        "a b",
    ],
)
def test_file_names_stay_in_the_folder(name: str) -> None:
    data = json.loads(json.dumps(GOOD))
    data["files"][name] = {"sha256": "0" * 64, "bytes": 1}
    refused(data, "plain file name")
    with pytest.raises(BundleError):
        check_name(name)  # as `write_files.finish` does before it lists a file


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"a":' * 50_000,
        b'{"format_version": 1, "format_version": 1}',
        b'{"format_version": NaN}',
        b'{"format_version": 1e999}',
        b'{"format_version": ' + b"9" * 10_000 + b"}",
    ],
)
def test_what_is_no_json_object_is_refused(text: bytes) -> None:
    refused(text)


@pytest.mark.parametrize("value", ['"\\ud800"', "[" * 700 + "]" * 700, "NaN", "-Infinity", "1e999", '{"a": 1, "a": 1}'])
def test_what_json_could_not_hold_again_is_refused(value: str) -> None:
    text = manifest().to_json().replace('"parity": {', f'"parity": {{"x": {value}, ', 1)
    with pytest.raises(BundleError, match="manifest.json: "):
        Manifest.from_json(text)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "b", FILES, manifest())
    return tmp_path / "b"


def test_one_changed_byte_is_noticed(bundle: Path) -> None:
    (bundle / "model.onnx").write_bytes(b"grapH")
    with pytest.raises(BundleError, match="model.onnx has sha256"):
        verify_files(bundle)
    verify_files(bundle, hashes=False)


def test_weights_are_hashed_beside_what_opens_them_and_everything_else_before(bundle: Path) -> None:
    opened = []
    with verified(bundle, read_manifest(bundle)):
        opened.append("right")
    (bundle / "model.onnx.data").write_bytes(b"weightZ")
    for problem in (None, BundleError("found", "expected", "fix"), ValueError("no graph")):
        with pytest.raises(BundleError, match=r"model\.onnx\.data has sha256"), verified(bundle, read_manifest(bundle)):
            opened.append("weights")
            if problem is not None:
                raise problem
    with verified(bundle, read_manifest(bundle), hashes=False):
        opened.append("unasked")
    (bundle / "model.onnx").write_bytes(b"grapH")
    with pytest.raises(BundleError, match=r"model\.onnx has sha256"), verified(bundle, read_manifest(bundle)):
        opened.append("graph")
    (bundle / "model.onnx.data").write_bytes(b"")
    with pytest.raises(BundleError, match=r"model\.onnx\.data has 0 bytes"), verified(bundle, read_manifest(bundle)):
        opened.append("cut off")
    assert opened == ["right", *["weights"] * 3, "unasked"]


def test_weights_are_hashed_once_until_they_change(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed, weights, now = PassedChecks(tmp_path / "cache"), bundle / "model.onnx.data", time.time
    monkeypatch.setattr("streamspec.paths.SETTLED", 2.0)
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    hashed = list[str]()
    whole = files.sha256_file
    monkeypatch.setattr(files, "sha256_file", lambda path: hashed.append(path.name) or whole(path))
    for times in (1, 1, 2):
        with verified(bundle, read_manifest(bundle), passed=passed if times == 1 else None):
            pass
        assert hashed.count("model.onnx.data") == times and hashed.count("model.onnx") > times - 1
    when = weights.stat()
    weights.write_bytes(b"weightZ")
    os.utime(weights, ns=(when.st_atime_ns, when.st_mtime_ns))
    for _ in range(2):  # and what is wrong is never noted
        with pytest.raises(BundleError, match="sha256"), verified(bundle, read_manifest(bundle), passed=passed):
            pass
    with verified(bundle, read_manifest(bundle), hashes=False, passed=passed):
        pass
    with pytest.raises(BundleError, match="sha256"), verified(bundle, read_manifest(bundle), passed=passed):
        pass


def test_sizes_are_checked_before_hashes(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bundle / "tokenizer.json").write_text("{} ")
    monkeypatch.setattr("streamspec.bundle.files.sha256_file", lambda path: pytest.fail("hashed too early"))
    with pytest.raises(BundleError, match="tokenizer.json has 3 bytes; expected 2"):
        verify_files(bundle)


def test_missing_files_are_named(bundle: Path) -> None:
    (bundle / "model.onnx.data").unlink()
    with pytest.raises(BundleError, match=r"no model\.onnx\.data"):
        verify_files(bundle)
    with pytest.raises(BundleError, match=r"no manifest\.json"):
        read_manifest(bundle.parent)
    with pytest.raises(BundleError, match="no folder"):
        read_manifest(bundle / "README.md")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX")
def test_links_out_pipes_and_folders_are_refused(bundle: Path, tmp_path: Path) -> None:
    file = bundle / "model.onnx"
    (tmp_path / "outside").write_bytes(b"graph")
    for spoil in (
        lambda: os.symlink(tmp_path / "outside", file),
        lambda: os.symlink("model.onnx", file),
        lambda: os.mkfifo(file),
        lambda: os.symlink("/dev/zero", file),
        lambda: file.mkdir(),
    ):
        file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()
        spoil()
        with pytest.raises(BundleError, match=r"model\.onnx"):
            verify_files(bundle)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX")
def test_the_manifest_itself_may_be_no_link_out(bundle: Path, tmp_path: Path) -> None:
    os.rename(bundle / "manifest.json", tmp_path / "m.json")
    os.symlink(tmp_path / "m.json", bundle / "manifest.json")
    with pytest.raises(BundleError, match=r"manifest\.json"):
        read_manifest(bundle)


def test_a_huge_manifest_is_not_parsed(bundle: Path) -> None:
    with open(bundle / "manifest.json", "r+b") as file:
        file.truncate(1 << 33)
    with pytest.raises(BundleError, match="at most"):
        read_manifest(bundle)
