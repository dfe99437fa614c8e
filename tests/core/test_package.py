"""The package's public names, and that it is one package wherever one stands."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import streamspec

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


def test_a_sub_package_named_like_its_function_can_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("streamspec.bench")
    monkeypatch.setattr(module, "bench", lambda *args: args, raising=False)
    assert streamspec.bench("x", 1) == ("x", 1)
    from streamspec import bench

    assert bench("y") == ("y",) and bench is module


def test_the_lazy_names_are_those_announced() -> None:
    from streamspec.runtime import load

    assert streamspec.load is load
    for name in streamspec.__all__:
        pytest.importorskip("torch")
        assert name == "__version__" or callable(getattr(streamspec, name)), name
    assert set(dir(streamspec)) == set(streamspec.__all__)
    with pytest.raises(AttributeError, match="swop"):
        _ = streamspec.swop


def test_the_type_check_covers_every_public_name() -> None:
    smoke = (HERE / "public_api_smoke.py").read_text(encoding="utf-8")
    assert [name for name in streamspec.__all__ if name not in smoke] == []


def test_a_type_checker_is_told_of_the_names_that_are_looked_up() -> None:
    stub = ast.parse((ROOT / "streamspec" / "__init__.pyi").read_text(encoding="utf-8"))
    imported = {
        alias.asname: (node.module, alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == streamspec._LAZY


def uninstalled() -> dict[str, str]:
    """Environment of a Python that sees this environment's libraries but no installed streamspec (-S skips the .pth
    files of an editable installation).
    """
    libraries = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "PYTHONPATH": os.pathsep.join(libraries)
    }


def test_a_checkout_is_the_whole_package_without_an_installation() -> None:
    code = "import streamspec.runtime, streamspec.adapters, streamspec.export; print(streamspec.runtime.__file__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, env=uninstalled(), capture_output=True, text=True
    )
    assert done.stdout.strip() == str(ROOT / "runtime" / "__init__.py"), done.stderr
    command = [sys.executable, "-S", "-m", "streamspec", "--version"]
    done = subprocess.run(command, cwd=ROOT, env=uninstalled(), capture_output=True, text=True)
    assert done.stdout.strip() == streamspec.__version__, done.stderr


@pytest.mark.slow
def test_torchrun_starts_the_package_from_a_checkout() -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "streamspec", "--version"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert streamspec.__version__ in done.stdout, done.stderr
