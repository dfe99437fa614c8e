"""setup.py: with a compiler the wheel holds the native operators, without one it is the wheel of any system; the source
distribution has all of their sources.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from streamspec.runtime.hardware import native_library
from tests.packaging.conftest import ROOT, module

COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cl.exe")
SOURCES = ("*.cpp", "*.h", "*.toml")


@pytest.fixture(scope="session")
def failing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment in which every compiler is a program that fails."""
    folder = tmp_path_factory.mktemp("compilers")
    for name in COMPILERS:
        (folder / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / name).chmod(0o755)
    named = {"CC": str(folder / "cc"), "CXX": str(folder / "c++"), "STREAMSPEC_NATIVE": ""}
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **named}


@pytest.fixture(scope="session")
def pure(failing: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as a machine without a compiler builds it."""
    built: Path = module(ROOT / "benchmarks" / "shipped.py").build_wheel(
        tmp_path_factory.mktemp("pure"), fresh=True, **failing
    )
    return built


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def setup(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", *words]
    return subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)


def test_without_a_compiler_the_wheel_is_for_any_system_and_holds_all_else(pure: Path, wheel: Path) -> None:
    assert pure.name.endswith("-py3-none-any.whl")
    library = f"streamspec/{native_library.NAME}"
    assert names(wheel) ^ names(pure) <= {library} and library not in names(pure)
    assert (
        "Root-Is-Purelib: true"
        in zipfile.ZipFile(pure).read(next(name for name in names(pure) if name.endswith("dist-info/WHEEL"))).decode()
    )


def test_with_a_library_the_wheel_is_for_this_system_and_any_python(wheel: Path) -> None:
    if not native_library.place().is_file():
        pytest.skip("the native operators were not built here: no C++ compiler")
    python, abi, system = wheel.stem.split("-")[-3:]
    assert (python, abi) == ("py3", "none") and system != "any"
    files = names(wheel)
    assert f"streamspec/{native_library.NAME}" in files
    assert not any(".data/" in name or "cpython" in name for name in files)


def test_without_a_compiler_an_installation_answers(pure: Path, chat_bundle: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(pure).extractall(tmp_path / "site")
    command = [sys.executable, "-m", "streamspec"]
    environment = {"PYTHONPATH": str(tmp_path / "site"), "HOME": str(tmp_path)}

    def say(*words: str) -> str:
        done = subprocess.run([*command, *words], env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert say("generate", str(chat_bundle), "--prompt", "hello", "--max-new-tokens", "5", "--rows", "1").strip()
    line = next(line for line in say("doctor").splitlines() if line.startswith("native operators: "))
    assert "no, " in line and "not built; with a C++17 compiler installed" in line


def test_a_failure_is_one_line_and_an_error_only_if_asked(failing: dict[str, str], tmp_path: Path) -> None:
    checkout = module(ROOT / "benchmarks" / "shipped.py").copy_checkout(tmp_path / "checkout", fresh=True)
    stale = checkout / "streamspec" / native_library.NAME
    stale.write_bytes(b"of older sources")
    asked = setup(checkout, "build_ext", "--inplace", **failing | {"STREAMSPEC_NATIVE": "1"})
    assert asked.returncode != 0 and asked.stderr.startswith("streamspec: the native operators were not built: native/")
    for environment, reason in ((failing, "non-zero exit status"), ({"STREAMSPEC_NATIVE": "0"}, "STREAMSPEC_NATIVE=0")):
        done = setup(checkout, "build_ext", "--inplace", **environment)
        [line] = done.stderr.splitlines()
        assert done.returncode == 0 and line.startswith("streamspec: no native operators") and reason in line
        assert not stale.exists()  # it is not of these sources


def test_the_source_distribution_builds_the_same_library(tmp_path: Path) -> None:
    """Of these very sources: that is what decides whether the library of the checkout is taken over."""
    checkout = module(ROOT / "benchmarks" / "shipped.py").copy_checkout(tmp_path / "checkout", fresh=True)
    done = setup(checkout, "sdist", "--dist-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    [archive] = tmp_path.glob("streamspec-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    [root] = (tmp_path / "unpacked").iterdir()
    ours, theirs = (
        {path.name for pattern in SOURCES for path in (one / "native").rglob(pattern)} for one in (ROOT, root)
    )
    assert "setup.py" in {path.name for path in root.iterdir()} and "kernels.toml" in ours == theirs
    assert native_library.sources(root / "native") == native_library.sources(ROOT / "native")
    if native_library.library() is None:
        return
    shutil.copy(native_library.place(), root / "streamspec")
    taken = setup(root, "build_ext", "--inplace", CXX="false", STREAMSPEC_NATIVE="1")
    assert taken.returncode == 0, taken.stderr
