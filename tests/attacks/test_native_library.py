"""Of libraries of native operators, only the one beside the package is loaded, whatever a bundle, the working folder or
the environment offers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from streamspec.runtime.hardware import native_library

# The libraries of this name that Python opens, and those that ONNX Runtime is given.
WATCH = """
import json, os, sys
import onnxruntime as ort
seen, register = [], ort.SessionOptions.register_custom_ops_library
def given(options, path):
    seen.append(str(path))
    return register(options, path)
ort.SessionOptions.register_custom_ops_library = given
sys.addaudithook(lambda event, a: seen.append(str(a[0])) if event == "ctypes.dlopen" and a[0] else None)
from streamspec.runtime import load
load(sys.argv[1], threads=1, cache_dir=sys.argv[2]).generate("hello", max_new_tokens=4)
print(json.dumps(sorted({path for path in seen if "streamspec" in os.path.basename(path)})))
"""


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[..., list[str]]:
    """Loads a bundle from a working folder that has a library of the name too, as the bundle has."""
    from tests.support.tiny_bundles import tiny_bundle

    bundle = tiny_bundle(tmp_path / "bundle", "int8")
    (bundle / native_library.NAME).write_bytes(b"not to be opened")

    def run(**environment: str) -> list[str]:
        folders = {name: str(bundle) for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "STREAMSPEC_LIBRARY")}
        done = subprocess.run(
            [sys.executable, "-c", WATCH, str(bundle), str(tmp_path / "cache")],
            env={**os.environ, **folders, "STREAMSPEC_NATIVE": "", **environment},
            cwd=bundle,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found: list[str] = json.loads(done.stdout)
        return found

    return run


def test_only_the_library_beside_the_package_is_loaded(loaded: Callable[..., list[str]]) -> None:
    there = [str(native_library.place())] if native_library.place().is_file() else []
    assert loaded() == there == [path for path in there if Path(path).parent.name == "streamspec"]


def test_turned_off_nothing_is_loaded(loaded: Callable[..., list[str]]) -> None:
    assert loaded(STREAMSPEC_NATIVE="0") == []
