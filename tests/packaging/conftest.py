"""A tiny chat bundle, a virtual display, and the wheel unpacked as pip would lay it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
APP = ROOT / "examples" / "desktop" / "chat.py"


def module(path: Path) -> ModuleType:
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    made = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="session")
def chat_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny_bundles import tiny_bundle

    return tiny_bundle(tmp_path_factory.mktemp("chat"), kind="chat")


@pytest.fixture(scope="session")
def display() -> Iterator[str]:
    """Name of a virtual display of its own, which nothing outside this machine reaches."""
    pytest.importorskip("tkinter", reason="this Python has no tkinter")
    if not shutil.which("Xvfb"):
        pytest.skip("Xvfb is not installed (Debian: xvfb)")
    read, write = os.pipe()
    command = ["Xvfb", "-displayfd", str(write), "-screen", "0", "900x700x24", "-nolisten", "tcp"]
    server = subprocess.Popen(command, pass_fds=[write], stderr=subprocess.DEVNULL)
    os.close(write)
    with os.fdopen(read) as answer:
        number = answer.readline().strip()  # empty where it died
    assert number, "Xvfb did not start"
    yield f":{number}"
    server.terminate()
    server.wait()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built: Path = module(ROOT / "benchmarks" / "shipped.py").build_wheel(tmp_path_factory.mktemp("wheel"))
    return built


@pytest.fixture(scope="session")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with streamspec as installed from the wheel: before an editable install, which
    PyInstaller cannot follow.
    """
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder
