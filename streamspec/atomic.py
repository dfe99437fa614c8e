"""Writes files and folders whole or not at all, and hashes them.

A file is written under a temporary name beside its target, flushed to disk and renamed. So is a folder; where it
replaces an older one, the older one is set aside first and put back if anything fails.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path


def sha256_file(path: str | Path) -> str:
    """Returns the sha256 of a file's content as 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: str | Path, text: str) -> None:
    """Writes UTF-8 text atomically; a failure leaves the previous file as it was."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, data: bytes) -> None:
    """Writes bytes atomically; a failure leaves the previous file as it was."""
    with new_file(path) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """Yields the name of a temporary file beside `path`; it replaces `path` on a clean exit, else it is deleted."""
    target = Path(path)
    temporary = _beside(target)
    try:
        yield temporary
        _sync_file(temporary)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(target.parent)


@contextlib.contextmanager
def new_folder(path: str | Path, check: Callable[[Path], None] | None = None) -> Iterator[Path]:
    """Yields an empty folder beside `path`; it replaces `path` on a clean exit, else it is deleted (Ctrl-C included).

    `check(folder)` runs after the body and before the swap: what it raises cancels the swap. The caller
    decides whether an existing folder may be replaced.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    recover(target)
    staging = _beside(target)
    staging.mkdir()
    try:
        yield staging
        if check is not None:
            check(staging)
        for file in staging.rglob("*"):
            if file.is_file():
                _sync_file(file)
        sync_folder(staging)
        _swap(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def recover(target: Path) -> None:
    """Restores a folder that a power cut left set aside between the two renames of a replacement."""
    previous = _previous(target)
    if previous.exists() and not target.exists():
        os.rename(previous, target)


def sync_folder(path: Path) -> None:
    """Flushes a folder's entries to disk where the system can."""
    with contextlib.suppress(OSError):  # Windows cannot open folders
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _swap(staging: Path, target: Path) -> None:
    previous = _previous(target)
    if not target.exists():
        os.rename(staging, target)
    else:
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(target, previous)
        try:
            os.rename(staging, target)
        except BaseException:
            os.rename(previous, target)
            raise
        shutil.rmtree(previous, ignore_errors=True)
    sync_folder(target.parent)


def _previous(target: Path) -> Path:
    return target.parent / f".{target.name}.previous"


def _sync_file(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _beside(target: Path) -> Path:
    """An unused name beside `target`."""
    return target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
