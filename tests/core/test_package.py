"""The package's public names, and that it is one package wherever one stands."""

from __future__ import annotations

import ast
import importlib
import os
import pickle
import subprocess
import sys
from base64 import b64decode
from json import loads
from pathlib import Path
from typing import Any

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


def objects_pickled_by_0_1() -> dict[str, Any]:
    from streamspec.bundle import manifest
    from streamspec.bundle.model_section import ModelInfo
    from streamspec.errors import BundleError
    from streamspec.prompt.prompt_format import PromptFormat
    from streamspec.runtime import Chunk, Completion, Grammar, Logprob, Pruning, Sampling, Stats
    from streamspec.serve import Limits

    stats = Stats(prompt_tokens=3, new_tokens=2, steps=1, step_tokens=2, speculation="on")
    described = manifest.Manifest(
        manifest.BaseInfo("base", "a" * 64, "llama"),
        "streaming",
        "int8",
        ModelInfo(2, 1, 4, 16, 8, 32, (2,), 1),
        PromptFormat("raw", "\n"),
        manifest.DrafterInfo(2, 1),
        manifest.DraftTreeInfo(((-1, 0, 1.0), (0, 0, 0.5)), 2),
        drafter="streaming",
        swappable=manifest.SwappableCapacity((1,)),
        format_version=4,
    )
    return {
        "Manifest": described,
        "Sampling": Sampling(0.7, top_p=0.9, seed=1),
        "Grammar": Grammar.choice(["yes", "no"]),
        "Pruning": Pruning(4, 0.25),
        "Logprob": Logprob(5, -0.5, ((5, -0.5),)),
        "Stats": stats,
        "Chunk": Chunk("a", [1], [True], None, stats),
        "Completion": Completion("ab", [1, 2], "stop", stats, [True, False]),
        "Limits": Limits(sessions=2),
        "BundleError": BundleError("a", "b", "c"),
    }


def test_pickles_made_by_0_1_load() -> None:
    for module in ("onnx", "torch", "llguidance", "starlette"):
        pytest.importorskip(module)
    expected = objects_pickled_by_0_1()
    stored = loads((HERE / "pickles_0_1.json").read_text(encoding="utf-8"))
    assert set(stored) == set(expected)
    for name, text in stored.items():
        loaded = pickle.loads(b64decode(text))
        assert type(loaded) is type(expected[name]) and repr(loaded) == repr(expected[name]), name


def test_a_pickle_made_by_0_1_loads_in_a_program_that_has_imported_nothing() -> None:
    text = loads((HERE / "pickles_0_1.json").read_text(encoding="utf-8"))["Sampling"]
    code = f"import base64, pickle; print(pickle.loads(base64.b64decode({text!r})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "temperature=0.7" in done.stdout, done.stderr


def test_the_module_of_the_memory_estimate_keeps_its_documented_name() -> None:
    from streamspec.runtime import estimate_memory
    from streamspec.runtime.memory import estimate

    assert estimate is estimate_memory is streamspec.estimate_memory


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
