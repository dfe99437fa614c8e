"""The folder for downloads, converted models and measurements, and where a user's folders are."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

from platformdirs import user_cache_dir

from streamspec.errors import ConfigError, StreamspecWarning


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
