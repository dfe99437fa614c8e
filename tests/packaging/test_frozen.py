"""The example frozen by PyInstaller with a bundle beside it, in an environment that knows no Python: driven with keys
and the mouse, it answers as `Session.chat` does.

Nothing heavy is in its folder, though all of it is installed where it was frozen, and it opens no socket but the
display's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamspec.runtime import load
from streamspec.runtime.hardware import native_library
from tests.packaging.conftest import APP, ROOT, module

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="driven through an X server")]
MESSAGES = ("hello", "how are you")
HEAVY = (
    "torch",
    "transformers",
    "peft",
    "onnx",
    "matplotlib",
    "scipy",
    "sympy",
    "hypothesis",
    "pytest",
    "rich",
    "typer",
)


@pytest.fixture(scope="session")
def folder(site: Path, chat_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("PyInstaller", reason="pyinstaller is not installed")
    pytest.importorskip("tkinter", reason="this Python has no tkinter")
    made = tmp_path_factory.mktemp("frozen")
    folders = [word for name in ("dist", "work", "spec") for word in (f"--{name}path", str(made / name))]
    command = [sys.executable, "-m", "PyInstaller", "--windowed", "--noconfirm", "--log-level", "WARN", *folders]
    command += [
        "--add-data",
        f"{chat_bundle}:bundle",
        "--runtime-hook",
        str(ROOT / "tests" / "support" / "witness.py"),
        str(APP),
    ]
    done = subprocess.run(command, cwd=made, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made / "dist" / "chat"


class Hand:
    """Keys and clicks into one window, as a user makes them."""

    def __init__(self, display: str, title: str) -> None:
        import tkinter

        self._environment = os.environ | {"DISPLAY": display}
        self._tk = tkinter.Tk(screenName=display)  # reads the clipboard
        self._tk.withdraw()
        self.window = wait(lambda: self._do("search", "--onlyvisible", "--name", title).split())[0]
        self._do("windowfocus", "--sync", self.window)

    def _do(self, *words: str) -> str:
        return subprocess.run(
            ["xdotool", *words], env=self._environment, capture_output=True, text=True, timeout=20
        ).stdout

    def enter(self, text: str) -> None:
        self._do("mousemove", "--window", self.window, "300", "560", "click", "1", "type", "--delay", "5", text)
        self._do("key", "Return")

    def copied(self) -> str:
        """Selects all of the conversation, copies it, and reads the clipboard."""
        self._do("mousemove", "--window", self.window, "300", "250", "click", "1", "key", "ctrl+a", "key", "ctrl+c")
        time.sleep(0.1)
        try:
            return str(self._tk.clipboard_get())
        except Exception:  # nothing was selected yet
            return ""

    def leave(self) -> None:
        self._do("key", "ctrl+q")
        self._tk.destroy()


def wait(reached: Callable[[], Any], seconds: float = 30) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := reached()):
        assert time.monotonic() < deadline, "nothing came of it"
        time.sleep(0.1)
    return found


@pytest.fixture(scope="session")
def telemetry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the application, through witness.py, writes the variable's value."""
    return tmp_path_factory.mktemp("witness") / "telemetry"


@pytest.fixture(scope="session")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """Where a tracer writes the sockets that the application asks for; None where there is no tracer, or it may not
    trace.
    """
    log = tmp_path_factory.mktemp("trace") / "sockets"
    works = (
        shutil.which("strace")
        and subprocess.run(["strace", "-o", str(log), "true"], capture_output=True).returncode == 0
    )
    return log if works else None


@pytest.fixture(scope="session")
def said(
    folder: Path,
    chat_bundle: Path,
    display: str,
    sockets: Path | None,
    telemetry: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, str]]:
    """(what the window shows after two turns, what the session says to them)."""
    if not shutil.which("xdotool"):
        pytest.skip("xdotool is not installed")
    home = tmp_path_factory.mktemp("home")
    traced = ["strace", "-f", "-qq", "-e", "trace=socket", "-o", str(sockets)] if sockets else []
    environment = {"DISPLAY": display, "HOME": str(home), "WITNESS": str(telemetry)}
    application = subprocess.Popen([*traced, str(folder / "chat")], env=environment, start_new_session=True)
    try:
        hand = Hand(display, "^bundle - streamspec chat$")  # its title once the bundle is loaded
        session, expected = load(chat_bundle, threads=1, cache_dir=home), ""
        shown = ""
        for message in MESSAGES:
            hand.enter(message)
            expected += f"{message}\n{session.chat(message, max_new_tokens=512).text}\n"
            deadline = time.monotonic() + 20
            while shown != expected and time.monotonic() < deadline:
                shown = hand.copied()
        hand.leave()
        assert application.wait(10) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(application.pid, signal.SIGKILL)  # the tracer and what it traces
    yield shown, expected


def test_it_answers_keys_as_the_session_does(said: tuple[str, str]) -> None:
    shown, expected = said
    assert shown == expected and len(expected) > 50


def test_it_opens_no_network_socket(said: tuple[str, str], sockets: Path | None) -> None:
    if sockets is None:
        pytest.skip("strace is not installed, or may not trace here")
    asked = [line for line in sockets.read_text().splitlines() if "socket(" in line]
    assert asked and all("socket(AF_UNIX," in line for line in asked)  # the display's is one


def test_telemetry_is_off_before_onnxruntime_starts(said: tuple[str, str], telemetry: Path) -> None:
    assert telemetry.read_text() == "1"


def test_grammars_work_frozen(folder: Path) -> None:
    pytest.importorskip("llguidance")
    done = subprocess.run([folder / "chat"], env={"GRAMMAR": "1"}, capture_output=True, text=True)
    assert done.stdout == "choice\n", done.stderr


def test_nothing_heavy_was_dragged_in(folder: Path) -> None:
    from PyInstaller.archive.readers import CArchiveReader

    modules = CArchiveReader(str(folder / "chat")).open_embedded_archive("PYZ.pyz").toc
    names = {name.split(".")[0] for name in modules} | {
        path.name.split("-")[0] for path in (folder / "_internal").iterdir()
    }
    assert "onnxruntime" in names and not names & set(HEAVY)
    assert not [
        name
        for name in modules
        if name.startswith(("onnxruntime.transformers", "onnxruntime.quantization", "onnxruntime.tools"))
    ]
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in files) < 250e6


def test_of_streamspec_it_holds_core_and_runtime_alone(folder: Path) -> None:
    shipped = module(ROOT / "benchmarks" / "shipped.py")
    modules = shipped.frozen(folder)
    parts = {name.split(".")[1] for name in modules if name.count(".") > 1}
    assert "streamspec.runtime.session" in modules and parts - {shipped.GRAMMARS} == set(shipped.RUNTIME)
    data = [path.name for path in (folder / "_internal" / "streamspec").glob("*")]
    assert set(data) <= {native_library.NAME}  # no data of the page or the demo
    sizes = [size for name, size in modules.items() if not name.startswith(f"streamspec.{shipped.GRAMMARS}")]
    assert sum(sizes) < 765_000  # bytecode, with its docstrings; each module costs some 500 bytes
