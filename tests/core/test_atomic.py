from __future__ import annotations

import errno
import hashlib
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from streamspec import file_lock
from streamspec.atomic import new_file, new_folder, recover, scratch_folder, sha256_file, sweep, write_bytes, write_text
from streamspec.errors import BundleError, StreamspecError


def test_text_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    write_text(file, "é")
    assert file.read_bytes() == "é".encode() and sha256_file(file) == hashlib.sha256("é".encode()).hexdigest()

    def failing(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("streamspec.atomic.os.replace", failing)
    with pytest.raises(KeyboardInterrupt):
        write_bytes(file, b"other")
    assert file.read_text() == "é" and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_files_get_ordinary_permissions(tmp_path: Path) -> None:
    write_text(tmp_path / "ours", "x")
    (tmp_path / "theirs").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "theirs").stat().st_mode


# Writes a folder of two files over an older one, or a file, and waits at each step to be killed.
VICTIM = """
import os, sys
from pathlib import Path
from streamspec import atomic
step, target = 0, Path(sys.argv[1])
def waits(real):
    def call(*args, **kwargs):
        global step
        step += 1
        if step == int(sys.argv[3]):
            print("here", flush=True)
            sys.stdin.read()
        return real(*args, **kwargs)
    return call
for module, names in ((os, "open rename replace unlink mkdir fsync rmdir"), (atomic.shutil, "rmtree")):
    for name in names.split():
        setattr(module, name, waits(getattr(module, name)))
if sys.argv[2] == "folder":
    with atomic.new_folder(target) as folder:
        (folder / "a").write_text("new"), (folder / "b").write_text("new")
else:
    with atomic.new_file(target) as file:
        beside = file.with_name(".theirs")  # as safetensors writes
        beside.write_text("new")
        os.replace(beside, file)
"""


def seen(target: Path) -> list[str]:
    return [one.read_text() for one in sorted(target.iterdir())] if target.is_dir() else [target.read_text()]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_killed_at_any_step_the_next_writer_finds_old_or_new_and_cleans_up(kind: str, tmp_path: Path) -> None:
    target, (old, new) = tmp_path / "x", (["old"], ["new"] * (2 if kind == "folder" else 1))
    states, step = [], 0
    while True:
        step += 1
        shutil.rmtree(tmp_path)
        if kind == "folder":
            target.mkdir(parents=True)
            (target / "a").write_text("old")
        else:
            tmp_path.mkdir()
            target.write_text("old")
        command = [sys.executable, "-c", VICTIM, str(target), kind, str(step)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victim:
            assert victim.stdout is not None
            if not victim.stdout.readline():
                break  # it has fewer steps
            if list(tmp_path.glob(".x.*.tmp")):
                before = sorted(tmp_path.iterdir())
                sweep(tmp_path)
                assert sorted(tmp_path.iterdir()) == before  # not those of a process that lives
            victim.kill()
        recover(target)
        states.append(seen(target))
        with new_folder(target) if kind == "folder" else new_file(target) as written:
            (written / "a" if kind == "folder" else written).write_text("next")
        assert [one.name for one in tmp_path.iterdir()] == ["x"] and seen(target) == ["next"], step
    assert victim.wait() == 0 and seen(target) == new and step > 5
    assert states == sorted(states, reverse=old > new) and old in states and new in states


def test_a_scratch_folder_goes_also_where_its_process_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "import sys; from streamspec.atomic import scratch_folder\nwith scratch_folder() as x:\n"
    code += " (x / 'rows').touch(); print(x, flush=True); sys.stdin.read()"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        with scratch_folder() as mine:
            assert theirs.parent == mine.parent == tmp_path and theirs.is_dir() and not list(mine.iterdir())
            assert os.name == "nt" or mine.stat().st_mode & 0o777 == 0o700
        other.kill()
    assert (theirs / "rows").exists()
    with scratch_folder() as mine:
        assert not theirs.exists()
    assert not list(tmp_path.iterdir())


def test_only_the_temporary_names_of_the_target_are_swept(tmp_path: Path) -> None:
    for name in (".a.0123abcd.tmp", ".b.0123abcd.tmp", ".a.tmp", ".a.0123abcd.tmpx", "a.0123abcd.tmp"):
        (tmp_path / name).write_text("x")
        (tmp_path / f"{name}.lock").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".a.99999999.tmp").symlink_to(tmp_path / "elsewhere")
    (tmp_path / ".a.99999999.tmp.lock").touch()
    (tmp_path / ".a.88888888.tmp.lock").touch()
    (tmp_path / ".a.77777777.tmp").mkdir()  # without a lock: not of this program
    before = {one.name for one in tmp_path.iterdir()}
    write_text(tmp_path / "a", "x")
    gone = {f".a.{mark}.tmp{end}" for mark in ("0123abcd", "99999999", "88888888") for end in ("", ".lock")}
    assert {one.name for one in tmp_path.iterdir()} == before - gone | {"a"}


