"""What the runtime does not do to the program it is part of.

Each test runs a whole life of sessions in a process of its own, watched from inside (audit hooks) or from outside
(strace).
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamspec.runtime.engine.executor import graph_failed
from streamspec.runtime.hardware import cpu

Bundles = Callable[[str], Path]

LIFE = """
import threading
from streamspec.runtime import Sampling, load
session = load(chat, threads=2, tree=4, cache_dir=cache)
session.generate([5, 6, 7], max_new_tokens=8)
session.generate([5, 6, 7], max_new_tokens=8, sampling=Sampling(temperature=1.0, seed=1))
session.chat("hello", max_new_tokens=8)
other = session.another()
running = other.stream("hello", max_new_tokens=8).start()
session.chat("and more", max_new_tokens=4)
running.result()
stream = session.stream("hello", max_new_tokens=50)
next(stream)
session.cancel()
list(stream)
session.save(cache + "/kept")
session.restore(cache + "/kept")
session.unload()
session.chat("again", max_new_tokens=4, timeout=60)
# measures this machine, asks for every provider, falls asleep
measured = load(plain, threads=1, cache_dir=cache, idle=0.05)
measured.generate([5, 6, 7], max_new_tokens=4)
many = load(swappable, threads=1, tree=4, cache_dir=cache, adapter="one")
for adapter in ("two", None, "one"):
    many.swap(adapter)
    many.generate([5, 6, 7], max_new_tokens=4)
for each in (session, other, measured, many):
    each.close()
"""

HOOK = """
import json, os, sys
import numpy  # sets and unsets a variable of its own
seen = []
def watch(event, arguments):
    if event in WATCHED:
        seen.append([event, *(str(a) if not isinstance(a, bytes) else a.decode(errors="replace") for a in arguments)])
sys.addaudithook(watch)
"""

SILENT = (
    "socket.__new__",
    "socket.connect",
    "socket.bind",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "socket.sendto",
    "subprocess.Popen",
    "os.system",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.exec",
    "os.spawn",
    "os.startfile",
    "pty.spawn",
    "os.putenv",
    "os.unsetenv",
    "urllib.Request",
    "http.client.connect",
    "webbrowser.open",
    "ftplib.connect",
    "smtplib.connect",
    "os.kill",
    "signal.pthread_kill",
    "sys.setprofile",
    "sys.settrace",
    "os.chdir",
    "os.chmod",
    "os.chown",
    "shutil.rmtree",
)
WRITING = (
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.utime",
    "tempfile.mkstemp",
    "tempfile.mkdtemp",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, bundles: Bundles) -> dict[str, str]:
    """A chat bundle, one of int8, one of two adapters."""
    from streamspec.export.swappable_bundle import export_swappable
    from tests.support.tiny_bundles import tiny_adapter, tiny_base

    folder = tmp_path_factory.mktemp("swappable")
    base = tiny_base(folder / "base")
    adapters = {name: tiny_adapter(folder / name, base) for name in ("one", "two")}
    export_swappable(base, list(adapters.values()), folder / "bundle", "fp32", progress=lambda line: None)
    return {"chat": str(bundles("chat")), "plain": str(bundles("int8")), "swappable": str(folder / "bundle")}


def live(
    folders: dict[str, str],
    tmp_path: Path,
    before: str = "",
    after: str = "",
    life: str = LIFE,
    wrapped: tuple[str, ...] = (),
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Runs `life` between two pieces of code, in a process that has a home and a cache of its own and byte code already
    compiled.
    """
    cache, home = tmp_path / "cache", tmp_path / "home"
    cache.mkdir(exist_ok=True)
    home.mkdir(exist_ok=True)
    names = "".join(f"{name} = {value!r}\n" for name, value in {**folders, "cache": str(cache)}.items())
    known = {k: v for k, v in os.environ.items() if k not in ("ORT_DISABLE_TELEMETRY", "STREAMSPEC_CACHE")}
    known |= {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(home),
    }
    out = subprocess.run(
        [*wrapped, sys.executable, "-c", before + names + life + after],
        capture_output=True,
        text=True,
        env=known | environment,
        cwd=home,
        timeout=300,
        check=False,
    )
    assert out.returncode == 0, out.stderr[-3000:]
    return out


def events(names: tuple[str, ...], folders: dict[str, str], tmp_path: Path, life: str = LIFE) -> list[list[Any]]:
    report = tmp_path / "events.json"
    after = f"\nfound = list(seen)\nopen({str(report)!r}, 'w').write(json.dumps(found))\n"
    live(folders, tmp_path, f"WATCHED = {names!r}\n" + HOOK, after, life)
    return list(json.loads(report.read_text()))


