"""Locks of the system, and the branch for Windows with its module played by a fake."""

from __future__ import annotations

import errno
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from streamspec import file_lock
from streamspec.file_lock import release, take

HOLD = "import sys; from pathlib import Path; from streamspec.file_lock import take; take(Path(sys.argv[1]));"


def test_one_holds_a_lock_and_it_goes_with_its_file(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    handle = take(lock)
    assert handle is not None and take(lock) is None
    release(handle, lock)
    assert not lock.exists()
    again = take(lock)
    assert again is not None
    release(again, lock)


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    command = [sys.executable, "-c", HOLD + "print(1, flush=True); input()", str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() and take(lock) is None
        other.kill()
    assert lock.exists()
    handle = take(lock)
    assert handle is not None
    release(handle, lock)


def test_a_lock_that_was_deleted_while_it_was_taken_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file would otherwise be made anew, and held by another at the same time."""
    lock, real = tmp_path / "lock", file_lock._lock

    def late(handle: int) -> None:
        real(handle)
        monkeypatch.setattr(file_lock, "_lock", real)
        lock.unlink()

    monkeypatch.setattr(file_lock, "_lock", late)
    handle = take(lock)
    assert handle is not None and os.path.samestat(os.fstat(handle), lock.stat()) and take(lock) is None
    release(handle, lock)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        take(tmp_path / "lock")
    assert not (tmp_path / "elsewhere").exists()


def test_windows_locks_the_first_byte_and_deletes_after_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[tuple[int, int, int]] = []

    def locking(handle: int, mode: int, count: int) -> None:
        if locked:
            raise OSError(errno.EACCES, "held")
        locked.append((handle, mode, count))

    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(LK_NBLCK=2, locking=locking))
    monkeypatch.setattr(sys, "platform", "win32")
    spec = importlib.util.spec_from_file_location("lock_of_windows", file_lock.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    handle = module.take(tmp_path / "lock")
    assert locked == [(handle, 2, 1)] and module.take(tmp_path / "lock") is None

    def unlink(path: Path) -> None:
        with pytest.raises(OSError):
            os.fstat(handle)  # closed before
        path.unlink()

    monkeypatch.setattr(module, "os", SimpleNamespace(close=os.close, unlink=unlink))
    module.release(handle, tmp_path / "lock")
    assert not (tmp_path / "lock").exists()
