"""Where streamspec keeps what it fetches, converts and measures. Knows nothing about any of it."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_dir


def cache_dir() -> Path:
    """Root of everything kept between runs: `STREAMSPEC_CACHE`, else the user's cache folder."""
    return Path(os.environ.get("STREAMSPEC_CACHE") or user_cache_dir("streamspec")).expanduser()