def test_no_socket_no_process_no_environment(folders: dict[str, str], tmp_path: Path) -> None:
    found = events(SILENT, folders, tmp_path)
    assert [event for event in found if event[:2] != ["os.putenv", "ORT_DISABLE_TELEMETRY"]] == []
    assert len(found) == 1  # the one documented


def test_the_watch_would_see_them(folders: dict[str, str], tmp_path: Path) -> None:
    life = (
        "import socket, subprocess, os, sys\nsocket.socket().close()\nsubprocess.run([sys.executable, '-c', "
        "''])\nos.environ['X'] = 'y'\nopen('mine', 'w').close()\n"
    )
    assert {event[0] for event in events((*SILENT, *WRITING), folders, tmp_path, life)} >= {
        "socket.__new__",
        "subprocess.Popen",
        "os.putenv",
        "open",
    }


def test_files_are_written_in_the_cache_folder_only(folders: dict[str, str], tmp_path: Path) -> None:
    cache, home = tmp_path / "cache", tmp_path / "home"
    before = {bundle: contents(Path(bundle)) for bundle in folders.values()}
    written = []
    for event, path, *rest in events(WRITING, folders, tmp_path):
        if event == "open" and not writes(rest[0], rest[1]):
            continue
        written.append((event, path))
    assert written and all(Path(path).is_relative_to(cache) for event, path in written if not path.isdigit()), written
    assert list(home.iterdir()) == []
    assert {bundle: contents(Path(bundle)) for bundle in folders.values()} == before


def writes(mode: str, flags: str) -> bool:
    return (
        any(letter in mode for letter in "wax+")
        if mode != "None"
        else bool(int(flags) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    )


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(file.relative_to(folder)): (file.stat().st_size, file.stat().st_mtime_ns) for file in folder.rglob("*")}


def test_nothing_is_printed(folders: dict[str, str], tmp_path: Path) -> None:
    out = live(folders, tmp_path)  # file descriptors 1 and 2, whoever writes to them
    assert (out.stdout, out.stderr) == ("", "")


def test_errors_print_nothing_either(folders: dict[str, str], tmp_path: Path) -> None:
    life = """
from streamspec.errors import StreamspecError
from streamspec.runtime import load
def refused(call):
    try: call()
    except StreamspecError: return
    raise SystemExit("not refused")
refused(lambda: load(cache))
refused(lambda: load(plain, provider="cuda"))
refused(lambda: load(plain, memory=1000))
session = load(plain, threads=1, tree=4, cache_dir=cache)
refused(lambda: session.generate([10 ** 9]))
refused(lambda: session.generate([5] * 100_000))
running = session.stream([5, 6], max_new_tokens=9).start()
running.cancel()
running.result()
"""
    out = live(folders, tmp_path, life=life)
    assert (out.stdout, out.stderr) == ("", "")


def test_no_signal_handler_no_thread_no_torch_no_changed_setting(folders: dict[str, str], tmp_path: Path) -> None:
    before = """
import locale, os, signal, sys, threading, warnings
import numpy, onnxruntime, tokenizers  # they set filters of warnings of their own
def settings():
    handlers = {s: signal.getsignal(s) for s in signal.Signals}
    import logging
    log = logging.getLogger()
    process = (dict(os.environ), sys.path[:], os.getcwd(), locale.setlocale(locale.LC_ALL), sys.stdout, sys.stderr)
    hooks = (handlers, sys.excepthook, threading.excepthook, warnings.filters[:], log.handlers[:], log.level)
    return process, hooks, sys.getrecursionlimit(), sys.getswitchinterval()
was = settings()
"""
    after = """
import time
end = time.monotonic() + 5
while threading.active_count() > 1 and time.monotonic() < end:
    time.sleep(0.01)
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
now = settings()
for old, new in zip(was, now):
    assert old == new, (old, new)
heavy = {"torch", "transformers", "peft", "onnx", "requests", "urllib3", "socketserver"} & set(sys.modules)
assert not heavy, heavy
"""
    live(folders, tmp_path, "import os\nos.environ['ORT_DISABLE_TELEMETRY'] = '1'\n" + before, after)


