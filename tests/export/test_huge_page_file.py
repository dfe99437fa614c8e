"""How files of weights are written."""

from __future__ import annotations

import errno
import hashlib
import io
from pathlib import Path

import pytest

from streamspec.bundle.manifest import FileInfo
from streamspec.export.ops.huge_page_file import HUGE_PAGE, HugePageFile


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
    with HugePageFile(tmp_path / "file") as file:
        at = 0
        for size in sizes:
            assert file.write(content[at : at + size]) == size
            assert file.tell() == at + size
            at += size
    assert (tmp_path / "file").read_bytes() == content[: sum(sizes)]
    pages, rest = divmod(sum(sizes), HUGE_PAGE)
    assert calls == [(i * HUGE_PAGE, HUGE_PAGE) for i in range(pages)] + [(pages * HUGE_PAGE, rest)] * bool(rest)


def test_a_write_that_fails_is_told_and_one_in_parts_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Half(io.FileIO):
        def write(self, data: memoryview) -> int:  # type: ignore[override]
            if full:
                raise OSError(errno.ENOSPC, "full")
            return super().write(data[: len(data) // 2 + 1])

    monkeypatch.setattr(io, "FileIO", Half)
    content, full = bytes(range(250)) * (HUGE_PAGE // 100), False
    with HugePageFile(tmp_path / "file") as file:
        file.write(content)
    assert (tmp_path / "file").read_bytes() == content
    full = True
    with pytest.raises(OSError, match="full"), HugePageFile(tmp_path / "file") as file:
        file.write(content)
    assert file.raw.closed


@pytest.mark.parametrize("mode", ["wb", "xb"])
def test_bundles_weights_are_such_files(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from streamspec.export.ops import builder
    from streamspec.library import file_list

    made = []

    class Noted(HugePageFile):
        def __init__(self, path: Path, mode: str = "wb") -> None:
            made.append((path, mode))
            super().__init__(path, mode)

    target = tmp_path / "model.onnx.data"
    if mode == "wb":
        monkeypatch.setattr(builder, "HugePageFile", Noted)
        builder.WeightStore(target).close()
    else:
        monkeypatch.setattr(file_list, "HugePageFile", Noted)
        digest = hashlib.sha256(b"abc").hexdigest()
        file_list.receive(io.BytesIO(b"abc"), target, target.name, FileInfo(digest, 3), lambda count: None)
    assert made == [(target, mode)]


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    with pytest.raises(FileExistsError):
        HugePageFile(tmp_path / "file", "xb")
    assert (tmp_path / "file").read_bytes() == b"before"
