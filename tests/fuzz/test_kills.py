"""A kill of everything that writes, in every run of the tests; `python -m tests.fuzz.kills` has more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import kills

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the runner forks and kills as POSIX does")


@pytest.mark.slow
def test_killed_at_random_moments_nothing_is_lost_and_nothing_left(tmp_path: Path) -> None:
    kept = tmp_path / "kills.json"
    command = [sys.executable, "-m", "tests.fuzz.kills", "--runs", "1", "--kept", str(kept)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(kept.read_text())["deeds"]
    assert set(counts) == set(kills.DEEDS)
    assert all(sum(count["left"].values()) == count["tried"] == 1 for count in counts.values())


def test_what_is_lost_or_left_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is not atomic, and one that leaves a file behind."""

    def in_place(made: Path, room: Path) -> None:
        with open(room / "out", "wb") as file:
            file.write(b"n")
            file.flush()
            kills._begin()
            kills.time.sleep(0.2)
            file.write(b"ew")

    def untidy(made: Path, room: Path) -> None:
        (room / f"left-{os.getpid()}").touch()
        kills._begin()
        kills.time.sleep(0.2)
        (room / "out").write_bytes(b"new")
        (room / f"left-{os.getpid()}").unlink()

    def before(made: Path, room: Path) -> None:
        (room / "out").write_bytes(b"old")

    for run, said in ((in_place, "neither what was nor what comes"), (untidy, "left-")):
        monkeypatch.setitem(kills.DEEDS, "bad", kills.Deed(before, run, run, "out"))
        with pytest.raises(AssertionError, match=said):
            kills.Campaign("bad", tmp_path, tmp_path).one(0, 0)
