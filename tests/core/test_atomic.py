from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import pytest

from streamspec.atomic import sha256_file, write_bytes, write_text
from streamspec.errors import BundleError, StreamspecError


def test_text_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    write_text(file, "é")
    assert file.read_bytes() == "é".encode() and sha256_file(file) == hashlib.sha256("é".encode()).hexdigest()

    def failing(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("streamspec.atomic.os.replace", failing)
    with pytest.raises(KeyboardInterrupt):
        write_bytes(file, b"other")
    assert file.read_text() == "é" and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_files_get_ordinary_permissions(tmp_path: Path) -> None:
    write_text(tmp_path / "ours", "x")
    (tmp_path / "theirs").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "theirs").stat().st_mode


def test_errors_are_one_line_of_found_expected_fix() -> None:
    error = BundleError("model.onnx has 10 bytes", "12 bytes as the manifest says", "export the bundle again")
    assert str(error) == "model.onnx has 10 bytes; expected 12 bytes as the manifest says; export the bundle again"
    assert (error.code, error.exit_status, isinstance(error, StreamspecError)) == ("bundle", 2, True)
    assert str(BundleError("a\nb\x1b[31m", "c")) == "a b [31m; expected c"
    assert len(str(BundleError("x" * 10000))) < 1000
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_codes_are_stable_and_distinct() -> None:
    codes = {c.code for c in StreamspecError.__subclasses__()}
    assert codes == {
        "bundle",
        "adapter",
        "data",
        "context_overflow",
        "config",
        "provider",
        "base_model",
        "conversation",
        "memory",
    }
