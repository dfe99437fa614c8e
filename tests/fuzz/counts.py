"""Counts that outlive the process that counts. Imports nothing of the package: `instrumented` reads it first."""

from __future__ import annotations

import mmap
from pathlib import Path

FIELDS = "inputs", "accepted", "failed", "milliseconds"  # milliseconds: of the slowest input


class Counts:
    """Whole numbers by name, in a file."""

    def __init__(self, file: Path) -> None:
        if not file.exists():
            file.write_bytes(bytes(8 * len(FIELDS)))
        with file.open("r+b") as stream:
            self._data = mmap.mmap(stream.fileno(), 0)

    def __getitem__(self, name: str) -> int:
        at = 8 * FIELDS.index(name)
        return int.from_bytes(self._data[at : at + 8], "little")

    def __setitem__(self, name: str, value: int) -> None:
        at = 8 * FIELDS.index(name)
        self._data[at : at + 8] = value.to_bytes(8, "little")
