"""Keeps an array of each text on disk, in files that only grow: what a killed process had begun is cut off."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from streamspec.adapters.runs.failures import FULL

MOST_DISK = 0.5  # of what is free
UNNAMED = 10.0  # seconds in which a killed process may lose what it wrote: the disk takes a while to have it
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
        self._unnamed, self._named = list[tuple[bytes, int]](), time.monotonic()
        self._go_on()
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
        """Appends a text to this process's file, and once that is on disk its key (`name`); tells whether the disk had
        room."""
        if not self.own.exists():  # not begun yet, or deleted: its keys would name the texts that come now
            keys_of(self.own).unlink(missing_ok=True)
            self.kept = {text: place for text, place in self.kept.items() if place[0] != self.own}
            self._unnamed.clear()
        start = self.own.stat().st_size if self.own.exists() else 0
        if not _appended(self.own, numbers.tobytes(), sync=False):
            return False
        self.kept[key] = self.own, start // self.bytes_of(1), len(numbers)
        self._unnamed.append((key, len(numbers)))
        if time.monotonic() - self._named > UNNAMED:
            self.name()
        return True

    def name(self) -> None:
        """Appends the keys of the texts that were added, now that their arrays are on disk: later runs find them."""
        self._named = time.monotonic()
        if not self._unnamed or not self.own.exists():
            return
        if _appended(self.own, b"", sync=True):
            _appended(keys_of(self.own), np.array(self._unnamed, TEXT).tobytes(), sync=True)
        self._unnamed.clear()  # where the disk is full now, this process alone finds them

    def find(self) -> None:
        """Finds the texts that the files of all processes hold by now."""
        self.name()
        for file in sorted(self.folder.glob(f"{self.layout}-*.bin")):
            if file != self.own:
                self._read_keys(file)

    def _read_keys(self, file: Path) -> tuple[int, int]:
        """Finds the texts of a file; returns how many they are, and their tokens."""
        texts = np.fromfile(keys_of(file), TEXT) if keys_of(file).exists() else np.empty(0, TEXT)
        ends = np.cumsum(texts["tokens"])
        whole = int(np.searchsorted(self.bytes_of(1) * ends, file.stat().st_size, "right"))
        for text, end in zip(texts[:whole], ends[:whole].tolist(), strict=True):
            self.kept[text["key"].tobytes()] = file, end - int(text["tokens"]), int(text["tokens"])
        return whole, int(ends[whole - 1]) if whole else 0

    def _go_on(self) -> None:
        """Finds the texts of this process's file, and cuts off what a killed one began."""
        if self.own.exists():
            texts, tokens = self._read_keys(self.own)
            keys_of(self.own).touch()
            os.truncate(self.own, self.bytes_of(tokens))
            os.truncate(keys_of(self.own), TEXT.itemsize * texts)


def _appended(file: Path, content: bytes, sync: bool) -> bool:
    """Appends to a file, with `sync` to the disk; tells whether there was room, without which it stays as it was."""
    size = file.stat().st_size if file.exists() else 0
    try:
        with file.open("ab") as opened:
            opened.write(content)
            opened.flush()
            if sync:
                os.fsync(opened.fileno())
    except OSError as error:
        if error.errno not in FULL:
            raise
        if file.exists():  # a part of what was begun would move the texts that come later
            os.truncate(file, size)
        return False
    return True


def keys_of(file: Path) -> Path:
    """The file that says which texts a file of arrays holds."""
    return file.with_suffix(".keys")


def key_of(ids: Sequence[int]) -> bytes:
    """Names a text by its tokens."""
    return hashlib.blake2b(np.array(ids, np.int64).tobytes(), digest_size=16).digest()
