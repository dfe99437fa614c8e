"""Writes files and folders whole or not at all, and hashes them.

A file is written in a temporary folder beside its target, flushed to disk and renamed. So is a folder; where it
replaces an older one, the older one is set aside first and put back if anything fails. A lock beside the temporary name
tells that its process lives: what one left that was killed is deleted by the next that writes the same target.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from streamspec.file_lock import held_if_any, release, take

LOCK = ".lock"
PATIENCE = 5.0  # seconds for another process to finish two renames


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
    """Yields the name of a temporary file, which replaces `path` on a clean exit and is deleted
    otherwise. It lies in a folder of its own, as libraries write temporary files into the folder of
    theirs."""
    target = Path(path)
    with _staged(target) as folder:
        folder.mkdir()
        temporary = folder / target.name
        try:
            yield temporary
            _sync_file(temporary)
            os.replace(temporary, target)
        finally:
            try:
                os.rmdir(folder)
            except OSError:  # it still holds what was not wanted
                delete(folder)
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
    with _staged(target) as staging:
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


@contextlib.contextmanager
def scratch_folder(beside: Path | None = None) -> Iterator[Path]:
    """Yields an empty folder `beside` a path, default: among the system's temporary files, for this user alone, and
    deletes it; also those of processes that were killed.
    """
    with _staged(beside or Path(tempfile.gettempdir(), "streamspec")) as folder:
        folder.mkdir(0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def recover(target: Path) -> None:
    """Finishes a replacement of the folder `target` that a power cut or a kill broke off: puts back what was set aside,
    or deletes it where the new folder is there.
    """
    previous, begun = _previous(target), _swap_lock(target).exists()
    if not previous.exists() and not begun:
        return
    with held_if_any(_swap_lock(target)) as alone:
        if alone and previous.exists():
            if not target.exists():
                os.rename(previous, target)
            elif begun:  # else a folder of somebody else's
                shutil.rmtree(previous, ignore_errors=True)


def sweep(folder: Path, name: str | None = None) -> None:
    """Deletes from `folder` what processes left that were killed while they wrote `name` there; None: anything, and
    finishes what they did not finish replacing. Their locks tell what is theirs: the same names without one stay.
    """
    written = "[^/]+" if name is None else re.escape(name)
    temporary = re.compile(rf"(\.{written}\.[0-9a-f]{{8}}\.tmp){re.escape(LOCK)}")
    with contextlib.suppress(OSError):  # a folder that cannot be listed, or a file system without locks: nothing goes
        for entry in os.listdir(folder):
            if (match := temporary.fullmatch(entry)) and (handle := take(folder / entry)) is not None:
                delete(folder / match[1])
                _unlock(handle, folder / match[1])
        for entry in os.listdir(folder) if name is None else ():
            if set_aside := re.fullmatch(rf"\.(.+)\.previous{re.escape(LOCK)}", entry):
                recover(folder / set_aside[1])


def remove_folder(path: Path) -> None:
    """Deletes a folder; from one moment to the next its name is gone. Raises OSError where it cannot be renamed."""
    recover(path)
    with _staged(path) as doomed:
        os.rename(path, doomed)
        sync_folder(path.parent)
        delete(doomed)


def delete(path: Path) -> None:
    """Deletes a file or a folder as far as it can be; a link, not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


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
    with held_if_any(_swap_lock(target), PATIENCE) as alone:
        if not alone:
            raise FileExistsError(f"another process replaces {target} right now")
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


def _swap_lock(target: Path) -> Path:
    return target.parent / f".{target.name}.previous{LOCK}"


def _sync_file(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """Yields an unused name beside `target`, locked for this process; deletes those of processes that were killed."""
    sweep(target.parent, target.name)
    handle = None
    with contextlib.suppress(OSError):  # a folder that is not writable says so when the file is written
        while handle is None:  # another process may sweep the lock before it is held
            temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
            handle = take(_lock_of(temporary))
    try:
        yield temporary
    finally:
        if handle is not None:
            _unlock(handle, temporary)


def _lock_of(temporary: Path) -> Path:
    return temporary.with_name(temporary.name + LOCK)


def _unlock(handle: int, temporary: Path) -> None:
    """Gives up the lock of a temporary name; it stays beside what could not be deleted, for the next to try."""
    if os.path.lexists(temporary):
        os.close(handle)
    else:
        release(handle, _lock_of(temporary))
