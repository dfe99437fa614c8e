"""Locks between processes: the operating system's, which end with their process, however that ends."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


HELD = (errno.EACCES, errno.EAGAIN, errno.EDEADLK, errno.EWOULDBLOCK)  # how systems say that another has it


@contextmanager
def held(path: Path, patience: float = 0.0) -> Iterator[bool]:
    """Holds the lock `path` while the block runs; gives False where another process has it for `patience` seconds.
    Raises OSError as `take` does."""
    end = time.monotonic() + patience
    while (handle := take(path)) is None and time.monotonic() < end:
        time.sleep(0.01)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            release(handle, path)


@contextmanager
def held_if_any(path: Path, patience: float = 0.0) -> Iterator[bool]:
    """As `held`; where there are no locks, a process is as good as alone."""
    with ExitStack() as stack:
        try:
            alone = stack.enter_context(held(path, patience))
        except OSError:
            alone = True
        yield alone


def take(path: Path) -> int | None:
    """Creates and locks the file `path`, without waiting. Returns a handle for `release`, None where another has it.

    Raises OSError where the file cannot be made, or its file system has no locks.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            _lock(handle)
            if _is(handle, path):
                return handle
        except OSError as error:
            os.close(handle)
            if error.errno in HELD:
                return None
            os.unlink(path)  # no locks here, and nothing to find
            raise
        os.close(handle)  # deleted by the one who had it: nobody else sees this lock


def release(handle: int, path: Path) -> None:
    """Deletes and unlocks a file of `take`."""
    if sys.platform != "win32":  # first the name, so that nobody takes a file that is about to go
        with suppress(OSError):
            os.unlink(path)
    os.close(handle)
    if sys.platform == "win32":  # cannot delete open files, nor one that another has opened since
        with suppress(OSError):
            os.unlink(path)


def _is(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
