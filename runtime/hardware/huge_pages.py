"""Puts a model's weights into huge pages, where Linux gives them on request, and gives freed memory back.

A decoding step reads all weights once: with pages of 4 KiB that is tens of thousands of address translations.
Weights mapped from a file are read from the disk into pages of 2 MiB (`MADV_HUGEPAGE`) where the file system has such
(ext4 since Linux 6.16, XFS); what the page cache holds stays as it is (`export.ops.huge_page_file`). A thread moves
memory of the process's own (`MADV_COLLAPSE`, Linux 6.1), half a gigabyte a second.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from pathlib import Path
from typing import Self

from streamspec.background import Background

HUGE_PAGE = 2 << 20  # bytes
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
FILLED = 0.9  # of a mapping that must be in memory: reserves are not to be filled by this
SWITCHES = Path("/sys/kernel/mm/transparent_hugepage")
MAPPINGS, MEMORY = Path("/proc/self/maps"), Path("/proc/self/smaps")
Range = tuple[int, int]


class HugePages:
    """A context: what its body allocates in large pieces, and has filled by its end, is moved into huge pages after
    it. Files in `folder` that are mapped in pieces of less than `below` bytes are read into such: 4 MiB a fault."""

    def __init__(self, folder: Path, below: float = math.inf) -> None:
        self._folder, self._below = folder, below
        self._before: list[Range] | None = None  # where there are no huge pages
        self._moving: Background[None] | None = None

    def __enter__(self) -> Self:
        self._before = anonymous() if offered() else None
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._before is not None and error is None:
            advise([span for span in files_in(self._folder) if size(span) < self._below], MADV_HUGEPAGE)
            large = any(size(span) >= HUGE_PAGE for span in without(anonymous(), self._before))
            added = without(filled(), self._before) if large else []
            self._moving = Background(lambda: advise([whole(span) for span in added], MADV_COLLAPSE))

    def wait(self) -> None:
        """Waits until all is moved."""
        if self._moving is not None:
            self._moving.result()


def advise(ranges: list[Range], advice: int) -> None:
    """Gives advice for the ranges that hold a huge page. A refusal leaves everything as it was."""
    madvise = ctypes.CDLL(None).madvise
    for start, end in ranges:
        if end - start >= HUGE_PAGE:
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


def trim() -> None:
    """Returns freed memory to the system, also where the C library would keep it for later."""
    if sys.platform == "linux":
        give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if give_back is not None:
            give_back(ctypes.c_size_t(0))


def offered() -> bool:
    """Tells whether this system gives such pages on request and shows a process its memory."""
    try:
        bytes_of_one, given = ((SWITCHES / name).read_text() for name in ("hpage_pmd_size", "enabled"))
        return int(bytes_of_one) == HUGE_PAGE and "[never]" not in given and os.access(MEMORY, os.R_OK)
    except (OSError, ValueError):
        return False


def anonymous() -> list[Range]:
    """Lists the writable private mappings of no file, in ascending order."""
    return [span for span in map(_anonymous, lines_of(MAPPINGS)) if span is not None]


def filled() -> list[Range]:
    """Lists those of `anonymous` that are in memory. Linux looks at every page: with PyTorch for 50 ms."""
    out: list[Range] = []
    span: Range | None = None
    for line in lines_of(MEMORY):
        key, *rest = line.split()
        if "-" in key:
            span = _anonymous(line)
        elif span is not None and key == "Rss:" and 1024 * int(rest[0]) > FILLED * size(span):
            out.append(span)
    return out


def files_in(folder: Path) -> list[Range]:
    """Lists the mappings of files in `folder`."""
    within = f"{folder.resolve()}{os.sep}"
    parts = (line.split(maxsplit=5) for line in lines_of(MAPPINGS))
    return [_range(addresses) for addresses, *_, name in parts if name.startswith(within)]


def lines_of(file: Path) -> list[str]:
    """Lines of a file of /proc, whose names escape line feeds alone."""
    return os.fsdecode(file.read_bytes()).removesuffix("\n").split("\n")


def size(span: Range) -> int:
    return span[1] - span[0]


def whole(span: Range) -> Range:
    """The huge pages in a range."""
    return -(-span[0] // HUGE_PAGE) * HUGE_PAGE, span[1] // HUGE_PAGE * HUGE_PAGE


def _range(addresses: str) -> Range:
    start, end = (int(x, 16) for x in addresses.split("-"))
    return start, end


def _anonymous(line: str) -> Range | None:
    """Returns the range of a mapping from its line; None for one of a file, or not to be written."""
    addresses, rights, _, _, inode, *name = line.split()
    private = inode == "0" and (not name or name[0] == "[heap]" or name[0].startswith("[anon"))
    return _range(addresses) if rights == "rw-p" and private else None


def without(ranges: list[Range], taken: list[Range]) -> list[Range]:
    """Returns the parts of `ranges` outside of `taken`; both ascend."""
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