def test_a_telemetry_setting_of_the_user_stays(folders: dict[str, str], tmp_path: Path) -> None:
    live(
        folders,
        tmp_path,
        after="\nimport os\nassert os.environ['ORT_DISABLE_TELEMETRY'] == '0'\n",
        life="import streamspec.runtime\n",
        ORT_DISABLE_TELEMETRY="0",
    )


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("strace") is None, reason="no strace here")
def test_no_system_call_reaches_for_the_network_or_starts_a_program(folders: dict[str, str], tmp_path: Path) -> None:
    """ONNX Runtime's own threads too, which no audit hook sees."""
    log = tmp_path / "calls"
    wrapped = ("strace", "-f", "-qq", "-e", "trace=network,execve,fork,vfork,kill,tkill", "-o", str(log))
    try:
        live(folders, tmp_path, wrapped=wrapped)
    except AssertionError as error:
        if "ptrace" in str(error):
            pytest.skip("strace may not trace here")
        raise
    calls = [match[1] for line in log.read_text().splitlines() if (match := re.search(r"^\d+\s+(\w+)\(", line))]
    assert calls[0] == "execve", calls[:3]  # the interpreter
    assert calls[1:] == []


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("strace") is None, reason="no strace here")
def test_no_system_call_writes_outside_the_cache(folders: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "calls"
    wrapped = (
        "strace",
        "-f",
        "-qq",
        "-e",
        "trace=open,openat,creat,rename,renameat,renameat2,mkdir,mkdirat,unlink,unlinkat,link,symlink",
        "-o",
        str(log),
    )
    live(folders, tmp_path, wrapped=wrapped)
    outside = []
    for line in log.read_text().splitlines():
        call = re.search(r"^\d+\s+(\w+)\((.*)", line)
        if call is None or (call[1].startswith("open") and not re.search(r"O_WRONLY|O_RDWR|O_CREAT", call[2])):
            continue
        path = re.search(r'"([^"]*)"', call[2])
        if path is None or not (
            Path(path[1]).is_relative_to(tmp_path / "cache") or path[1].startswith(("/dev/", "/proc/self"))
        ):
            outside.append(line)
    assert outside == []


# ---- threads


def test_a_core_gets_one_thread_by_default(bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from streamspec.runtime import load

    monkeypatch.setattr("streamspec.runtime.engine.loaded_model.physical_cores", lambda: 3)
    monkeypatch.setattr("streamspec.runtime.tuning.select_provider.physical_cores", lambda: 3)
    assert load(bundles("fp32"), tree="plain", cache_dir=tmp_path).runner.threads == 3  # type: ignore[attr-defined]
    assert load(bundles("fp32"), tree="plain", threads=2, cache_dir=tmp_path).runner.threads == 2  # type: ignore[attr-defined]


def test_second_threads_of_a_core_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [
        f"processor: {i}\nphysical id: {i // 8}\ncore id: {i // 2 % 4}\n" for i in range(16)
    ]  # two processors of four cores, twice each
    (tmp_path / "cpuinfo").write_text("\n".join(blocks))
    monkeypatch.setattr(cpu, "_CPUINFO", tmp_path / "cpuinfo")
    for usable, cores in ((range(16), 8), ((0, 1, 8, 9), 2), ((0, 2, 4), 3)):  # that this process may use
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, usable=usable: set(usable))
        assert cpu.physical_cores() == cores


@pytest.mark.parametrize(
    ("listed", "usable", "cores"),
    [
        ([(0, 1), (0, 5)], {1, 5}, 2),
        ([(0, 0), (0, 1), (0, 0), (0, 1)], {8, 9, 24, 25}, 2),
        ([(0, 0), (0, 1), (0, 2), (0, 3)], {3}, 1),
        ([(0, 0), (0, 1)], set(range(32)), 2),
    ],
)
def test_processors_that_a_container_numbers_anew_are_counted(
    listed: list[tuple[int, int]], usable: set[int], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [f"processor: {i}\nphysical id: {chip}\ncore id: {core}\n" for i, (chip, core) in enumerate(listed)]
    (tmp_path / "cpuinfo").write_text("\n".join(blocks))
    monkeypatch.setattr(cpu, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: usable)
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    assert cpu.physical_cores() == cores


def test_windows_tells_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = b"".join(struct.pack("<II40x", 0, 48) for _ in range(8))

    def tell(kind: int, data: Any, size: Any) -> bool:
        size._obj.value, room = len(records), data is not None
        if room:
            ctypes.memmove(data, records, len(records))
        return room

    monkeypatch.setattr(cpu, "_CPUINFO", tmp_path / "none")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    kernel = SimpleNamespace(GetLogicalProcessorInformationEx=tell)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel), raising=False)
    assert cpu.physical_cores() == 8


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("[ONNXRuntimeError] : 1 : FAIL : Non-zero status code; Message: std::bad_alloc"), "memory"),
        (RuntimeError("Failed to allocate memory for requested buffer of size 1"), "memory"),
        (MemoryError(), "memory"),
        (RuntimeError("[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : a shape"), "bundle"),
    ],
)
def test_a_call_without_memory_is_no_fault_of_the_bundle(error: Exception, code: str) -> None:
    assert graph_failed(error).code == code
