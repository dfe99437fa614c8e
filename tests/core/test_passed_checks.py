"""What a note lets a later load skip, and all that makes it void."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from streamspec import paths
from streamspec.paths import SETTLED, PassedChecks, file_state


def aged(path: Path, seconds: float = 10.0) -> Path:
    """Lets a file have been written `seconds` ago as far as its own time says."""
    then = time.time() - seconds
    os.utime(path, (then, then))
    return path


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    monkeypatch.setattr(paths, "SETTLED", SETTLED)
    monkeypatch.setattr(time, "time", lambda: now() + SETTLED + 1)


def test_a_note_stands_for_what_it_names_alone_and_for_other_processes(tmp_path: Path) -> None:
    passed = PassedChecks(tmp_path)
    assert ("sha256", "a") not in passed
    passed.add(("sha256", "a"))
    assert ("sha256", "a") in PassedChecks(tmp_path)
    assert ("sha256", "b") not in passed and ("self-test", "a") not in passed


def test_where_no_note_can_be_looked_for_none_is_there(tmp_path: Path) -> None:
    passed = PassedChecks(tmp_path / ("n" * 300))  # as in a folder that may not be entered
    passed.add("a")
    assert "a" not in passed


def test_a_file_that_changed_just_now_has_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"1")
    assert file_state(file) is None and file_state(aged(file)) is None  # its inode was written just now
    settle(monkeypatch)
    assert file_state(file) is not None


@pytest.mark.parametrize(("nanoseconds", "known"), [(500, True), (0, False)])
def test_times_of_whole_seconds_settle_later(
    nanoseconds: int, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _written(tmp_path / "a")
    monkeypatch.setattr(paths, "SETTLED", SETTLED)
    newest = file.stat().st_mtime_ns // 10**9 * 10**9 + nanoseconds
    os.utime(file, ns=(newest, newest))
    changed = file.stat().st_ctime
    monkeypatch.setattr(time, "time", lambda: changed + 1)
    assert (file_state(file) is not None) == known


def test_a_file_of_the_same_size_and_time_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"1")
    times = file.stat()
    settle(monkeypatch)
    before = file_state(file)
    time.sleep(0.02)
    file.write_bytes(b"2")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file_state(file) != before  # the time of its inode cannot be set
    os.replace(aged(_written(tmp_path / "b")), file)
    assert file_state(file) != before


def _written(path: Path) -> Path:
    path.write_bytes(b"1")
    return path


def test_without_a_cache_nothing_is_known_and_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    passed = PassedChecks(tmp_path / "file")
    passed.add("a")
    assert "a" not in passed


def test_without_a_home_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        from streamspec.errors import ConfigError

        raise ConfigError("no home", "one", "set it")

    monkeypatch.setattr("streamspec.paths.cache_dir", homeless)
    passed = PassedChecks()
    passed.add("a")
    assert "a" not in passed
