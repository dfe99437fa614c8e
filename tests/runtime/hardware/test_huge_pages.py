"""Which memory is asked to lie in huge pages, and that asking never hurts."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamspec.runtime.hardware import huge_pages as pages
from streamspec.runtime.hardware.huge_pages import HUGE_PAGE as HUGE
from streamspec.runtime.hardware.huge_pages import HugePages, offered, without

spans = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=6).map(
    lambda some: [(a, a + n) for i, (a, n) in enumerate(sorted(some)) if all(a >= b + m for b, m in sorted(some)[:i])]
)


def mapped(size: int) -> np.ndarray:
    """Filled memory fresh from the system: an allocator might hand out what the process held before."""
    out = np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    out[:] = 1
    return out


@given(spans, spans)
def test_without_is_the_difference_of_sets(ranges: list[tuple[int, int]], taken: list[tuple[int, int]]) -> None:
    left = without(ranges, taken)
    covered = {i for a, b in left for i in range(a, b)}
    assert covered == {i for a, b in ranges for i in range(a, b)} - {i for a, b in taken for i in range(a, b)}
    assert all(a < b for a, b in left) and left == sorted(left)


@pytest.mark.skipif(not offered(), reason="this system gives no huge pages on request")
def test_what_the_body_allocates_is_asked_for_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Library:
        def __init__(self, name: str | None) -> None: ...

        def madvise(self, start: object, size: object, advice: int) -> int:
            assert advice == pages.MADV_COLLAPSE
            asked.append((start.value, start.value + size.value))  # type: ignore[attr-defined]
            return -1

    earlier = mapped(8 * HUGE)
    monkeypatch.setattr(pages.ctypes, "CDLL", Library)
    with HugePages(tmp_path) as moved:
        new = mapped(9 * HUGE)
    moved.wait()
    monkeypatch.undo()
    inside = [(a, b) for a, b in asked if a < new.ctypes.data + new.nbytes and new.ctypes.data < b]
    assert sum(b - a for a, b in inside) >= 7 * HUGE
    assert all(a % HUGE == b % HUGE == 0 and b - a >= HUGE for a, b in asked)
    assert not any(a < earlier.ctypes.data + earlier.nbytes and earlier.ctypes.data < b for a, b in asked)


@pytest.mark.skipif(not offered(), reason="this system gives no huge pages on request")
def test_what_fills_no_huge_page_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "filled", lambda: pytest.fail("looked at every page"))
    with HugePages(tmp_path) as moved:
        held = mapped(HUGE // 4)
    moved.wait()
    assert held.all()


@pytest.mark.skipif(not offered(), reason="this system gives no huge pages on request")
def test_a_folders_files_are_read_into_them_and_no_others(tmp_path: Path) -> None:
    folder, beside, link = tmp_path / "a bundle\x0b", tmp_path / "a bundle\x0b of another", tmp_path / "link"
    sizes = {folder / "weights": 4 * HUGE, folder / "table": 8 * HUGE, folder / "small": HUGE // 2}
    found = {}
    link.symlink_to(folder)
    with HugePages(link, 8 * HUGE) as moved:
        for path, size in {**sizes, beside / "weights": 4 * HUGE}.items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(bytes(size))
            found[path] = np.memmap(path, np.uint8, "r")
    moved.wait()
    advised = [path for path, array in found.items() if "hg" in flags_at(array.ctypes.data)]
    assert advised == [folder / "weights"]


def flags_at(address: int) -> list[str]:
    """What Linux notes of the mapping that begins there."""
    _, _, rest = os.fsdecode(pages.MEMORY.read_bytes()).partition(f"\n{address:x}-")
    return rest.partition("VmFlags: ")[2].partition("\n")[0].split()


def test_contents_stay_what_they_were(tmp_path: Path) -> None:
    with HugePages(tmp_path) as moved:
        held = np.arange(4 * HUGE, dtype=np.uint32)
    np.testing.assert_array_equal(held, np.arange(4 * HUGE, dtype=np.uint32))  # while it is moved
    moved.wait()
    np.testing.assert_array_equal(held, np.arange(4 * HUGE, dtype=np.uint32))


def test_what_fails_to_open_is_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "advise", lambda *_: pytest.fail("moved"))
    with pytest.raises(KeyError), HugePages(tmp_path) as moved:
        raise KeyError
    moved.wait()


def test_systems_without_huge_pages_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for look in ("anonymous", "filled", "files_in"):
        monkeypatch.setattr(pages, look, lambda *_: pytest.fail("looked at memory"))
    monkeypatch.setattr(pages, "SWITCHES", tmp_path)
    for enabled, size in (None, HUGE), ("always madvise [never]", HUGE), ("[madvise]", 16 * HUGE), ("[madvise]", ""):
        (tmp_path / "hpage_pmd_size").write_text(f"{size}\n")
        if enabled is not None:
            (tmp_path / "enabled").write_text(enabled)
        with HugePages(tmp_path) as moved:
            pass
        moved.wait()


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc only")
def test_what_was_freed_goes_back_to_the_system() -> None:
    code = """
from pathlib import Path
from streamspec.runtime.hardware.huge_pages import trim
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096
pieces = [bytes(10_000) for _ in range(8000)]
last = bytes(10_000)  # lies after them
del pieces
before = resident()
trim()
print(before - resident())
"""
    assert int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) > 60e6
