"""A user without a home folder, as in containers run as any user: no HOME, no entry in passwd."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOMELESS = """
import pwd
def gone(uid):
    raise KeyError(uid)
pwd.getpwuid = pwd.getpwnam = gone
from streamspec.cli import main
main()
"""
pytest.importorskip("pwd")
SETTINGS = ("HOME", "STREAMSPEC_CACHE", "XDG_CACHE_HOME")


def homeless(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    return subprocess.run(
        [sys.executable, "-c", HOMELESS, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )


def test_a_bundle_runs_without_a_cache_and_one_line_says_so(bundle: Path) -> None:
    done = homeless("generate", str(bundle), "abc", "--max-new-tokens", "4", "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no home folder") == 1 and done.stderr.count("\n") == 1
