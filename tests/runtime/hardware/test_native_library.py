"""The library of native operators is found beside the package, or its absence has a reason."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from streamspec.runtime.hardware import native_library as native

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAMSPEC_NATIVE", raising=False)


@pytest.fixture
def built() -> Path:
    """The library of this checkout."""
    if not native.place().is_file():
        pytest.skip("the native operators were not built here: no C++ compiler")
    return native.place()


def placed(monkeypatch: pytest.MonkeyPatch, path: Path) -> str:
    monkeypatch.setattr(native, "place", lambda: path)
    assert native.library() is None and native.kernels() == ""
    return native.why_not()


def test_onnxruntime_takes_what_is_found(built: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    assert native.why_not() == "" and native.library() == built == ROOT / "streamspec" / native.NAME
    assert native.kernels().isalnum()
    ort.SessionOptions().register_custom_ops_library(str(built))


def test_a_setting_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMSPEC_NATIVE", "0")
    assert placed(monkeypatch, native.place()) == "turned off by STREAMSPEC_NATIVE=0"


def test_a_library_that_was_not_built_is_a_line_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = placed(monkeypatch, tmp_path / native.NAME)
    assert said.startswith("not built; ") and said.endswith(" ./streamspec") and "\n" not in said  # no index has it


def test_a_file_that_is_no_library_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / native.NAME).write_bytes(b"no library\n" * 100)
    said = placed(monkeypatch, tmp_path / native.NAME)
    assert said.startswith("cannot be loaded (") and "\n" not in said


def test_a_library_of_something_else_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import _ctypes

    shutil.copy(str(_ctypes.__file__), tmp_path / native.NAME)
    assert placed(monkeypatch, tmp_path / native.NAME).startswith("cannot be loaded (")


def test_a_name_of_no_kernels_is_a_line_that_lists_those_here(built: Path) -> None:
    code = """
import onnxruntime
from streamspec.cli.doctor import about
from streamspec.runtime import doctor
from streamspec.runtime.hardware import native_library
found = native_library.find()
print(repr(found.kernels), found.why_not)
print(dict(about(doctor.machine()))["native operators"])
try:
    onnxruntime.SessionOptions().register_custom_ops_library(str(found.path))
except Exception as error:
    print(error)
"""
    environment = {**os.environ, "STREAMSPEC_KERNELS": "avx9\nx"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    said, shown, refused = done.stdout.splitlines()
    assert said.startswith("'' STREAMSPEC_KERNELS='avx9\\nx' names no kernels of this machine, which runs ")
    names = said.partition("runs ")[2].partition(";")[0].split(", ")
    assert names[-1] == "portable" and native.kernels() in names and "unset it" in said
    assert shown.startswith("no, bundles run the standard ones, slower: ") and shown.endswith(said[3:])
    assert refused.endswith(f"STREAMSPEC_KERNELS names none of {', '.join(names)}")


def test_in_a_checkout_a_library_of_older_sources_is_not_used(
    built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "streamspec").mkdir()
    copy = Path(os.path.realpath(shutil.copy(built, tmp_path / "streamspec" / native.NAME)))
    shutil.copytree(ROOT / "native", tmp_path / "native")
    with (tmp_path / "native" / "sources.cpp").open("a") as changed:
        changed.write("// changed\n")
    assert placed(monkeypatch, copy).startswith("built from other sources")


def test_an_installation_has_no_sources_to_compare_with(tmp_path: Path) -> None:
    assert native.sources(tmp_path / "native") == "" and len(native.sources(ROOT / "native")) == 64
