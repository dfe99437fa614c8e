"""Keeps an array of each text on disk, in files that only grow: what a killed process had begun is cut off."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from streamspec.adapters.runs.failures import FULL

MOST_DISK = 0.5  # of what is free
TEXT = np.dtype([("key", "V16"), ("tokens", "<i8")])  # of a text whose array is kept


class TextArrays:
    """Arrays int16 [tokens, width] by the keys of texts. `kept`: where each is: file, first token, tokens."""

    def __init__(self, folder: Path, layout: str, owner: str, width: int) -> None:
        """`folder`: holds the files, of which those of the same `layout` are read. `owner`: the only process that
        writes the file of that name."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.layout, self.width = folder, layout, width
        self.own = folder / f"{layout}-{owner}.bin"
        self.kept: dict[bytes, tuple[Path, int, int]] = {}
        self.find()

    def bytes_of(self, tokens: int) -> int:
        """The size of the arrays of so many tokens."""
        return 2 * self.width * tokens

    def read(self, key: bytes) -> np.ndarray | None:
        """int16 [tokens, width] of a text; None where it is not kept."""
        place = self.kept.get(key)
        if place is None:
            return None
        file, start, tokens = place
        numbers = np.fromfile(file, np.int16, tokens * self.width, offset=self.bytes_of(start))
        return numbers.reshape(tokens, self.width)

    def add(self, key: bytes, numbers: np.ndarray) -> bool:
        """Appends a text to this process's file, and once that is on disk its key; tells whether the disk had room."""
        if not self.own.exists():  # not begun yet, or deleted: its keys would name the texts that come now
            keys_of(self.own).unlink(missing_ok=True)
            self.kept = {text: place for text, place in self.kept.items() if place[0] != self.own}
        files = self.own, keys_of(self.own)
        start, keys = (file.stat().st_size if file.exists() else 0 for file in files)
        try:
            for file, content in zip(
                files, (numbers.tobytes(), np.array((key, len(numbers)), TEXT).tobytes()), strict=True
            ):
                with file.open("ab") as opened:
                    opened.write(content)
                    opened.flush()
                    os.fsync(opened.fileno())
        except OSError as error:
            if error.errno not in FULL:
                raise
            for file, size in zip(files, (start, keys), strict=True):
                if file.exists():  # a part of what was begun would move the texts that come later
                    os.truncate(file, size)
            return False
        self.kept[key] = self.own, start // self.bytes_of(1), len(numbers)
        return True

    def find(self) -> None:
        """Finds the texts that the files of all processes hold, and cuts off what a killed process began."""
        for file in sorted(self.folder.glob(f"{self.layout}-*.bin")):
            texts = np.fromfile(keys_of(file), TEXT) if keys_of(file).exists() else np.empty(0, TEXT)
            ends = np.cumsum(texts["tokens"])
            whole = int(np.searchsorted(self.bytes_of(1) * ends, file.stat().st_size, "right"))
            for text, end in zip(texts[:whole], ends[:whole].tolist(), strict=True):
                self.kept[text["key"].tobytes()] = file, end - int(text["tokens"]), int(text["tokens"])
            if file == self.own:
                keys_of(file).touch()
                os.truncate(file, self.bytes_of(int(ends[whole - 1]) if whole else 0))
                os.truncate(keys_of(file), TEXT.itemsize * whole)


def keys_of(file: Path) -> Path:
    """The file that says which texts a file of arrays holds."""
    return file.with_suffix(".keys")


def key_of(ids: Sequence[int]) -> bytes:
    """Names a text by its tokens."""
    return hashlib.blake2b(np.array(ids, np.int64).tobytes(), digest_size=16).digest()
