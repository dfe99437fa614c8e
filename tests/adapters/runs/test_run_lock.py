"""A folder is written by one run at a time; the lock goes with its process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamspec.adapters.runs.run_folder import WORK
from streamspec.adapters.runs.run_lock import check_unused, sole_owner
from streamspec.adapters.train import train
from streamspec.errors import AdapterError, DataError
from tests.support.tiny_models import options

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys, time
from pathlib import Path
from streamspec.adapters.runs.run_lock import sole_owner
with sole_owner(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(120)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the run's folder."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "out" / WORK)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_folder_in_use_is_refused_until_its_process_is_gone(
    other: subprocess.Popen[str], base: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    config = options(base, data, out, method="lora")
    with pytest.raises(AdapterError, match=f"{out} is in use by process {other.pid}; expected a folder that no other"):
        train(config)
    for attempt in (check_unused, lambda work: sole_owner(work).__enter__()):
        with pytest.raises(AdapterError, match=f"in use by process {other.pid}"):
            attempt(out / WORK)
    other.kill()  # which leaves its files behind
    other.wait()
    assert (out / WORK / "lock").exists()
    check_unused(out / WORK)
    train(config)
    assert (out / "training.json").exists() and not (out / WORK).exists()


def test_what_a_killed_run_left_stands_in_no_way(base: Path, data: Path, tmp_path: Path) -> None:
    """One killed while it wrote its first file, and one killed after its last."""
    out = tmp_path / "out"
    config = options(base, data, out, method="lora")
    (out / WORK).mkdir(parents=True)
    for name in (".journal.json.0123abcd.tmp", ".journal.json.0123abcd.tmp.lock", "lock", "process"):
        (out / WORK / name).touch()
    train(config)
    assert (out / "training.json").exists() and not (out / WORK).exists()
    (out / WORK / "checkpoint-3").mkdir(parents=True)
    with pytest.raises(AdapterError, match="is a finished adapter"):
        train(config)
    assert not (out / WORK).exists()


def test_a_refused_run_leaves_no_folder(base: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        train(options(base, data, tmp_path / "a" / "out", method="lora", max_length=3))
    assert not (tmp_path / "a").exists()
    (tmp_path / "there").mkdir()
    with pytest.raises(DataError):
        train(options(base, data, tmp_path / "there", method="lora", max_length=3))
    assert not list((tmp_path / "there").iterdir())


def test_of_several_processes_of_a_run_the_first_holds_its_folder(
    other: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    check_unused(tmp_path / "out" / WORK)
    with sole_owner(tmp_path / "out" / WORK):
        pass
    assert other.poll() is None and (tmp_path / "out" / WORK / "process").read_text() == str(other.pid)


def test_a_damaged_owner_is_not_quoted(other: subprocess.Popen[str], tmp_path: Path) -> None:
    (tmp_path / "out" / WORK / "process").write_text("12\n rm -rf /")
    with pytest.raises(AdapterError, match="in use by process unknown;"):
        check_unused(tmp_path / "out" / WORK)
