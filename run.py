#!/usr/bin/env python3
"""Sets a fresh checkout up and runs it: `python3 run.py demo`, `python3 run.py test`, or any streamspec command.

Needs Python 3.11 or newer and nothing else. Makes `.venv` beside itself, installs what the command needs and stays out
of the way afterwards: a second call only compares a stamp. Package sources are pip's own settings (PIP_INDEX_URL,
PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...); on Linux, name an index that carries CPU builds there to spare a CUDA
download.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
TORCH = "torch==2.13.0"
USAGE = """usage: python3 run.py demo [options]    the whole loop on the reference base: export, plain vs speculative
       python3 run.py test              format, lint, type check and tests, as CI runs them
       python3 run.py COMMAND ...       any streamspec command: train, shrink, export, generate, bench, tune, inspect"""


def call(*command: str | Path, cwd: Path | None = ROOT) -> int:
    """Runs a command, from the repository root unless told, and returns its exit code; Ctrl-C goes to the command,
    which cleans up.
    """
    process = subprocess.Popen([str(part) for part in command], cwd=cwd)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def check(*command: str | Path) -> None:
    if code := call(*command):
        sys.exit(f"run.py: `{' '.join(map(str, command))}` failed with exit code {code}")


def set_up(extra: str) -> None:
    """Makes .venv and installs `.[extra]`, unless the stamp says that this very pyproject.toml is installed already."""
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    stamp = VENV / f"streamspec-{extra}.stamp"
    if PYTHON.exists() and stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"run.py: setting up {VENV} (once; some minutes)", flush=True)
    check(sys.executable, "-m", "venv", VENV)  # over one that is there, too: it may be half made
    pip = (PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--quiet")
    # Torch first and pinned: an open-ended requirement resolves to the newest build with all of CUDA behind it.
    check(*pip, TORCH)
    check(*pip, "-e", f".[{extra}]")
    stamp.write_text(wanted)


def type_check() -> int:
    """mypy on the package as it ships: the four folders are one package only once they are installed."""
    build, installed = ROOT / "build", ROOT / "build" / "typecheck"
    shutil.rmtree(build, ignore_errors=True)  # setuptools would copy stale modules from it
    check(
        PYTHON,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "--target",
        installed,
        ".",
    )
    return call(PYTHON, "-m", "mypy", "--config-file", "pyproject.toml", installed / "streamspec")


def test(pytest_arguments: list[str]) -> int:
    checks = {
        "format": lambda: call(PYTHON, "-m", "ruff", "format", "--check", "."),
        "lint": lambda: call(PYTHON, "-m", "ruff", "check", "."),
        "mypy": type_check,
        "pytest": lambda: call(PYTHON, "-m", "pytest", *pytest_arguments),
    }
    failed = []
    for name, run in checks.items():
        print(f"== {name}", flush=True)
        if run():
            failed.append(name)
    print(f"== result: {'failed: ' + ', '.join(failed) if failed else 'all passed'}", flush=True)
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - the one check that an older Python gets to run
        sys.exit(f"run.py: Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    command, *rest = arguments
    if command == "test":
        set_up("dev")
        return test(rest)
    set_up("all")
    return call(PYTHON, "-m", "streamspec", command, *rest, cwd=None)  # paths are the user's own


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
