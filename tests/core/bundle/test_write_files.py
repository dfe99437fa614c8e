"""How files of weights are written."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from streamspec.bundle.write_files import HUGE_PAGE, LargeFile


@pytest.mark.parametrize(
    "sizes",
    [[10], [HUGE_PAGE], [0, HUGE_PAGE - 1, 1, 1], [3, 5 * HUGE_PAGE, 7], [HUGE_PAGE // 3] * 10, [2 * HUGE_PAGE + 1]],
)
def test_calls_end_where_huge_pages_do(sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Recorded(io.FileIO):
        def write(self, data: memoryview) -> int:  # type: ignore[override]
            calls.append((self.tell(), len(data)))
            return super().write(data)

    monkeypatch.setattr(io, "FileIO", Recorded)
    content = bytes(range(251)) * (sum(sizes) // 251 + 1)
    with LargeFile(tmp_path / "file") as file:
        at = 0
        for size in sizes:
            assert file.write(content[at : at + size]) == size
            assert file.tell() == at + size
            at += size
    assert (tmp_path / "file").read_bytes() == content[: sum(sizes)]
    pages, rest = divmod(sum(sizes), HUGE_PAGE)
    assert calls == [(i * HUGE_PAGE, HUGE_PAGE) for i in range(pages)] + [(pages * HUGE_PAGE, rest)] * bool(rest)


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    with pytest.raises(FileExistsError):
        LargeFile(tmp_path / "file", "xb")
    assert (tmp_path / "file").read_bytes() == b"before"
