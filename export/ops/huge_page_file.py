"""Writes files of weights so that Linux keeps them in huge pages."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from streamspec.runtime.hardware.huge_pages import HUGE_PAGE


class HugePageFile(io.BufferedWriter):
    """A file that is written from its beginning to its end, a whole huge page in each call to the system: the page
    cache takes, up to the largest of the file system (2 MiB of ext4 since Linux 6.16 and of XFS), pages of the size
    of the call that fills them."""

    def __init__(self, path: Path, mode: str = "wb") -> None:
        super().__init__(io.FileIO(path, mode), HUGE_PAGE)

    def write(self, data: Any) -> int:
        """Writes `data`, bytes-like, and returns how many bytes."""
        left = memoryview(data).cast("B")
        size = len(left)
        while left:  # what does not fit would send out a page that is not full: pieces end where huge pages do
            left = left[super().write(left[: HUGE_PAGE - self.tell() % HUGE_PAGE]) :]
        return size
