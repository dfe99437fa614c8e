"""What a process opens that loads a bundle and answers: the bundle, the cache, Python and the system's libraries,
nothing else; no network, no programs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.attacks.test_graphs import place
from tests.support import traced
from tests.support.forging import edit, forge

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="folders and calls are those of Linux")
STRACE = shutil.which("strace")
CALLS = (
    "open,openat,openat2,creat,connect,bind,execve,execveat,unlink,unlinkat,rename,renameat,renameat2,symlink,"
    "symlinkat,link,linkat,truncate,mkdir,mkdirat,chmod,fchmodat"
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from tests.support.tiny_bundles import tiny_bundle

    return {kind: tiny_bundle(tmp_path_factory.mktemp(f"traced-{kind}"), kind=kind) for kind in ("raw", "chat")}


def graph(bundle: Path, **entries: str) -> None:
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    place(model, **entries)
    forge(bundle, "model.onnx", model.SerializeToString())


def link(bundle: Path, name: str, target: str) -> None:
    (bundle / name).unlink()
    (bundle / name).symlink_to(target)


def unlisted(bundle: Path) -> None:
    edit(bundle, lambda manifest: manifest["files"].pop("model.onnx.data"))
    shutil.copy(bundle / "model.onnx.data", bundle.parent / "outside")
    link(bundle, "model.onnx.data", str(bundle.parent / "outside"))


def template(text: str) -> Callable[[Path], None]:
    return lambda bundle: forge(bundle, "chat_template.jinja", text.encode())


VARIANTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a good bundle": ("raw", lambda bundle: None, "answered"),
    "a good chat bundle": ("chat", lambda bundle: None, "answered"),
    "weights in another folder": ("raw", lambda bundle: graph(bundle, location="../outside"), "refused"),
    "weights by an absolute path": ("raw", lambda bundle: graph(bundle, location="/etc/passwd"), "refused"),
    "weights that are a link": ("raw", lambda bundle: link(bundle, "model.onnx.data", "/etc/passwd"), "refused"),
    "weights that are a link and not listed": ("raw", unlisted, "refused"),
    "a tokenizer that is a link": ("raw", lambda bundle: link(bundle, "tokenizer.json", "/etc/passwd"), "refused"),
    "a manifest that is a link": ("raw", lambda bundle: link(bundle, "manifest.json", "/etc/passwd"), "refused"),
    "a manifest with a path": (
        "raw",
        lambda bundle: edit(bundle, lambda m: m["files"].update({"../outside": {"sha256": "0" * 64, "bytes": 0}})),
        "refused",
    ),
    "a template that includes": ("chat", template("{% include '/etc/passwd' %}"), "refused"),
    "a template that reads": (
        "chat",
        template("{{ cycler.__init__.__globals__.os.popen('cat /etc/passwd').read() }}"),
        "refused",
    ),
    "a tokenizer with a path": ("raw", lambda bundle: forge(bundle, "tokenizer.json", b'"/etc/passwd"'), "refused"),
    "a graph with a custom operator": (
        "raw",
        lambda bundle: forge(
            bundle, "model.onnx", (bundle / "model.onnx").read_bytes().replace(b"com.microsoft", b"com.micr0soft")
        ),
        "refused",
    ),
}


def run(bundle: Path, kind: str, before: list[str]) -> tuple[dict[str, Any], str]:
    cache = bundle.parent / "cache"
    cache.mkdir()
    command = [*before, sys.executable, "-B", traced.__file__, str(bundle), str(cache), kind]
    clean = {
        "PATH": os.environ["PATH"],
        "HOME": str(bundle.parent / "home"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),  # this checkout, whatever is installed
        "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=clean, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("name", VARIANTS)
def test_what_python_opens(name: str, originals: dict[str, Path], tmp_path: Path) -> None:
    kind, spoil, outcome = VARIANTS[name]
    bundle = Path(os.path.realpath(shutil.copytree(originals[kind], tmp_path / "bundle")))
    spoil(bundle)
    found, _ = run(bundle, kind, [])
    assert found["said"].startswith(outcome)
    assert found["bad"] == [] and found["opened"] > 100
    if outcome == "answered":
        assert {"manifest.json", "model.onnx", "tokenizer.json"} <= set(found["inside"])


@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
@pytest.mark.parametrize("name", VARIANTS)
def test_what_native_code_opens(name: str, originals: dict[str, Path], tmp_path: Path) -> None:
    kind, spoil, outcome = VARIANTS[name]
    bundle = Path(os.path.realpath(shutil.copytree(originals[kind], tmp_path / "bundle")))
    before = {file.name: file.read_bytes() for file in bundle.iterdir()}
    spoil(bundle)
    spoilt = {file.name for file in bundle.iterdir()}
    log = tmp_path / "strace"
    probe = subprocess.run([str(STRACE), "-f", "-o", str(log), "true"], capture_output=True)
    if probe.returncode:
        pytest.skip("this system does not let a process be traced")
    found, _ = run(bundle, kind, [str(STRACE), "-f", "-y", "-s", "4096", "-o", str(log), "-e", f"trace={CALLS},write"])
    assert found["said"].startswith(outcome)
    lines = log.read_text(errors="replace").splitlines()
    start = next(i for i, line in enumerate(lines) if "write(2" in line and "watching" in line)
    bad, data = [], 0
    for line in lines[start:]:
        call = re.match(r"\d+ +(\w+)\((.*)", line)
        if call is None or call[1] == "write":
            continue
        paths = re.findall(r'"((?:[^"\\]|\\.)*)"', call[2])
        data += any(path.endswith("model.onnx.data") for path in paths)
        if call[1] in ("connect", "bind", "execve", "execveat") or not all(
            traced.allowed(path, str(bundle), str(bundle.parent / "cache")) for path in paths
        ):
            bad.append(line[:300])
        if any(path.startswith(str(bundle)) for path in paths) and (
            call[1] not in ("open", "openat", "openat2") or "O_RDONLY" not in line
        ):
            bad.append(f"the bundle was written to: {line[:300]}")
    assert bad == []
    assert {file.name for file in bundle.iterdir()} == spoilt
    if outcome == "answered":
        assert data > 0, "the tracer saw nothing of the weights"
        assert {file.name: file.read_bytes() for file in bundle.iterdir()} == before
