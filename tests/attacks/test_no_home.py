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
SETTINGS = ("HOME", "STREAMSPEC_CACHE", "XDG_CACHE_HOME", "STREAMSPEC_BUNDLES", "XDG_DATA_HOME")


def homeless(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    return subprocess.run(
        [sys.executable, "-c", HOMELESS, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )


def test_a_bundle_runs_without_a_cache_and_one_line_says_so(bundle: Path) -> None:
    done = homeless("generate", str(bundle), "abc", "--max-new-tokens", "4", "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no home folder") == 1 and done.stderr.count("\n") == 1


LIBRARY = "no home folder, so no library of bundles; expected STREAMSPEC_BUNDLES or HOME; set STREAMSPEC_BUNDLES"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("list", LIBRARY),
        ("remove tiny", LIBRARY),
        ("pull {bundle}", LIBRARY),
        ("generate tiny hello", "tiny does not exist"),
        ("inspect tiny", "tiny does not exist"),
        ("chat tiny", "tiny does not exist"),
        ("chat ~nobody-of-this-name/tiny", "~nobody-of-this-name/tiny does not exist"),
        ("export --base ~nobody-of-this-name/tiny --out {bundle}-2", "~nobody-of-this-name/tiny does not exist"),
    ],
)
def test_what_needs_the_folders_of_a_user_says_so_in_one_line(arguments: str, says: str, bundle: Path) -> None:
    done = homeless(*arguments.format(bundle=bundle).split())
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_what_needs_no_library_works(bundle: Path, tmp_path: Path) -> None:
    done = homeless("pull", str(bundle), "--out", str(tmp_path / "here"))
    assert done.returncode == 0 and (tmp_path / "here" / "manifest.json").is_file(), done.stderr
