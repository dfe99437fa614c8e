"""The folder for downloads, converted models and measurements."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_dir


def cache_dir() -> Path:
    """Root of everything kept between runs: the folder `STREAMSPEC_CACHE`, else the user's cache folder."""
    return Path(os.environ.get("STREAMSPEC_CACHE") or user_cache_dir("streamspec")).expanduser()
