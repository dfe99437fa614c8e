"""The folder for downloads, converted models and measurements; notes in it of checks that passed; where a user's
folders are, and the nearest folder that exists."""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from platformdirs import user_cache_dir

from streamspec.errors import ConfigError, StreamspecWarning

# Seconds after which a file that changes again gets another time, on any file system; a quarter of them where times are
# finer than seconds, which then move on at least a hundred times a second.
SETTLED = 2.0


def cache_dir() -> Path:
    """Returns the root of everything kept between runs: the folder `STREAMSPEC_CACHE`, else the
    user's cache folder. Raises ConfigError for a user without a home folder."""
    return user_folder("STREAMSPEC_CACHE", lambda: user_cache_dir("streamspec"), "cache")


def user_folder(variable: str, default: Callable[[], str], what: str) -> Path:
    """Returns the folder that `variable` names, else the user's. Raises ConfigError for a user without a home folder,
    as in containers that run as any user."""
    try:
        return Path(os.environ.get(variable) or default()).expanduser()
    except RuntimeError:  # of pathlib, and of newer versions of platformdirs
        found = f"a user with no home folder, so no {what}"
        raise ConfigError(found, f"{variable} or HOME", f"set {variable} to a folder") from None


def cache_dir_if_any() -> Path | None:
    """Returns `cache_dir`, or None with a warning: measurements can be made anew without a cache."""
    try:
        return cache_dir()
    except ConfigError as error:
        warnings.warn(f"{error.found}: measurements are not kept; {error.fix}", StreamspecWarning, stacklevel=2)
        return None


def file_state(path: Path) -> tuple[int, ...] | None:
    """Returns what changes with a file's content: device, inode, size, times in ns; None where it changed so lately
    that another change might keep its times. Raises OSError."""
    info = path.stat()
    fine = info.st_mtime_ns % 10**9 and info.st_ctime_ns % 10**9
    if time.time() - max(info.st_mtime, info.st_ctime) < (SETTLED / 4 if fine else SETTLED):
        return None
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


class PassedChecks:
    """Checks that passed in an earlier process, noted in `folder`, by default the user's cache, so that they need not
    be repeated. A note is an empty file, named by a hash of all that the check rested on. Where there is no folder, or
    it cannot be written, every check is repeated."""

    def __init__(self, folder: str | Path | None = None) -> None:
        try:
            self._folder: Path | None = Path(folder or cache_dir()).absolute() / "passed"
        except ConfigError:
            self._folder = None

    def __contains__(self, rests_on: object) -> bool:
        """`rests_on`: all that decides whether the check passes, with a `repr` of its own for every value."""
        return self._folder is not None and os.path.exists(
            self._note(self._folder, rests_on)
        )  # False if none may enter

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


def nearest_existing(path: Path) -> Path:
    """Finds the path itself where it exists, else the nearest of its folders that does."""
    return next((place for place in (path, *path.absolute().parents) if os.path.exists(place)), path)
