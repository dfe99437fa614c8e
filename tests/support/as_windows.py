"""The module `os` as one module of the package sees it on Windows, as far as names of files go."""

from __future__ import annotations

import os
from typing import Any


class WindowsOs:
    """`os` that says it is Windows' and whose `rename` replaces nothing. Nothing of POSIX's own is there."""

    name = "nt"

    def __getattr__(self, name: str) -> Any:
        if name in ("geteuid", "link"):
            raise AttributeError(name)
        return getattr(os, name)

    def rename(self, source: Any, target: Any) -> None:
        os.link(source, target)  # raises FileExistsError where it is taken
        os.unlink(source)
