"""Puts a model's weights into huge pages, where Linux gives them on request, and returns freed memory to the system.

A decoding step reads all weights once: with pages of 4 KiB that is tens of thousands of address translations.
`MADV_COLLAPSE` (Linux 6.1) moves what is there into pages of 2 MiB, without more memory, at about half a gigabyte a
second: a thread does it while the model is already used. Elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Self

from streamspec.background import Background

HUGE = 2 << 20  # bytes
MADV_COLLAPSE = 25
FILLED = 0.9  # of a mapping that must be in memory: thread stacks and other reserves are not to be filled by this
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MAPPINGS, MEMORY = Path("/proc/self/maps"), Path("/proc/self/smaps")
Range = tuple[int, int]


class HugePages:
    """A context: what its body allocates in large pieces, and has filled by its end, is moved into huge pages after
    it."""

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled and offered()
        self._before: list[Range] = []
        self._moving: Background[None] | None = None

    def __enter__(self) -> Self:
        if self._enabled:
            self._before = anonymous()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._enabled and error is None:
            large = any(end - start >= HUGE for start, end in without(anonymous(), self._before))
            added = without(filled(), self._before) if large else []
            self._moving = Background(lambda: move(added))

    def wait(self) -> None:
        """Waits until all is moved."""
        if self._moving is not None:
            self._moving.result()


def move(ranges: list[Range]) -> None:
    """Moves what lies in these ranges, as far as it fills huge pages."""
    for start, end in ranges:
        start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
        if start < end:
            # A refusal, for want of free huge pages, of support, or of the range, leaves everything as it was.
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


def trim() -> None:
    """Returns freed memory to the system, also where the C library would keep it for later (glibc: all but the largest
    pieces).
    """
    if sys.platform == "linux":
        give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if give_back is not None:
            give_back(ctypes.c_size_t(0))


def offered() -> bool:
    """Tells whether this system gives huge pages on request, and lets a process look at its own memory."""
    try:
        return sys.platform == "linux" and "[never]" not in SWITCH.read_text() and os.access(MEMORY, os.R_OK)
    except OSError:
        return False


def anonymous() -> list[Range]:
    """Lists this process's writable private mappings that belong to no file, in ascending order."""
    lines = MAPPINGS.read_text(encoding="utf-8", errors="replace").splitlines()
    return [span for span in map(_anonymous, lines) if span is not None]


def filled() -> list[Range]:
    """Lists those of `anonymous` that are in memory. For this Linux looks at every page of the process: in one with
    PyTorch that takes 50 ms."""
    out: list[Range] = []
    span: Range | None = None
    for line in MEMORY.read_text(encoding="utf-8", errors="replace").splitlines():
        key, *rest = line.split()
        if "-" in key:
            span = _anonymous(line)
        elif span is not None and key == "Rss:" and 1024 * int(rest[0]) > FILLED * (span[1] - span[0]):
            out.append(span)
    return out


def _anonymous(line: str) -> Range | None:
    """Returns the range of a mapping, from its line in MAPPINGS or MEMORY; None for one of a file, or not to be
    written."""
    addresses, rights, _, _, inode, *name = line.split()
    private = inode == "0" and (not name or name[0] == "[heap]" or name[0].startswith("[anon"))
    start, end = (int(x, 16) for x in addresses.split("-"))
    return (start, end) if rights == "rw-p" and private else None


def without(ranges: list[Range], taken: list[Range]) -> list[Range]:
    """Returns the parts of `ranges` that no range of `taken` covers; both ascend."""
    out = []
    for start, end in ranges:
        for low, high in taken:
            if low < end and start < high:
                if start < low:
                    out.append((start, low))
                start = max(start, high)
        if start < end:
            out.append((start, end))
    return out
