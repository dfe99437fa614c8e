"""Checks that passed in an earlier process, noted in the user's cache so that they need not be repeated.

A note is an empty file, named by a hash of all that the check rested on; it says nothing of what was checked."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from streamspec import paths
from streamspec.errors import ConfigError

SETTLED = 2.0  # seconds after which a file that changes again gets another time, on any file system


def file_state(path: Path) -> tuple[int, ...] | None:
    """Returns what changes with a file's content: device, inode, size, times in ns; None where it changed so lately
    that another change might keep its times. Raises OSError."""
    info = path.stat()
    if time.time() - max(info.st_mtime, info.st_ctime) < SETTLED:
        return None
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


class PassedChecks:
    """The notes in `folder`, by default the user's cache. Where there is none, or it cannot be written, every check is
    repeated."""

    def __init__(self, folder: str | Path | None = None) -> None:
        try:
            self._folder: Path | None = Path(folder or paths.cache_dir()) / "passed"
        except ConfigError:
            self._folder = None

    def __contains__(self, rests_on: object) -> bool:
        """`rests_on`: all that decides whether the check passes, with a `repr` of its own for every value."""
        return self._folder is not None and self._note(self._folder, rests_on).exists()

    def add(self, rests_on: object) -> None:
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._note(self._folder, rests_on).touch()
            except OSError:
                pass

    @staticmethod
    def _note(folder: Path, rests_on: object) -> Path:
        return folder / hashlib.sha256(repr(rests_on).encode()).hexdigest()[:40]