def test_a_set_aside_folder_of_somebody_else_is_not_deleted(tmp_path: Path) -> None:
    for name in ("a", ".a.previous"):
        (tmp_path / name).mkdir()
    sweep(tmp_path)
    recover(tmp_path / "a")
    assert (tmp_path / ".a.previous").is_dir()
    (tmp_path / ".a.previous.lock").touch()
    sweep(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


def test_a_name_whose_lock_another_process_takes_first_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def swept(path: Path) -> int | None:
        asked.append(path)
        return None if len(asked) == 1 else file_lock.take(path)

    monkeypatch.setattr("streamspec.atomic.take", swept)
    with new_file(tmp_path / "a") as file:
        assert len(asked) == 2 and str(file.parent) == str(asked[1]).removesuffix(".lock")
        file.touch()


def test_what_cannot_be_deleted_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".a.0123abcd.tmp").mkdir()
    (tmp_path / ".a.0123abcd.tmp.lock").touch()
    with monkeypatch.context() as patched:
        patched.setattr("streamspec.atomic.delete", lambda path: None)
        sweep(tmp_path)
    assert (tmp_path / ".a.0123abcd.tmp").exists()
    sweep(tmp_path)
    assert not list(tmp_path.iterdir())


def test_where_there_are_no_locks_files_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(path: Path) -> None:
        raise OSError("no locks here")

    for module in ("atomic", "file_lock"):
        monkeypatch.setattr(f"streamspec.{module}.take", none)
    (tmp_path / ".a.0123abcd.tmp").write_text("of a process that may live")
    with new_file(tmp_path / "a") as file:
        file.write_text("x")
    with new_folder(tmp_path / "b") as folder:
        (folder / "x").touch()
    assert sorted(one.name for one in tmp_path.iterdir()) == [".a.0123abcd.tmp", "a", "b"]


def test_a_file_system_without_locks_keeps_none_of_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(handle: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("streamspec.file_lock._lock", none)
    write_text(tmp_path / "a", "x")
    with new_folder(tmp_path / "b"):
        pass
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "b"]


def test_errors_are_one_line_of_found_expected_fix() -> None:
    error = BundleError("model.onnx has 10 bytes", "12 bytes as the manifest says", "export the bundle again")
    assert str(error) == "model.onnx has 10 bytes; expected 12 bytes as the manifest says; export the bundle again"
    assert (error.code, error.exit_status, isinstance(error, StreamspecError)) == ("bundle", 2, True)
    assert str(BundleError("a\nb\x1b[31m", "c")) == "a b [31m; expected c"
    assert len(str(BundleError("x" * 10000))) < 1000
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_codes_are_stable_and_distinct() -> None:
    codes = {c.code for c in StreamspecError.__subclasses__()}
    assert codes == {
        "bundle",
        "adapter",
        "data",
        "context_overflow",
        "config",
        "provider",
        "base_model",
        "conversation",
        "memory",
    }
