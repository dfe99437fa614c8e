"""Guided fuzzing: the inputs that it left in the repository, and, where atheris is installed, some hundred new ones."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the runner limits memory and time as POSIX does")

MOST_BYTES = 400_000  # of the kept inputs
COMMAND = "--guided", "--runs", "300", "--corpus"


@pytest.fixture(scope="module")
def kept() -> dict[str, list[bytes]]:
    from tests.fuzz.guided import kept_inputs

    return kept_inputs()


def test_each_target_has_kept_inputs_in_one_small_file(kept: dict[str, list[bytes]]) -> None:
    from tests.fuzz.guided import KEPT
    from tests.fuzz.targets import TARGETS

    assert set(kept) == set(TARGETS) and all(kept.values())
    assert KEPT.stat().st_size <= MOST_BYTES


def test_of_kept_inputs_nothing_but_one_line_comes_out(kept: dict[str, list[bytes]], tmp_path: Path) -> None:
    from tests.fuzz.targets import TARGETS
    from tests.fuzz.verdict import limited_time, one_input

    for name, inputs in kept.items():
        if name == "request" and importlib.util.find_spec("fastapi") is None:
            continue
        (tmp_path / name).mkdir()
        for number, data in enumerate(inputs):
            with limited_time():
                assert one_input(TARGETS[name], data, tmp_path / name), (name, number)


def test_without_atheris_it_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tests.fuzz.__main__ import main

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["fuzz", "manifest", *COMMAND, str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^tests\.fuzz: --guided needs atheris.*pip install atheris[^\n]*$"):
        main()


def test_an_input_that_fails_is_kept_once_for_each_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.fuzz import targets
    from tests.fuzz.counts import Counts
    from tests.fuzz.instrumented import Judge

    def run(data: bytes, folder: Path) -> int:
        if data.startswith(b"a"):
            raise ValueError("one place")
        return len(data) // (len(data) - 3)

    monkeypatch.setitem(targets.TARGETS, "bad", targets.Target(lambda random: b"", run))
    counts = Counts(tmp_path / "counts")
    judge = Judge("bad", counts, tmp_path, tmp_path)
    for data in (b"a1", b"a2", b"bcd", b"fine", b"bce"):
        judge(data)
    assert (counts["inputs"], counts["accepted"], counts["failed"]) == (5, 1, 2)
    assert sorted(one.read_bytes() for one in tmp_path.glob("bad-guided-*")) == [b"a1", b"bcd"]


def test_coverage_guides_and_another_call_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="it has wheels for few systems")
    command = [sys.executable, "-m", "tests.fuzz", "acceptance", *COMMAND, str(tmp_path)]
    root = Path(__file__).parents[2]
    first = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True).stdout
    found = list((tmp_path / "acceptance").iterdir())
    assert " 0 failed" in first and " 0 edges" not in first and found
    second = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True).stdout
    assert len(list((tmp_path / "acceptance").iterdir())) >= len(found) and " 0 failed" in second
