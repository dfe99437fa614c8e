"""The folder for downloads, converted models and measurements."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from platformdirs import user_cache_dir

from streamspec.errors import ConfigError, StreamspecWarning


def cache_dir() -> Path:
    """Returns the root of everything kept between runs: the folder `STREAMSPEC_CACHE`, else the
    user's cache folder. Raises ConfigError for a user without a home folder, as in containers that
    run as any user."""
    try:
        return Path(os.environ.get("STREAMSPEC_CACHE") or user_cache_dir("streamspec")).expanduser()
    except RuntimeError:
        raise ConfigError(
            "a user with no home folder, so no cache", "STREAMSPEC_CACHE or HOME", "set STREAMSPEC_CACHE to a folder"
        ) from None


def cache_dir_if_any() -> Path | None:
    """Returns `cache_dir`, or None with a warning: measurements can be made anew without a cache."""
    try:
        return cache_dir()
    except ConfigError as error:
        warnings.warn(f"{error.found}: measurements are not kept; {error.fix}", StreamspecWarning, stacklevel=2)
        return None
