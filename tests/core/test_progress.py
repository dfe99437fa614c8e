"""Progress goes to stderr: one region on a terminal, lines now and then elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from streamspec import progress
from streamspec.progress import counted, duration, is_quiet, region, track

if os.name == "posix":
    import pty


def test_every_item_comes_and_progress_goes_to_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY", -1.0)  # a line after each item
    assert list(track("abc", "reading", 3)) == ["a", "b", "c"]
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == ["reading: 1/3, 0 s left", "reading: 2/3, 0 s left", "reading: 3/3"]


def test_short_work_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    list(track("abc", "reading", 3))
    assert capsys.readouterr().err == ""


def test_a_first_line_comes_at_once_and_a_last_one_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    step = 0
    with region(lambda: ["task", f"step {step}"], first=True) as show:
        assert capsys.readouterr().err == ""
        for step in range(1, 5):
            show()
            if step == 1:
                assert capsys.readouterr().err == "task, step 1\n"
    assert capsys.readouterr().err == "task, step 4\n"


def test_lines_go_on_while_a_step_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.05)
    began = time.monotonic()
    with region(lambda: [f"{time.monotonic() - began:.2f} s"], first=True) as show:
        show()
        time.sleep(0.5)
    assert 3 <= len(capsys.readouterr().err.splitlines()) <= 12


def test_what_goes_on_inside_a_shown_operation_is_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY", -1.0)
    with counted("outer", 2) as add:
        assert list(track("ab", "inner", 2)) == ["a", "b"]
        add(2)
    assert capsys.readouterr().err == "outer: 2/2\n"
    with counted("after", 1) as add:
        add(1)
    assert capsys.readouterr().err == "after: 1/1\n"


def test_the_first_of_several_processes_shows_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY", -1.0)
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        list(track("a", f"of {rank}", 1))
    assert capsys.readouterr().err == "of 0: 1/1\n"


def test_on_a_terminal_one_region_is_redrawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with counted("reading", 3) as add:
        add(2)
        print("a remark", file=sys.stderr)
        add(1)
    shown = capsys.readouterr().err
    assert "a remark\n" in shown and "\r\x1b[2Kreading: 3/3\n" in shown


@pytest.mark.skipif(os.name != "posix", reason="makes a terminal")
def test_the_cursor_comes_back_where_a_thread_is_left_behind() -> None:
    """As where an export is interrupted while the reference is computed beside it."""
    code = """
import sys, threading, time
from streamspec.progress import counted
def work():
    with counted("layers", 2) as add:
        add(1); drawn.set(); time.sleep(60)
drawn = threading.Event()
threading.Thread(target=work, daemon=True).start()
drawn.wait(); time.sleep(0.3)
sys.exit(130)
"""
    terminal, inside = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", code], stderr=inside, env=os.environ | {"TERM": "xterm"}) as process:
        os.close(inside)
        written = b""
        with suppress(OSError):  # the other end is closed
            while part := os.read(terminal, 1 << 16):
                written += part
    os.close(terminal)
    assert process.returncode == 130 and written.rfind(b"\x1b[?25h") > written.rfind(b"\x1b[?25l") >= 0


def test_times_are_spelt_for_people() -> None:
    assert [duration(s) for s in (7.4, 200, 6000, 40000)] == ["7 s", "3 min", "1.7 h", "11.1 h"]


def test_what_all_processes_find_is_printed_once_on_each_machine() -> None:
    assert is_quiet(environment={"LOCAL_RANK": "1"}) and is_quiet("RANK", {"RANK": "2", "LOCAL_RANK": "0"})
    for environment in ({}, {"LOCAL_RANK": "0", "RANK": "2"}, {"LOCAL_RANK": ""}):
        assert not is_quiet(environment=environment)
